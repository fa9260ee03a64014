"""Process groups of the stand-in."""
