"""The ledger, which assigns each second of a job's time to a kind of work. The history is invented.
tests/faults and tests/cluster test real runs.
"""

import json

import pytest
from typer.testing import CliRunner

from cluster.site import Fact
from cluster.state import JobState
from kit.cli.app import app
from kit.errors import RunError
from kit.monitor.goodput import ledger
from kit.run import Run
from tests.support.recorded_runs import happened, lines, looked_at, row, write


def step(run: Run, number: int, attempt: int, ended: float, took=1.0, **more: float) -> None:
    write(run, [lines([row(number, attempt, time=ended, step_time_s=took, **more)])])


def why(run: Run, *options: str) -> str:
    command = ["status", str(run.directory), "--why", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def told(run: Run) -> Run:
    """Returns a run with two attempts. The first is queued for 10 s, starts in 5 s, takes ten steps
    with a pause of 2 s, and then writes nothing for 7 s. After 20 s the second attempt takes six
    steps, two of which repeat earlier steps.
    """
    (run.directory / "metrics.jsonl").write_text("")
    happened(run, 1, 0.0, JobState.QUEUED)
    happened(run, 1, 10.0, JobState.STARTING)
    step(run, 1, 1, 18.0, took=3.0)  # the first step takes two seconds more than the other steps
    for number in range(2, 11):
        step(run, number, 1, 18.0 + number - 1 + 2 * (number > 5))
    happened(run, 1, 36.0, JobState.REQUEUED, reason="node3 no longer answers", lost_node="node3")
    happened(run, 2, 56.0, JobState.STARTING)
    for number in range(9, 15):
        step(run, number, 2, 61.0 + number - 8)
    happened(run, 2, 67.5, JobState.STOPPING)
    happened(run, 2, 68.0, JobState.DONE, reason="stopped on request at step 14")
    return run


def test_ledger_assigns_every_second_to_one_part(told):
    found = ledger(told)
    told_parts = {"waiting": 10 + 20, "start-up": 5 + 5, "first step": 2, "between steps": 2}
    told_parts |= {"lost": 7, "repeated": 2, "productive": 8 + 6, "ending": 1}
    assert found.seconds == pytest.approx(dict.fromkeys(found.seconds, 0.0) | told_parts)
    assert found.wall_s == pytest.approx(68) and found.idle_s == 0
    assert found.goodput == pytest.approx(14 / 38), "no node is held while it waits"


def test_ledger_separates_saves_from_validation(run):
    (run.directory / "metrics.jsonl").write_text("")
    step(run, 1, 1, 101.0, validation_loss=3.0)
    # of the 7 s between steps 1 and 2, the save takes 3 and validation 4
    step(run, 2, 1, 109.0, checkpoint_s=3.0)
    # the time of the save is limited to the gap between the steps
    step(run, 3, 1, 110.5, checkpoint_s=9.0)
    found = ledger(run).seconds
    assert (found["checkpoints"], found["validation"]) == (pytest.approx(3.5), pytest.approx(4.0))
    assert sum(found.values()) == pytest.approx(10.5) and found["between steps"] == 0


def test_final_validation_is_not_counted_as_ending(run):
    (run.directory / "metrics.jsonl").write_text("")
    happened(run, 1, 100.0, JobState.STARTING)
    step(run, 1, 1, 101.0, validation_loss=3.0, validation_s=2.0)
    # of the 4 s between steps 1 and 2, validation takes 2
    step(run, 2, 1, 106.0, validation_loss=3.0, validation_s=40.0)
    happened(run, 1, 150.0, JobState.DONE, reason="finished 2 steps")
    found = ledger(run).seconds
    assert (found["validation"], found["ending"]) == (pytest.approx(42), pytest.approx(4))
    assert found["between steps"] == pytest.approx(2)


def test_idle_time_between_jobs_is_not_job_time(told):
    happened(told, 3, 1068.0, JobState.QUEUED)
    happened(told, 3, 1069.0, JobState.STARTING)
    step(told, 15, 3, 1072.0)
    found = ledger(told)
    assert found.idle_s == pytest.approx(1000) and found.wall_s == pytest.approx(68 + 4)


def test_time_after_unrecorded_end_counts_as_lost(told):
    """The supervisor was killed with its ranks and recorded no end. The scheduler then started the
    job again.
    """
    events = (told.directory / "history.jsonl").read_text().splitlines(keepends=True)
    left = [line for line in events if "requeued" not in line]
    (told.directory / "history.jsonl").write_text("".join(left))
    found = ledger(told)
    assert (found.seconds["lost"], found.wall_s) == pytest.approx((27, 68))


def test_time_before_a_kill_is_lost_although_ranks_were_stopped(run):
    """A rank was killed after 30 s in which the run was stalled. The local supervisor then stops
    the other ranks, and starts all ranks again after 2 s.
    """
    (run.directory / "metrics.jsonl").write_text("")
    happened(run, 1, 0.0, JobState.STARTING)
    step(run, 1, 1, 1.0)
    happened(run, 1, 31.0, JobState.STOPPING, reason="rank 1 was killed by SIGKILL")
    happened(run, 2, 33.0, JobState.STARTING, reason="restarting: rank 1 was killed by SIGKILL")
    step(run, 2, 2, 35.0)
    happened(run, 2, 65.0, JobState.STOPPING, reason="cancelled by SIGTERM")
    happened(run, 2, 66.0, JobState.FAILED, reason="cancelled by SIGTERM")
    found = ledger(run)
    assert found.seconds["lost"] == pytest.approx(30 + 2 + 31)
    assert found.seconds["ending"] == 0 and found.idle_s == found.unknown_s == 0


def test_time_after_an_unrecorded_end_is_not_called_idle(run):
    """A stalled run was killed together with its supervisor. Later, a user resumed it."""
    (run.directory / "metrics.jsonl").write_text("")
    happened(run, 1, 0.0, JobState.STARTING)
    step(run, 1, 1, 1.0)
    happened(run, 2, 1501.0, JobState.QUEUED)
    step(run, 2, 2, 1503.0)
    happened(run, 2, 1504.0, JobState.DONE)
    found = ledger(run)
    assert (found.idle_s, found.unknown_s) == (0, pytest.approx(1500))
    words = " ".join(why(run).split())
    assert "25 min after the last sign of life of an attempt are in no part" in words
    assert "none was wanted" not in words


def test_ledger_costs_use_devices_of_each_attempt(told):
    plan = told.plan.replace(data_parallel=8)
    plan.write(told.directory / "plan.attempt_02.json")
    price = Fact(value=36.0, source="the tests")
    site = told.site.replace(devices_per_node=4, price_per_node_hour=price)
    site.write(told.directory / "site.json")
    found = ledger(Run.open(told.directory))
    dashboard = looked_at(Run.open(told.directory))
    dashboard.update_speed(wait=True)
    assert dashboard.facts()["cost"]["value"] == found.usd
    rows = {row["part"]: row for row in found.rows()}
    assert rows["productive"]["device_hours"] == pytest.approx((8 + 8 * 6) / 3600)
    cents = 1 * 8 + 2 * 6  # a node costs one cent per second: 8 s with 1 node, 6 s with 2
    assert rows["productive"]["usd"] == pytest.approx(cents / 100)
    assert rows["waiting"]["usd"] == 0 and found.usd == pytest.approx((1 * 26 + 2 * 12) / 100)
    assert found.goodput == pytest.approx((8 + 8 * 6) / (26 + 8 * 12))


def test_status_why_prints_the_ledger(told, run):
    words = " ".join(why(told).split())
    assert "36.8% of the device-hours of a run were productive" in words, "14 of 38 s"
    assert "shares are of all time, waiting included" in words and "20.6%" in words, "14 of 68 s"
    assert "30.8%" in words and "50.0%" in words, "8 of 26 s and 6 of 12, attempt by attempt"
    assert "node3 no longer answers" in words and "first step" in words
    assert "in no part" not in words
    assert "has fewer than 10 steps" in words, "of its speed"
    found = json.loads(why(told, "--json"))
    assert sum(part["seconds"] for part in found["goodput"]["parts"]) == pytest.approx(68)
    assert found["goodput"]["share"] == pytest.approx(14 / 38)
    assert "fewer than 10 steps" in found["pace"]["verdict"]
    happened(told, 3, 1068.0, JobState.QUEUED)
    assert "17 min between attempts" in why(told)


def test_ledger_refuses_run_without_attempt(run):
    (run.directory / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match="has no attempt yet"):
        ledger(run)
