"""Runs one step of a dataset build on one piece of the corpus (a group of files), in its own
process: `python -m kit.data`. The class `Workers` in `kit/data/workers.py` starts such processes.

Standard input is a pickle of (function, arguments). Standard output is a pickle of the result, or
of the exception that the function raised.
"""

import os
import pickle
import sys

from cluster.process import become_rank


def ignore_progress(num_bytes: int) -> None:
    """Does nothing. The function replaces the progress bar of a step: the parent process advances
    its own bar once per completed piece of the corpus.
    """


become_rank(os.getppid())
function, arguments = pickle.load(sys.stdin.buffer)
try:
    result = function(*arguments, ignore_progress)
except Exception as error:
    # The parent process raises this exception.
    result = error
pickle.dump(result, sys.stdout.buffer)
