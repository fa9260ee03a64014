"""Heartbeats of a run: who writes them, and how old the last one is.

    state.json                heartbeat of the job: rank 0 writes it after each step, the
                              supervisor before the first step (`StartWatch`)
    ranks/rank_00003.json     heartbeat of one rank, which the rank writes: up to
    MAX_RANKS_WITH_FILES ranks ranks/all.jsonl           heartbeats of more ranks, one line
    each, which rank 0 gathers every
                              GATHER_EVERY_S

With 3,072 ranks, one file per rank and second would cost 15,000 metadata operations per second.
That is the capacity of a whole file system.

A heartbeat contains the time of the machine that wrote it. The clock of the machine that reads it
may be minutes ahead or behind. A heartbeat that looks old therefore counts as old only if it does
not change while this process watches it. The watch is timed by the monotonic clock of this process.
Standard library only.
"""

import contextlib
import dataclasses
import json
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from cluster.files import read_small, write_atomic
from cluster.record import Record, field_doc
from cluster.state import JobState, RunState, read_state, update_state

MAX_RANKS_WITH_FILES = 64
"""Largest number of ranks of a job in which each rank has separate files: its heartbeat and, under
Slurm, its log."""
GATHER_EVERY_S = 10.0
STEP_PHASES = ("data_s", "forward_backward_s", "reduction_s", "optimizer_s", "waiting_s")
"""Columns of metrics.jsonl with the duration of each phase of a step, in seconds. `waiting_s`, the
wait for other ranks or the network, is also contained in the other phases."""
START_BEAT_S = 5.0
"""Seconds between two heartbeats that a supervisor writes while its ranks have taken no step
yet."""
WATCH_S = 5.0
"""Minimum time, in seconds, for which a heartbeat that looks old is watched for a change. Runs
write a heartbeat every second, or every step if steps take longer."""
WATCH_STEPS = 3.0
"""Minimum time for which a heartbeat that looks old is watched, in durations of a step of the
run."""
MAX_WATCH_S = 30.0
"""Upper limit, in seconds, of the minimum time that WATCH_STEPS gives. It bounds the wait for runs
with long steps."""
WATCH_BEATS = 2.5
"""Minimum time for which a heartbeat that looks old is watched for a change before the first step,
in multiples of START_BEAT_S."""
LOOK_EVERY_S = 0.2
"""Seconds between two readings of a heartbeat that is watched for a change."""
MAX_SKEW_S = 86400.0
"""Largest difference between the clocks of two machines that is assumed possible, in seconds. A
heartbeat that looks older than this counts as old without being watched."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankHeartbeat(Record):
    """Heartbeat of one rank: the number and the durations of its last finished step."""

    rank: int = field_doc("global number of the rank")
    attempt: int = field_doc("number of the attempt that the rank belongs to")
    step: int = field_doc("number of the last finished step")
    time: float = field_doc("Unix time of the end of the last finished step, in seconds")
    step_time_s: float | None = field_doc(
        "duration of the last finished step, in seconds", default=None
    )
    host: str | None = field_doc("host name of the node on which the rank runs", default=None)
    work_s: float | None = field_doc(
        "duration of the last finished step without the wait for other ranks, in seconds; None:"
        " the wait is unknown",
        default=None,
    )
    parts_s: tuple[float | None, ...] = field_doc(
        "median duration of each phase over the last steps, in seconds, in this order of columns of"
        " metrics.jsonl: data_s, forward_backward_s, reduction_s, optimizer_s, waiting_s",
        default=(),
    )
    own_s: float | None = field_doc(
        "median of `work_s` over the last steps, in seconds; None: the waits are unknown",
        default=None,
    )
    utilisation: float | None = field_doc(
        "fraction of the driver's last sampling period in which the device computed, 0 to 1; None:"
        " the device does not provide it",
        default=None,
    )
    power_w: float | None = field_doc(
        "power of the device, in watts; None: the device does not provide it", default=None
    )
    temperature_c: float | None = field_doc(
        "temperature of the device, in degrees Celsius; None: the device does not provide it",
        default=None,
    )
    memory_bytes: int | None = field_doc(
        "largest memory of the device so far or, on Trainium, the memory that the process uses, in"
        " bytes; None: on a CPU",
        default=None,
    )
    device_problem: str | None = field_doc(
        "reason why utilisation, power and temperature cannot be read; None: no problem",
        default=None,
    )

    @property
    def line(self) -> bytes:
        """This heartbeat as JSON, without a line break."""
        return json.dumps(self.to_dict(), separators=(",", ":")).encode()


DEVICE_EXTREMES: dict[str, tuple[str, Callable[..., Mapping[str, Any]]]] = {
    "lowest_device_utilisation": ("utilisation", min),
    "highest_device_temperature_c": ("temperature_c", max),
    "largest_device_memory_bytes": ("memory_bytes", max),
}
"""Field of RankHeartbeat and the function that selects the device to report, by the name of the
column in metrics.jsonl."""
MAX_DEVICE_VALUE = 1e18
"""Smallest absolute value that cannot be a memory in bytes, a power or a temperature."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """One number about the devices of all ranks."""

    value: float
    rank: int | None = None
    """Number of the rank whose device has this value. None for a sum over the devices."""
    host: str | None = None
    """Host name of the node of this rank. None if it is unknown, or for a sum."""


def summarise_devices(beats: Iterable[Mapping[str, Any]]) -> dict[str, DeviceSummary]:
    """Returns the least used, the hottest and the fullest device and the power of all devices, by
    the name of the column in metrics.jsonl. Leaves out values that no device provides.

    `beats` are the fields of the heartbeats of all ranks. They are dicts and not records, since
    rank 0 would need half a second to make records of the heartbeats of 3,072 ranks.
    """
    beats = list(beats)
    summaries = dict[str, DeviceSummary]()
    for column, (field, select) in DEVICE_EXTREMES.items():
        known = [beat for beat in beats if _is_believable(beat.get(field))]
        if known:
            beat = select(known, key=operator.itemgetter(field))
            summaries[column] = DeviceSummary(
                value=beat[field], rank=beat["rank"], host=beat.get("host")
            )
    powers_w = [beat["power_w"] for beat in beats if _is_believable(beat.get("power_w"))]
    if powers_w:
        summaries["device_power_w"] = DeviceSummary(value=round(sum(powers_w), 1))
    return summaries


def _is_believable(value: float | None) -> TypeGuard[float]:
    """Returns whether a heartbeat has this value and the value can be shown. Any number may be in a
    file of another user.
    """
    return value is not None and abs(value) < MAX_DEVICE_VALUE


def write_rank_heartbeat(run_dir: Path, beat: RankHeartbeat) -> None:
    """Writes the heartbeat of a rank into `ranks/rank_NNNNN.json`, the file of this rank."""
    beat.write(run_dir / "ranks" / f"rank_{beat.rank:05d}.json")


def write_all_heartbeats(run_dir: Path, lines: Iterable[bytes]) -> None:
    """Writes the heartbeats of all ranks, one JSON line per rank, into `ranks/all.jsonl`."""
    write_atomic(run_dir / "ranks" / "all.jsonl", b"\n".join(lines) + b"\n")


def read_rank_heartbeats(run_dir: Path, attempt: int) -> list[RankHeartbeat]:
    """Returns the heartbeats of one attempt in rank order. Ranks without a heartbeat in this
    attempt are left out.
    """
    folder = run_dir / "ranks"
    lines = list[bytes]()
    with contextlib.suppress(OSError):
        lines = read_small(folder / "all.jsonl").splitlines()
    gathered = [RankHeartbeat.parsed(line) for line in lines]
    beats = [beat for beat in gathered if beat and beat.attempt == attempt]
    if not beats:  # A run of at most MAX_RANKS_WITH_FILES ranks has one file per rank.
        written = [RankHeartbeat.read_or_none(file) for file in folder.glob("rank_*.json")]
        beats = [beat for beat in written if beat and beat.attempt == attempt]
    return sorted(beats, key=lambda beat: beat.rank)


class StartWatch:
    """Writes heartbeats of an attempt into state.json until its first step. Each heartbeat contains
    the seconds since the last change of `RunState.reason`.

    The supervisor calls `beat` in its loop. The seconds are measured by the clock of the
    supervisor, so that readers need not compare two clocks.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.run_dir = run_dir
        self.attempt = attempt
        self.reason = ""
        self.since = time.monotonic()
        self.due = self.since + START_BEAT_S
        self.is_over = False
        """Whether the ranks have taken a step, or the attempt has ended."""

    def beat(self) -> None:
        """Writes a heartbeat if START_BEAT_S seconds have passed since the previous heartbeat.

        Raises:
            StaleAttemptError: A newer attempt owns the directory.
        """
        now = time.monotonic()
        if self.is_over or now < self.due:
            return
        self.due = now + START_BEAT_S
        # An error of the file system must not end the job.
        with contextlib.suppress(OSError):
            state = read_state(self.run_dir)
            if state is None:
                return
            if state.attempt != self.attempt or state.state is not JobState.STARTING:
                self.is_over = True
                return
            if state.reason != self.reason:
                if self.reason:
                    self.since = now
                self.reason = state.reason
            update_state(
                self.run_dir,
                attempt=self.attempt,
                heartbeat=time.time(),
                starting_s=round(now - self.since, 1),
            )


@dataclasses.dataclass(frozen=True)
class _Sighting:
    """The newest heartbeat of a run, and when this process has read it. The three times are seconds
    of the monotonic clock of this process.
    """

    heartbeat: tuple[int, float | None]
    """(attempt, time): the number of the attempt, and the Unix time of the heartbeat by the clock
    of the machine that wrote it."""
    found_at: float
    """Time at which this process first read this heartbeat."""
    looked_at: float
    """Time at which this process last read this heartbeat."""
    newer_than: float | None
    """Time at which this process last read the previous heartbeat. None if it has read no previous
    heartbeat."""


_sightings: dict[Path, _Sighting] = {}
_lock = threading.Lock()


def record_sighting(run_dir: Path, state: RunState) -> _Sighting:
    """Records that this process reads the heartbeat of a run now. Returns the record, with the
    times of the first and the last reading of this heartbeat.
    """
    heartbeat = (state.attempt, state.heartbeat)
    now = time.monotonic()
    with _lock:
        known = _sightings.get(run_dir)
        if known is None:
            sighting = _Sighting(heartbeat, now, now, newer_than=None)
        elif known.heartbeat == heartbeat:
            sighting = dataclasses.replace(known, looked_at=now)
        else:
            sighting = _Sighting(heartbeat, now, now, newer_than=known.looked_at)
        _sightings[run_dir] = sighting
        return sighting


def has_changed_since(run_dir: Path, state: RunState, moment: float) -> bool:
    """Returns whether this process has found a new heartbeat after `moment`, a time of its
    monotonic clock.
    """
    sighting = record_sighting(run_dir, state)
    return sighting.newer_than is not None and sighting.found_at > moment


def heartbeat_age_s(run_dir: Path, state: RunState, limit_s: float) -> float | None:
    """Returns the seconds since the last heartbeat, or None if there is no heartbeat.

    A result above `limit_s` is reliable even if the clocks of two machines differ. Then either the
    heartbeat did not change while this process watched it (`watch_heartbeats`), or it looks older
    than MAX_SKEW_S.
    """
    if state.heartbeat is None:
        return None
    sighting = record_sighting(run_dir, state)
    unchanged_s = time.monotonic() - sighting.found_at
    if _is_tracked(sighting, limit_s) or _must_be_watched(sighting, state, limit_s):
        return unchanged_s
    return max(unchanged_s, time.time() - state.heartbeat)


def watch_heartbeats(limits_s: dict[Path, float]) -> None:
    """Waits until each heartbeat that looks older than its limit has changed or was watched for
    long enough. All heartbeats are watched at the same time.

    `limits_s` gives the limit in seconds by run directory.
    """
    silent = dict(limits_s)
    while True:
        silent = {
            run_dir: limit_s for run_dir, limit_s in silent.items() if _is_silent(run_dir, limit_s)
        }
        if not silent:
            return
        time.sleep(LOOK_EVERY_S)


def _is_silent(run_dir: Path, limit_s: float) -> bool:
    state = read_state(run_dir)
    return state is not None and _must_be_watched(record_sighting(run_dir, state), state, limit_s)


def _is_tracked(sighting: _Sighting, limit_s: float) -> bool:
    """Returns whether this process knows by its own clock when the heartbeat was written. It does
    if it read the previous heartbeat at most `limit_s` seconds before it read this heartbeat.
    """
    before = sighting.newer_than
    return before is not None and sighting.found_at - before <= limit_s


def _must_be_watched(sighting: _Sighting, state: RunState, limit_s: float) -> bool:
    """Returns whether a heartbeat looks old by the clocks of two machines, which may differ, and
    this process has not watched it for long enough yet.
    """
    if state.heartbeat is None or _is_tracked(sighting, limit_s):
        return False
    if not limit_s < time.time() - state.heartbeat <= MAX_SKEW_S:
        return False
    return time.monotonic() - sighting.found_at < _enough_s(state)


def _enough_s(state: RunState) -> float:
    """Returns the seconds in which a running job writes its next heartbeat, with a margin."""
    if state.state is JobState.STARTING:
        return max(WATCH_S, WATCH_BEATS * START_BEAT_S)
    return max(WATCH_S, min(MAX_WATCH_S, WATCH_STEPS * (state.step_time_s or 0.0)))
