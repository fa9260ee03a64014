"""Engines: implementations of the optimizer step of a plan. `build.py` builds an `Engine` (defined
in `engine.py`), and `capabilities.py` lists what each engine can do.
"""
