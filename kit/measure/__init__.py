"""What this machine does: matrix products, collectives, its nodes."""
