"""Decisions of the supervisor of a Slurm job, tested with replaced Slurm commands."""

import dataclasses
import errno
import os
from unittest.mock import Mock

import pytest

from cluster.attempts import AttemptOutcome, take_over
from cluster.directory_handle import RunDirectory
from cluster.slurm import supervisor as module
from cluster.slurm.queries import native_state
from cluster.slurm.rank import Failure, failure_folder
from cluster.slurm.supervisor import SlurmSupervisor
from cluster.state import (
    JobError,
    JobState,
    SchedulerJob,
    StaleAttemptError,
    read_exit,
    read_pending_request,
    read_state,
    take_request,
    update_state,
    write_request,
)
from tests.cluster.jobs import standin


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    """A supervisor whose job has taken two training steps. All nodes of its allocation answer."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setattr(module, "slurm_command", lambda words: "node1\nnode2\n")
    monkeypatch.setattr(module, "answering_nodes", lambda num_nodes: {"node1", "node2"})
    spec = standin(tmp_path)
    spec.write(tmp_path / "job.json")
    job = SchedulerJob(scheduler="slurm", id="7")
    attempt = take_over(tmp_path, job)
    update_state(tmp_path, attempt=attempt, state=JobState.RUNNING, step=2)
    return SlurmSupervisor(RunDirectory(tmp_path), spec, attempt, job, [])


KILLED = AttemptOutcome(
    137, "rank 3 on node2 was killed by SIGKILL", failing_rank=3, fate="restart"
)
LOST = AttemptOutcome(1, "node2 no longer answers", fate="requeue", lost_node="node2")
STOPPED = AttemptOutcome(0, "stopped on request at step 2")


def happen(supervisor, *events):
    """Simulates events in order. "person" and "scheduler" request a stop, "taken" is the trainer's
    acceptance of the request, and any other event is the trainer's stop.
    """
    for event in events:
        if event == "person":
            write_request(supervisor.run_dir, "stop")
        elif event == "scheduler":
            supervisor._ask_to_stop("preempted", JobState.PREEMPTED)
        elif event == "taken":
            assert take_request(supervisor.run_dir, "stop", step=2)
        else:
            update_state(supervisor.run_dir, attempt=1, state=JobState.STOPPING, reason="stopped")


@pytest.mark.parametrize("outcome", [KILLED, LOST], ids=["killed", "lost"])
@pytest.mark.parametrize(
    ("events", "fate", "reason"),
    [
        ("", None, "{}"),
        ("person", "end", "{}, after a request to stop"),
        ("person taken", "end", "{}, after a request to stop"),
        ("person taken stopped", "end", STOPPED.reason),
        ("scheduler taken stopped", "requeue", "{}"),
        ("scheduler person", "end", "{}, after a request to stop"),
        ("scheduler person taken stopped", "end", STOPPED.reason),
        ("scheduler taken person taken stopped", "end", STOPPED.reason),
    ],
)
def test_origin_of_stop_request_decides_about_requeue(supervisor, outcome, events, fate, reason):
    """The decision about a requeue does not depend on steps after the last checkpoint, which are
    lost.
    """
    happen(supervisor, *events.split())
    judged = supervisor.decide(outcome)
    assert (judged.fate, judged.reason) == (fate or outcome.fate, reason.format(outcome.reason))
    if judged.reason == STOPPED.reason:
        assert judged == supervisor._after(0) == STOPPED


def test_users_stop_request_survives_a_slurm_requeue(supervisor):
    """A requeue by Slurm keeps a stop request of the user, but removes a stop request of the
    scheduler.
    """
    happen(supervisor, "scheduler")
    assert take_over(supervisor.run_dir, supervisor.job) == 2
    assert read_pending_request(supervisor.run_dir, "stop") is None
    happen(supervisor, "person", "taken")
    assert take_over(supervisor.run_dir, supervisor.job) == 3
    assert read_pending_request(supervisor.run_dir, "stop") is not None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_stop_request_is_retried_until_written(supervisor, monkeypatch, code):
    write = Mock(side_effect=[OSError(code, os.strerror(code))] * 2 + [None])
    monkeypatch.setattr(module, "write_request", write)
    supervisor._ask_to_stop("the time limit is near")
    assert supervisor.must_request_stop
    for _ in range(4):
        supervisor._write_request()
    assert not supervisor.must_request_stop and write.call_count == 3


@pytest.mark.parametrize(("max_restarts", "fate"), [(2, "requeue"), (0, "end")])
def test_transient_disk_error_requeues_the_job(supervisor, max_restarts, fate):
    """The job has taken steps, so it is requeued. If no restarts are left, or the disk is full, the
    run ends instead.
    """
    supervisor.spec = supervisor.spec.replace(max_restarts=max_restarts)
    outcome = supervisor.after_error(OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
    assert (outcome.fate, outcome.rc) == (fate, 1)
    assert supervisor.after_error(OSError(errno.ENOSPC, "full")).fate == "end"


@pytest.mark.parametrize("trouble", [OSError(errno.ENOSPC, "full"), JobError("no answer")])
def test_disk_or_slurm_error_is_in_the_exit_report(supervisor, monkeypatch, trouble):
    monkeypatch.setattr(supervisor, "start_ranks", Mock(side_effect=trouble))
    assert supervisor.run() == 1
    report = read_exit(supervisor.run_dir)
    assert report and (report.attempt, report.rc, report.reason) == (1, 1, str(trouble))


@pytest.mark.parametrize("fate", ["end", "restart", "requeue", "taken"])
def test_supervisor_of_older_attempt_changes_nothing(supervisor, monkeypatch, fate):
    """The supervisor runs on a node that was disconnected and has returned. The supervisor must
    neither requeue the job nor submit the job again.
    """
    outcome = dataclasses.replace(LOST, fate=fate)
    for name in ("submit_replacement_job", "requeue_this", "begin_attempt"):
        monkeypatch.setattr(module, name, Mock(side_effect=AssertionError(name)))
    monkeypatch.setattr(supervisor, "run_ranks", lambda: outcome)
    assert take_over(supervisor.run_dir, supervisor.job) == 2
    state = (supervisor.run_dir / "state.json").read_bytes()
    history = (supervisor.run_dir / "history.jsonl").read_bytes()
    assert supervisor.run() == 1
    assert (supervisor.run_dir / "state.json").read_bytes() == state
    assert (supervisor.run_dir / "history.jsonl").read_bytes() == history
    assert read_exit(supervisor.run_dir) is None


def test_stale_attempt_is_neither_ended_nor_requeued(supervisor, monkeypatch):
    monkeypatch.setattr(supervisor, "start_ranks", Mock(side_effect=StaleAttemptError("newer")))
    monkeypatch.setattr(module, "requeue_this", Mock(side_effect=AssertionError))
    assert take_over(supervisor.run_dir, supervisor.job) == 2
    assert supervisor.run() == 1 and read_exit(supervisor.run_dir) is None


def test_failed_restart_requeues_the_job(supervisor, monkeypatch):
    """The restart fails with ESTALE (stale file handle), after the job has taken steps."""
    requeue = Mock()
    monkeypatch.setattr(module, "requeue_this", requeue)
    monkeypatch.setattr(supervisor, "run_ranks", lambda: KILLED)
    trouble = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    monkeypatch.setattr(supervisor, "begin_next", Mock(side_effect=trouble))
    assert supervisor.run() == KILLED.rc
    requeue.assert_called_once_with(supervisor.job)
    state = read_state(supervisor.run_dir)
    assert state is not None and state.state is JobState.REQUEUED
    assert state.reason.startswith(f"{KILLED.reason}; not started again: ")


def test_supervisor_waits_while_its_node_is_cut_off(supervisor, monkeypatch):
    """Either the node or Slurm's controller is unreachable. The wait does not count as a restart.
    The wait ends when the nodes answer, or when a newer attempt has started.
    """
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setattr(module, "slurm_command", lambda words: "node1\nnode2\n")
    monkeypatch.setattr(module, "CUT_OFF_WAIT_S", 0.0)
    answers = [{"node1", "node2"}, set(), set()]
    monkeypatch.setattr(module, "answering_nodes", lambda num_nodes: answers.pop())
    assert supervisor._without_lost(KILLED) == KILLED and not answers
    answers[:] = [set(), set()]
    assert take_over(supervisor.run_dir, supervisor.job) == 2
    with pytest.raises(StaleAttemptError):
        supervisor._without_lost(KILLED)
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("answers", "lost"), [({"node1", "node2"}, None), ({"node1"}, "node2")], ids=["passes", "lost"]
)
def test_unanswered_node_check_requeues_the_job(supervisor, monkeypatch, answers, lost):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setattr(module, "check_allocation", Mock(side_effect=JobError("no answer")))
    monkeypatch.setattr(module, "slurm_command", lambda words: "node1\nnode2\n")
    monkeypatch.setattr(module, "answering_nodes", lambda num_nodes: answers)
    outcome = supervisor._check_nodes()
    assert (outcome.fate, outcome.lost_node) == ("requeue", lost) and "no answer" in outcome.reason


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
def test_job_being_preempted_reads_as_preempted(monkeypatch, state):
    found = f"JobState={state} Reason=None Dependency=(null)\n"
    text = f"JobId=7\n   {found}   PreemptEligibleTime=now PreemptTime=now\n"
    monkeypatch.setattr("cluster.slurm.queries.slurm_command", lambda words, config: text)
    assert native_state(SchedulerJob(scheduler="slurm", id="7")) == "PREEMPTED"


@pytest.mark.parametrize("has_failed", [False, True])
def test_sigterm_from_srun_is_no_stop_request(supervisor, monkeypatch, has_failed):
    """After a rank has failed, srun sends SIGTERM to the other ranks. The keepers of these ranks
    cannot distinguish it from a SIGTERM of the scheduler, so the supervisor checks for a recorded
    failure.
    """
    monkeypatch.setattr(module, "native_state", lambda job: "RUNNING")
    failure_folder(supervisor.run_dir, 1).mkdir(parents=True)
    if has_failed:
        failure = Failure(rank=3, code=1, node="node2", time=1.0)
        failure.write(failure_folder(supervisor.run_dir, 1) / "rank_00003.json")
    assert supervisor._told_to_end() is None
    assert (read_pending_request(supervisor.run_dir, "stop") is None) == has_failed


def test_first_failure_ignores_node_clocks(supervisor):
    """The clock of node3 is slow. The failure of the rank on node3 therefore has an earlier time
    than the failure on node2, although the rank on node3 failed later.
    """
    folder = failure_folder(supervisor.run_dir, 1)
    folder.mkdir(parents=True)
    for rank, node, by_node_s, written_s in ((3, "node2", 500.0, 100), (1, "node3", 1.0, 101)):
        file = folder / f"rank_{rank:05d}.json"
        Failure(rank=rank, code=1, node=node, time=by_node_s).write(file)
        os.utime(file, (written_s, written_s))
    assert supervisor._after(1).reason.startswith("rank 3 on node2 ended with code 1")
