"""Engines run one optimizer step of a plan. `build.py` makes an `Engine` (`engine.py`), and
`capabilities.py` lists what each engine can do.
"""
