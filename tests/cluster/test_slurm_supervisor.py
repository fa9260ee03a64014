"""What follows the end of an attempt, without a Slurm."""

import errno
import os
import signal
import sys

import pytest

from cluster.attempts import take_over
from cluster.job import JobSpec
from cluster.slurm.supervisor import Ending, Supervisor
from cluster.state import (
    JobState,
    SchedulerJob,
    ask,
    read_asked,
    read_exit,
    take_request,
    update_state,
)


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    """A supervisor whose trainer has taken two steps; signals stay as they are."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: -1)
    JobSpec(name="test", run_dir=str(tmp_path), argv=(sys.executable,), num_processes=4).write(
        tmp_path / "job.json"
    )
    supervisor = Supervisor(tmp_path, [], SchedulerJob(scheduler="slurm", id="7"))
    supervisor.attempt = take_over(tmp_path, supervisor.job)
    update_state(tmp_path, attempt=1, state=JobState.RUNNING, step=2)
    return supervisor


KILLED = Ending("restart", "rank 3 on node2 was killed by SIGKILL", rc=137, failing_rank=3)
LOST = Ending("requeue", "node2 fell silent", rc=1, lost_node="node2")


@pytest.mark.parametrize("ending", [KILLED, LOST], ids=["killed", "lost"])
@pytest.mark.parametrize("is_taken", [False, True], ids=["not taken", "taken"])
def test_a_request_to_stop_outlives_the_attempt(supervisor, ending, is_taken):
    assert supervisor._judge(ending) == ending
    ask(supervisor.run_dir, "stop")
    if is_taken:
        assert take_request(supervisor.run_dir, "stop", step=2)
    judged = supervisor._judge(ending)
    assert (judged.fate, judged.reason) == ("failed", f"{ending.reason}, after a request to stop")


@pytest.mark.parametrize("ending", [KILLED, LOST], ids=["killed", "lost"])
def test_what_is_lost_after_the_last_checkpoint_changes_nothing(supervisor, ending):
    ask(supervisor.run_dir, "stop")
    take_request(supervisor.run_dir, "stop", step=2)
    update_state(
        supervisor.run_dir, attempt=1, state=JobState.STOPPING, reason="stopped after step 2"
    )
    assert supervisor._judge(ending) == Ending("done", "stopped on request at step 2")


def test_a_stop_that_the_scheduler_wanted_is_followed_by_another_start(supervisor):
    supervisor._ask_to_stop(JobState.PREEMPTED, "preempted")
    assert take_request(supervisor.run_dir, "stop", step=2)
    update_state(
        supervisor.run_dir, attempt=1, state=JobState.STOPPING, reason="stopped after step 2"
    )
    assert supervisor._judge(KILLED).fate == "requeue"


@pytest.mark.parametrize("taken_first", [False, True], ids=["before it is taken", "after"])
def test_a_person_who_asks_while_the_scheduler_does_is_heard(supervisor, taken_first):
    supervisor._ask_to_stop(JobState.PREEMPTED, "preempted")
    if taken_first:
        take_request(supervisor.run_dir, "stop", step=2)
    ask(supervisor.run_dir, "stop")
    assert supervisor._judge(KILLED).fate == "failed"
    take_request(supervisor.run_dir, "stop", step=2)
    update_state(
        supervisor.run_dir, attempt=1, state=JobState.STOPPING, reason="stopped after step 2"
    )
    assert (
        supervisor._judge(LOST)
        == supervisor._after(0)
        == Ending("done", "stopped on request at step 2")
    )


def test_a_person_s_request_outlives_a_requeue_by_slurm_itself(supervisor):
    supervisor._ask_to_stop(JobState.PREEMPTED, "preempted")
    assert (
        take_over(supervisor.run_dir, supervisor.job) == 2
        and read_asked(supervisor.run_dir, "stop") is None
    )
    ask(supervisor.run_dir, "stop")
    take_request(supervisor.run_dir, "stop", step=2)
    assert (
        take_over(supervisor.run_dir, supervisor.job) == 3
        and read_asked(supervisor.run_dir, "stop") is not None
    )


def test_trouble_with_the_disk_is_recorded_as_the_end(supervisor, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    monkeypatch.setattr(supervisor, "_check_nodes", lambda: None)
    monkeypatch.setattr(supervisor, "_attempt", lambda starts: (_ for _ in ()).throw(full))
    assert supervisor.run() == 1
    report = read_exit(supervisor.run_dir)
    assert (
        report is not None
        and (report.attempt, report.rc) == (2, 1)
        and "No space left on device" in report.reason
    )
