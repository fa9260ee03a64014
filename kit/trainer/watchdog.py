"""A watchdog in each rank: ends the attempt if a step does not end, so that the supervisor can
restart the ranks.

A rank that is frozen blocks all other ranks in their collectives until the collectives time out,
after ten minutes or more. The watchdog counts its own ticks instead of reading a clock. Therefore
neither a changed clock nor a process that was suspended and continued looks like a hang. The
watchdog itself never accesses a file system, since a file system that hangs may be the cause of the
hang. Files are read and written by threads for which the watchdog does not wait.
"""

import contextlib
import faulthandler
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from cluster.heartbeats import MAX_RANKS_WITH_FILES
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.engines import gpu
from kit.torch_private import on_compile
from kit.trainer.callback import Step

TICK_S = 0.5
"""Seconds between two checks of the watchdog."""
STEPS, REMEMBERED = 10, 20
"""A step may always take STEPS times as long as the longest of the last REMEMBERED steps, even if
the limit of the recipe is shorter."""
OTHERS_WAIT_S = 5.0
"""Seconds that ranks other than 0 wait after the limit before they end. Rank 0 ends first and
reports the hang. If another rank ends first, rank 0 itself hangs. On a GPU rank 0 waits for
DUMP_WAIT_S, so that all ranks can first write their record of the last collectives."""
LOOK_SHARE = 0.75
"""Fraction of the limit after which rank 0 stores the heartbeat times of all ranks. After half of
the limit, a rank that still runs writes a heartbeat every TICK_S seconds. Its heartbeat therefore
changes between this point and the limit."""
DUMP_WAIT_S = 2.0
"""Seconds that rank 0 waits on a GPU after the watchdog's time limit has passed, so that all ranks
can write their record of the last collectives."""
REPORT_WAIT_S = 15.0
"""Longest time, in seconds, for writing the report of a hang before the process ends."""
MANY_LIMIT_S = 600.0
"""Limit for a step, in seconds, in runs of more than MAX_RANKS_WITH_FILES ranks whose recipe has
the default `hung_after_s`."""


def patience_s(recipe: Recipe, plan: Plan) -> float | None:
    """Returns the seconds that a step may take before the attempt is ended, or None if there is no
    limit.

    The limit is the recipe's `hung_after_s`. If this field has its default value and there are more
    than MAX_RANKS_WITH_FILES ranks, the limit is MANY_LIMIT_S. On a large machine, the file system
    may fail over to another server, which takes two minutes, and a restart of thousands of ranks
    costs more than a longer wait.
    """
    # On Trainium any step may compile a graph, which takes longer than any useful limit.
    if plan.capabilities.runs_on_trainium:
        return None
    is_asked = recipe.hung_after_s != Recipe.hung_after_s
    return (
        recipe.hung_after_s
        if is_asked or plan.num_devices <= MAX_RANKS_WITH_FILES
        else MANY_LIMIT_S
    )


class Watchdog:
    """Watches the steps of this rank in a separate thread.

    Args:
        limit_s: shortest limit for a step, in seconds. If None, steps are not watched.
        rank: number of this rank.
        alive: function that is called every TICK_S seconds while a step is late. It requests a
            heartbeat that shows that the process still runs, and does not wait for the file system.
        store_heartbeat_times: function that stores the heartbeat times of all ranks, with which
            `silent_ranks` compares later.
        silent_ranks: function that returns the ranks whose heartbeat has not changed since
            `store_heartbeat_times`, or None if this is unknown.
        dump: function that writes this process's record of its last collectives. None if there is
            no record.
    """

    def __init__(
        self,
        limit_s: float | None,
        *,
        rank: int,
        alive: Callable[[], None],
        store_heartbeat_times: Callable[[], None],
        silent_ranks: Callable[[], list[int] | None],
        dump: Callable[[], None] | None = None,
    ) -> None:
        self.limit_s = limit_s
        self.rank = rank
        self.dump = dump
        self.alive = alive
        self.store_heartbeat_times = store_heartbeat_times
        self.silent_ranks = silent_ranks
        self.times: deque[float] = deque(maxlen=REMEMBERED)
        self.silent_s = 0.0
        self.step = 0
        self.has_compiled = False
        # The first step has no limit: this pause ends when it is done.
        self.pauses = 1
        self.ended = threading.Event()

    def start(self) -> None:
        """Starts the thread, and registers functions that torch's compiler calls when it begins and
        ends.
        """
        on_compile(self.compile_begins, self.compile_ends)
        if self.limit_s is not None:
            threading.Thread(target=self._watch, args=(self.limit_s,), daemon=True).start()

    def after_step(self, step: Step) -> None:
        """Restarts the time limit, now for the next step. The first step has no limit. The time of
        the first step, and of steps in which torch compiled, is not used for the limits of later
        steps.
        """
        if self.step == 0:
            gpu.shorten_timeouts(self.limit_s)
            self.pauses -= 1
        elif not self.has_compiled:
            self.times.append(step.row["step_time_s"])
        self.step = step.number
        self.silent_s = 0.0
        self.has_compiled = False

    def compile_begins(self, *_: object) -> None:
        """Suspends the limit until `compile_ends` is called. Torch may compile in any step, for
        example for a new shape.
        """
        self.has_compiled = True
        self.pauses += 1

    def compile_ends(self, *_: object) -> None:
        """Ends the suspension of the limit. The time of the step is then counted from zero."""
        self.pauses -= 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that suspends the limit. It is used for operations that may be slow: a
        validation may compile, and saving a checkpoint may wait for the disk.
        """
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def stop(self) -> None:
        """Ends the thread."""
        self.ended.set()

    def _watch(self, least_s: float) -> None:
        looking = dumping = None
        end_wait_s = 0.0
        if self.rank:
            end_wait_s = OTHERS_WAIT_S
        elif self.dump:
            end_wait_s = DUMP_WAIT_S
        while not self.ended.wait(TICK_S):
            self.silent_s += TICK_S
            if self.pauses:
                self.silent_s = 0.0
                looking = None
                continue
            if self.silent_s <= TICK_S:  # a step has ended since the last tick
                looking = None
            limit_s = max(least_s, STEPS * max(self.times, default=0.0))
            if self.silent_s > limit_s / 2:
                self.alive()
            if self.silent_s > LOOK_SHARE * limit_s and self.rank == 0 and not looking:
                looking = _start(self.store_heartbeat_times)
            if self.silent_s > limit_s and self.dump and not dumping:
                # Every rank must write its record before the first rank ends, because the end of
                # one rank ends the other ranks.
                dumping = _start(self.dump)
            if self.silent_s > limit_s + end_wait_s:
                _start(self._report_hang).join(REPORT_WAIT_S)
                os._exit(1)

    def _report_hang(self) -> None:
        silent = self.silent_ranks() if self.rank == 0 else [0]
        who = "the stacks in logs/ say where they wait"
        if silent:
            more = " ..." if len(silent) > 8 else ""
            who = f"rank {', '.join(map(str, silent[:8]))}{more} no longer answers"
        elif silent is not None:
            who = f"all ranks answer; {who}"
        faulthandler.dump_traceback(all_threads=True)
        # The supervisor reports the last line of the log as the reason.
        print(
            f"Hung: no step for {self.silent_s:.0f} s after step {self.step}: {who}.",
            file=sys.stderr,
            flush=True,
        )


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
