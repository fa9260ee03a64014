"""Applies a Plan to the model: one file per kind of parallelism. `apply.py` combines the kinds."""
