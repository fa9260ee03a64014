"""The option `on_alert`, a command of the user that runs for each alert: its input, how often it
runs, and how it can fail.
"""

import io
import json
import time
from pathlib import Path

import pytest

from cluster.record import ConfigError
from cluster.state import JobState
from kit.monitor import on_alert, watch
from kit.monitor.dashboard import Dashboard
from kit.monitor.on_alert import AlertCommand, on_alert_command
from kit.run import Run
from kit.run.alerts import Alert, AlertLog
from kit.show.terminal import PlainConsole
from tests.support.recorded_runs import (
    add_row,
    add_rows,
    alert,
    dead_process,
    look,
    recorded_run,
    say,
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "kit").mkdir()
    return tmp_path / "kit" / "config.toml"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return recorded_run(tmp_path / "run", steps=300, spike_at=250)


def _alert(message: str, kind: str = "guard", step: int = 300) -> Alert:
    return alert(message, step, kind, level="error", time=time.time() + 1)


def _lose_a_loss(run: Run, step: int) -> None:
    add_row(run, step, time=time.time() + 1, loss=float("nan"))


def test_on_alert_runs_once_for_each_new_alert(config, run, tmp_path):
    """The `on_alert` command does not run for alerts from before `kit watch` was started. It also
    runs for alerts that the trainer and other viewers wrote.
    """
    told = tmp_path / "told"
    config.write_text(f"on_alert = 'echo \"$KIT_ALERT\" >> {told}'")
    dashboard = Dashboard(run)
    on_alert = AlertCommand(run, dashboard.run_view.alert_monitor.log)

    def told_now() -> list[str]:
        look(dashboard)
        on_alert.run_for_new_alerts()
        found = told.read_text().splitlines() if told.exists() else []
        return [json.loads(line)["kind"] for line in found]

    assert told_now() == [], "the spike was there before"
    _lose_a_loss(run, 301)
    assert told_now() == ["nan"] == told_now()
    AlertLog(run.directory / "alerts.jsonl").add([_alert("went back to step 200", step=301)])
    _lose_a_loss(run, 302)
    assert told_now() == ["nan", "guard"], "the trainer's too; the loss is still lost"
    other = Dashboard(run)
    add_rows(run, 303, 400)
    _lose_a_loss(run, 401)
    look(other)
    assert told_now() == ["nan", "guard", "nan"], "though another view has found it first"
    first = json.loads(told.read_text().splitlines()[0])
    assert (first["run"], first["directory"]) == ("run", str(run.directory))
    assert (first["step"], first["message"]) == (301, "loss is not finite")


def _watch(run):
    watch(run, console=PlainConsole(file=io.StringIO()))


def test_watch_runs_on_alert_once_for_a_lost_job(config, run, tmp_path):
    say(run, JobState.RUNNING, step=300, process=dead_process())
    _watch(run)
    config.write_text(f"on_alert = 'echo \"$KIT_MESSAGE\" >> {tmp_path}/told'")
    (run.directory / "alerts.jsonl").unlink()
    for _ in range(2):  # in the second reading the alert is already known
        _watch(run)
    (told,) = (tmp_path / "told").read_text().splitlines()
    assert told.startswith("run, step 300: job lost: process")


def test_alert_message_is_never_run_as_shell_code(config, run, tmp_path):
    config.write_text(f"on_alert = 'cd {tmp_path} && printf %s \"$KIT_MESSAGE\" > told'")
    on_alert = AlertCommand(run, AlertLog(run.directory / "alerts.jsonl"))
    on_alert.log.add([_alert('spike "$(touch injected)"; true \x1b[2J\0\ud800\n`touch injected`')])
    on_alert.run_for_new_alerts()
    told = (tmp_path / "told").read_text()
    assert told == 'run, step 300: spike "$(touch injected)"; true ␛[2J␀\ufffd `touch injected`'
    assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("no-such-mailer x", "on_alert: it ended with 127: "),
        ("echo no route >&2; exit 3", "on_alert: it ended with 3: no route"),
        ("sleep 600 | sleep 600", "on_alert: it had not ended after 0.3 s"),
        ("echo \\u0000", "on_alert: it could not be run (embedded null byte)"),
    ],
)
def test_failing_on_alert_command_gives_one_alert(config, run, command, why, monkeypatch):
    monkeypatch.setattr(on_alert, "LIMIT_S", 0.3)
    config.write_text(f'on_alert = "{command}"')
    caller = AlertCommand(run, AlertLog(run.directory / "alerts.jsonl"))
    caller.log.add([_alert("rolled back")])
    for _ in range(2):
        caller.run_for_new_alerts()
    first, second = AlertLog(run.directory / "alerts.jsonl").alerts
    assert first.kind == "guard" and second.kind == "on_alert" and second.level == "warning"
    assert second.message.startswith(why)


def test_on_alert_configuration_is_validated(config, run):
    assert on_alert_command() is None
    for text, command in (("", None), ('on_alert = "notify-send x"', "notify-send x")):
        config.write_text(text)
        assert on_alert_command() == command
    for text, why in (
        ("on_alert = ", "Write one line: on_alert = 'COMMAND'"),
        ("on_alert = 3", "expected"),
        ('alarm = "x"', "unknown key"),
    ):
        config.write_text(text)
        with pytest.raises(ConfigError, match=why):
            _watch(run)


@pytest.mark.parametrize("skew_s", [-600.0, 600.0])
def test_trainer_clock_skew_hides_no_alert(config, run, tmp_path, skew_s):
    config.write_text(f"on_alert = 'echo \"$KIT_MESSAGE\" >> {tmp_path}/told'")
    log = AlertLog(run.directory / "alerts.jsonl")
    log.add([alert("old", 100, "hook", level="error", time=time.time() + skew_s)])
    dashboard = Dashboard(run)
    caller = AlertCommand(run, dashboard.run_view.alert_monitor.log)
    log.add([alert("went back", 301, "guard", level="error", time=time.time() + skew_s)])
    look(dashboard)
    caller.run_for_new_alerts()
    assert (tmp_path / "told").read_text() == "run, step 301: went back\n"


def test_on_alert_runs_at_most_ten_times_a_minute(config, run, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    config.write_text(f"on_alert = 'echo \"$KIT_MESSAGE\" >> {calls}'")
    now = [0.0]
    monkeypatch.setattr(on_alert.time, "monotonic", lambda: now[0])
    told = AlertCommand(run, Dashboard(run).run_view.alert_monitor.log)
    for minute in (1, 2):
        planted = [_alert(f"planted {minute}.{n}", step=1000 * minute + n) for n in range(500)]
        lines = [json.dumps(alert.to_dict()) + "\n" for alert in planted]
        with (run.directory / "alerts.jsonl").open("a") as stream:
            stream.writelines(lines)
        for _ in range(3):
            told.run_for_new_alerts()
        lines = calls.read_text().splitlines()
        assert len(lines) == 10 * minute
        assert "490 more alerts; the last one: planted" in lines[-1]
        now[0] += 61.0
