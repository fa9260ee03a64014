"""Shortest time of a call on this machine, as a measure of its time without disturbance."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread within the context. On a busy machine, several threads wait for
    each other, so that a measured rate would be too low.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of one call, including the work that it queues on an accelerator."""
    start = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def best_of(count: int, run: Callable[[], object]) -> float:
    """Returns the seconds of the shortest of `count` calls, on all threads."""
    return min(timed(run) for _ in range(count))


@one_thread()
def best_within(
    seconds: float, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the seconds of the shortest call on one thread, measured by `clock`. Calls are
    repeated until `seconds` of wall time have passed, and at least one call is made.
    """
    end = time.perf_counter() + seconds
    best = timed(run, clock)
    while time.perf_counter() < end:
        best = min(best, timed(run, clock))
    return best
