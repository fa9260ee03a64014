"""Weights and logs of other projects, in and out."""
