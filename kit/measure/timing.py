"""The time that a call takes on this machine when nothing disturbs it."""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within the context, torch computes on one thread. On a busy machine, threads that wait for
    each other make a rate look low.
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
    """Returns the seconds of the shortest of some calls, on all threads."""
    return min(timed(run) for _ in range(count))


@one_thread()
def best_within(
    seconds: float, run: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the seconds of the shortest call on one thread, by any clock. There are as many calls
    as fit into `seconds` on the wall, and at least one.
    """
    end = time.perf_counter() + seconds
    best = timed(run, clock)
    while time.perf_counter() < end:
        best = min(best, timed(run, clock))
    return best
