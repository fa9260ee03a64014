"""Calls a function on one piece of a build: `python -m kit.data`, as `kit/data/workers.py` does.

Standard input is a pickle of (function, arguments), standard output a pickle of the result, or of
the exception that the function raised.
"""

import os
import pickle
import sys

from cluster.process import become_rank


def ignore_progress(num_bytes: int) -> None:
    """Takes the place of a progress bar. The parent process counts whole pieces."""


become_rank(os.getppid())
function, arguments = pickle.load(sys.stdin.buffer)
try:
    result = function(*arguments, ignore_progress)
except Exception as error:
    # The parent process raises it.
    result = error
pickle.dump(result, sys.stdout.buffer)
