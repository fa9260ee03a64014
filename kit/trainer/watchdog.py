"""A watchdog in each rank: a step that never ends ends the attempt, so that a restart can begin.

A rank that is frozen, or waits for one that is, holds up all others in their collectives, for as
long as those have patience (ten minutes and more). Time is counted in ticks of this process, so
neither a stepped clock nor a process that was frozen and thawed as a whole looks like a hang. A
file system that hangs, which may be why, cannot hold it up: files are read and written by threads
for which the watchdog does not wait.
"""

import contextlib
import faulthandler
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from cluster.heartbeats import MANY
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.engines import gpu
from kit.torch_private import on_compile
from kit.trainer.callback import Step

TICK_S = 0.5
STEPS, REMEMBERED = 10, 20
"""A step may take this many times the longest of so many before it, however short the limit."""
OTHERS_WAIT_S = 5.0
"""Rank 0 tells of a hang; the others end so much later, which says that it was rank 0 itself. On a
GPU rank 0 too lets the others dump their collectives first."""
LOOK_SHARE = 0.75
"""Share of the limit after which rank 0 remembers the heartbeats of all ranks. From half of the
limit on, a rank that answers writes a heartbeat every TICK_S, so its heartbeat has changed when the
limit is reached."""
DUMP_WAIT_S = 2.0
REPORT_WAIT_S = 15.0
MANY_LIMIT_S = 600.0


def patience_s(recipe: Recipe, plan: Plan) -> float | None:
    """Returns how long a step may take: as asked, but of many ranks and where nothing was asked,
    MANY_LIMIT_S.

    The file system of a large machine may fail over to another server, which takes two minutes, and
    a restart of thousands of ranks costs more than a wait.
    """
    # There any step may compile, for longer than anyone would wait for a hung rank.
    if plan.capabilities.runs_on_trainium:
        return None
    is_asked = recipe.hung_after_s != Recipe.hung_after_s
    return recipe.hung_after_s if is_asked or plan.num_devices <= MANY else MANY_LIMIT_S


class Watchdog:
    """Watches the steps of this rank from a thread of its own.

    Args:
        limit_s: seconds without a step, at least; None: never.
        rank: of this process.
        alive: called each TICK_S while a step is late. It has this rank's heartbeat say that the
            process still answers, and never waits for the file system.
        look_at_ranks: remembers the heartbeats of all ranks, for `silent_ranks`.
        silent_ranks: returns the ranks whose heartbeat has not changed since `look_at_ranks`, or
            None if that is unknown.
        dump: leaves what this process knows of its last collectives.
    """

    def __init__(
        self,
        limit_s: float | None,
        *,
        rank: int,
        alive: Callable[[], None],
        look_at_ranks: Callable[[], None],
        silent_ranks: Callable[[], list[int] | None],
        dump: Callable[[], None] | None = None,
    ) -> None:
        self.limit_s = limit_s
        self.rank = rank
        self.dump = dump
        self.alive = alive
        self.look_at_ranks = look_at_ranks
        self.silent_ranks = silent_ranks
        self.times: deque[float] = deque(maxlen=REMEMBERED)
        self.silent_s = 0.0
        self.step = 0
        self.has_compiled = False
        self.pauses = 1  # until the first step is done
        self.ended = threading.Event()

    def start(self) -> None:
        """Starts to watch, and to listen to torch's compiler."""
        on_compile(self.compile_begins, self.compile_ends)
        if self.limit_s is not None:
            threading.Thread(target=self._watch, args=(self.limit_s,), daemon=True).start()

    def after_step(self, step: Step) -> None:
        """Begins to wait for the next step; the first is not waited for, and tells as little as
        any that compiled.
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
        """Until `compile_ends` nothing is late: torch may compile at any step, for a new shape,
        say.
        """
        self.has_compiled = True
        self.pauses += 1

    def compile_ends(self, *_: object) -> None:
        """Begins to wait anew."""
        self.pauses -= 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts nothing is late: a validation may compile, a checkpoint may wait for
        its disk.
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
                looking = _start(self.look_at_ranks)
            if self.silent_s > limit_s and self.dump and not dumping:
                dumping = _start(self.dump)  # all ranks, before the first of them ends the others
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
        # The last line of the log is what the supervisor gives as the reason.
        print(
            f"Hung: no step for {self.silent_s:.0f} s after step {self.step}: {who}.",
            file=sys.stderr,
            flush=True,
        )


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
