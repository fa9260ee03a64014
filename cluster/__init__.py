"""Sites, jobs and schedulers. Standard library only, so that it starts at once anywhere."""

import sys

# `python -m MODULE` puts the working directory first on sys.path, where a user's token.py would be
# imported in place of Python's. Last, it shadows no module. While Python imports the packages of
# MODULE, "-m" is the first word.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))
