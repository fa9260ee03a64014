"""The view of a run in a terminal, and the commands that send the same requests as the dashboard's
buttons.
"""

import io
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.job import JobSpec
from cluster.site import Site
from cluster.state import (
    ExitReport,
    JobState,
    log_path,
    read_pending_request,
    take_request,
    write_exit,
    write_request,
)
from cluster.submission import submit
from kit.cli.app import app
from kit.errors import RunError
from kit.monitor import run_figure, status_row, status_table, watch
from kit.monitor.dashboard import Dashboard
from kit.monitor.export import export_table, scalars
from kit.monitor.runs import compare_figure, live_row
from kit.monitor.text import bar_chart
from kit.run import Run
from kit.run.alerts import AlertLog
from kit.show import terminal
from tests.support.recorded_runs import alert, dead_process, recorded_run, say, spoil


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return recorded_run(tmp_path / "run", steps=400, second_attempt_at=200)


def _screen(run: Run, width: int) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width, highlight=False).print(status_table(run, width))
    return screen.getvalue().splitlines()


def _command(*arguments: object):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def test_bars_mark_non_finite_values():
    assert bar_chart(np.linspace(8, 4, 400), 8) == "█▇▆▅▄▃▂▁"
    values = np.where(np.arange(400) == 201, np.nan, np.linspace(8, 4, 400))
    assert bar_chart(values, 8) == "█▇▆▅?▃▂▁"
    assert (
        bar_chart(np.full(3, np.inf), 40) == "???" and bar_chart(np.array([2.0, 2.0]), 40) == "▁▁"
    )


NEWEST = ("nan: loss is not finite", "checkpoint: asked")


@pytest.mark.parametrize("width", [80, 60, 44, 200])
def test_status_fits_the_terminal_width(run, width):
    spoil(run, {390: {"loss": float("nan")}, 400: {"step_time_s": 10.0}})
    write_request(run.directory, "checkpoint")
    lines = _screen(run, width)
    words = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    for wanted in ("● running", "400 / 1,000", "MFU", "HFU", "?", *NEWEST):
        assert wanted in words
    if width == 80:
        assert len(lines) <= 20, "one look, no scrolling"
        shown = [word for word in words.split() if word.endswith("%")]
        mfu, hfu, *_, beside, _, _ = shown
        assert mfu == hfu == beside and len(shown) > 3, "the bars' speed is the heading's"


def test_short_terminal_omits_only_oldest_alerts(run):
    spoil(run, {390: {"loss": float("nan")}})
    write_request(run.directory, "checkpoint")
    take_request(run.directory, "checkpoint", step=400)
    folder = run.checkpoints.path(400)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    for step in range(10, 200, 20):
        AlertLog(run.directory / "alerts.jsonl").add([alert("loss spike 9 " * 9, step * 60)])
    words = "\n".join(_screen(run, 80)[:15])
    for wanted in ("● running", "loss", "MFU", *NEWEST, "saved at step 400"):
        assert wanted in words


def test_pipe_gets_first_and_last_view_and_some_between(monkeypatch):
    """At least every 30 s a view is printed. Without it, hours without output would look like a
    hang.
    """
    now, screen = [0.0], io.StringIO()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    console, over = terminal.PlainConsole(file=screen), lambda: now[0] >= 40
    terminal.keep_drawing(lambda: f"{now[0]:.0f} s", console, every_s=10.0, over=over)
    assert screen.getvalue() == "0 s\n30 s\n40 s\n"


STEP = {"step": 1, "attempt": 1, "tokens": 4096, "step_time_s": 1, "loss": 1}
READERS: dict[str, Callable[[Run], dict]] = {
    "status": status_row,
    "runs": live_row,
    "figure": lambda run: run_figure(run)[1],
    "compare": lambda run: next(iter(compare_figure([run])[1].values())),
    "export": lambda run: dict.fromkeys(export_table(run).column_names, 1),
    "sink": lambda run: scalars(run, [STEP])[0],
    "dashboard": lambda run: Dashboard(run).read_all().facts(),
}


def test_every_view_omits_mfu_of_implausible_peak(run):
    peak = run.site.peak_flops_per_s("fp32") or 0
    slip = run.site.with_measured_peak("fp32", peak / 100, "a slip")
    slip.write(run.directory / "site.json")
    run = Run.open(run.directory)
    for name, read in READERS.items():
        told = read(run)
        assert told["loss"] is not None, name
        assert told.get("mfu") is None and told.get("hfu") is None, name
    words = " ".join(" ".join(_screen(run, 80)).split())
    assert "MFU above the peak" in words and "cannot be true" in words


def watched(run: Run, end: Callable[[], object], **console: object) -> str:
    """Runs `watch` for a run until the function `end` ends the run. Returns its output."""
    screen = io.StringIO()
    shown = {"console": Console(file=screen, **console)}  # type: ignore[arg-type]
    thread = threading.Thread(target=watch, args=(run,), kwargs=shown)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive(), "as long as the job runs"
    end()
    thread.join(20)
    assert not thread.is_alive()
    return screen.getvalue()


def test_watch_ends_with_the_job_and_shows_the_reason(run):
    reason = "rank 0 ended with code 3"
    report = ExitReport(attempt=2, rc=3, reason=reason, host="h", time=time.time())
    screen = watched(run, lambda: write_exit(run.directory, report), width=80, force_terminal=True)
    last = screen.rpartition("run  ")[2]
    assert reason in last
    assert "step 400 of 1000: all is well" in last, "with the end of its log"


def test_status_of_a_failed_run_gives_the_reason_once(run):
    line = "ValueError: the batch of step 401 is empty"
    log = log_path(run.directory, 2, 0)
    log.write_text(f"step 400 of 1000\n  File train.py\n{line}\n")
    report = ExitReport(
        attempt=2, rc=1, reason=f"rank 0 ended with code 1: {line}", host="h", time=1.75e9
    )
    write_exit(run.directory, report)
    found = json.loads(_command("status", run.directory, "--json").stdout)
    (alert,) = found["alerts"]
    assert alert["message"] == f"job failed: {report.reason}" and alert["time"] == 1.75e9
    screen = "\n".join(_screen(run, 200))
    assert screen.count(line) == 1 and "File train.py" in screen
    assert f"{terminal.format_time(1.75e9, '%m-%d %H:%M:%S')} step 400 job: job failed" in screen


def test_watch_reports_removed_run_directory(run):
    screen = watched(run, lambda: shutil.rmtree(run.directory), width=120)
    assert "was removed" in screen and "400 / 1,000" in screen, "with what was read before"


def test_status_finds_each_alert_once_without_viewer(run):
    spoil(run, {390: {"loss": float("nan")}})
    say(run, JobState.RUNNING, attempt=2, step=400, process=dead_process())
    for _ in range(2):
        found = json.loads(_command("status", run.directory, "--json").stdout)["alerts"]
        assert [(alert["kind"], alert["step"]) for alert in found] == [("nan", 390), ("job", 400)]
    words = _command("status", run.directory).stdout
    assert "loss is not finite" in words and "job lost" in words and "older" not in words


def test_status_shows_newest_alerts_and_counts_older(run):
    log = AlertLog(run.directory / "alerts.jsonl")
    told = [alert(f"jump {step}", step, time=step) for step in range(0, 13 * 60, 60)]
    log.add(told)
    lines = _command("status", run.directory).stdout.splitlines()
    shown = [line.rpartition(" ")[2] for line in lines if "spike: jump" in line]
    assert shown == [str(step) for step in range(720, 120, -60)]
    assert f"and 3 older alerts: kit status {run.directory} --json" in lines
    found = json.loads(_command("status", run.directory, "--json").stdout)["alerts"]
    assert found == [alert.to_dict() for alert in told]


def test_alert_log_drops_repeated_alerts(tmp_path):
    """Alerts about one event and attempt are repetitions if they are close in step or time. A lost
    job is reported only once per attempt, at any time.
    """
    log = AlertLog(tmp_path / "alerts.jsonl")
    spikes = [alert("jump", step) for step in (1000, 1050, 949, 1051, 1101, 50)]
    assert [each.step for each in log.add(spikes)] == [1000, 949, 1051, 50]
    stalls = [alert("no step", 1, "stall", time=when) for when in (0.0, 599.0, 1201.0, 700.0)]
    assert [each.time for each in log.add(stalls)] == [0.0, 1201.0]
    assert AlertLog(log.file).add([*spikes, *stalls]) == []
    lost = alert("job lost: gone", 4, "job", level="error", time=0.0)
    others = [lost.replace(message="job failed: code 1"), lost.replace(attempt=2)]
    again = lost.replace(time=1e6, message="job lost: gone for 9 days")
    assert log.add([lost, again, *others]) == [lost, *others], "however late one looks"


def test_commands_act_like_the_dashboard_buttons(tmp_path):
    run = recorded_run(tmp_path / "run")
    sleep = {"argv": ("sleep", "60"), "num_processes": 1, "grace_s": 2.0}
    say(run, JobState.DONE, process=dead_process())
    submit(JobSpec(name="sleeper", run_dir=str(run.directory), **sleep), Site.load("laptop"))
    for command in ("checkpoint", "stop"):
        assert "Asked at" in _command(command, run.directory).stdout
        assert read_pending_request(run.directory, command)
    assert "kit resume" in _command("stop", "--now", run.directory).stdout
    assert run.job.wait(20).state is JobState.FAILED
    for command in ("stop", "checkpoint"):
        with pytest.raises(RunError, match="nothing to .*the job is failed"):
            _command(command, run.directory)
    with pytest.raises(RunError, match="is not a run directory"):
        _command("watch", tmp_path / "nowhere")
