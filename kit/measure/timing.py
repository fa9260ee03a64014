"""How long something takes on this machine when nothing disturbs it."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute on one thread: threads that wait for each other on a busy machine make a
    rate look low.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of one call, with the work that it leaves to an accelerator."""
    start = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


@one_thread()
def best_within(
    seconds: float, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the shortest of the calls on one thread that fit into some seconds on the wall, at
    least one, by any clock.
    """
    end = time.perf_counter() + seconds
    best = timed(run, clock)
    while time.perf_counter() < end:
        best = min(best, timed(run, clock))
    return best
