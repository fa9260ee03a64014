"""The alarm: real servers and commands, good and bad; what is sent, how often, and that nothing waits for it."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.process import Process
from cluster.record import ConfigError
from cluster.state import JobState
from kit.commands.app import app
from kit.monitor import watcher as watching
from kit.monitor.actions import Actions
from kit.monitor.dashboard import Dashboard
from kit.monitor.watcher import Watcher, watch_over
from kit.run import Run, alarm
from tests.monitor.recorded import add_rows, dead_process, recorded_run, rows, say


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict]]]:
    """An address, to which /500, /moved, /slow and /drip can be added, and the messages that have come to it."""
    got: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if self.path == "/slow":
                time.sleep(1.5)
            if self.path == "/drip":  # a byte every now and then, so that no single read is ever late
                for _ in range(30):
                    self.wfile.write(b"H")
                    time.sleep(0.05)
            self.send_response({"/500": 500, "/moved": 302}.get(self.path, 200))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", got
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", None),
        ("/500", "the server answered 500"),
        ("/moved", "the server answered 302"),
        ("/slow", "no answer within 0.2 s"),
        ("/drip", "no answer within 0.2 s"),
    ],
)
def test_a_webhook_gets_the_message_or_says_why_not(server, path: str, why: str | None, monkeypatch) -> None:
    address, got = server
    monkeypatch.setattr(alarm, "DEADLINE_S", 5.0 if path not in ("/slow", "/drip") else 0.2)
    started = time.monotonic()
    assert alarm.send(address + path, {"text": "loss is not finite", "kind": "nan"}) == why
    assert time.monotonic() - started < 4
    assert got == [{"text": "loss is not finite", "kind": "nan"}], "once, and followed nowhere"


def test_a_webhook_that_is_not_there(server) -> None:
    assert "refused" in str(alarm.send("http://127.0.0.1:1/secret", {"text": "t"}))
    why = str(alarm.send("http://no-such-host.invalid/secret", {"text": "t"}))
    assert why and "secret" not in why


def test_a_command_gets_text_and_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = 'spike "$(touch injected)"; true'
    assert alarm.send(f'cd {tmp_path} && echo "$KIT_MESSAGE" > out && cat >> out', {"text": text, "step": 3}) is None
    first, second = out.read_text().splitlines()
    assert first == text and json.loads(second)["step"] == 3 and not (tmp_path / "injected").exists()


def test_commands_that_fail_or_never_end(monkeypatch) -> None:
    assert alarm.send("no-such-mailer x", {"text": "t"}) and "127" in str(alarm.send("no-such-mailer x", {"text": "t"}))
    assert alarm.send("echo no route >&2; exit 3", {"text": "t"}) == "the command ended with 3: no route"
    monkeypatch.setattr(alarm, "DEADLINE_S", 0.3)
    started = time.monotonic()
    assert "not ended after 0.3 s" in str(alarm.send("sleep 60 | sleep 60", {"text": "t"}))
    assert time.monotonic() - started < 3


def test_the_configuration(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("KIT_ALARM")
    file = tmp_path / "kit" / "config.toml"
    assert alarm.find_alarm() is None
    file.parent.mkdir()
    for text, expected in (
        ("", None), ('alarm = " "', None), ('alarm = "notify-send x"', "notify-send x"),
        ('alarm = "HTTPS://a.example/b"', "HTTPS://a.example/b"),
    ):  # fmt: skip
        file.write_text(text)
        assert alarm.find_alarm() == expected
    for text, why in (
        ("alarm = ", "TOML"), ("alarm = 3", "expected"), ('alrm = "x"', "Did you mean 'alarm'"),
        ('alarm = "htp://x"', "http:// or https://"), ('alarm = "https:///x"', "with a host"),
        ('alarm = "a\\nb"', "control character"), ('alarm = "http://a:99999/"', "with a host"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            alarm.find_alarm()
    monkeypatch.setenv("KIT_ALARM", "true")
    assert alarm.find_alarm() == "true", "the variable wins"
    assert alarm.describe_alarm("https://hooks.example/T0/secret") == "webhook at hooks.example"


def append(run: Run, step: int, **values: object) -> None:
    row = json.loads(rows(step, step)[0]) | {"time": time.time() + 1} | values
    with (run.directory / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def test_each_kind_once_in_ten_minutes_and_the_end_of_the_job(server, tmp_path: Path) -> None:
    address, got = server
    run = recorded_run(tmp_path / "run", steps=300, spike_at=250)
    watcher = Watcher(run, address)
    assert watcher.look() and got == [], "what was there before is known"
    append(run, 301, loss=float("nan"))
    assert watcher.look() and [message["kind"] for message in got] == ["nan"]
    assert got[0]["text"] == "run, step 301: loss is not finite" and got[0]["directory"] == str(run.directory)
    add_rows(run, 302, 400)
    for step in (401, 461):
        append(run, step, grad_norm=float("inf"))
        add_rows(run, step + 1, step + 59)
        watcher.look()
    assert len(got) == 1 and len(watcher.waiting["nan"]) == 2
    assert Watcher(run, address).not_before.keys() == {"nan"}, "kept for a watcher that comes later"
    watcher.not_before["nan"] = 0.0
    assert watcher.look() and "(and 1 more)" in got[1]["text"] and got[1]["alerts"] == 2
    say(run, JobState.RUNNING, step=520, process=dead_process())
    assert not watcher.look(), "it ends with the job"
    assert got[2]["kind"] == "job" and "job lost" in got[2]["text"] and len(got) == 3


def test_an_alarm_that_fails_is_recorded_and_tried_again(server, tmp_path: Path) -> None:
    address, got = server
    run = recorded_run(tmp_path / "run", steps=300)
    say(run, JobState.RUNNING, step=300, process=dead_process())
    watcher = Watcher(run, address + "/500/secret")
    watcher.alarm = address + "/500"
    assert watcher.look() and watcher.look() and len(got) == 1
    kinds = [alert["kind"] for alert in Dashboard(run).alerts()]
    assert sorted(kinds) == ["alarm", "job"], "and no alarm is sent of an alarm"
    assert json.loads(watcher.record.read_text())["error"] == "the server answered 500"
    watcher.alarm, watcher.not_before["job"] = address, 0.0
    assert not watcher.look() and len(got) == 2
    watcher.alarm, watcher.waiting = (
        address + "/500",
        {"job": watcher.waiting.get("job", []) or [next(iter(watcher.seen))]},
    )
    for _ in range(watching.TRIES):
        watcher.not_before["job"] = 0.0
        goes_on = watcher.look()
    assert not goes_on, "it is given up"


def test_the_newest_watcher_takes_over_and_a_deleted_run_ends_it(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", steps=20)
    looks = []

    def other(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            dead_process().write(run.directory / "monitor" / "watcher.json")

    watch_over(run, "true", idle=other)
    assert len(looks) == 2

    def delete(_: float) -> None:
        os.rename(run.directory, tmp_path / "gone")

    watch_over(run, "true", idle=delete)


def test_the_launcher_s_watcher_tells_of_a_lost_job_when_nobody_looks(tmp_path: Path, monkeypatch) -> None:
    run = recorded_run(tmp_path / "run", steps=20)
    say(run, JobState.RUNNING, step=20, process=dead_process())
    monkeypatch.setenv("KIT_ALARM", f"cat > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/told")
    started = time.monotonic()
    alarm.start_watcher(run.directory)
    assert time.monotonic() - started < 2, "it is not waited for"
    deadline = time.monotonic() + 60
    while not (tmp_path / "told").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert json.loads((tmp_path / "told").read_text())["kind"] == "job"
    left = Process.read(run.directory / "monitor" / "watcher.json")
    while left.is_alive and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left.is_alive and (run.directory / "monitor" / "watcher.log").read_text() == ""


def test_the_button_and_the_command(server, tmp_path: Path, monkeypatch) -> None:
    address, got = server
    run = recorded_run(tmp_path / "run", steps=20)
    actions, status = Actions(run), Dashboard(run).status
    assert "alarm" not in actions.allowed(status), "where none is set"
    command = CliRunner()
    assert "No alarm is set" in command.invoke(app, ["alarm"]).output
    assert command.invoke(app, ["alarm", "--test"]).exit_code != 0
    for alarm_of, note in (
        (address, "sent by webhook at 127.0.0.1"),
        (address + "/500", "refused: webhook"),
        ("htp://x", "refused"),
    ):
        monkeypatch.setenv("KIT_ALARM", alarm_of)
        assert "alarm" in actions.allowed(status)
        actions.start("alarm", status)
        deadline = time.monotonic() + 20
        while not (report := actions.report(status)["alarm"])["done_at"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert note in report["note"]
    monkeypatch.setenv("KIT_ALARM", address)
    assert command.invoke(app, ["alarm", "--test"]).output.startswith("sent by webhook")
    assert [message["kind"] for message in got] == ["test"] * 3
