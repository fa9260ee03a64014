"""The command line, with one module per subject. `kit/__main__.py` imports all modules."""
