"""`python -m kit.data`: a process that does one piece of a build. It is told which, and answers, by pickles."""

import os
import pickle
import sys

from cluster.descendants import become_rank

become_rank(os.getppid())
function, piece = pickle.load(sys.stdin.buffer)
try:
    answer = function(*piece, lambda _: None)
except Exception as error:  # which the process that asked raises
    answer = error
pickle.dump(answer, sys.stdout.buffer)
