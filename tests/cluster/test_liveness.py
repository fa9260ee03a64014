"""Detection of silent runs by their heartbeats when the clocks of two machines differ.

The clock of the reading process is changed by `faketime`, in a separate process, or by replacing
the module `time`.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import heartbeats, status
from cluster.job import read_status
from cluster.process import Process
from cluster.state import JobState, read_state, update_state

LOOK = """
import json, sys, time
from pathlib import Path
from cluster.status import read_status, watch_silent
start = time.monotonic()
watch_silent([Path(word) for word in sys.argv[1:]])
found = [read_status(Path(word)).to_dict() for word in sys.argv[1:]]
print(json.dumps({"found": found, "took_s": time.monotonic() - start}))
"""


class Beats:
    """A run on another host. A thread writes its heartbeat several times a second."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.over = run_dir, threading.Event()
        elsewhere = Process.current().replace(host="node7")
        update_state(run_dir, attempt=1, state=JobState.RUNNING, step=1, process=elsewhere)
        self._beat()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        update_state(self.run_dir, attempt=1, heartbeat=time.time(), step_time_s=0.1)

    def _run(self) -> None:
        while not self.over.wait(0.3):
            self._beat()

    def stop(self) -> None:
        self.over.set()
        self.thread.join()


@pytest.fixture
def beats(tmp_path):
    beats = Beats(tmp_path)
    yield beats
    beats.stop()


def test_clock_offset_does_not_stall_a_starting_run(tmp_path):
    """The heartbeats come at long intervals, because the supervisor writes them before the first
    training step.
    """
    elsewhere = Process.current().replace(host="node7")
    update_state(tmp_path, attempt=1, state=JobState.STARTING, process=elsewhere)
    start, over = heartbeats.StartWatch(tmp_path, 1), threading.Event()

    def beats() -> None:
        while not over.wait(0.2):
            start.beat()

    thread = threading.Thread(target=beats, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while (state := read_state(tmp_path)) and state.starting_s is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (found,), _ = look("+2m", tmp_path)
    finally:
        over.set()
        thread.join()
    assert found["state"] == "starting" and found["heartbeat_age_s"] < 6


def look(offset: str, *run_dirs: Path) -> tuple[list[dict], float]:
    """Reads runs in a process whose clock has an offset. Returns (statuses of the runs, seconds
    that reading took).
    """
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed: apt-get install faketime")
    words = ["faketime", "-f", offset, sys.executable, "-c", LOOK, *map(str, run_dirs)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["found"], answer["took_s"]


@pytest.mark.parametrize("offset", ["+2m", "+1h", "-90s", "-2h"])
def test_clock_offset_does_not_stall_a_running_run(beats, offset):
    (found,), took_s = look(offset, beats.run_dir)
    assert (found["state"], found["step"]) == ("running", 1)
    assert 0 <= found["heartbeat_age_s"] < 3 and took_s < 3


@pytest.mark.parametrize("offset", ["+0", "+2m"])
def test_silent_run_is_stalled_despite_clock_offset(tmp_path, offset):
    """Five silent runs are watched at the same time, so reading all of them takes as long as
    reading one.
    """
    run_dirs = [tmp_path / str(number) for number in range(5)]
    elsewhere = Process.current().replace(host="node7")
    for run_dir in run_dirs:
        run_dir.mkdir()
        facts = {"state": JobState.RUNNING, "step": 1, "process": elsewhere}
        update_state(run_dir, attempt=1, heartbeat=time.time() - 90, **facts)
    found, took_s = look(offset, *run_dirs)
    assert {each["state"] for each in found} == {"stalled"}
    assert all("stalled after 60 s" in each["reason"] for each in found)
    assert heartbeats.WATCH_S <= took_s < heartbeats.WATCH_S + 3


class Clocks:
    """Replaces the module `time` of the reading process by simulated clocks: a monotonic clock, and
    a wall clock with an offset.
    """

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s, self.now = ahead_s, 1000.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now + self.ahead_s

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


@pytest.mark.parametrize("ahead_s", [0.0, 300.0, -300.0])
def test_run_is_stalled_a_minute_after_last_heartbeat(tmp_path, monkeypatch, ahead_s):
    """The run must not be reported as stalled earlier than one minute after its last heartbeat,
    even if the clock of the reading machine is wrong.
    """
    clocks = Clocks(ahead_s)
    monkeypatch.setattr(heartbeats, "time", clocks)
    monkeypatch.setattr(status, "time", clocks)
    elsewhere = Process.current().replace(host="node7")
    facts = {"state": JobState.RUNNING, "step": 1, "process": elsewhere}
    update_state(tmp_path, attempt=1, heartbeat=1.7e9 + clocks.now, **facts)

    def beat() -> None:
        if clocks.now <= 1100.0:
            update_state(tmp_path, attempt=1, heartbeat=1.7e9 + clocks.now, **facts)

    clocks.on_sleep = beat
    states = {}
    while clocks.now < 1200.0:
        states[clocks.now] = read_status(tmp_path).state
        clocks.sleep(1.0)
    running = {moment for moment, state in states.items() if state is JobState.RUNNING}
    assert 1159.0 <= max(running) <= 1162.0
    assert {state for moment, state in states.items() if moment > max(running)} == {"stalled"}
    assert all(moment in running for moment in states if moment <= max(running))


def test_rare_status_query_uses_the_wall_clock(tmp_path, monkeypatch):
    """The status is queried only twice, with a long time in between. A heartbeat that changed
    between the queries may be old, and does not count as recent.
    """
    clocks = Clocks(0.0)
    monkeypatch.setattr(heartbeats, "time", clocks)
    elsewhere = Process.current().replace(host="node7")
    facts = {"state": JobState.RUNNING, "step": 1, "process": elsewhere}
    update_state(tmp_path, attempt=1, heartbeat=1.7e9 + clocks.now, **facts)
    assert read_status(tmp_path).state is JobState.RUNNING
    update_state(tmp_path, attempt=1, heartbeat=1.7e9 + clocks.now + 60, **facts)
    clocks.now += 3600.0
    assert read_status(tmp_path).state is JobState.STALLED
    state = read_state(tmp_path)
    assert state is not None and state.heartbeat == 1.7e9 + 1060


def test_start_watch_times_phases_by_monotonic_clock(tmp_path, monkeypatch):
    clocks = Clocks(ahead_s=-7200.0)
    monkeypatch.setattr(heartbeats, "time", clocks)
    update_state(tmp_path, attempt=1, state=JobState.STARTING, reason="ranks start")
    start = heartbeats.StartWatch(tmp_path, 1)

    def seconds(until: float, reason: str | None = None) -> float | None:
        if reason:
            update_state(tmp_path, attempt=1, reason=reason)
        while clocks.now < until:
            clocks.sleep(1.0)
            start.beat()
        state = read_state(tmp_path)
        assert state is not None
        return state.starting_s

    assert seconds(1004.0) is None
    assert seconds(1200.0) == 200.0
    assert seconds(1230.0, "ranks join") == 25.0
    update_state(tmp_path, attempt=1, state=JobState.RUNNING, step=1)
    assert seconds(1300.0) == 25.0 and start.is_over
