"""The kernel side of the dashboard's widget, tested without a browser."""

import base64
import json
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from cluster.state import JobState, read_pending_request, take_request
from kit.data.wheels import file_sha256
from kit.monitor.dashboard import PlotRange
from kit.monitor.text import status_row
from tests.support.recorded_runs import (
    add_row,
    add_rows,
    dead_process,
    looked_at,
    recorded_run,
    say,
)
from tests.support.waiting import eventually

anywidget = pytest.importorskip("anywidget")
from kit.monitor.front_end import STATIC  # noqa: E402
from kit.monitor.widget import CellActivity, Monitor  # noqa: E402


@pytest.fixture
def show(monkeypatch):
    """Returns a function that shows the dashboard of a run. The fixture ends the dashboards'
    threads.
    """
    # The estimate takes seconds, and test_speed.py tests it, so it is skipped in this file.
    monkeypatch.setattr("kit.monitor.speed.SpeedMonitor.update_comparison", lambda *_, **__: None)
    shown = []

    def monitor(run, **options) -> Monitor:
        shown.append(Monitor(run, **options))
        return shown[-1]

    yield monitor
    for widget in shown:
        widget.close()


def until(condition, limit_s: float = 30.0) -> None:
    assert eventually(condition, limit_s), "it did not come about"


def unpack(widget: Monitor) -> tuple[np.ndarray, np.ndarray]:
    n = widget.frame["n"]
    values = np.frombuffer(widget.window, "<f4", offset=8 * n).reshape(-1, n)
    return np.frombuffer(widget.window, "<f8", n), values


# Checksums of the files of uPlot 1.6.32, whose npm package has the integrity
# sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==
VENDORED = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_vendored_chart_library_is_unmodified():
    files = (STATIC / "vendor").iterdir()
    assert {file.name: file_sha256(file) for file in files} == VENDORED


def test_new_steps_reach_the_widget(show, tmp_path):
    run = recorded_run(tmp_path / "run", steps=50)
    widget = show(run)
    assert widget.facts["step"] == 50 and unpack(widget)[0].tolist() == list(range(1, 51))
    add_rows(run, 51, 60)
    until(lambda: widget.frame["rows"] == 60 and len(widget.window) == 60 * (8 + 4 * 19))
    x, values = unpack(widget)
    assert x[-1] == 60 and values.shape == (3 * 6 + 1, 60)


def say_to(widget: Monitor, kind: str, **content) -> None:
    """Sends a message to the widget's kernel side, as the front end does."""
    widget._on_message(widget, {"type": kind, "number": 7, **content}, [])


def test_widget_applies_zoom_smoothing_and_log_search(show, tmp_path):
    widget = show(recorded_run(tmp_path / "run", steps=5000, planned=9000))
    assert widget.frame["rows"] > 0, "the first frame has rows, without a wait for all of them"
    until(lambda: widget.frame["rows"] == 5000)
    view = {"axis": "step", "log_x": False, "start": 1000, "end": 1100}
    for width in (0, 500, 10**9):
        say_to(widget, "view", **view, width=width)
        assert widget.frame["heard"] == 7 and unpack(widget)[0][[0, -1]].tolist() == [999, 1101]
    say_to(widget, "smoothing", value=0.0)
    _, values = unpack(widget)
    np.testing.assert_array_equal(values[0], values[2])
    say_to(widget, "log", search="step 7 of", rank=-1)
    say_to(widget, "action", name="rm")
    assert widget.log.startswith("step 7 of 9000") and not widget.facts["actions"]
    assert widget.failure == ""


def test_widget_sends_only_shown_charts(show, tmp_path):
    """A metric that the run does not have yet is sent when a step records it."""
    run = recorded_run(tmp_path / "run", steps=100)
    widget = show(run)
    until(lambda: widget.frame["rows"] == 100)
    assert widget.frame["charts"] == [chart["key"] for chart in widget.charts]
    offered = {metric["key"]: metric["meaning"] for metric in widget.metrics}
    assert "in nats per token" in offered["validation_loss"] and "hook/score" not in offered
    say_to(widget, "charts", keys=["loss", "hook/score", "validation_loss", "loss"])
    assert widget.frame["charts"] == ["loss", "validation_loss"]
    assert widget.frame["smoothed"] == ["loss"]
    assert unpack(widget)[1].shape == (3 * 2 + 1, 100)
    add_row(run, 101, **{"hook/score": 0.25})
    until(lambda: widget.frame["charts"] == ["loss", "hook/score", "validation_loss"])
    assert unpack(widget)[1][3:6, -1].tolist() == [0.25] * 3
    until(lambda: {"key": "hook/score", "meaning": ""} in widget.metrics)
    say_to(widget, "charts", keys=[])
    assert widget.frame["charts"] == [] and unpack(widget)[1].shape == (1, 101)
    assert widget.failure == ""


def test_widget_stores_and_sends_notes(show, tmp_path):
    widget = show(recorded_run(tmp_path / "run", steps=20))
    say_to(widget, "notes", text="a new tokenizer")
    assert (tmp_path / "run" / "notes.txt").read_text() == "a new tokenizer"
    assert widget.notes == {"text": "a new tokenizer", "is_editable": True, "error": ""}
    assert widget.settings["others"] == [] and widget.failure == ""


def test_widget_buttons_write_and_follow_requests(show, tmp_path):
    run = recorded_run(tmp_path / "run")
    widget = show(run)
    say_to(widget, "action", name="checkpoint")
    until(lambda: read_pending_request(run.directory, "checkpoint"))
    assert take_request(run.directory, "checkpoint")
    until(lambda: widget.facts["actions"]["checkpoint"]["taken_at"])
    say(run, JobState.RUNNING, step=400, process=dead_process())
    until(lambda: widget.facts["actions"]["checkpoint"]["done_at"], limit_s=5)
    assert widget.facts["actions"]["checkpoint"]["note"] == "the job ended first"
    assert widget.facts["state"] == "lost" and widget.facts["allowed"] == ["resume"]
    say_to(widget, "action", name="resume")
    until(lambda: widget.facts["actions"].get("resume", {}).get("done_at"))
    assert "refused" in widget.facts["actions"]["resume"]["note"], "there are no data to train on"


def displayed(monkeypatch) -> list[dict]:
    """Returns a list to which every object is appended that is displayed during the test."""
    shown: list[dict] = []
    keep = shown.append
    monkeypatch.setattr("IPython.display.display", lambda data, **_: keep(data))
    monkeypatch.setattr("IPython.display.DisplayHandle.display", lambda _, data, **__: keep(data))
    return shown


def test_widget_output_has_static_picture_and_json(show, tmp_path, monkeypatch):
    run, shown = recorded_run(tmp_path / "run", steps=300), displayed(monkeypatch)
    empty = show(recorded_run(tmp_path / "empty", steps=0, state=JobState.STARTING))
    widget = show(run, baselines={"published": 2.0})
    for each in (empty, widget):
        each._ipython_display_()
    assert empty.frame["n"] == 0 and empty.facts["state"] == "starting"
    assert "image/png" in shown[1], "of an empty run too"
    view, picture = shown[2:]
    assert view["text/plain"] == "run: running, step 300 of 1000"
    assert "application/vnd.jupyter.widget-view+json" in view and "image/png" not in view
    assert base64.b64decode(picture["image/png"]).startswith(b"\x89PNG")
    assert widget.model_id in picture["text/html"]
    assert len(json.dumps([view, picture])) < 260_000, "two drawings and a picture"
    json.dumps([widget.frame, widget.facts, widget.alerts], allow_nan=False)


def test_widget_shows_its_own_error_and_recovers(show, tmp_path, monkeypatch):
    run = recorded_run(tmp_path / "run", steps=20)
    widget = show(run)

    def fail(directory: Path) -> None:
        raise OSError("the file server is away")

    monkeypatch.setattr("kit.monitor.dashboard.read_status", fail)
    until(lambda: widget.facts["failure"] == "OSError: the file server is away")
    add_rows(run, 21, 30)
    until(lambda: widget.frame["rows"] == 30)
    assert widget.facts["failure"]
    monkeypatch.undo()
    until(lambda: widget.facts["failure"] == "")


def test_widget_heartbeat_needs_no_new_data(show, tmp_path, monkeypatch):
    """The widget sends heartbeats to the page even while the scheduler or the file system hangs. It
    sends none for a run that has ended.
    """
    sent, hangs = {}, threading.Event()
    monkeypatch.setattr("kit.monitor.widget.BEAT_S", 0.02)
    keep = lambda widget, content, **_: sent.setdefault(widget, []).append(content)  # noqa: E731
    monkeypatch.setattr(Monitor, "send", keep)
    monkeypatch.setattr("kit.monitor.dashboard.Dashboard.update_status", lambda _: hangs.wait(60))
    ended = recorded_run(tmp_path / "ended")
    say(ended, JobState.FAILED, step=400)
    finished, running = show(ended), show(recorded_run(tmp_path / "run"))
    with running._lock:
        until(lambda: len(sent.get(running, [])) > 5)
    beats = sent[running]
    assert all(beat["type"] == "beat" and beat["busy"] is False for beat in beats)
    assert 0 < beats[0]["looked_s_ago"] < beats[-1]["looked_s_ago"]
    assert finished not in sent
    hangs.set()


def test_cell_activity_follows_a_real_shell():
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    activity = CellActivity()
    activity.follow(None)
    seen: list[bool] = []
    shell.push({"activity": activity, "seen": seen, "shell": shell})
    for code in ("activity.follow(shell)", "activity.follow(shell)", "raise ValueError"):
        shell.run_cell(f"seen.append(activity.is_running)\n{code}", store_history=False)
        assert not activity.is_running
    shell.run_cell("seen.append(activity.is_running)", store_history=False)
    assert shell.user_ns["seen"] == [False, True, True, True]


def test_closing_the_widget_ends_its_threads(show, tmp_path):
    others = set(threading.enumerate())
    widget = show(run := recorded_run(tmp_path / "run"))
    own = set(threading.enumerate()) - others
    add_rows(run, 401, 402)
    until(lambda: widget.frame["rows"] == 402)
    widget.close()
    until(lambda: len(own) == 3 and not any(thread.is_alive() for thread in own))


def test_rerun_cell_closes_only_its_own_old_widget(show, tmp_path, monkeypatch):
    run, parent = recorded_run(tmp_path / "run"), {}
    events = types.SimpleNamespace(register=lambda *_: None)
    kernel = types.SimpleNamespace(get_parent=lambda: parent, events=events)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: kernel)
    displayed(monkeypatch)
    picture = types.SimpleNamespace(to_bundle=lambda alt: {"text/html": ""})
    monkeypatch.setattr(Monitor, "figure", lambda self: picture)

    def execute(cell: str, message: str, *widgets: Monitor) -> None:
        parent.update(metadata={"cellId": cell}, header={"msg_id": message})
        for widget in widgets:
            widget._ipython_display_()

    first, second, other = show(run), show(run), show(run)
    execute("a", "1", first, second)
    execute("b", "2", other)
    assert not any(widget._closed.is_set() for widget in (first, second, other))
    execute("a", "3", second, show(run))
    assert first._closed.is_set() and not second._closed.is_set() and not other._closed.is_set()


def test_baseline_run_is_read_at_the_same_steps(tmp_path):
    run = recorded_run(tmp_path / "run", steps=100)
    other = recorded_run(tmp_path / "other", steps=60)
    dashboard = looked_at(run, baselines={"other": other, "level": 2.5}, smoothing=0.0)
    dashboard.show_charts(["loss", "mfu", "learning_rate"])
    description, window = dashboard.frame(PlotRange())
    rows = np.frombuffer(window, "<f4", offset=8 * 100).reshape(-1, 100)[3 * 3 + 1 :]
    metrics = other.metrics()
    for name, recorded, (line, values) in zip(
        description["charts"],
        (metrics["loss"], metrics.speeds()["mfu"], metrics["learning_rate"]),
        rows.reshape(3, 2, 100),
        strict=True,
    ):
        for curve in (line, values):
            np.testing.assert_allclose(curve[:60], recorded, rtol=1e-5, err_msg=name)
            assert np.isnan(curve[60:]).all()
    assert description["others"] == ["other"] and description["levels"] == {"level": 2.5}


def test_baseline_without_a_metric_has_no_curve(tmp_path):
    run = recorded_run(tmp_path / "run", steps=20)
    add_row(run, 21, **{"hook/score": 0.25})
    other = recorded_run(tmp_path / "other", steps=60)
    dashboard = looked_at(run, baselines={"other": other})
    dashboard.show_charts(["hook/score"])
    _, window = dashboard.frame(PlotRange())
    rows = np.frombuffer(window, "<f4", offset=8 * 21).reshape(-1, 21)
    assert rows.shape == (3 + 1 + 2, 21) and np.isnan(rows[4:]).all()


def test_dashboard_facts_equal_the_metrics(tmp_path):
    dashboard = looked_at(recorded_run(tmp_path / "run", steps=100))
    facts, metrics = dashboard.facts(), dashboard.run.metrics()
    assert facts["mfu"] == pytest.approx(metrics.summary()["mfu"])
    assert facts["hfu"] == pytest.approx(float(np.median(metrics.hfu()[-20:])))
    assert facts["tokens"] == metrics.total_tokens[-1] and facts["tokens_left"] == 900 * 4096
    assert facts["eta_s"] == pytest.approx(900 * 1.02), "from one step's end to that of the next"


def test_time_left_includes_pauses_between_steps(tmp_path):
    """200 of 400 steps of 36 s are done. Validation takes 360 s after every tenth step, so the
    remaining time is 4 hours.
    """
    run = recorded_run(tmp_path / "run", steps=200, planned=400)
    file = run.directory / "metrics.jsonl"
    taken = [json.loads(line) for line in file.read_text().splitlines()]

    def told(attempt: int, set_back_s: float = 0.0) -> list[float]:
        for row in taken:
            step = row["step"]
            wall = 36 * step + 360 * ((step - 1) // 10) - set_back_s * (step > 100)
            later = 1e5 * (step >= attempt)  # the second attempt starts a day later
            row |= {"attempt": 1 + (step >= attempt), "step_time_s": 36.0}
            row["time"] = 1.7e9 + wall + later
        file.write_text("".join(json.dumps(row) + "\n" for row in taken))
        return [looked_at(run).facts()["eta_s"], status_row(run)["eta_s"]]

    for attempt in (1000, 41):  # the estimate uses only pauses of the newest attempt
        assert told(attempt) == pytest.approx([4 * 3600] * 2, rel=0.03)
    assert told(attempt=200) == [200 * 36] * 2, "one step says nothing of what is between two"
    assert told(attempt=1000, set_back_s=1e6) == pytest.approx([4 * 3600] * 2, rel=0.05)


@pytest.mark.parametrize("pause", [None, "validation_loss", "checkpoint_s", "untold"])
def test_time_left_forgets_a_slow_phase(pause, tmp_path):
    """The run has 1,000 slow steps and then 1,000 fast steps. The expected remaining time is that
    of 1,000 further fast steps.
    """
    run = recorded_run(tmp_path / "run", steps=2, planned=3000)
    rows, now, ends = [], 1.7e9, {}
    for step in range(1, 3001):
        slow = step <= 1000
        took_s = 10.0 if slow and pause is None else 1.0
        gap_s = (200.0 if slow else 20.0) if pause and step % 50 == 1 and step > 1 else 0.0
        now += gap_s + took_s
        ends[step] = now
        row = {
            "step": step,
            "attempt": 1,
            "time": now,
            "step_time_s": took_s,
            "tokens": 1,
            "loss": 1.0,
        }
        row |= {"validation_loss": 2.0} if pause == "validation_loss" and step % 50 == 0 else {}
        row |= {"checkpoint_s": gap_s} if pause == "checkpoint_s" and gap_s else {}
        rows.append(json.dumps(row) + "\n")
    (run.directory / "metrics.jsonl").write_text("".join(rows[:2000]))
    left_s = ends[3000] - ends[2000]
    assert left_s == (1400.0 if pause else 1000.0)
    assert [looked_at(run).facts()["eta_s"], status_row(run)["eta_s"]] == pytest.approx(
        [left_s] * 2, rel=0.02
    )


def test_monitor_package_imports_widget_lazily():
    import kit.monitor

    assert kit.monitor.Monitor is Monitor
    with pytest.raises(AttributeError, match="no attribute 'Montor'"):
        kit.monitor.Montor  # noqa: B018
    late = "{'anywidget', 'rich', 'numpy', 'torch'}"
    code = f"import sys, kit.monitor; sys.exit(bool({late} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_dashboard_retries_unreadable_new_attempt(tmp_path):
    run = recorded_run(tmp_path / "run", steps=100)
    dashboard, recipe = looked_at(run), run.directory / "recipe.json"
    whole = run.recipe.replace(num_steps=2000).to_json()
    recipe.write_text(whole[:40])
    say(run, JobState.RUNNING, attempt=2, step=100)
    for _ in range(2):
        dashboard.update_status()
        facts = dashboard.facts()
        assert (facts["attempt"], facts["num_steps"]) == (2, 1000), "the last picture stays"
    recipe.write_text(whole)
    dashboard.update_status()
    assert dashboard.facts()["num_steps"] == 2000


def test_new_attempt_keeps_the_viewers_settings(tmp_path):
    """When a new attempt starts, rows are not parsed again, alerts are not reported again, and a
    request stays on the screen.
    """
    run = recorded_run(tmp_path / "run", steps=2000, planned=5000, spike_at=700)
    dashboard = looked_at(run)
    before, position = dashboard.run_view, dashboard.columns.position
    dashboard.set_smoothing(0.5)
    dashboard.start_action("checkpoint")
    run.recipe.replace(num_steps=6000).write(run.directory / "recipe.json")
    say(run, JobState.RUNNING, attempt=2, step=2000)
    dashboard.update_status()
    after = dashboard.run_view
    assert after is not before and after.run is not before.run
    assert (before.run.recipe.num_steps, after.run.recipe.num_steps) == (5000, 6000)
    assert before.run is run, "the replaced view was not changed"
    assert len(after.curves) == 2000 and dashboard.columns.position == position
    assert after.curves.smoothing == 0.5
    assert "checkpoint" in dashboard.facts()["actions"]
    assert [alert["kind"] for alert in dashboard.alerts()] == ["spike"]
