"""The run directory of a process: detects that the directory was deleted, moved or replaced, and
repeats operations that an error of the file system has interrupted.

Standard library only.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cluster.files import FULL, print_line
from cluster.process import END_SIGNALS
from cluster.state import JobError

RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Seconds between the calls in `retry_disk`. Their sum is two minutes, in which a metadata server
of a file system can restart."""

Result = TypeVar("Result")


class RunDirectory:
    """The run directory of a process. Its inode number distinguishes it from another directory that
    is created later at the same path.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError if the directory does not exist."""
        self.run_dir = run_dir
        # The open directory prevents the file system from giving its inode number to another
        # directory.
        self.handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        self.number = os.fstat(self.handle).st_ino
        self.marks = [
            file for file in (run_dir / "job.json", run_dir / "spec.json") if file.exists()
        ]

    def why_lost(self) -> str | None:
        """Returns a message if the directory was deleted, renamed, replaced or emptied, otherwise
        None. An error of the file system does not count as a loss, since the directory may still
        exist.
        """
        if _is_gone(self.run_dir):
            return f"{self.run_dir} was deleted or renamed"
        with contextlib.suppress(OSError):
            if os.stat(self.run_dir).st_ino != self.number:
                return f"{self.run_dir} is another directory now"
        if self.marks and all(map(_is_gone, self.marks)):
            return f"{self.run_dir} was emptied"
        return None

    def check(self) -> None:
        """Raises JobError if the directory was deleted, renamed, replaced or emptied. Files that
        this process wrote after that would be lost, or would mislead readers of the new directory.
        """
        if lost := self.why_lost():
            raise JobError(f"{lost}: nothing can be recorded any more, so this process ends.")


def _is_gone(file: Path) -> bool:
    # Path.exists is not used here. Since Python 3.14 it returns False after an error of the file
    # system, although the file may exist.
    try:
        file.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def retry_disk(action: Callable[[], Result], home: RunDirectory | None = None) -> Result:
    """Returns the result of `action`. If `action` raises OSError, calls it again after each of
    RETRY_DELAYS_S. A temporary error of the file system must not end a job that has run for days.

    An earlier call may have done a part of the work before its error, which `action` must tolerate.

    Raises:
        OSError: The last call has failed. There is no further call if the disk is full, the run
            directory `home` is lost, or one of END_SIGNALS is pending.
    """
    for delay_s in RETRY_DELAYS_S:
        try:
            return action()
        except OSError as error:
            if error.errno in FULL or (home is not None and home.why_lost()):
                raise
            print_line(f"{error}: next try in {delay_s:g} s")
            deadline = time.monotonic() + delay_s
            while time.monotonic() < deadline:
                if END_SIGNALS & signal.sigpending():
                    raise
                time.sleep(min(0.5, delay_s))
    return action()
