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

        self._console, self._told_at = Console(quiet=not shown), time.monotonic()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        """Shows a stage of so many bytes; what it yields is told of those that are done."""
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console, named = self._console, TextColumn("{task.description:<22}")
        columns = named, BarColumn(), DownloadColumn(), TimeRemainingColumn()
        is_log = not (console.is_terminal or console.is_jupyter)
        with Bars(*columns, console=console, disable=console.quiet) as bars:
            task = bars.add_task(title, total=total)

            def advance(num_bytes: int) -> None:
                bars.advance(task, num_bytes)
                if is_log and time.monotonic() - self._told_at > TELL_EVERY_S:
                    self._told_at, now = time.monotonic(), bars.tasks[task]
                    done, left = f"{now.completed / 1e9:,.2f}", now.time_remaining
                    ending = "" if left is None else f", {left / 60:.0f} min left"
                    self.say(f"{title}: {done} of {total / 1e9:,.2f} GB{ending}")

            yield advance
            bars.update(task, completed=total)


def share_out(
    workers: int,
    progress: Progress,
    title: str,
    function: Callable[..., Any],
    pieces: Sequence[tuple[Any, ...]],
    sizes: Sequence[int],
) -> list[Any]:
    """Returns what a function makes of each piece, `sizes` being their bytes of text.

    One worker, or one piece, needs no process but this, which encodes on all cores. Otherwise each
    piece has a process, of which so many run at a time; none outlives this call, or this process.

    Raises:
        DataError: a piece cannot be done, or a process has gone.
    """
    children: list[subprocess.Popen[bytes]] = []
    command, pipe, silence = [sys.executable, "-m", "kit.data"], subprocess.PIPE, subprocess.DEVNULL
    alone = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # there is a process for each core
    with progress.stage(title, sum(sizes)) as advance:

        def elsewhere(piece: tuple[Any, ...], size: int) -> Any:
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=silence, env=alone)
            children.append(child)
            told, _ = child.communicate(pickle.dumps((function, piece)))
            if child.returncode:
                raise DataError(
                    f"A process of the build has ended with code {child.returncode}, which is -9 "
                    f"where memory ran out. Build again on fewer cores, with `taskset`, or in "
                    f"Python with fewer workers."
                )
            if isinstance(answer := pickle.loads(told), Exception):
                raise answer
            advance(size)
            return answer

        if min(workers, len(pieces)) == 1:
            return [function(*piece, advance) for piece in pieces]
        with ThreadPoolExecutor(workers) as threads:
            try:
                results = [threads.submit(elsewhere, *of) for of in zip(pieces, sizes, strict=True)]
                for result in as_completed(results):  # the first error ends all
                    result.result()
                return [result.result() for result in results]
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    child.kill()
