"""The command line, with one module per subject. `kit/cli/app.py` combines the commands of all
modules.
"""
