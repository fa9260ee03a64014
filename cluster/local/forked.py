"""Ranks forked from one process that has imported their module: what all need is read and run once,
not once a rank.

Importing torch and what trains with it costs about two seconds of a core. Standard library, Linux.
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

PR_SET_NAME = 15  # linux/prctl.h; what ps and top show


@dataclasses.dataclass
class ForkedRank:
    """A child process, with as much of `subprocess.Popen` as the supervisor asks of one."""

    pid: int
    returncode: int | None = None


def import_once(module: str, environment: Mapping[str, str]) -> None:
    """Imports a module of `python -m` in the environment of the ranks, part of which libraries read
    when imported.

    A failure is left to the ranks: each meets it again and tells it in its own log.
    """
    os.environ.update(environment)
    # nothing of a module is garbage, and to look for it would take a quarter of the time
    gc.disable()
    with contextlib.suppress(Exception):
        importlib.import_module(module)
    gc.freeze()  # nor need a rank ever look, which would copy the pages that it shares
    gc.enable()


def fork_rank(
    argv: tuple[str, ...], environment: Mapping[str, str], directory: str, log: IO[bytes]
) -> ForkedRank:
    """Forks a child of this process that runs the command `argv`, `python -P -m MODULE ...`, and
    returns the child. It runs as a new process would: in a process group of its own, with
    `environment`, in `directory`, and with its output in `log`.

    Raises:
        OSError: it could not be forked.
    """
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        # Either of both is the first, so that the group is there when this returns.
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
        # What the parent has open, its port and its run directory.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        module, words = started_module(argv)
        sys.argv = [module, *words]
        sys.modules.pop(module, None)  # It runs again as __main__. Its imports stay loaded.
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
