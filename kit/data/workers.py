"""Runs the steps of a dataset build in several processes, and reports their progress."""

import contextlib
import os
import pickle
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.interpreter import source_command
from cluster.logs import end_reason
from kit.errors import DataError

LOG_INTERVAL_S = 30.0
"""Seconds between two lines of progress in the log of a job."""

Advance = Callable[[int], None]
"""Function that adds a number of bytes of text to the progress bar of a stage of the build."""


class BuildProgress:
    """Reports the progress of a dataset build: with a progress bar in bytes of text, with lines in
    the log of a job, or not at all.
    """

    def __init__(self, shown: bool) -> None:
        from kit.show.terminal import PlainConsole

        self._console = PlainConsole(quiet=not shown)
        self._logged_at = time.monotonic()

    def log_line(self, text: str) -> None:
        """Prints a line of text, or nothing if the build shows no progress."""
        self._console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        """Shows the progress of a stage with `total` bytes of text.

        Yields the function that advances the progress.
        """
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = self._console
        is_log = not (console.is_terminal or console.is_jupyter)
        with Bars(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet,
        ) as bars:
            task = bars.add_task(title, total=total)

            def advance(num_bytes: int) -> None:
                bars.advance(task, num_bytes)
                if is_log and time.monotonic() - self._logged_at > LOG_INTERVAL_S:
                    self._logged_at = time.monotonic()
                    now = bars.tasks[task]
                    line = f"{title}: {now.completed / 1e9:,.2f} of {total / 1e9:,.2f} GB"
                    if now.time_remaining is not None:
                        line += f", {now.time_remaining / 60:.0f} min left"
                    self.log_line(line)

            yield advance
            bars.update(task, completed=total)


class Workers:
    """Runs a function once per piece of the text (group of corpus files), in up to `count`
    processes at a time.

    A process is `python -m kit.data`. It is not part of a process pool, since a pool breaks scripts
    without a `__main__` guard.
    """

    def __init__(self, count: int, progress: BuildProgress) -> None:
        self._count = count
        self._progress = progress

    def map(
        self,
        title: str,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        sizes: Sequence[int],
    ) -> list[Any]:
        """Calls a function once per piece, and returns the results in the order of the pieces.

        With a single piece or a single worker, the calls run in this process, and each call encodes
        on all cores. All processes end with this call, or with the calling process.

        Args:
            title: title of the stage in the progress bar.
            function: function that takes the arguments of a piece and, as the last argument, an
                `Advance`.
            arguments: arguments of the function for each piece.
            sizes: bytes of text of each piece, for the progress bar.

        Raises:
            DataError: The function raised it, or a process was killed.
        """
        with self._progress.stage(title, sum(sizes)) as advance:
            if min(self._count, len(arguments)) == 1:
                return [function(*piece, advance) for piece in arguments]
            children: list[subprocess.Popen[bytes]] = []

            def call(piece: tuple[Any, ...], size: int) -> Any:
                result = _call_in_process(function, piece, children)
                advance(size)
                return result

            with ThreadPoolExecutor(self._count) as threads:
                try:
                    return list(threads.map(call, arguments, sizes))
                finally:
                    # If one call has failed, the results of the other processes are not needed.
                    for child in children:
                        child.kill()


def _call_in_process(
    function: Callable[..., Any], piece: tuple[Any, ...], children: list[subprocess.Popen[bytes]]
) -> Any:
    """Returns the result of a function, called with the arguments `piece` in a new process.

    The process is added to `children`, so that the caller can kill it.

    Raises:
        DataError: The process was killed or crashed. Any exception of the function is raised too.
    """
    child = subprocess.Popen(
        source_command("kit.data"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # The build already runs one process per core, so each process encodes with one thread.
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    )
    children.append(child)
    output, errors = child.communicate(pickle.dumps((function, piece)))
    if child.returncode:
        reason = end_reason(errors.decode(errors="replace"))
        if reason:
            reason = f": {reason}"
        raise DataError(
            f"A process of the build has ended with code {child.returncode}, which is -9 where"
            f" memory ran out{reason}. Build again on fewer cores, with `taskset`, or in Python"
            " with fewer workers."
        )
    answer = pickle.loads(output)
    if isinstance(answer, Exception):
        raise answer
    return answer
