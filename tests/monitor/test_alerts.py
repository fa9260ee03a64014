"""Alerts of a run: events that must be reported, events that must not be reported, and the rule
that each event is reported once.
"""

import dataclasses
import json
import math
import os
import re
import time

import numpy as np
import pytest

from cluster.login.mirror import MIRROR_FILE, REPORT_FILE, ClusterReport, Mirror
from cluster.record import ConfigError
from cluster.state import JobState, log_path, update_state
from kit.monitor import alerts
from kit.monitor.dashboard import Dashboard
from kit.monitor.detectors import MIN_SAMPLES
from kit.monitor.figure import run_figure
from kit.monitor.runs import runs_table
from kit.monitor.text import recorded_alerts, status_row
from kit.run import Run
from kit.run.alerts import AlertLog
from tests.support.environments import ROOT
from tests.support.recorded_runs import add_row, add_rows, alert, beat, look, recorded_run


def kinds(dashboard: Dashboard) -> list[str]:
    return [alert.kind for alert in look(dashboard).run_view.alert_monitor.log.alerts]


def test_each_stretch_of_nan_steps_gives_one_alert(tmp_path):
    run = recorded_run(tmp_path / "run", steps=100)
    dashboard = Dashboard(run)
    assert kinds(dashboard) == []
    add_row(run, 101, loss=float("nan"))
    assert kinds(dashboard) == ["nan"]
    add_row(run, 102, loss=float("nan"))
    add_row(run, 103, grad_norm=float("inf"))
    assert kinds(dashboard) == ["nan"]
    add_rows(run, 104, 199)
    add_row(run, 200, grad_norm=float("nan"))
    assert kinds(dashboard) == ["nan", "nan"]
    assert [alert.step for alert in dashboard.run_view.alert_monitor.log.alerts] == [101, 200]


def test_nan_in_steps_without_times_gives_an_alert(tmp_path):
    """Some imported logs contain no times. Their rows have no step time."""
    run = recorded_run(tmp_path / "run", steps=0)
    dashboard = Dashboard(run)
    for step in range(1, 41):
        loss = math.nan if 20 < step < 31 else 3.0
        add_row(run, step, step_time_s=None, grad_norm=None, loss=loss)
        if step in (15, 25):
            look(dashboard)  # The alert is not repeated at the next look.
    look(dashboard)
    found = [(a.kind, a.step) for a in dashboard.run_view.alert_monitor.log.alerts]
    assert found == [("nan", 21)]


def test_fp16_scale_search_gives_no_nan_alert(tmp_path):
    """In fp16, the trainer skips steps until the loss scale is low enough. A skipped step gives no
    alert, but a NaN in a step that was not skipped does.
    """
    run = recorded_run(tmp_path / "run", steps=0)
    for step in range(1, 31):
        add_row(run, step, grad_norm=None)
    assert kinds(Dashboard(run)) == [] and status_row(run)["grad_norm"] is None, "never logged"
    for step in range(31, 40):
        skipped = min(step - 30, 5)
        scale, norm = 2.0 ** (16 - skipped), math.inf if step < 36 else 0.4
        add_row(run, step, skipped_steps=skipped, loss_scale=scale, grad_norm=norm)
    assert kinds(Dashboard(run)) == []
    add_row(run, 40, skipped_steps=5, loss_scale=1.0, grad_norm=math.inf)
    assert kinds(Dashboard(run)) == ["loss_scale", "nan"], "which was not skipped"
    add_row(run, 41, skipped_steps=6, loss_scale=1.0, loss=math.nan)
    assert kinds(Dashboard(run)) == ["loss_scale", "nan"]


def test_diverging_start_gives_one_alert(tmp_path):
    """A dashboard that is open during the start, and a dashboard that is opened later, give the
    same alert.
    """
    dashboard = Dashboard(run := recorded_run(tmp_path / "run", steps=0))
    wrong, back = [9.5 + 0.5 * i for i in range(12)], [8.0 - 0.1 * i for i in range(20)]
    for step, loss in enumerate([8.3, 9.1, *wrong, *back], 1):
        add_row(run, step, loss=loss)
        assert kinds(dashboard) == ["start"] * (step >= 12)
    (live,) = dashboard.run_view.alert_monitor.log.alerts
    (run.directory / "alerts.jsonl").unlink()
    (found,) = recorded_alerts(run)
    assert found == live and live.step == 12 and "loss 14, after 8.3 at the start" in live.message


def test_spike_seen_by_several_viewers_is_recorded_once(tmp_path):
    run = recorded_run(tmp_path / "run", steps=2000, planned=5000, spike_at=700)
    first, second = Dashboard(run), Dashboard(run)
    assert kinds(first) == kinds(second) == ["spike"]
    assert kinds(Dashboard(run)) == ["spike"], "a kernel that comes later"
    assert len((run.directory / "alerts.jsonl").read_text().splitlines()) == 1
    (found,) = first.run_view.alert_monitor.log.alerts
    assert (found.step, found.attempt, found.level) == (700, 1, "warning")
    assert "median" in found.message


def test_alert_log_survives_torn_lines_and_no_folder(tmp_path):
    file, told = tmp_path / "alerts.jsonl", alert("m", 5)
    file.write_text('{"kind": "na\n[]\n\x00\n' + json.dumps(told.to_dict()) + '\n{"torn')
    assert AlertLog(file).alerts == [told]
    absent = AlertLog(tmp_path / "absent" / "alerts.jsonl")
    assert absent.add([told]) == [told] and absent.alerts == [told]
    with pytest.raises(ConfigError):
        dataclasses.replace(told, level="fatal")


def test_stall_is_timed_by_the_viewers_clock(tmp_path, monkeypatch):
    """No stall is reported while the connection to the login node is lost, or while the newest
    steps may still arrive.
    """
    run = recorded_run(tmp_path / "run", steps=50)
    dashboard = Dashboard(run)
    assert kinds(dashboard) == []
    now = alerts.time.monotonic()
    there = Mirror(login="far", python="python", source="/", directory="/run")
    there.write(run.directory / MIRROR_FILE)
    status = dashboard.status.to_dict()
    seen = ClusterReport(time=alerts.time.time() - 20, status=status)
    seen.write(run.directory / REPORT_FILE)
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now + 20)
    assert kinds(dashboard) == [], "nobody knows: a login node was lost"
    assert dashboard.facts()["as_of"] == "20 s"
    seen.replace(time=alerts.time.time()).write(run.directory / REPORT_FILE)
    assert kinds(dashboard) == [], "steps may be on their way"
    assert dashboard.facts()["as_of"] is None
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now + 40)
    assert kinds(dashboard) == ["stall"]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.DONE])
@pytest.mark.parametrize(
    ("peak", "expected"), [(1e9, "so no MFU or HFU is given"), (4.6e10, "than real runs reach")]
)
def test_implausible_peak_gives_one_alert(tmp_path, peak, expected, state):
    """The MFU is above 1, or above the values that real runs reach. After the peak FLOP/s in
    `site.json` is corrected, MFU is shown again.
    """
    run = recorded_run(tmp_path / "a run", steps=200, state=state)
    run.site.with_measured_peak("fp32", peak, "test").write(run.directory / "site.json")
    dashboard = Dashboard(Run.open(run.directory))
    assert kinds(dashboard) == ["peak"]
    message = dashboard.alerts()[0]["message"]
    assert expected in message and f"kit bench --apply '{run.directory}'" in message
    assert kinds(Dashboard(Run.open(run.directory))) == ["peak"], "once, however often one looks"
    run.site.write(run.directory / "site.json")
    dashboard.update_status()
    dashboard.read()
    corrected = np.median(run.metrics().mfu()[-20:])
    assert dashboard.facts()["mfu"] == pytest.approx(corrected)


@pytest.mark.parametrize("record", ["plan", "site"])
def test_damaged_record_hides_mfu_of_its_attempt_only(tmp_path, record):
    run = recorded_run(tmp_path / "run", steps=200, second_attempt_at=101)
    whole, name = run.metrics().mfu(), f"{record}.attempt_01.json"
    (run.directory / name).write_text('{"torn')
    mfu = run.metrics().mfu()
    assert np.isnan(mfu[:100]).all() and np.array_equal(mfu[100:], whole[100:])
    dashboard = look(Dashboard(run))
    (told,) = dashboard.run_view.alert_monitor.log.alerts
    assert (told.kind, told.attempt, told.step) == ("record", 1, 100)
    assert told.message.startswith(f"{name}: {record}: not valid JSON")
    assert dashboard.facts()["mfu"] == pytest.approx(np.median(whole[-20:]))
    assert kinds(Dashboard(run)) == ["record"], "once, however often one looks"
    assert run_figure(run)[1]["mfu"][-1] == pytest.approx(whole[-1])
    table, reason = runs_table(tmp_path), f"no MFU of attempt 1: {name}: "
    assert table.rows[0]["mfu"] == pytest.approx(np.median(whole[-20:]))
    assert reason in table.rows[0]["reason"] and table.notes[0].startswith(f"run: {reason}")


def test_mfu_change_with_layout_gives_no_alert(tmp_path):
    """Two thirds of the steps were trained with a layout whose MFU is three times as high. The
    lower MFU of the later layout is no fault.
    """
    run = recorded_run(tmp_path / "run", steps=300, second_attempt_at=201)
    run.plan.replace(compile=True).write(run.directory / "plan.attempt_01.json")
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["attempt"] == 1:
            row["step_time_s"] /= 3
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.directory / "metrics.jsonl").write_text(text)
    assert kinds(Dashboard(Run.open(run.directory))) == []
    run.plan.write(run.directory / "plan.attempt_01.json")
    assert kinds(Dashboard(Run.open(run.directory))) == ["mfu"], "with one layout it is a fall"


def test_slow_steps_ranks_disk_and_memory_give_alerts(tmp_path, monkeypatch):
    """If the recipe asks for checkpoints and none appear, an alert is given too."""
    run = recorded_run(tmp_path / "run", steps=200, ranks=8)
    run.recipe.replace(checkpoint_every=20).write(run.directory / "recipe.json")
    dashboard = Dashboard(Run.open(run.directory))
    assert kinds(dashboard) == ["checkpoint"]
    for step in range(201, 260):
        add_row(run, step, step_time_s=1.6)
    assert kinds(dashboard)[1:] == ["mfu"] and "fell to" in dashboard.alerts()[0]["message"]
    for step in range(100, 100 + MIN_SAMPLES - 1):
        beat(run, step, slow_rank=3)
        dashboard.update_status()
    assert kinds(dashboard)[2:] == [], "it is not sure yet"
    # after a slow reading the dashboard pauses, so several are needed
    for step in range(200, 200 + MIN_SAMPLES):
        beat(run, step, slow_rank=3)
        if kinds(dashboard)[2:]:
            break
    assert kinds(dashboard)[2:] == ["straggler"]
    named = f"rank 3 on {os.uname().nodename} takes 1.4"
    assert dashboard.alerts()[0]["message"].startswith(named)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(alerts.shutil, "disk_usage", lambda path: usage())
    add_row(run, 260, memory_bytes=2**60)
    assert sorted(kinds(dashboard)[3:]) == ["disk", "memory"]


@pytest.mark.parametrize(("has_joined", "limit_s"), [(False, 180), (True, 300)])
def test_slow_start_is_reported_with_its_log(tmp_path, has_joined, limit_s):
    """The dashboard reads the state only once, because the supervisor counts the seconds of the
    start.
    """
    run = recorded_run(tmp_path / "run", steps=0)
    log = log_path(run.directory, 1, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("first\n[W socket.cpp] cannot look up node1-hsn0\n")
    start = {"state": JobState.STARTING, "reason": "4 ranks join", "has_joined": has_joined}
    for starting_s, expected in ((limit_s - 10, []), (limit_s + 10, ["stall"])):
        update_state(
            run.directory, attempt=1, heartbeat=time.time(), starting_s=starting_s, **start
        )
        assert kinds(Dashboard(run)) == expected
    (alert,) = AlertLog(run.directory / "alerts.jsonl").alerts
    assert alert.level == "warning"
    for words in ("4 ranks join", f"for {limit_s + 10} s", "rank_00000.log: [W socket.cpp] cannot"):
        assert words in alert.message


def test_slow_start_without_supervisor_is_reported(tmp_path, monkeypatch):
    """The dashboard measures the duration of the start with its own clock, as under Kubernetes
    before the first pod reports a duration.
    """
    run = recorded_run(tmp_path / "run", steps=0)
    start = {"state": JobState.STARTING, "reason": "started by a pod"}
    update_state(run.directory, attempt=1, heartbeat=time.time(), **start)
    dashboard = Dashboard(run)
    assert kinds(dashboard) == []
    now = time.monotonic()
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now + 200)
    assert kinds(dashboard) == ["stall"]


def test_gallery_explains_every_alert_rule():
    page = (ROOT / "notebooks" / "gallery" / "04_watch_a_run.md").read_text()
    explained = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    assert {rule.kind for rule in alerts.ALERT_RULES} == explained
    assert all(rule.threshold for rule in alerts.ALERT_RULES)
