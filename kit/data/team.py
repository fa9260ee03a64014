"""Who does the pieces of a build, and what is seen of it."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from kit.data.pieces import Advance
from kit.errors import DataError

TELL_EVERY_S = 30.0


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
        self._bars.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        """Shows a stage of so many bytes; what it yields is told of those that are done."""
        task = self._bars.add_task(title, total=total)

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


def share_out(
    workers: int,
    progress: Progress,
    title: str,
    function: Callable[..., Any],
    pieces: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
) -> list[Any]:
    """Returns what a function makes of each piece, `sizes` being their bytes of text.

    One worker, or one piece, needs no other process than this, which encodes on all cores. Otherwise there is a process
    for each piece, of which so many run at a time; none outlives this call, or this process.

    Raises:
        DataError: a piece cannot be done, or a process has gone.
    """
    children: list[subprocess.Popen[bytes]] = []
    command, pipe = [sys.executable, "-m", "kit.data"], subprocess.PIPE
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # there is a process for each core
    with progress.stage(title, sum(sizes)) as advance:

        def elsewhere(piece: tuple[Any, ...], size: int) -> Any:
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
            children.append(child)
            told, _ = child.communicate(pickle.dumps((function, piece)))
            if child.returncode:
                raise DataError(
                    f"A process of the build has ended with code {child.returncode}, which is -9 where memory ran out. "
                    f"Build again; fewer --workers need less memory."
                )
            if isinstance(answer := pickle.loads(told), Exception):
                raise answer
            advance(size)
            return answer

        if min(workers, len(pieces)) == 1:
            return [function(*piece, advance) for piece in pieces]
        with ThreadPoolExecutor(workers) as threads:
            try:
                results = [threads.submit(elsewhere, *each) for each in zip(pieces, sizes, strict=True)]
                for result in as_completed(results):  # the first error ends all
                    result.result()
                return [result.result() for result in results]
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    child.kill()
