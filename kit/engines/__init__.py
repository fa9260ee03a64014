"""Engines: one optimizer step of a plan. `build.py` makes an `Engine` (`engine.py`), and
`capabilities.py` says what each can do.
"""
