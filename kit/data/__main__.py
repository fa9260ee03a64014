"""Calls a function on one piece of a build, in a process of its own: `python -m kit.data`.
`kit/data/workers.py` starts it.

Standard input is a pickle of (function, arguments). Standard output is a pickle of the result, or
of the exception that the function raised.
"""

import os
import pickle
import sys

from cluster.process import become_rank


def ignore_progress(num_bytes: int) -> None:
    """Does nothing. It replaces the progress bar, since the parent process counts only whole
    pieces.
    """


become_rank(os.getppid())
function, arguments = pickle.load(sys.stdin.buffer)
try:
    result = function(*arguments, ignore_progress)
except Exception as error:
    # The parent process raises this exception.
    result = error
pickle.dump(result, sys.stdout.buffer)
