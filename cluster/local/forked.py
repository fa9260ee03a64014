"""Forks ranks from one process that has imported their module, so that the module is imported once
instead of once per rank.

The import of torch and of the training code costs about two CPU seconds. Standard library and Linux
only.
"""

import contextlib
import dataclasses
import gc
import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from typing import IO

from cluster.interpreter import started_module
from cluster.process import LIBC, become_rank
from cluster.shadows import explain

PR_SET_NAME = 15  # Sets the process name that ps and top show. Source: linux/prctl.h.


@dataclasses.dataclass
class ForkedRank:
    """A forked child process. It has the attributes of `subprocess.Popen` that the supervisor
    reads.
    """

    pid: int
    returncode: int | None = None


def import_once(module: str, environment: Mapping[str, str]) -> None:
    """Imports the module that ranks run with `python -m`. The environment variables of the ranks
    are set first, because libraries read some of them during import.

    Errors of the import are ignored: each rank repeats the import and reports the error in its log.
    """
    os.environ.update(environment)
    # An import leaves no garbage, but the garbage collector would take a quarter of the time of the
    # import.
    gc.disable()
    with contextlib.suppress(Exception):
        importlib.import_module(module)
    # The garbage collector of a rank then does not write to, and so copy, shared memory pages.
    gc.freeze()
    gc.enable()


def fork_rank(
    argv: tuple[str, ...], environment: Mapping[str, str], directory: str, log: IO[bytes]
) -> ForkedRank:
    """Forks a child of this process that runs the command `argv`, `python -P -m MODULE ...`, and
    returns the child.

    The child runs like a new process: in its own process group, with the environment variables
    `environment`, in the folder `directory`, and with its output in `log`.

    Raises:
        OSError: The process could not be forked.
    """
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        # Parent and child both make the process group, so that it exists when this function
        # returns, whichever process is faster.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return ForkedRank(pid)
    code = 1
    try:
        os.setpgid(0, 0)
        become_rank(parent_pid)
        LIBC.prctl(PR_SET_NAME, f"rank {environment['RANK']}".encode())
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log.fileno(), 1), (log.fileno(), 2)):
            os.dup2(source, target)
        # The child closes the open files of its parent, such as the port and the run directory.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        module, words = started_module(argv)
        sys.argv = [module, *words]
        sys.modules.pop(module, None)  # The module runs again as __main__. Its imports stay loaded.
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        if isinstance(error, ImportError):
            explain(error)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
