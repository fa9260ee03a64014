"""Simulates a day of a run within a minute. The dashboard's memory and its messages to the page
stay small, even if files of the run are damaged or removed.
"""

import ctypes
import gc
import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cluster.state import JobState, log_path, update_state
from kit.monitor.dashboard import Dashboard, PlotRange, log_lines
from tests.support.recorded_runs import beat, lines, look, recorded_run, row, rows, say, spoil

HOURS, TICK_STEPS, LOOK_TICKS = 24, 50, 4
"""Hours of the simulated run, steps between two updates of its files, and updates between two
readings of the dashboard. A step takes a second, so the dashboard reads every 200 steps."""
RANKS = 64
WIDTH = 900


class Clock:
    """Simulated clock that replaces the module `time` in the dashboard's code."""

    def __init__(self) -> None:
        self.elapsed = 0.0

    def time(self) -> float:
        return 1.7e9 + self.elapsed

    def monotonic(self) -> float:
        return self.elapsed


def _resident_bytes() -> int:
    """Returns the resident memory of this process in bytes. Freed heap memory is returned to the
    system first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_dashboard_memory_stays_bounded_for_a_day(tmp_path, monkeypatch):
    clock = Clock()
    for module in ("alerts", "actions"):
        monkeypatch.setattr(f"kit.monitor.{module}.time", clock)
    run = recorded_run(tmp_path / "run", steps=1, planned=10**6, ranks=RANKS)
    dashboard, view = Dashboard(run), PlotRange(width=WIDTH)
    sizes, resident, files = [], [], []
    steps = HOURS * 3600
    # The rows start at step 2, because with the random noise from step 1 on, one of the 86,400
    # losses would be a spike.
    told = rows(2, steps + 1)
    for tick, step in enumerate(range(TICK_STEPS, steps + 1, TICK_STEPS)):
        clock.elapsed = float(step)
        new = told[step - TICK_STEPS : step]
        with (run.directory / "metrics.jsonl").open("w" if tick == 0 else "a") as stream:
            stream.writelines(new)
        with log_path(run.directory, 1, 0).open("a") as stream:
            stream.writelines(new)
        while dashboard.read():
            pass
        sizes.append(len(dashboard.frame(view)[1]))
        if tick % LOOK_TICKS == 0:
            say(run, JobState.RUNNING, step=step)
            beat(run, step)
            dashboard.update_status()
            shown = json.dumps([dashboard.facts(), dashboard.alerts()], allow_nan=False)
            sizes[-1] += len(shown) + len(dashboard.step_time_heat_map()) + len(dashboard.log())
        if tick % (3600 // TICK_STEPS) == 0:
            resident.append(_resident_bytes())
            files.append(len(os.listdir("/proc/self/fd")))
    assert len(dashboard.columns) == steps
    assert dashboard.alerts() == [], "no false alarm in a whole day"
    # Columns and curves are arrays whose capacity doubles when they are full. The limit allows for
    # this.
    assert resident[-1] - resident[4] < 30 * 8 * 2 * steps + 20e6, resident
    assert files[-1] <= files[1] + 1, "no file stays open"
    hour = 3600 // TICK_STEPS
    late, early = max(sizes[-hour:]), max(sizes[hour : 2 * hour])
    assert late < 1.3 * early, "a late picture is no larger than an early one"
    assert max(sizes) < 300e3


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_log_of_ten_gigabytes_is_searched_and_followed(tmp_path):
    dashboard = Dashboard(run := recorded_run(tmp_path / "run"))
    file = log_path(run.directory, 1, 0)
    with file.open("r+b") as stream:
        stream.seek(10 * 2**30)
        stream.write(b"\n" + b"".join(b"step %d: all is well\n" % step for step in range(200_000)))
        stream.write(b"Traceback: Out Of Memory on rank 3\n" + b"step 200000: all is well\n" * 5)
    tracemalloc.start()
    before = _bytes_read()
    assert dashboard.log().endswith("step 200000: all is well\n")
    assert _bytes_read() - before < 100e3, "the end is read, not the file"
    dashboard.select_log(search="out of memory")
    assert dashboard.log() == "Traceback: Out Of Memory on rank 3"
    assert _bytes_read() - before < 20e6 and tracemalloc.get_traced_memory()[1] < 150e6
    tracemalloc.stop()
    with file.open("ab") as stream:
        stream.write(b"a new line\n" + b"half a")
    dashboard.select_log()
    assert dashboard.log().endswith("a new line\nhalf a"), "what is being written is shown too"
    assert log_lines(file, "NEW LINE") == "a new line"


def test_following_a_long_log_uses_little_memory(tmp_path):
    run = recorded_run(tmp_path / "run")
    with log_path(run.directory, 1, 0).open("w") as stream:
        stream.writelines(f"step {step}: {'x' * 200}\n" for step in range(200_000))
    tracemalloc.start()
    followed = run.job.follow()
    assert [next(followed)[:8] for _ in range(3)] == ["step 0: ", "step 1: ", "step 2: "]
    assert tracemalloc.get_traced_memory()[1] < 10e6, "of 42 MB"
    tracemalloc.stop()
    last = next(line for line in followed if line.startswith("step 199999"))
    assert len(last) == len("step 199999: ") + 200


def test_dashboard_survives_truncated_and_removed_files(tmp_path):
    run = recorded_run(tmp_path / "run", steps=300, ranks=4)
    dashboard = Dashboard(run)
    dashboard.read()
    metrics, log = run.directory / "metrics.jsonl", log_path(run.directory, 1, 0)
    told, revision = metrics.read_text().splitlines(keepends=True), dashboard.columns.revision
    metrics.write_text("".join(told[:120]) + told[120][:40])  # the last line is cut in the middle
    log.write_text("")
    _everything(dashboard)
    assert len(dashboard.columns) == 120 and dashboard.log() == ""
    assert dashboard.columns.revision > revision
    metrics.unlink()
    log.unlink()
    _everything(dashboard)
    assert len(dashboard.columns) == 120, "what was read stays on the screen"
    # A new metrics file is longer than the removed one.
    metrics.write_text(lines([row(step, loss=1.0) for step in range(1, 301)]))
    _everything(dashboard)
    assert len(dashboard.columns) == 300 and (dashboard.columns["loss"] == 1).all()
    (run.directory / "state.json").write_text('{"state": "runn')
    _everything(dashboard)
    shutil.rmtree(run.directory)
    facts = _everything(dashboard)
    assert facts["state"] == "lost" and len(dashboard.columns) == 300
    assert not run.directory.exists(), "a view makes no directory"


def _everything(dashboard: Dashboard) -> dict:
    """Reads all data that a view shows, as a view does once a second. Returns the facts of the
    dashboard as a dict.
    """
    look(dashboard).frame(PlotRange(axis="time", log_x=True))
    for ask in (dashboard.step_time_heat_map, dashboard.alerts, dashboard.log):
        ask()
    return json.loads(json.dumps(dashboard.facts(), allow_nan=False))


def test_clock_jumps_neither_hide_nor_reorder_steps(tmp_path):
    run = recorded_run(tmp_path / "run", steps=100)
    jumps = {30: 1e9, 31: -1e9, 32: float("nan")} | dict.fromkeys(range(61, 101), -7200)
    spoil(run, {step: {"time": 1.7e9 + 1.02 * step + jump} for step, jump in jumps.items()})
    update_state(run.directory, attempt=1, heartbeat=time.time() + 3600)
    dashboard = Dashboard(run)
    facts = _everything(dashboard)
    assert facts["state"] == "running" and facts["eta_s"] == pytest.approx(900, rel=0.1)
    description, window = dashboard.frame(PlotRange(axis="time"))
    x = np.frombuffer(window, "<f8", description["n"])
    assert len(dashboard.columns) == 100 and np.isfinite(x).all() and (np.diff(x) >= 0).all()
