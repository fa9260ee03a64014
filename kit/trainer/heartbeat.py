"""What a rank says of itself, for those who watch the run: its heartbeat, by which the watchdog
names the rank that hangs, and what people should know.

Each rank has a file; of more than MANY ranks, rank 0 gathers them every GATHER_EVERY_S. So no file
system meets many ranks at once.
"""

import os
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cluster.files import unless_full
from cluster.heartbeats import (
    GATHER_EVERY_S,
    MANY,
    PARTS,
    RankHeartbeat,
    read_rank_heartbeats,
    tell,
    write_all_heartbeats,
)
from cluster.outcome import RunDirectory
from cluster.state import JobState, read_state, record_event, update_state
from kit.run.alerts import Alert, AlertLog
from kit.trainer.callback import Callback, Step

BEAT_EVERY_S = 1.0
RECENT = 15
"""Steps, of whose parts the medians are told: one step alone says little on a busy machine."""


class Notices:
    """What people should know of an attempt: nothing that was lost or left out goes unsaid.

    `newest` is the last of it, on rank 0, empty if nothing happened.
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory, self.attempt, self.newest = directory, attempt, ""

    def add(self, kind: str, notice: str, step: int) -> None:
        """Says it in the log, the history and the alerts, of rank 0; the state has it at the next
        heartbeat.
        """
        if dist.get_rank() != 0:
            return
        self.newest = notice
        print(f"WARNING: {notice}", file=sys.stderr, flush=True)
        alert = Alert(
            kind=kind,
            level="error" if kind == "checkpoint" else "warning",
            message=notice,
            attempt=self.attempt,
            step=step,
            time=time.time(),
        )
        AlertLog(self.directory / "alerts.jsonl").add([alert])
        state = read_state(self.directory)
        if state is not None and state.attempt == self.attempt:
            record_event(self.directory, state.replace(reason=notice))


class Heartbeat(Callback):
    """Says each second what a rank did last.

    Args:
        home: the run directory.
        attempt: of the run.
        group: of all ranks, on the CPU.
        notices: of the attempt.
    """

    def __init__(
        self, home: RunDirectory, attempt: int, group: dist.ProcessGroup, notices: Notices
    ) -> None:
        self.home, self.directory, self.notices = home, home.run_dir, notices
        self.group, self.num_ranks = group, dist.get_world_size()
        self.beat = RankHeartbeat(
            rank=dist.get_rank(),
            attempt=attempt,
            step=0,
            time=time.time(),
            host=os.uname().nodename,
        )
        self.is_gathered = self.num_ranks > MANY
        self.gathered_at, self.said_at = float("-inf"), float("-inf")
        self.last = dict[str, Any]()
        self.recent = deque[list[float | None]](maxlen=RECENT)
        self.remembered: dict[int, float] | None = None
        """Time of each rank's heartbeat by its own clock, at the last `look_at_ranks`."""

    def after_step(self, step: Step) -> None:
        """Takes note of a step, and says so if the last time is a second ago."""
        self.recent.append(
            [*map(step.row.get, PARTS), step.work_s if "waiting_s" in step.row else None]
        )
        self.last = {
            "step": step.number,
            "time": time.time(),
            "step_time_s": step.row["step_time_s"],
            "work_s": step.work_s,
        }
        # a wall clock that is set back must not silence a run
        if time.monotonic() - self.said_at >= BEAT_EVERY_S:
            self._beat()

    def on_end(self) -> None:
        """Says what the last step was."""
        if self.last:
            self._beat()

    def _beat(self) -> None:
        self.said_at = time.monotonic()
        # Else nothing is written, and thousands of ranks would look.
        if self.beat.rank == 0 or not self.is_gathered:
            self.home.check()
        with unless_full():
            self.write()
            if self.beat.rank == 0:
                update_state(
                    self.directory,
                    attempt=self.beat.attempt,
                    state=JobState.RUNNING,
                    step=self.last["step"],
                    heartbeat=time.time(),
                    step_time_s=self.last["step_time_s"],
                    notice=self.notices.newest,
                )

    def write(self) -> None:
        """Writes that this rank answers, and what it did last; also from the thread of the
        watchdog, and nothing into a directory that has taken the place of its own.
        """
        if not self.is_gathered and not self.home.why_lost():
            tell(self.directory, self._newest().replace(time=time.time()))

    def must_gather(self) -> bool:
        """Whether all ranks are to call `gather` now; for rank 0, which has them agree."""
        return self.is_gathered and time.monotonic() - self.gathered_at > GATHER_EVERY_S

    def gather(self) -> None:
        """Has rank 0 write what all ranks did last; all of them call it."""
        self.gathered_at = time.monotonic()
        lines: list[Any] | None = [None] * self.num_ranks if self.beat.rank == 0 else None
        dist.gather_object(self._newest().line, lines, dst=0, group=self.group)
        if lines:
            with unless_full():
                write_all_heartbeats(self.directory, lines)

    def _newest(self) -> RankHeartbeat:
        columns = zip(*list(self.recent), strict=True)  # a copy: the watchdog's thread asks too
        *parts_s, own_s = map(_median, columns) if self.recent else [None]
        return self.beat.replace(**self.last, parts_s=tuple(parts_s), own_s=own_s)

    def look_at_ranks(self) -> None:
        """Remembers the heartbeats of all ranks, for `silent_ranks`."""
        if not self.is_gathered:
            self.remembered = self._beats_of_ranks()

    def silent_ranks(self) -> list[int] | None:
        """Returns the ranks whose heartbeat has not changed since `look_at_ranks`, or None if
        `look_at_ranks` remembered no heartbeats.

        The times of two ranks are not compared, since each rank uses the clock of its own node.
        """
        if self.remembered is None:
            return None
        now = self._beats_of_ranks()
        return [
            rank for rank in range(self.num_ranks) if now.get(rank) == self.remembered.get(rank)
        ]

    def _beats_of_ranks(self) -> dict[int, float]:
        beats = read_rank_heartbeats(self.directory, self.beat.attempt)
        return {beat.rank: beat.time for beat in beats}


def _median(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 6) if known else None
