"""Whether a run directory is still the one in which a process began to work.

Standard library only.
"""

import contextlib
import os
from pathlib import Path

from cluster.state import JobError


class Home:
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
