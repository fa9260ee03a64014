"""A day of a run in a minute, and what befalls files in a day: memory and pictures stay as small
as they were.
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

from cluster.heartbeats import RankHeartbeat
from cluster.process import Process
from cluster.state import JobState, RunState, log_path
from kit.monitor.dashboard import ALERTS_SHOWN, Dashboard, View, log_lines
from kit.run import Run
from kit.run.alerts import AlertLog
from tests.monitor.recorded import TOKENS, beat, look, recorded_run

HOURS, STEP_S, TICK_STEPS, LOOK_TICKS = 24, 1.0, 50, 4  # a tick of 0.25 s at 200 times real speed
RANKS, SLOW_RANK, SLOW_HOURS = 64, 37, (10, 12)
RESUMED = {8: 500, 16: 900}  # hour of a new attempt: steps that it does again
LOST_STEPS, SPIKES = (20_000, 50_000), (30_000, 61_000)
WIDTH = 900


class Clock:
    """Stands in for `time` where the dashboard looks at it."""

    def __init__(self) -> None:
        self.elapsed = 0.0

    def time(self) -> float:
        return 1.7e9 + self.elapsed

    def monotonic(self) -> float:
        return self.elapsed


class Day:
    """The job of a run, as its files see it: steps, states, heartbeats, log lines, attempts, a
    clock set back.
    """

    def __init__(self, run: Run, clock: Clock) -> None:
        self.run, self.clock, self.attempt, self.step = run, clock, 1, 0
        self.metrics = run.directory / "metrics.jsonl"
        self.metrics.write_text("")
        self.random = np.random.default_rng(0)
        self.say()

    def tick(self) -> None:
        hour = int(self.clock.elapsed // 3600)
        if self.attempt <= sum(hour >= start for start in RESUMED):
            self.attempt, self.step = self.attempt + 1, self.step - RESUMED[hour]
        with self.metrics.open("a") as stream:
            for _ in range(TICK_STEPS):
                self.step += 1
                stream.write(self.line() + "\n")
        log = log_path(self.run.directory, self.attempt, 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as stream:
            stream.writelines(f"step {self.step - i}: all is well\n" for i in range(TICK_STEPS))
        self.clock.elapsed += TICK_STEPS * STEP_S

    def line(self) -> str:
        loss = (
            1.9
            + 9 * (1 + self.step / 200) ** -0.45
            + 0.04 * self.random.normal()
            + 4 * (self.step in SPIKES)
        )
        shift = (
            -3600 if 6 <= self.clock.elapsed / 3600 < 9 else 0
        )  # a clock set back for three hours
        return json.dumps(
            {
                "step": self.step,
                "attempt": self.attempt,
                "time": self.clock.time() + shift,
                "step_time_s": STEP_S,
                "tokens": TOKENS,
                "loss": float("nan") if self.step in LOST_STEPS else loss,
                "grad_norm": 0.4,
                "learning_rate": 1e-4,
                "memory_bytes": 6 * 2**30,
            }
        )

    def say(self) -> None:
        RunState(
            state=JobState.RUNNING,
            attempt=self.attempt,
            step=self.step,
            heartbeat=self.clock.time(),
            step_time_s=STEP_S,
            process=Process.current(),
        ).write(self.run.directory / "state.json")
        slow = SLOW_HOURS[0] <= self.clock.elapsed / 3600 < SLOW_HOURS[1]
        for rank in range(RANKS):
            time_s = STEP_S * (1 + 0.01 * (rank % 3) + 0.4 * (slow and rank == SLOW_RANK))
            heartbeat = RankHeartbeat(
                rank=rank,
                attempt=self.attempt,
                step=self.step,
                time=self.clock.time(),
                step_time_s=time_s,
            )
            file = self.run.directory / "ranks" / f"rank_{rank:05d}.json"
            file.write_text(json.dumps(heartbeat.to_dict()))


def _resident_bytes() -> int:
    """Returns what this process holds: without what it has freed, which other tests of it have
    left in pieces.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_day_costs_no_more_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (
        "kit.monitor.alerts",
        "kit.monitor.dashboard",
        "kit.monitor.actions",
        "cluster.status",
    ):
        monkeypatch.setattr(f"{module}.time", clock)
    run = recorded_run(tmp_path / "run", steps=1, planned=10**6, ranks=RANKS)
    day, sizes, resident, files = Day(run, clock), [], [], []
    dashboard, view = Dashboard(run), View(width=WIDTH)
    for tick in range(int(HOURS * 3600 / (TICK_STEPS * STEP_S))):
        day.tick()
        while dashboard.read():
            pass
        sizes.append(len(dashboard.frame(view)[1]))
        if tick % LOOK_TICKS == 0:
            day.say()
            dashboard.look()
            shown = [dashboard.facts(), dashboard.alerts()]
            sizes[-1] += (
                len(json.dumps(shown, allow_nan=False))
                + len(dashboard.heat())
                + len(dashboard.log())
            )
        if tick % (3600 // TICK_STEPS) == 0:
            resident.append(_resident_bytes())
            files.append(len(os.listdir("/proc/self/fd")))
    steps = HOURS * 3600 - sum(RESUMED.values())
    assert len(dashboard.columns) == steps and sorted(dashboard.columns.first_steps) == [1, 2, 3]
    assert (np.diff(dashboard.curves["time"]) >= 0).all(), (
        "a clock that is set back does not turn time around"
    )
    _check_alerts(dashboard)
    rows_bytes = 30 * 8 * 2 * steps  # columns and curves, in arrays that double
    assert resident[-1] - resident[4] < rows_bytes + 20e6, (
        f"resident, MB: {[round(r / 1e6) for r in resident]}"
    )
    assert files[-1] <= files[1] + 1, "no file stays open"
    hour = 3600 // TICK_STEPS
    assert max(sizes[-hour:]) < 1.3 * max(sizes[hour : 2 * hour]), (
        "a late picture is no larger than an early one"
    )
    assert max(sizes) < 300e3


def _check_alerts(dashboard: Dashboard) -> None:
    alerts = AlertLog(dashboard.run.directory / "alerts.jsonl").alerts
    assert [alert.step for alert in alerts if alert.kind == "nan"] == list(LOST_STEPS)
    assert [alert.step for alert in alerts if alert.kind == "spike"] == list(SPIKES)
    slow = [alert for alert in alerts if alert.kind == "straggler"]
    assert slow and all(f"rank {SLOW_RANK}" in alert.message for alert in slow)
    assert len(slow) <= 2 + 6 * (SLOW_HOURS[1] - SLOW_HOURS[0]), "said again only after ten minutes"
    assert {alert.kind for alert in alerts} == {
        "nan",
        "spike",
        "straggler",
    }, "and no false alarm in a whole day"
    assert len(dashboard.alerts()) <= ALERTS_SHOWN


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_log_of_ten_gigabytes_is_shown_searched_and_followed(tmp_path: Path) -> None:
    dashboard = Dashboard(run := recorded_run(tmp_path / "run"))
    file = log_path(run.directory, 1, 0)
    with file.open("r+b") as stream:
        stream.seek(10 * 2**30)
        stream.write(b"\n" + b"".join(b"step %d: all is well\n" % step for step in range(200_000)))
        stream.write(b"Traceback: Out Of Memory on rank 3\n" + b"step 200000: all is well\n" * 5)
    tracemalloc.start()
    before, start = _bytes_read(), time.monotonic()
    assert dashboard.log().endswith("step 200000: all is well\n")
    assert _bytes_read() - before < 100e3, "the end is read, not the file"
    dashboard.log_search = "out of memory"
    assert dashboard.log() == "Traceback: Out Of Memory on rank 3"
    assert _bytes_read() - before < 20e6 and tracemalloc.get_traced_memory()[1] < 150e6
    assert time.monotonic() - start < 20, "with tracing, on a busy machine"
    tracemalloc.stop()
    with file.open("ab") as stream:
        stream.write(b"a new line\n" + b"half a")
    dashboard.log_search = ""
    assert dashboard.log().endswith("a new line\nhalf a"), "what is being written is shown too"
    assert log_lines(file, "NEW LINE") == "a new line"


def test_a_long_log_is_followed_in_pieces(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    with log_path(run.directory, 1, 0).open("w") as stream:
        stream.writelines(f"step {step}: {'x' * 200}\n" for step in range(200_000))
    tracemalloc.start()
    lines = run.job.follow()
    assert [next(lines)[:8] for _ in range(3)] == ["step 0: ", "step 1: ", "step 2: "]
    assert tracemalloc.get_traced_memory()[1] < 10e6, "of 42 MB"
    tracemalloc.stop()
    last = next(line for line in lines if line.startswith("step 199999"))
    assert len(last) == len("step 199999: ") + 200


def test_files_that_are_cut_replaced_or_removed_while_watched(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", steps=300, ranks=4)
    dashboard = Dashboard(run)
    dashboard.read()
    metrics, log = run.directory / "metrics.jsonl", log_path(run.directory, 1, 0)
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:120]) + lines[120][:40])  # cut in the middle of a line
    log.write_text("")
    _everything(dashboard)
    assert len(dashboard.columns) == 120 and dashboard.log() == ""
    metrics.unlink()
    log.unlink()
    _everything(dashboard)
    assert len(dashboard.columns) == 120, "what was read stays on the screen"
    metrics.write_text("".join(lines))
    _everything(dashboard)
    assert len(dashboard.columns) == 300
    (run.directory / "state.json").write_text('{"state": "runn')
    _everything(dashboard)
    shutil.rmtree(run.directory)
    facts = _everything(dashboard)
    assert facts["state"] == "lost" and len(dashboard.columns) == 300
    assert not run.directory.exists(), "a view makes no directory"


def _everything(dashboard: Dashboard) -> dict:
    """Asks for all that a view shows, as it does in one second."""
    look(dashboard)
    (
        dashboard.frame(View(axis="time", log_x=True)),
        dashboard.heat(),
        dashboard.alerts(),
        dashboard.log(),
    )
    return json.loads(json.dumps(dashboard.facts(), allow_nan=False))


def test_clocks_that_jump_neither_hide_steps_nor_turn_time_around(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", steps=100)
    file = run.directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["time"] += {30: 1e9, 31: -1e9, 32: float("nan")}.get(
            row["step"], -7200 if row["step"] > 60 else 0
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = RunState(
        state=JobState.RUNNING,
        attempt=1,
        step=100,
        heartbeat=time.time() + 3600,
        process=Process.current(),
    )
    state.write(run.directory / "state.json")
    dashboard = Dashboard(run)
    facts = _everything(dashboard)
    assert facts["state"] == "running" and facts["eta_s"] == pytest.approx(900, rel=0.1)
    description, window = dashboard.frame(View(axis="time"))
    x = np.frombuffer(window, "<f8", description["n"])
    assert len(dashboard.columns) == 100 and np.isfinite(x).all() and (np.diff(x) >= 0).all()


def test_sixty_four_ranks_at_a_glance(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", ranks=RANKS)
    dashboard = Dashboard(run)
    taken = []
    for step in range(1, 41):
        beat(run, step, slow_rank=SLOW_RANK)
        start = time.process_time()
        dashboard.look()
        taken.append(time.process_time() - start)
    (run.directory / "ranks" / "rank_00005.json").write_text('{"rank": 5, "att')
    dashboard.look()
    assert np.median(taken) < 0.1, "ten looks a second would be possible"
    assert f"rank {SLOW_RANK}" in str(dashboard.facts()["straggler"])
    heat = np.frombuffer(dashboard.heat(), np.uint8).reshape(RANKS, -1)
    assert heat[:, -1].argmax() == SLOW_RANK and heat.shape[1] <= 120
