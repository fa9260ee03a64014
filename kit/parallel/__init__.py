"""Application of a Plan to the model, with one file per kind of parallelism. `apply.py` combines
the kinds.
"""
