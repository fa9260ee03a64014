"""Files in the run directory: state and exit files, rejection of writes by older attempts, process
identity, requests, and the status derived from these files.
"""

import dataclasses
import fcntl
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster import heartbeats, poll, slurm, status
from cluster.attempts import claim_attempt, hand_over, take_over
from cluster.heartbeats import (
    RankHeartbeat,
    read_rank_heartbeats,
    write_all_heartbeats,
    write_rank_heartbeat,
)
from cluster.job import Job, JobSpec, read_status
from cluster.logs import end_reason
from cluster.poll import Poller, SchedulerAnswer
from cluster.process import Process
from cluster.record import ConfigError
from cluster.slurm import queries
from cluster.state import (
    ExitReport,
    JobError,
    JobState,
    SchedulerJob,
    StaleAttemptError,
    compile_log,
    last_attempt,
    read_exit,
    read_history,
    read_pending_request,
    read_state,
    read_taken_request,
    take_request,
    update_state,
    write_exit,
    write_request,
)
from cluster.supervisor import fruitless_starts, furthest_steps
from tests.cluster.jobs import job_spec


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch):
    """Disables the wait in which a reader watches for a newer heartbeat. An old heartbeat counts as
    old at once.
    """
    monkeypatch.setattr(heartbeats, "WATCH_S", 0.0)
    monkeypatch.setattr(heartbeats, "WATCH_STEPS", 0.0)
    monkeypatch.setattr(heartbeats, "WATCH_BEATS", 0.0)


def running(run_dir, **changes):
    given = {"process": Process.current(), "heartbeat": time.time(), "step": 7, **changes}
    return update_state(run_dir, attempt=1, **{"state": "running", **given})


def ended(attempt, rc=0):
    return ExitReport(attempt=attempt, rc=rc, reason="because", host="here", time=time.time())


def test_job_states_and_final_states_are_fixed():
    assert " ".join(JobState) == (
        "queued configuring starting running stalled stopping preempted requeued done failed lost"
        " imported"
    )
    assert " ".join(state for state in JobState if state.is_final) == "done failed lost imported"


def test_reason_is_cleared_when_the_state_changes(tmp_path):
    starting = {"state": "starting", "step": None, "reason": "4 processes started"}
    assert "4 processes started" in running(tmp_path, **starting).reason
    assert update_state(tmp_path, attempt=1, step_time_s=0.5).reason == "4 processes started"
    assert running(tmp_path, step=192).reason == ""
    assert read_history(tmp_path)[-1].reason == ""
    assert read_status(tmp_path).reason.startswith("step 192; ")


LMOD = """\
Lmod has detected the following error: The following module(s) are unknown: "cuda/99"

Please check the spelling or version number. Also try "module spider ..."
  $ module --ignore_cache load "cuda/99"

kit: the module cuda/99 cannot be loaded
======== job summary: 12 s, 0 GPU hours ========
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            LMOD,
            "the module cuda/99 cannot be loaded: Lmod has detected the following error: The"
            ' following module(s) are unknown: "cuda/99"',
        ),
        ("kit: setup: x failed with code 1\nattempt 2 of run in job 5 on n1\nkilled\n", "killed"),
        ("0: no such device\nsrun: error: n1: task 0: Exited with code 1\n", "0: no such device"),
        ("srun: error: no step\nsrun: Terminating StepId=1.0\n", "srun: error: no step"),
        ("0: no room\n0: slurmstepd-n1: error: *** STEP 1.0 CANCELLED ***\n", "0: no room"),
        (" \n\n", ""),
        ("", ""),
    ],
    ids=["Lmod", "older", "task", "srun", "labelled", "blank", "empty"],
)
def test_error_message_is_extracted_from_a_log(text, words):
    assert end_reason(text) == words


def test_long_error_of_a_scheduler_keeps_its_end():
    words = ["bash", "-c", "printf 'x%.0s' {1..600} >&2; echo NO-SUCH-QOS >&2; exit 1"]
    with pytest.raises(JobError, match="xxxNO-SUCH-QOS$"):
        poll.run_command(words, "", 10.0)


def test_lost_local_run_names_its_supervisors_error(tmp_path):
    running(tmp_path, process=dataclasses.replace(Process.current(), pid=2**22 + 1))
    log = tmp_path / "logs" / "attempt_01_supervisor.log"
    log.parent.mkdir()
    log.write_text("Traceback\nMemoryError: cannot allocate\n")
    status = read_status(tmp_path)
    assert status.state is JobState.LOST
    assert status.reason.endswith(
        f"{log.relative_to(tmp_path)} ends with: MemoryError: cannot allocate"
    )


def test_state_update_keeps_other_fields(tmp_path):
    """A reader ignores keys of a newer version in state.json."""
    before = running(tmp_path)
    state = update_state(tmp_path, attempt=1, step=8, step_time_s=0.5)
    assert state == before.replace(step=8, step_time_s=0.5)
    text = (tmp_path / "state.json").read_text()
    (tmp_path / "state.json").write_text(text.replace("{", '{"mood": "fine",', 1))
    assert read_state(tmp_path) == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepp": 8}, "stepp.*Did you mean 'step'"),
        ({"state": "runing"}, "'runing' is not allowed"),
    ],
)
def test_state_update_refuses_unknown_field_or_value(tmp_path, change, message):
    before = running(tmp_path)
    with pytest.raises(ConfigError, match=message):
        update_state(tmp_path, attempt=1, **change)
    assert read_state(tmp_path) == before


def test_older_attempt_is_fenced_off(tmp_path):
    running(tmp_path)
    newer = update_state(tmp_path, attempt=2, state=JobState.RUNNING, step=1)
    assert newer.process is None, "a new attempt must not inherit the identity of the old one"
    with pytest.raises(StaleAttemptError, match="attempt 1 may not write.*attempt 2"):
        update_state(tmp_path, attempt=1, step=999)
    with pytest.raises(StaleAttemptError):
        write_exit(tmp_path, ended(attempt=1, rc=1))
    assert read_state(tmp_path) == newer and read_exit(tmp_path) is None
    # exit.json also prevents writes of older attempts when state.json is damaged.
    (tmp_path / "state.json").write_text('{"state": "runn')
    write_exit(tmp_path, ended(attempt=3))
    with pytest.raises(StaleAttemptError):
        update_state(tmp_path, attempt=2, step=1)
    assert update_state(tmp_path, attempt=4, step=1).state is JobState.RUNNING


def test_concurrent_writers_lose_no_update(tmp_path):
    running(tmp_path)
    fields = ("step", "heartbeat", "step_time_s")

    def write(field):
        for number in range(100):
            update_state(tmp_path, attempt=1, **{field: number})

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, fields))
    state = read_state(tmp_path)
    assert state and [getattr(state, field) for field in fields] == [99, 99, 99]


def test_held_state_lock_delays_only_one_update(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.state.LOCK_WAIT_S", 0.1)
    running(tmp_path)
    with (tmp_path / ".state.lock").open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert update_state(tmp_path, attempt=1, step=8).step == 8
        monkeypatch.setattr("cluster.state.LOCK_WAIT_S", 1e6)
        test_concurrent_writers_lose_no_update(tmp_path)


def test_truncated_state_or_exit_file_is_tolerated(tmp_path):
    running(tmp_path)
    write_exit(tmp_path, ended(attempt=1))
    for name, read in (("state.json", read_state), ("exit.json", read_exit)):
        whole = (tmp_path / name).read_bytes()
        for length in range(0, len(whole) - 2, 7):
            (tmp_path / name).write_bytes(whole[:length])
            assert read(tmp_path) is None
            assert read_status(tmp_path).attempt == 1, "one of the two files still knows"
        (tmp_path / name).write_bytes(whole)
        assert read(tmp_path) is not None


FOREIGN = ["[]", "null", '"x"', "{}", '{"state": "flying", "attempt": 1}', "\xff\xfe", "[" * 9999]


@pytest.mark.parametrize("text", FOREIGN)
def test_invalid_state_file_reads_as_a_lost_run(tmp_path, text):
    (tmp_path / "state.json").write_text(text, encoding="latin-1")
    assert read_state(tmp_path) is None and read_status(tmp_path).state is JobState.LOST


def test_status_of_a_running_and_a_stopping_job(tmp_path):
    running(tmp_path)
    status = read_status(tmp_path)
    found = (status.state, status.step, status.attempt, status.exit_code)
    assert found == (JobState.RUNNING, 7, 1, None) and "step 7" in status.reason
    assert status.heartbeat_age_s is not None and status.heartbeat_age_s < 5
    write_request(tmp_path, "stop")
    assert read_status(tmp_path).state is JobState.STOPPING


def test_status_uses_exit_report_of_this_attempt_only(tmp_path):
    write_exit(tmp_path, ended(attempt=1, rc=3))
    running(tmp_path)
    status = read_status(tmp_path)
    assert (status.state, status.exit_code, status.reason) == (JobState.FAILED, 3, "because")
    now = {"process": Process.current(), "heartbeat": time.time()}
    update_state(tmp_path, attempt=2, state="running", **now)
    assert read_status(tmp_path).state is JobState.RUNNING
    write_exit(tmp_path, ended(attempt=2))
    assert (read_status(tmp_path).state, read_status(tmp_path).exit_code) == (JobState.DONE, 0)


@pytest.mark.parametrize(
    ("written", "age_s", "step_time_s", "expected"),
    [
        ("running", 50, None, "running"),
        ("running", 70, None, "stalled"),
        ("running", 70, 8.0, "running"),
        ("running", 90, 8.0, "stalled"),
        ("running", 70, 0.1, "stalled"),
        ("starting", 600, None, "starting"),
        ("starting", 2000, None, "stalled"),
    ],
)
def test_silent_job_is_stalled_after_a_timeout(tmp_path, written, age_s, step_time_s, expected):
    """A job without a new heartbeat is stalled after 60 s or ten steps, whichever is longer. Before
    the first step, it is stalled after half an hour.
    """
    running(tmp_path, state=written, heartbeat=time.time() - age_s, step_time_s=step_time_s)
    status = read_status(tmp_path)
    assert status.state == expected and f"{age_s} s ago" in status.reason


@pytest.mark.parametrize(
    "change", [{"start_ticks": 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}, {"pid": -1}]
)
def test_job_without_its_process_is_lost(tmp_path, change):
    """Four cases: the process number belongs to a newer process, is from another boot, is unused,
    or is invalid.
    """
    running(tmp_path, process=dataclasses.replace(Process.current(), **change))
    status = read_status(tmp_path)
    assert status.state is JobState.LOST and "left no exit.json" in status.reason


def test_recycled_pid_and_zombie_count_as_ended():
    """Process numbers are reused. No signal is sent to a newer process that has the number of an
    ended process.
    """
    stranger = dataclasses.replace(Process.current(), start_ticks=1)
    # The process number is the number of this test process, so SIGKILL would end the test.
    assert stranger.send_signal(signal.SIGKILL) is False
    child = subprocess.Popen(["sleep", "60"])
    ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    identity = dataclasses.replace(Process.current(), pid=child.pid, start_ticks=ticks)
    assert identity.is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive
    child.wait()


def test_process_on_another_host_is_not_presumed_dead(tmp_path):
    """While the heartbeat of the job is recent, no new attempt can claim the run directory, and
    this host cannot cancel the job. With an old heartbeat, a new attempt replaces the job.
    """
    away = dataclasses.replace(Process.current(), host="node77", pid=1)
    running(tmp_path, process=away)
    job_spec(tmp_path, "x").write(tmp_path / "job.json")
    status = read_status(tmp_path)
    assert status.state is JobState.RUNNING and "it runs on node77" in status.reason
    with pytest.raises(JobError, match="in use"):
        claim_attempt(tmp_path)
    with pytest.raises(JobError, match="node77.*`kit stop` without --now"):
        Job.attach(tmp_path).cancel()
    heartbeats._sightings.clear()  # A new process has not seen the earlier heartbeats.
    running(tmp_path, process=away, heartbeat=time.time() - 100)
    assert read_status(tmp_path).state is JobState.STALLED
    assert claim_attempt(tmp_path) == 2, "a silent job elsewhere may be replaced: it is fenced off"


def test_claim_increments_attempt_and_clears_requests(tmp_path):
    """A run directory in use is refused. Without state.json, the number of the last attempt is read
    from the names of the logs.
    """
    run_dir = tmp_path / "new" / "run"
    assert claim_attempt(run_dir) == 1
    with pytest.raises(JobError, match=r"in use: attempt 1 is queued.*kit stop .* \(--now"):
        claim_attempt(run_dir)
    write_exit(run_dir, ended(attempt=1))
    write_request(run_dir, "stop")
    assert claim_attempt(run_dir) == 2 and read_pending_request(run_dir, "stop") is None
    (run_dir / "state.json").unlink()
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "attempt_120_rank_00000.log").touch()
    assert last_attempt(run_dir) == 120


def test_request_is_taken_once(tmp_path):
    """An empty request file, created by `touch`, counts as a request too."""
    running(tmp_path)
    job_spec(tmp_path, "x").write(tmp_path / "job.json")
    assert not take_request(tmp_path, "stop")
    Job.attach(tmp_path).checkpoint()
    assert read_pending_request(tmp_path, "stop") is None
    (tmp_path / "control" / "request_stop").touch()
    for request in ("checkpoint", "stop"):
        asked = read_pending_request(tmp_path, request)
        assert asked and asked.asked_at == pytest.approx(time.time(), abs=5)
        assert take_request(tmp_path, request, step=7) and not take_request(tmp_path, request)
    taken = read_taken_request(tmp_path, "stop")
    assert taken and taken.step == 7 and 0 <= taken.taken_at - taken.asked_at < 5


def test_rank_heartbeats_are_sorted_and_of_one_attempt(tmp_path):
    def ranks(attempt):
        return [beat.rank for beat in read_rank_heartbeats(tmp_path, attempt)]

    for rank, attempt in ((10, 2), (2, 2), (0, 2), (1, 1)):
        write_rank_heartbeat(
            tmp_path, RankHeartbeat(rank=rank, attempt=attempt, step=rank, time=1.0)
        )
    (tmp_path / "ranks" / "rank_00003.json").write_text('{"rank": 3, "att')
    assert ranks(2) == [0, 2, 10] and (tmp_path / "ranks" / "rank_00010.json").exists()
    newer = [RankHeartbeat(rank=rank, attempt=3, step=1, time=2.0).line for rank in (5, 1)]
    write_all_heartbeats(tmp_path, [*newer, b'{"rank": 3, "att', b"\xff"])
    assert ranks(3) == [1, 5] and ranks(2) == [0, 2, 10], "of an older version"


def test_job_spec_round_trips_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = job_spec("runs/ä b", "x", "a\nb", environment={"A": "'\"\n"})
    assert job.run_dir == str(tmp_path / "runs/ä b") and job.working_directory == str(tmp_path)
    assert JobSpec.from_json(job.to_json()) == job


# Jobs of a scheduler ------------------------------------------------------------------------------

JOB = SchedulerJob(scheduler="slurm", id="7")
TO_8 = "belongs to job 7 now, this is job 8"


def scheduler_says(monkeypatch, state, reason="so it says", **fields):
    """Replaces the scheduler query by a function that always returns this state and reason."""
    look = SchedulerAnswer(state=state, reason=reason, **fields)
    monkeypatch.setattr(poll, "POLLER", Poller(lambda jobs: {job.id: look for job in jobs}))


def submitted(run_dir):
    attempt = claim_attempt(run_dir)
    hand_over(run_dir, attempt, JOB)
    return attempt


def test_only_the_submitted_job_takes_over_a_run(tmp_path, monkeypatch):
    """At its first start, the job takes over the queued attempt. A restart of the job begins the
    next attempt.
    """
    scheduler_says(monkeypatch, JobState.RUNNING)
    assert submitted(tmp_path) == 1
    # The path of slurm.conf on a node may differ from the path on the submitting host.
    elsewhere = JOB.replace(config="/run/slurm.conf")
    assert take_over(tmp_path, elsewhere) == 1, "the job starts the attempt that was queued for it"
    state = read_state(tmp_path)
    assert state is not None and state.scheduler_job == JOB and state.process == Process.current()
    assert take_over(tmp_path, elsewhere) == 2, "and comes back as the next one"
    with pytest.raises(JobError, match=TO_8):
        take_over(tmp_path, JOB.replace(id="8"))
    with pytest.raises(JobError, match="in use"):
        claim_attempt(tmp_path)
    told = [f"{event.attempt} {event.state}" for event in read_history(tmp_path)]
    assert told == ["1 queued", "1 starting", "2 starting"]


def test_late_hand_over_keeps_state_of_started_job(tmp_path):
    attempt = claim_attempt(tmp_path)
    assert take_over(tmp_path, JOB) == attempt
    update_state(tmp_path, attempt=attempt, state="running", step=3, heartbeat=time.time())
    before = read_state(tmp_path)
    hand_over(tmp_path, attempt, JOB)
    assert read_state(tmp_path) == before


def test_follow_up_job_takes_over_from_its_attempt_only(tmp_path, monkeypatch):
    """The follow-up job may take over even if the supervisor died before it wrote the new job
    number into state.json.
    """
    new = SchedulerJob(scheduler="slurm", id="8", config="/run/slurm.conf")
    scheduler_says(monkeypatch, JobState.RUNNING)
    submitted(tmp_path)
    assert take_over(tmp_path, JOB) == 1
    monkeypatch.setenv("KIT_FOLLOWS", "7/2")
    with pytest.raises(JobError, match=TO_8):
        take_over(tmp_path, new)
    monkeypatch.setenv("KIT_FOLLOWS", "7/1")
    assert take_over(tmp_path, new) == 2
    state = read_state(tmp_path)
    assert state and state.scheduler_job == JOB.replace(id="8"), "as its submitter reaches it"
    with pytest.raises(StaleAttemptError):
        update_state(tmp_path, attempt=1, state="requeued")
    with pytest.raises(JobError, match="belongs to job 8 now, this is job 7"):
        take_over(tmp_path, JOB)


def test_writer_of_a_given_up_attempt_is_fenced_off(tmp_path):
    running(tmp_path)
    lost = {"reason": "node3 no longer answers", "lost_node": "node3"}
    update_state(tmp_path, attempt=1, state="requeued", **lost)
    with pytest.raises(StaleAttemptError, match="given up: node3 no longer answers"):
        running(tmp_path)
    update_state(tmp_path, attempt=1, state="failed")
    assert [event.lost_node for event in read_history(tmp_path)] == [None, "node3", None]


SCONTROL = """JobId=7 JobName=run
   JobState=CANCELLED Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:15
"""


@pytest.mark.parametrize(
    ("scontrol", "sacct", "expected"),
    [
        (SCONTROL, "CANCELLED by 0|0:15|2026-11-29T10:00:00", "by root (Slurm: CANCELLED by 0, "),
        ("", "CANCELLED by 0|0:15|2026-11-29T10:00:00", "by root (Slurm: CANCELLED by 0, "),
        (SCONTROL, "RUNNING|0:0|Unknown", "(Slurm: CANCELLED, "),
        (SCONTROL, None, "(Slurm: CANCELLED, "),
    ],
)
def test_cancelled_slurm_job_names_who_cancelled_it(
    scontrol, sacct, expected, tmp_path, monkeypatch
):
    """Slurm has ended the job before its supervisor could record the end."""

    def answer(words, config=None):
        if words[0] == "sacct" and sacct is None:
            raise JobError("Slurm accounting storage is disabled")
        return {"squeue": "", "scontrol": scontrol, "sacct": sacct}[words[0]]

    monkeypatch.setattr(queries, "slurm_command", answer)
    monkeypatch.setattr(poll, "POLLER", Poller())
    running(tmp_path)
    job = SchedulerJob(scheduler="slurm", id="7")
    update_state(tmp_path, attempt=1, scheduler_job=job)
    found = read_status(tmp_path)
    assert found.state is JobState.FAILED and found.is_cancelled
    assert found.reason.startswith(f"cancelled {expected}exit code 0:15)")
    update_state(tmp_path, attempt=1, state="failed", reason="rank 3 was killed by SIGKILL")
    write_exit(
        tmp_path, ExitReport(attempt=1, rc=137, reason="rank 3 was killed", host="n", time=1.0)
    )
    assert not read_status(tmp_path).is_cancelled


def test_heartbeat_after_the_end_changes_nothing(tmp_path):
    """After `scancel` has ended the supervisor, a rank may train for some more seconds and write
    heartbeats.
    """
    running(tmp_path)
    update_state(tmp_path, attempt=1, state="failed", reason="cancelled (scancel)")
    with pytest.raises(StaleAttemptError, match=r"has ended: cancelled \(scancel\)"):
        running(tmp_path)
    state = read_state(tmp_path)
    assert state is not None and state.state is JobState.FAILED
    assert [event.state for event in read_history(tmp_path)][-1] == "failed"


@pytest.mark.parametrize(
    ("said", "written", "heartbeat_ago_s", "expected"),
    [
        ("queued", "queued", 5, "queued"),
        ("configuring", "queued", 5, "configuring"),
        ("running", "queued", 5, "starting"),
        ("running", "running", 5, "running"),
        ("queued", "running", 5, "requeued"),
        ("queued", "preempted", 5, "requeued"),
        ("stopping", "preempted", 5, "preempted"),
        ("stopping", "running", 5, "stopping"),
        (None, "running", 5, "running"),
        ("failed", "running", 5, "failed"),
        ("done", "queued", 5, "done"),
        ("lost", "queued", 5, "lost"),
        # The controller lost this job in a crash, but the job is alive.
        ("lost", "running", 5, "running"),
        ("lost", "running", 100, "lost"),
    ],
)
def test_status_combines_scheduler_and_state_file(
    tmp_path, monkeypatch, said, written, heartbeat_ago_s, expected
):
    submitted(tmp_path)
    update_state(tmp_path, attempt=1, state=written, heartbeat=time.time() - heartbeat_ago_s)
    scheduler_says(monkeypatch, JobState(said) if said else None)
    status = read_status(tmp_path)
    assert status.state == expected and status.reason
    assert ("so it says" in status.reason) is not (said == written == "running")


@pytest.mark.parametrize("clock_ahead_s", [0.0, 3600.0, -3600.0])
def test_status_is_running_despite_older_queue_answer(tmp_path, monkeypatch, clock_ahead_s):
    """The scheduler's answer is older than the heartbeat. The clock of the job's node may differ
    from the local clock by an hour.
    """
    submitted(tmp_path)
    scheduler_says(monkeypatch, JobState.QUEUED)
    assert read_status(tmp_path).state is JobState.QUEUED
    heartbeat = time.time() + clock_ahead_s
    update_state(tmp_path, attempt=1, state="running", step=1, heartbeat=heartbeat)
    assert read_status(tmp_path).state is JobState.RUNNING


def test_history_skips_a_torn_line(tmp_path):
    running(tmp_path)
    write_exit(tmp_path, ended(attempt=1))
    job_spec(tmp_path, "x").write(tmp_path / "job.json")
    with (tmp_path / "history.jsonl").open("a") as stream:
        stream.write('{"time": 1, "att')
    assert [event.state for event in Job.attach(tmp_path).history] == ["running", "done"]


@pytest.mark.parametrize(
    ("steps", "fruitless"),
    [([None], 1), ([None, None], 2), ([5], 0), ([5, None], 1), ([5, 5], 1), ([5, 4, 3], 2)]
    + [([5, None, 6], 0)],
)
def test_starts_without_a_new_step_are_counted(tmp_path, steps, fruitless):
    """`steps` holds the last step of each attempt. None means that the attempt took no step."""
    for attempt, step in enumerate(steps, start=1):
        update_state(tmp_path, attempt=attempt, state="running", step=step)
        update_state(tmp_path, attempt=attempt, state="requeued")
    assert fruitless_starts(tmp_path) == fruitless
    assert any(furthest_steps(tmp_path).values()) == any(steps)


def test_starts_ended_by_a_lost_node_are_not_counted(tmp_path):
    lost = {2: "node2", 3: "node3"}
    for attempt, step in ((1, 5), (2, None), (3, None), (4, None), (5, None)):
        update_state(tmp_path, attempt=attempt, state="running", step=step)
        update_state(tmp_path, attempt=attempt, state="requeued", lost_node=lost.get(attempt))
    assert fruitless_starts(tmp_path) == 2


def test_cancel_of_a_starting_job_writes_no_exit_report(tmp_path, monkeypatch):
    """The supervisor of the job writes the exit report when the job ends."""
    job_spec(tmp_path, "x").write(tmp_path / "job.json")
    scheduler_says(monkeypatch, JobState.QUEUED)
    submitted(tmp_path)
    take_over(tmp_path, JOB)
    update_state(tmp_path, attempt=1, state=JobState.REQUEUED)
    monkeypatch.setattr(slurm, "cancel", lambda job, run_dir: take_over(tmp_path, job))
    Job.attach(tmp_path).cancel()
    state = read_state(tmp_path)
    assert state and (state.state, state.attempt) == (JobState.STARTING, 2)
    assert read_exit(tmp_path) is None


def test_preempted_attempts_are_no_fruitless_starts(tmp_path):
    """A job with low priority may be preempted often before its first step, and must not be given
    up.
    """
    for attempt, end in enumerate(("preempted", "preempted", "requeued", "preempted"), 1):
        update_state(tmp_path, attempt=attempt, state="starting")
        update_state(tmp_path, attempt=attempt, state=end)
    assert fruitless_starts(tmp_path) == 1
    update_state(tmp_path, attempt=5, state="running", step=3)
    assert fruitless_starts(tmp_path) == 0


def test_reason_of_compile_job_is_its_first_failure(tmp_path):
    """srun ends the other tasks after the first failure, and its last lines name these tasks."""
    update_state(tmp_path, attempt=1, state="queued", scheduler_job=JOB)
    log = compile_log(tmp_path, 1)
    log.parent.mkdir()
    log.write_text(
        "srun: error: node1: task 0: Exited with exit code 1\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=78.0\n"
        "0: slurmstepd-node1: error: *** STEP 78.0 ON node1 CANCELLED AT 2026-11-28T21:43:54 ***\n"
        "srun: error: node1: task 1: Terminated\n"
        "srun: Force Terminated StepId=78.0\n"
    )
    (tmp_path / "logs" / "compile_rank_00000.log").write_text("no compiler\n")
    state = read_state(tmp_path)
    assert state is not None
    assert status.with_end_reason(tmp_path, state, "failed").endswith(": no compiler")


def test_reason_is_not_taken_from_an_earlier_attempt(tmp_path):
    """One local supervisor starts several attempts. It was killed in attempt 2."""
    log = tmp_path / "logs" / "attempt_01_supervisor.log"
    log.parent.mkdir()
    log.write_text("first: attempt 1: rank 1 was killed by SIGKILL (often: out of memory)\n")
    for attempt in (1, 2):
        update_state(tmp_path, attempt=attempt, state="starting")
    state = read_state(tmp_path)
    assert state is not None
    assert status.with_end_reason(tmp_path, state, "is gone") == "is gone"
    first = state.replace(attempt=1)
    assert "SIGKILL" in status.with_end_reason(tmp_path, first, "is gone")
