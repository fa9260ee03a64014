"""Describes machines (sites), and starts and monitors jobs on them. The package uses only the
standard library, so that it starts fast on any machine with Python.
"""

import os
import sys

# The first lines of `kit/__init__.py` say why.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and "kit" not in sys.modules:
    _first = sys.path.pop(0)
    if _first == os.path.dirname(os.path.dirname(__file__)):
        sys.path.append(_first)
