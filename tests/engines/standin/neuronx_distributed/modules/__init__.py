"""Modules of the stand-in."""
