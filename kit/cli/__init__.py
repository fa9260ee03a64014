"""The command line, one file per subject; `kit/__main__.py` puts them together."""
