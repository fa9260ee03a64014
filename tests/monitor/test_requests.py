"""Requests to a running job, such as "save a checkpoint": every viewer shows their state."""

import json
import time
from pathlib import Path

import pytest

from cluster.state import Event, JobState, TakenRequest, take_request, write_request
from kit.monitor.actions import Actions
from kit.run import Run
from tests.support.recorded_runs import recorded_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return recorded_run(tmp_path / "run", steps=120)


def _checkpoint(run: Run, step: int) -> None:
    folder = run.checkpoints.path(step)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_all_viewers_show_request_until_attempt_ends(run):
    """The trainer took the request between two readings of the viewers."""
    first, status = Actions(run), run.job.status()
    assert not first.report(status)
    (run.directory / "control").mkdir(exist_ok=True)
    (run.directory / "control" / "request_checkpoint").touch()  # requested from a login node
    assert take_request(run.directory, "checkpoint", step=120)
    for viewer in (first, Actions(run)):
        told = viewer.report(status)["checkpoint"]
        assert told["asked_at"] == pytest.approx(time.time(), abs=5)
        assert told["taken_at"] and not told["done_at"]
    _checkpoint(run, 100)  # a regular checkpoint, complete after the request was taken
    assert first.report(status)["checkpoint"]["done_at"] is None
    _checkpoint(run, 120)
    told = first.report(status)["checkpoint"]
    assert told["done_at"] and told["note"] == "saved at step 120"
    write_request(run.directory, "checkpoint")
    told = first.report(status)["checkpoint"]
    assert told["done_at"] is None, "a second request is a new one"
    take_request(run.directory, "checkpoint", step=120)
    assert first.report(status)["checkpoint"]["note"] == "saved at step 120"
    (run.directory / "control" / "taken_checkpoint").unlink()  # each new attempt removes the file
    assert not first.report(status.replace(attempt=2))


def test_completion_time_does_not_depend_on_viewers(run):
    write_request(run.directory, "checkpoint")
    take_request(run.directory, "checkpoint", step=120)
    asked = Actions(run).report(run.job.status())["checkpoint"]["asked_at"]
    _checkpoint(run, 120)
    (run.checkpoints.path(120) / "manifest.json").write_text(json.dumps({"time": asked + 25}))
    for _ in range(3):
        assert Actions(run).report(run.job.status())["checkpoint"]["done_at"] == asked + 25
    write_request(run.directory, "stop")
    take_request(run.directory, "stop", step=121)
    assert Actions(run).report(run.job.status())["stop"]["done_at"] is None, "until it has ended"
    states = {-9: JobState.RUNNING, 30: JobState.STOPPING, 40: JobState.DONE}
    events = [Event(time=asked + more, attempt=1, state=state) for more, state in states.items()]
    history = "".join(json.dumps(event.to_dict()) + "\n" for event in events)
    (run.directory / "history.jsonl").write_text(history)
    status = run.job.status().replace(state=JobState.DONE)
    for _ in range(3):
        told = Actions(run).report(status)["stop"]
        assert (told["done_at"], told["note"]) == (asked + 40, "the job has ended")


@pytest.mark.parametrize("skew_s", [-600.0, 600.0])
def test_request_is_followed_despite_clock_skew(run, monkeypatch, skew_s):
    """The viewer and the trainer set the time stamps of a request with different clocks."""
    actions, status = Actions(run), run.job.status()
    old = TakenRequest(asked_at=5.0, taken_at=time.time() + skew_s - 60, step=90)
    old.write(run.directory / "control" / "taken_checkpoint")
    monkeypatch.setattr(type(run.job), "checkpoint", lambda job: None)
    actions.start("checkpoint", status)
    assert actions.report(status)["checkpoint"]["taken_at"] is None, "that was another request"
    new = TakenRequest(asked_at=9.0, taken_at=time.time() + skew_s, step=120)
    new.write(run.directory / "control" / "taken_checkpoint")
    assert actions.report(status)["checkpoint"]["step"] == 120
    _checkpoint(run, 120)
    assert actions.report(status)["checkpoint"]["note"] == "saved at step 120"
