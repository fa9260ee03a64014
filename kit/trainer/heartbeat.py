"""Reports of a rank: its heartbeat, by which the watchdog names a rank that hangs, and notices for
people who watch the run.

Each rank has a file. In a run of more than MANY ranks, rank 0 gathers the heartbeats of all ranks
every GATHER_EVERY_S, so that no file system gets many writes at once. The training thread only
stores values in memory. `kit.trainer.background` calls the methods that read or write files.
"""

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cluster.directory_handle import RunDirectory
from cluster.heartbeats import (
    GATHER_EVERY_S,
    MANY,
    PARTS,
    RankHeartbeat,
    read_rank_heartbeats,
    write_all_heartbeats,
    write_rank_heartbeat,
)
from cluster.state import JobState, read_state, record_event, update_state
from kit.run.alerts import Alert, AlertLog
from kit.trainer.callback import Step

BEAT_EVERY_S = 1.0
"""Seconds between two heartbeats of a rank."""
RECENT = 15
"""Number of steps whose medians are in a heartbeat, since a single step says little on a busy
machine."""


class Notices:
    """Notices for people about an attempt, such as a loss of data or a feature that is off.

    `newest` is the last notice on rank 0, or an empty text if there was none.
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory = directory
        self.attempt = attempt
        self.newest = ""
        self.unwritten = deque[Alert]()
        """Notices that are not in the alerts and the history yet, oldest first."""

    def add(self, kind: str, notice: str, step: int) -> None:
        """Prints a notice on rank 0. `write` adds the notice to the alerts and the history, and the
        next heartbeat adds it to state.json.
        """
        if dist.get_rank() != 0:
            return
        self.newest = notice
        print(f"WARNING: {notice}", file=sys.stderr, flush=True)
        level = "error" if kind == "checkpoint" else "warning"
        alert = Alert(
            kind=kind,
            level=level,
            message=notice,
            attempt=self.attempt,
            step=step,
            time=time.time(),
        )
        self.unwritten.append(alert)

    def write(self) -> None:
        """Writes the notices that were added since the last call.

        Raises:
            OSError: Not all notices could be written. The next call tries again.
        """
        while self.unwritten:
            alert = self.unwritten[0]
            AlertLog(self.directory / "alerts.jsonl").add([alert], raises=True)
            self.unwritten.popleft()
            state = read_state(self.directory)
            if state is not None and state.attempt == self.attempt:
                record_event(self.directory, state.replace(reason=alert.message))


class Heartbeat:
    """The heartbeat of a rank: the record of its last step.

    Args:
        home: the run directory.
        attempt: number of the attempt.
        group: group of all ranks, on the CPU.
        notices: notices of the attempt.
        wake: function that begins the next background pass at once.
    """

    def __init__(
        self,
        home: RunDirectory,
        attempt: int,
        group: dist.ProcessGroup,
        notices: Notices,
        wake: Callable[[], None],
    ) -> None:
        self.home = home
        self.directory = home.run_dir
        self.notices = notices
        self.group = group
        self.num_ranks = dist.get_world_size()
        self.wake = wake
        self.beat = RankHeartbeat(
            rank=dist.get_rank(),
            attempt=attempt,
            step=0,
            time=time.time(),
            host=os.uname().nodename,
        )
        self.is_gathered = self.num_ranks > MANY
        self.gathered_at = float("-inf")
        self.gathered: list[Any] | None = None
        """Heartbeats of all ranks, on rank 0, until they are written."""
        self.last = dict[str, Any]()
        """Fields of RankHeartbeat about the last step. Each step replaces the object."""
        self.written: dict[str, Any] = self.last
        """Value of `last` that this rank's file contains."""
        self.recorded: dict[str, Any] = self.last
        """Value of `last` that state.json contains."""
        self.final: dict[str, Any] | None = None
        """Fields of state.json at the end of training, until they are written."""
        self.must_answer = False
        """Whether the watchdog has requested a heartbeat, to see that this process still runs."""
        self.recent = deque[list[float | None]](maxlen=RECENT)
        """Seconds of the last RECENT steps: the time of each of PARTS, and the rank's own time."""
        self.remembered: dict[int, float] | None = None
        """Time of each rank's heartbeat by its own clock, at the last `look_at_ranks`."""

    def after_step(self, step: Step) -> None:
        """Stores the values of a step for the next heartbeat."""
        # Without the time of waiting for other ranks, the rank's own time is unknown.
        work_s = step.work_s if "waiting_s" in step.row else None
        self.recent.append([*map(step.row.get, PARTS), work_s])
        self.last = {
            "step": step.number,
            "time": time.time(),
            "step_time_s": step.row["step_time_s"],
            "work_s": step.work_s,
        }

    def end(self, state: JobState, reason: str, step: int) -> None:
        """Stores how training ended. On rank 0 the next `write_state` records it."""
        if self.beat.rank == 0:
            self.final = {"state": state, "reason": reason, "step": step}

    def write(self) -> None:
        """Writes this rank's file, if there was a step since the last call.

        Raises:
            JobError: The run directory is lost.
        """
        last = self.last
        if last is not self.written and not self.is_gathered:
            self.home.check()
            write_rank_heartbeat(self.directory, self._newest())
            self.written = last

    def write_state(self) -> None:
        """Writes state.json if there was a step since the last call, or if training has ended.
        Called on rank 0 only.

        Raises:
            JobError: The run directory is lost, or belongs to a newer attempt.
        """
        last = self.last
        final = self.final
        if last is self.recorded and final is None:
            return
        self.home.check()
        beat: dict[str, Any] = {"state": JobState.RUNNING, "notice": self.notices.newest}
        if last:
            beat |= {"step": last["step"], "step_time_s": last["step_time_s"]}
            beat["heartbeat"] = time.time()
        update_state(self.directory, attempt=self.beat.attempt, **beat | (final or {}))
        self.recorded = last
        if final is not None:
            self.final = None

    def answer(self) -> None:
        """Requests a heartbeat with the present time while a step is late. Never waits, since the
        watchdog calls it.
        """
        self.must_answer = True
        self.wake()

    def write_answer(self) -> None:
        """Writes this rank's file with the present time, if `answer` has requested it. Writes
        nothing into a directory that has taken the place of the run directory.
        """
        if self.must_answer and not self.is_gathered and not self.home.why_lost():
            write_rank_heartbeat(self.directory, self._newest().replace(time=time.time()))
        self.must_answer = False

    def must_gather(self) -> bool:
        """Returns whether all ranks must call `gather` now. Only rank 0's result counts."""
        return self.is_gathered and time.monotonic() - self.gathered_at > GATHER_EVERY_S

    def gather(self) -> None:
        """Sends the heartbeats of all ranks to rank 0. All ranks must call it."""
        self.gathered_at = time.monotonic()
        lines: list[Any] | None = [None] * self.num_ranks if self.beat.rank == 0 else None
        dist.gather_object(self._newest().line, lines, dst=0, group=self.group)
        self.gathered = lines

    def write_gathered(self) -> None:
        """Writes the heartbeats that rank 0 has gathered since the last call."""
        lines = self.gathered
        if lines is not None:
            write_all_heartbeats(self.directory, lines)
            if self.gathered is lines:
                self.gathered = None

    def _newest(self) -> RankHeartbeat:
        columns = zip(*list(self.recent), strict=True)  # A copy: training adds steps meanwhile.
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
