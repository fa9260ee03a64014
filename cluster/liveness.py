"""Judges whether the heartbeat of a run is old, although the clocks of two machines may differ.

A heartbeat bears the time of the machine that wrote it. The clock of the machine that reads it may
be minutes ahead or behind. So a heartbeat that looks old is believed to be old only if it does not
change while this process watches it, by its own monotonic clock. Standard library only.
"""

import dataclasses
import threading
import time
from pathlib import Path

from cluster.outcome import START_BEAT_S
from cluster.state import JobState, RunState, read_state

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


def see(run_dir: Path, state: RunState) -> _Sighting:
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
    sighting = see(run_dir, state)
    return sighting.newer_than is not None and sighting.found_at > moment


def heartbeat_age_s(run_dir: Path, state: RunState, limit_s: float) -> float | None:
    """Returns the seconds since the last heartbeat, None if there is none.

    Returns more than `limit_s` only if the heartbeat is old whatever the clocks say: it did not
    change while this process watched it for long enough, as `watch` does, or it looks older than
    MAX_SKEW_S.
    """
    if state.heartbeat is None:
        return None
    sighting = see(run_dir, state)
    unchanged_s = time.monotonic() - sighting.found_at
    if _is_tracked(sighting, limit_s) or _must_be_watched(sighting, state, limit_s):
        return unchanged_s
    return max(unchanged_s, time.time() - state.heartbeat)


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


def watch(limits_s: dict[Path, float]) -> None:
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
    return state is not None and _must_be_watched(see(run_dir, state), state, limit_s)
