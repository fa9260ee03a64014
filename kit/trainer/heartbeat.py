"""Reports of a rank: its heartbeat, a record of its last step from which the watchdog sees which
rank hangs, and notices for users who watch the run.

Each rank writes its heartbeat to its own file. In a run of more than MAX_RANKS_WITH_FILES
ranks, rank 0 instead gathers the heartbeats of all ranks every GATHER_EVERY_S seconds and writes
them, so that the file system does not receive thousands of writes at once. The training thread only
stores values in memory. The background thread (`kit.trainer.background`) calls the methods that
read or write files.
"""

import json
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
    MAX_RANKS_WITH_FILES,
    STEP_PHASES,
    RankHeartbeat,
    read_rank_heartbeats,
    summarise_devices,
    write_all_heartbeats,
    write_rank_heartbeat,
)
from cluster.state import JobState, read_state, record_event, update_state
from kit.run.alerts import Alert, AlertLog
from kit.trainer.callback import Step
from kit.trainer.device_readings import DeviceReader

BEAT_EVERY_S = 1.0
"""Seconds between two heartbeats of a rank."""
RECENT = 15
"""Number of last steps over which a heartbeat reports the median seconds of each phase. On a busy
machine, the time of a single step varies too much."""


class Notices:
    """Notices for users about an attempt, such as a loss of data or a feature that is turned off.

    `newest` is the text of the last notice on rank 0, empty if there is none.
    """

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory = directory
        self.attempt = attempt
        self.newest = ""
        self.unwritten = deque[Alert]()
        """Notices that are not yet written to alerts.jsonl and to the history of the run, oldest
        first."""

    def add(self, kind: str, notice: str, step: int) -> None:
        """Prints a notice on rank 0 and stores it. `write` later adds it to alerts.jsonl and the
        history, and the next heartbeat adds it to state.json.

        `kind` is the kind of the alert, and `step` the step at which the problem occurred.
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
        """Writes the notices that were added since the last call to alerts.jsonl and the history.

        Raises:
            OSError: Not all notices could be written. The next call writes the rest.
        """
        while self.unwritten:
            alert = self.unwritten[0]
            AlertLog(self.directory / "alerts.jsonl").add([alert], raises=True)
            self.unwritten.popleft()
            state = read_state(self.directory)
            if state is not None and state.attempt == self.attempt:
                record_event(self.directory, state.replace(reason=alert.message))


class Heartbeat:
    """Stores and writes the heartbeat of a rank, which is a record of the rank's last step.

    Args:
        home: handle of the run directory.
        attempt: number of the attempt.
        group: CPU process group of all ranks.
        notices: notices of the attempt, of which the newest is written to state.json.
        wake: function that starts the next pass of the background thread at once.
        device_reader: reader of this rank's device. None on a CPU.
    """

    def __init__(
        self,
        home: RunDirectory,
        attempt: int,
        group: dist.ProcessGroup,
        notices: Notices,
        wake: Callable[[], None],
        device_reader: DeviceReader | None = None,
    ) -> None:
        self.home = home
        self.directory = home.run_dir
        self.notices = notices
        self.group = group
        self.num_ranks = dist.get_world_size()
        self.wake = wake
        self.device_reader = device_reader
        self.device_row: dict[str, float] | None = None
        """On rank 0, columns of metrics.jsonl about the devices of all ranks that are not yet in
        the row of a step. None if there are none."""
        self.beat = RankHeartbeat(
            rank=dist.get_rank(),
            attempt=attempt,
            step=0,
            time=time.time(),
            host=os.uname().nodename,
        )
        self.is_gathered = self.num_ranks > MAX_RANKS_WITH_FILES
        self.gathered_at = float("-inf")
        self.gathered: list[Any] | None = None
        """On rank 0, gathered heartbeats of all ranks that are not yet written. None if there are
        none."""
        self.last_gathered: list[Any] = []
        """On rank 0, heartbeats of all ranks that were gathered last, as JSON. Empty before."""
        self.last = dict[str, Any]()
        """Fields of RankHeartbeat that describe the last step. Each step stores a new dict, so that
        a change is seen by identity."""
        self.written: dict[str, Any] = self.last
        """The dict in `last` that was written to this rank's heartbeat file. If `last` is another
        dict, the file is out of date."""
        self.recorded: dict[str, Any] = self.last
        """The dict in `last` that was written to state.json. If `last` is another dict, the file is
        out of date."""
        self.final: dict[str, Any] | None = None
        """Fields of state.json at the end of training. None before the end, and after they have
        been written."""
        self.must_answer = False
        """Whether the watchdog has requested a new heartbeat. A new heartbeat shows that this
        process is still running."""
        self.recent = deque[list[float | None]](maxlen=RECENT)
        """Measurements of the last RECENT steps, one list per step: the seconds of each phase in
        STEP_PHASES, then the seconds in which the rank worked without waiting for other ranks."""
        self.remembered: dict[int, float] | None = None
        """Time in each rank's heartbeat when `store_heartbeat_times` was last called, by rank. The
        time is from the clock of the rank's node."""

    def after_step(self, step: Step) -> None:
        """Stores the values of a finished step for the next heartbeat."""
        # The rank's own work is known only if the time of waiting for other ranks was measured.
        work_s = step.work_s if "waiting_s" in step.row else None
        self.recent.append([*map(step.row.get, STEP_PHASES), work_s])
        # On a CPU, the column has the memory of the process, which is not memory of a device.
        memory_bytes = step.row.get("memory_bytes") if self.device_reader else None
        self.last = {
            "step": step.number,
            "time": time.time(),
            "step_time_s": step.row["step_time_s"],
            "work_s": step.work_s,
            "memory_bytes": memory_bytes,
        }

    def end(self, state: JobState, reason: str, step: int) -> None:
        """Stores how training ended. On rank 0 the next call of `write_state` writes it to
        state.json.
        """
        if self.beat.rank == 0:
            self.final = {"state": state, "reason": reason, "step": step}

    def write(self) -> None:
        """Writes this rank's heartbeat file, if a step has finished since the last call.

        Raises:
            JobError: The run directory is lost.
        """
        last = self.last
        if last is not self.written and not self.is_gathered:
            self.home.check()
            write_rank_heartbeat(self.directory, self._newest())
            self.written = last

    def write_state(self) -> None:
        """Writes state.json if a step has finished since the last call, or if training has ended.
        Only rank 0 calls it.

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
        """Requests a heartbeat with the present time, although no step has finished. The watchdog
        calls this while a step is late, so it never waits.
        """
        self.must_answer = True
        self.wake()

    def write_answer(self) -> None:
        """Writes this rank's heartbeat file with the present time, if the method `answer` was
        called since the last `write_answer`. Writes nothing if heartbeats are gathered on rank 0,
        or if another directory has replaced the run directory.
        """
        if self.must_answer and not self.is_gathered and not self.home.why_lost():
            write_rank_heartbeat(self.directory, self._newest().replace(time=time.time()))
        self.must_answer = False

    def must_gather(self) -> bool:
        """Returns whether `gather` is due. All ranks must then call it. The ranks follow the result
        of rank 0.
        """
        return self.is_gathered and time.monotonic() - self.gathered_at > GATHER_EVERY_S

    def gather(self) -> None:
        """Sends the newest heartbeats of all ranks to rank 0, which stores them for
        `write_gathered`. All ranks must call it.
        """
        self.gathered_at = time.monotonic()
        lines: list[Any] | None = [None] * self.num_ranks if self.beat.rank == 0 else None
        dist.gather_object(self._newest().line, lines, dst=0, group=self.group)
        self.gathered = lines
        self.last_gathered = lines or []

    def write_gathered(self) -> None:
        """Writes the heartbeats that rank 0 has gathered, unless they are already written."""
        lines = self.gathered
        if lines is not None:
            write_all_heartbeats(self.directory, lines)
            if self.gathered is lines:
                self.gathered = None

    def _newest(self) -> RankHeartbeat:
        # The deque is copied, since the training thread may add a step at the same time.
        columns = zip(*list(self.recent), strict=True)
        *parts_s, own_s = map(_median, columns) if self.recent else [None]
        device = {} if self.device_reader is None else self.device_reader.fields()
        fields = {**self.last, **device}
        return self.beat.replace(**fields, parts_s=tuple(parts_s), own_s=own_s)

    def summarise_devices(self) -> None:
        """Stores columns about the devices in the newest heartbeats of all ranks, for the row of
        the next step. Only rank 0 calls it, every GATHER_EVERY_S seconds.
        """
        if self.is_gathered:
            beats = [json.loads(line) for line in self.last_gathered]
        else:
            beats = list(map(vars, read_rank_heartbeats(self.directory, self.beat.attempt)))
        summaries = summarise_devices(beats)
        self.device_row = {name: summary.value for name, summary in summaries.items()}

    def take_device_row(self) -> dict[str, float]:
        """Returns the columns about the devices of all ranks, if `summarise_devices` was called
        since the last call. Otherwise returns an empty dict.
        """
        row = self.device_row
        self.device_row = None
        return row or {}

    def store_heartbeat_times(self) -> None:
        """Stores the heartbeat times of all ranks, with which `silent_ranks` compares later. Does
        nothing if heartbeats are gathered on rank 0.
        """
        if not self.is_gathered:
            self.remembered = self._beats_of_ranks()

    def silent_ranks(self) -> list[int] | None:
        """Returns the ranks whose heartbeat has not changed since the last call of
        `store_heartbeat_times`. Returns None if no heartbeat times are stored.

        The times of different ranks are not compared, since each rank uses the clock of its own
        node.
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
