"""Ends every process that a job has started, even when its supervisor is killed. Standard library,
Linux.

The kernel kills a rank when its supervisor dies (PR_SET_PDEATHSIG). What a rank itself has started
and left behind becomes a child of the nearest subreaper above it, which kills its children until it
has none.
"""

import contextlib
import ctypes
import os
import signal
import time

from cluster.process import child_pids

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
KILL_WAIT_S = 10.0


def become_rank(parent_pid: int) -> None:
    """Runs in the child before its command: it dies with its parent, however that dies."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def become_subreaper() -> None:
    """Makes descendants whose parents die children of this process, instead of the init process."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kills the children of this process, then those that they leave behind, until there are
    none.
    """
    deadline = time.monotonic() + KILL_WAIT_S
    while (children := child_pids(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            with contextlib.suppress(PermissionError):  # it became another user by setuid
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
