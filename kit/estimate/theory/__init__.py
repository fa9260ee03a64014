"""Memory and time of a layout, by equations."""
