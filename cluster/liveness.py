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
"""Seconds for which a heartbeat that looks old is watched, at least. Runs write one every second,
or every step if steps take longer."""
WATCH_STEPS = 3.0
"""Steps for which it is watched, at least, up to MAX_WATCH_S."""
MAX_WATCH_S = 30.0
WATCH_BEATS = 2.5
"""Heartbeats of a supervisor before the first step for which it is watched, at least."""
LOOK_EVERY_S = 0.2
MAX_SKEW_S = 86400.0
"""Difference between two clocks in seconds that is thought possible. An older heartbeat is old by
any clock."""


@dataclasses.dataclass(frozen=True)
class _Sighting:
    """A heartbeat as this process knows it. All times are of this process's monotonic clock."""

    heartbeat: tuple[int, float | None]
    """Attempt, and unix time by the clock of the writer."""
    found_at: float
    """Time of the first look that found this heartbeat."""
    looked_at: float
    """Time of the last look."""
    newer_than: float | None
    """Time of the last look that found the heartbeat before. None if there was no such look."""


_sightings: dict[Path, _Sighting] = {}
_lock = threading.Lock()


def see(run_dir: Path, state: RunState) -> _Sighting:
    """Notes the heartbeat of a run and returns since when this process knows it."""
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
    """Returns whether this process has found a new heartbeat after a moment of its monotonic
    clock.
    """
    sighting = see(run_dir, state)
    return sighting.newer_than is not None and sighting.found_at > moment


def heartbeat_age_s(run_dir: Path, state: RunState, limit_s: float) -> float | None:
    """Returns the seconds since the last heartbeat, None if there is none.

    More than `limit_s` is returned only if the heartbeat is old whatever the clocks say: it did not
    change while this process watched it for long enough. `watch` does that.
    """
    if state.heartbeat is None:
        return None
    sighting = see(run_dir, state)
    unchanged_s = time.monotonic() - sighting.found_at
    if _is_tracked(sighting, limit_s) or _must_be_watched(sighting, state, limit_s):
        return unchanged_s
    return max(unchanged_s, time.time() - state.heartbeat)


def _is_tracked(sighting: _Sighting, limit_s: float) -> bool:
    """Returns whether this process knows by its own clock when the heartbeat was written: it looked
    shortly before it found the heartbeat.
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
