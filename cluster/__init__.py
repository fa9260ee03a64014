"""Describes machines (sites), and starts and monitors jobs on them. The package uses only the
standard library, so that it starts fast on any machine with Python.
"""

import sys

# `python -m MODULE` puts the working directory first on sys.path. Python would then import a user's
# token.py in place of its own. The working directory is therefore moved to the end of sys.path,
# where it shadows no module. While Python imports the packages of MODULE, sys.argv[0] is "-m".
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))
