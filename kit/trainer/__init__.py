"""One rank's training loop and all that keeps it alive."""
