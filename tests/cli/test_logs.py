"""The command `kit logs` for a rank that has printed nothing: it reports the state of the job."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster import poll, slurm
from cluster.attempts import claim_attempt, hand_over
from cluster.poll import Poller, SchedulerAnswer
from cluster.state import JobState, SchedulerJob, log_path, update_state
from kit.cli.app import app
from tests.cluster.jobs import job_spec

JOB = SchedulerJob(scheduler="slurm", id="7")
PENDING = "JobHeldUser: held by its owner"


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run directory of a job that was submitted to Slurm and waits in its queue."""
    spec = job_spec(tmp_path, "true")
    spec.write(tmp_path / "job.json")
    hand_over(tmp_path, claim_attempt(tmp_path), JOB)
    answer(monkeypatch, JobState.QUEUED, PENDING)
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, state: JobState, reason: str) -> None:
    """Replaces the query to the scheduler by this state and reason for each job."""
    said = SchedulerAnswer(state=state, reason=reason, exit_code=1 if state.is_final else None)
    monkeypatch.setattr(poll, "POLLER", Poller(lambda jobs: {job.id: said for job in jobs}))
    monkeypatch.setattr(slurm, "output", lambda job: ("scontrol", ""))


def shown(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["logs", *map(str, words)])
    assert done.exit_code == 0, f"{done.output} {done.exception}"
    return done.stderr


def test_logs_of_a_queued_job_report_its_reason(queued: Path) -> None:
    text = shown(queued)
    assert f"Rank 0 has printed nothing yet. State of the job: queued ({PENDING})." in text
    assert f"Looked at: {log_path(queued, 1, 0)}" in text


def test_logs_of_a_starting_job_report_its_reason(
    queued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the batch script is printed in addition to the state."""
    answer(monkeypatch, JobState.RUNNING, "running on node1")
    (queued / "logs").mkdir(exist_ok=True)
    (queued / "logs" / "slurm-7.log").write_text("module load rocm\n")
    text = shown(queued)
    assert "Rank 0 has printed nothing yet. State of the job: starting (running on node1;" in text
    assert re.search(r"This is \S+/logs/slurm-7\.log:", text)


def test_logs_of_a_failed_job_do_not_say_yet(queued: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, JobState.FAILED, "ended with code 1")
    assert "Rank 0 has printed nothing. State of the job: failed (ended with code 1)." in shown(
        queued
    )


def test_followed_logs_report_the_state_first(
    queued: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(job: object, rank: int) -> list[str]:
        return ["step 1"]

    monkeypatch.setattr("cluster.job.Job.follow", follow)
    assert f"State of the job: queued ({PENDING}). Its lines follow here." in shown(
        queued, "--follow"
    )
    log_path(queued, 1, 0).parent.mkdir(parents=True, exist_ok=True)
    log_path(queued, 1, 0).write_text("step 1\n")
    update_state(queued, attempt=1, state="running", step=1)
    assert "printed nothing" not in shown(queued, "--follow")
