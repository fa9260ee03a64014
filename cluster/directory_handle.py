"""The run directory of a process: whether it is still there, and how to work on it while its file
system is in trouble.

Standard library only.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cluster.files import FULL, say
from cluster.process import END_SIGNALS
from cluster.state import JobError

RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Seconds between the calls in `retry_disk`. Their sum is two minutes, in which a metadata server
of a file system can restart."""

Result = TypeVar("Result")


class RunDirectory:
    """The run directory of a process, told apart from every other that may come to lie at its
    path.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError unless there is such a directory."""
        self.run_dir = run_dir
        # Kept open, so that the file system gives its number to no other directory.
        self.handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        self.number = os.fstat(self.handle).st_ino
        self.marks = [
            file for file in (run_dir / "job.json", run_dir / "spec.json") if file.exists()
        ]

    def why_lost(self) -> str | None:
        """Returns what has become of the directory, or None while it is there; a file system in
        trouble is no loss.
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
        """Raises JobError unless the directory is there: whatever this process wrote now would
        be lost or mislead.
        """
        if lost := self.why_lost():
            raise JobError(f"{lost}: nothing can be recorded any more, so this process ends.")


def _is_gone(file: Path) -> bool:
    # not by Path.exists, which from Python 3.14 on takes a file system in trouble for a loss
    try:
        file.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def retry_disk(action: Callable[[], Result], home: RunDirectory | None = None) -> Result:
    """Returns what `action` returns. Calls it again, after each of RETRY_DELAYS_S, while it raises
    OSError: a file system in trouble must not end a job of days.

    `action` must tolerate that an earlier call has done a part of its work.

    Raises:
        OSError: the last call has failed. There is no further call if the disk is full, the run
            directory `home` is lost, or one of END_SIGNALS is pending.
    """
    for delay_s in RETRY_DELAYS_S:
        try:
            return action()
        except OSError as error:
            if error.errno in FULL or (home is not None and home.why_lost()):
                raise
            say(f"{error}: next try in {delay_s:g} s")
            deadline = time.monotonic() + delay_s
            while time.monotonic() < deadline:
                if END_SIGNALS & signal.sigpending():
                    raise
                time.sleep(min(0.5, delay_s))
    return action()
