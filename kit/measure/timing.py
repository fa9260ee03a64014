"""Measures the shortest time of repeated calls of a function. It is the time of a call that other
programs do not disturb.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context manager within which torch uses one thread. On a busy machine, several threads would
    wait for each other, and a measured rate would be too low.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of one call of `run`. The time until a GPU has finished the work that the
    call started is included.
    """
    start = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def best_of(count: int, run: Callable[[], object]) -> float:
    """Returns the seconds of the shortest of `count` calls of `run`. Torch's number of threads is
    not changed.
    """
    return min(timed(run) for _ in range(count))


@one_thread()
def best_within(
    seconds: float, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the seconds, measured by `clock`, of the shortest call of `run`. Torch uses one
    thread. Calls are repeated until `seconds` of wall time have passed. At least one call is made.
    """
    end = time.perf_counter() + seconds
    best = timed(run, clock)
    while time.perf_counter() < end:
        best = min(best, timed(run, clock))
    return best
