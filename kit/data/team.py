"""Who does the pieces of a build: this process leads, others on this machine or on the nodes of a job share them.

Process R of W does every W-th piece of a stage, and says what goes wrong in a file that the leader finds.
"""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.descendants import become_rank
from cluster.files import write_atomic
from kit.data.pieces import OPENS, Advance, Work
from kit.errors import DataError

LOOK_EVERY_S = 0.1, 2.0
"""At what others have done: a few processes, and many."""
TELL_EVERY_S = 30.0
ERROR = "error.txt"


class Progress:
    """A progress bar in bytes of text, lines in the log of a job, or silence."""

    def __init__(self, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description:<22}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=Console(quiet=not shown), disable=not shown)
        self._is_log = not (self._bars.console.is_terminal or self._bars.console.is_jupyter)
        self._told_at = time.monotonic()

    def say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False, emoji=False)

    @contextlib.contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[Advance]:
        """Shows a stage of so many bytes, some done before; what it yields is told of those that are done now."""
        task = self._bars.add_task(title, total=total, completed=done)

        def advance(num_bytes: int) -> None:
            self._bars.advance(task, num_bytes)
            if self._is_log and time.monotonic() - self._told_at > TELL_EVERY_S:
                self._told_at, now = time.monotonic(), self._bars.tasks[task]
                left = "" if now.time_remaining is None else f", {now.time_remaining / 60:.0f} min left"
                self.say(f"{title}: {now.completed / 1e9:,.2f} of {total / 1e9:,.2f} GB{left}")

        yield advance
        self._bars.update(task, completed=total)

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


@dataclasses.dataclass(frozen=True)
class Team:
    """The leader's view of the `size` processes of a build: it is the first, some of the others are its children."""

    work: Work
    size: int
    children: list[subprocess.Popen[bytes]]
    progress: Progress

    def stage(self, stage: str, title: str, sizes: list[int]) -> None:
        """Returns when all pieces of a stage are done; `sizes` are their bytes of text.

        Raises:
            DataError: a piece cannot be done, or a process has gone.
        """
        work, opening = self.work, self.work.folder / OPENS[stage]
        if not opening.exists():
            write_atomic(opening, "{}")
        left = {number for number in range(len(sizes)) if not work.is_done(stage, number)}
        with self.progress.stage(title, sum(sizes), sum(sizes) - sum(sizes[number] for number in left)) as advance:
            for number in range(0, len(sizes), self.size):
                if number in left:
                    work.do(stage, number, advance)
                    left.remove(number)
                    self._check()
            while left:
                done = {number for number in left if work.is_done(stage, number)}
                advance(sum(sizes[number] for number in done))
                if left := left - done:
                    self._check()
                    time.sleep(LOOK_EVERY_S[self.size > 64])

    def _check(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            raise DataError((self.work.folder / ERROR).read_text(encoding="utf-8"))
        for child in self.children:
            if child.poll():
                raise DataError(
                    f"A process of the build has ended with code {child.returncode}, which is -9 where memory ran out. "
                    f"Build again: it goes on where it was. Fewer --workers need less memory."
                )


def follow(work: Work, rank: int, size: int) -> None:
    """Does the pieces of process `rank` of `size`, and returns when the build is over and its folder gone."""

    def wait_for(name: str) -> None:
        while work.folder.exists() and not (work.folder / name).exists():
            time.sleep(LOOK_EVERY_S[size > 64])

    try:
        for stage, opening in OPENS.items():
            wait_for(opening)
            for number in range(rank, work.count(stage), size):
                if not work.is_done(stage, number):
                    work.do(stage, number, lambda _: None)
        wait_for("its end")  # since a task that leaves earlier would end a job
    except Exception as error:
        if work.folder.exists():
            what = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            write_atomic(work.folder / ERROR, what)
            raise


@contextlib.contextmanager
def helpers(folder: Path, first: int, end: int, size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts processes `first` .. `end` - 1 of `size` here; none outlives the end of the block, or this process."""
    started = []
    how: dict[str, Any] = {
        "stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL,
        "env": {**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # there is a process for each core
        "preexec_fn": functools.partial(become_rank, os.getpid()),
    }  # fmt: skip
    try:
        for rank in range(first, end):
            command = [sys.executable, "-m", "kit.data", str(folder), str(rank), str(size)]
            started.append(subprocess.Popen(command, **how))
        yield started
    finally:
        for child in started:
            child.kill()
        for child in started:
            child.wait()
