"""Heartbeats of a run: who writes them, and how old the last one is.

    state.json                heartbeat of the job: rank 0 writes it after each step, the
                              supervisor before the first step (`StartWatch`)
    ranks/rank_00003.json     heartbeat of one rank, which the rank writes: up to MANY ranks
    ranks/all.jsonl           heartbeats of more ranks, one line each, which rank 0 gathers every
                              GATHER_EVERY_S

A file per rank and second is 15,000 metadata operations a second at 3,072 ranks, as many as a whole
file system gives.

A heartbeat bears the time of the machine that wrote it. The clock of the machine that reads it may
be minutes ahead or behind. So a heartbeat that looks old is believed to be old only if it does not
change while this process watches it, by its own monotonic clock. Standard library only.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from cluster.files import read_small, write_atomic
from cluster.record import Record, field_doc
from cluster.state import JobState, RunState, read_state, update_state

MANY = 64
"""Ranks from which no rank has files of its own: neither its heartbeat nor, under Slurm, its
log."""
GATHER_EVERY_S = 10.0
PARTS = ("data_s", "forward_backward_s", "reduction_s", "optimizer_s", "waiting_s")
"""Of a step, columns of the metrics; a wait for other ranks or the network lies within the
others."""
START_BEAT_S = 5.0
"""Seconds between two heartbeats of a supervisor whose ranks have taken no step yet."""
WATCH_S = 5.0
"""Minimum time, in seconds, for which a heartbeat that looks old is watched. Runs write a heartbeat
every second, or every step if steps take longer."""
WATCH_STEPS = 3.0
"""Minimum time, in steps of the run, for which a heartbeat that looks old is watched."""
MAX_WATCH_S = 30.0
"""Upper limit, in seconds, of the time that WATCH_STEPS gives."""
WATCH_BEATS = 2.5
"""Minimum time before the first step for which a heartbeat that looks old is watched, in intervals
of the supervisor's heartbeats (START_BEAT_S)."""
LOOK_EVERY_S = 0.2
"""Seconds between two readings of a heartbeat that is watched."""
MAX_SKEW_S = 86400.0
"""Largest difference between two clocks that is assumed possible, in seconds. A heartbeat that
looks older is old by any clock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankHeartbeat(Record):
    """One rank's last step."""

    rank: int = field_doc("global rank")
    attempt: int = field_doc("attempt it belongs to")
    step: int = field_doc("last finished step")
    time: float = field_doc("unix time of that step's end")
    step_time_s: float | None = field_doc("seconds that this step took", default=None)
    host: str | None = field_doc("where the rank runs", default=None)
    work_s: float | None = field_doc(
        "seconds of that step without the wait for other ranks, where that is known", default=None
    )
    parts_s: tuple[float | None, ...] = field_doc(
        "medians of its last steps, in the order of PARTS", default=()
    )
    own_s: float | None = field_doc(
        "median of `work_s` over its last steps, where its waits are known", default=None
    )

    @property
    def line(self) -> bytes:
        """As JSON, without a line break."""
        return json.dumps(self.to_dict(), separators=(",", ":")).encode()


def write_rank_heartbeat(run_dir: Path, beat: RankHeartbeat) -> None:
    """Writes what a rank did last into its own file."""
    beat.write(run_dir / "ranks" / f"rank_{beat.rank:05d}.json")


def write_all_heartbeats(run_dir: Path, lines: Iterable[bytes]) -> None:
    """Writes the file of all ranks' heartbeats."""
    write_atomic(run_dir / "ranks" / "all.jsonl", b"\n".join(lines) + b"\n")


def read_rank_heartbeats(run_dir: Path, attempt: int) -> list[RankHeartbeat]:
    """Returns the heartbeats of one attempt in rank order; a rank that has not written yet is
    absent.
    """
    folder = run_dir / "ranks"
    lines = list[bytes]()
    with contextlib.suppress(OSError):
        lines = read_small(folder / "all.jsonl").splitlines()
    gathered = [RankHeartbeat.parsed(line) for line in lines]
    beats = [beat for beat in gathered if beat and beat.attempt == attempt]
    if not beats:  # Each rank has a file of its own.
        written = [RankHeartbeat.read_or_none(file) for file in folder.glob("rank_*.json")]
        beats = [beat for beat in written if beat and beat.attempt == attempt]
    return sorted(beats, key=lambda beat: beat.rank)


class StartWatch:
    """Writes heartbeats of an attempt until its first step, and for how many seconds the reason in
    state.json has been the same.

    The supervisor calls `beat` in its loop. The seconds are counted by the clock of this process,
    so readers need not compare two clocks.
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
        """Writes a heartbeat every START_BEAT_S.

        Raises:
            StaleAttemptError: a newer attempt owns the directory.
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
    """A heartbeat as this process knows it. All times are of this process's monotonic clock."""

    heartbeat: tuple[int, float | None]
    """Attempt, and Unix time by the clock of the machine that wrote it."""
    found_at: float
    """Time of the first look that found this heartbeat."""
    looked_at: float
    """Time of the last look."""
    newer_than: float | None
    """Time of the last look that still found the previous heartbeat. None if there was no such
    look."""


_sightings: dict[Path, _Sighting] = {}
_lock = threading.Lock()


def record_sighting(run_dir: Path, state: RunState) -> _Sighting:
    """Records the heartbeat of a run, and returns when this process has found and last seen it."""
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
    """Returns the seconds since the last heartbeat, None if there is none.

    Returns more than `limit_s` only if the heartbeat is old whatever the clocks say: it did not
    change while this process watched it for long enough (see `watch_heartbeats`), or it looks older
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
    """Watches the heartbeats of runs that look older than their limit, all at the same time, until
    each has changed or was watched for long enough.

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
    if at most `limit_s` before it found the heartbeat it had still seen the previous one.
    """
    before = sighting.newer_than
    return before is not None and sighting.found_at - before <= limit_s


def _must_be_watched(sighting: _Sighting, state: RunState, limit_s: float) -> bool:
    """Returns whether a heartbeat looks old by a clock that may be wrong, and was not watched for
    long enough yet.
    """
    if state.heartbeat is None or _is_tracked(sighting, limit_s):
        return False
    if not limit_s < time.time() - state.heartbeat <= MAX_SKEW_S:
        return False
    return time.monotonic() - sighting.found_at < _enough_s(state)


def _enough_s(state: RunState) -> float:
    """Returns the seconds in which a living run writes its next heartbeat, with a margin."""
    if state.state is JobState.STARTING:
        return max(WATCH_S, WATCH_BEATS * START_BEAT_S)
    return max(WATCH_S, min(MAX_WATCH_S, WATCH_STEPS * (state.step_time_s or 0.0)))
