"""`python -m kit.data`: a process for one piece of a build; asked, and answering, by a pickle."""

import os
import pickle
import sys

from cluster.process import become_rank

become_rank(os.getppid())
function, piece = pickle.load(sys.stdin.buffer)
try:
    answer = function(*piece, lambda _: None)
except Exception as error:  # which the process that asked raises
    answer = error
pickle.dump(answer, sys.stdout.buffer)
