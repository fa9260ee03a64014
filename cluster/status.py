"""Status of a job: `read_status` combines the files of its run, its process and its scheduler.

The sources are read in this order. A source decides only if no earlier source has decided:

    exit.json of the newest attempt     the job is done or has failed
    the scheduler                       the job waits, or has ended, or is being ended
    the process, on this host           the job is lost if its process is gone
    the heartbeat in state.json         the job runs, or is stalled (`cluster.heartbeats`)

Standard library only.
"""

import dataclasses
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cluster import heartbeats, poll
from cluster.files import why_full
from cluster.login import mirror
from cluster.logs import end_reason, log_tail, unrecorded_end
from cluster.record import field_doc
from cluster.state import (
    CANCELLED,
    GIVEN_UP,
    ExitReport,
    JobState,
    RunState,
    StateRecord,
    compile_log,
    last_attempt,
    read_exit,
    read_pending_request,
    read_state,
    script_logs,
)

STALLED_AFTER_S = 60.0
STALLED_AFTER_STEPS = 10
STALLED_START_S = 1800.0
"""Seconds without a heartbeat after which a job counts as stalled before its first step, if no
supervisor writes heartbeats. Imports, rendezvous and compilation take long on a large machine."""
WAITING = (JobState.QUEUED, JobState.REQUEUED, JobState.CONFIGURING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus(StateRecord):
    """Current status of a job, with the reason for its state."""

    heartbeat_age_s: float | None = field_doc("seconds since the last heartbeat", default=None)
    exit_code: int | None = field_doc("exit code of a job that has ended", default=None)
    starting_s: float | None = field_doc(
        "seconds since the last change of `reason`, while the job is starting; otherwise None",
        default=None,
    )
    has_joined: bool = field_doc(
        "whether all ranks of this attempt have passed the rendezvous", default=False
    )
    heard_at: float | None = field_doc(
        "Unix time at which the machine that runs the job reported this status, in seconds; None:"
        " the job runs on this machine, or there is no report yet",
        default=None,
    )

    @property
    def is_cancelled(self) -> bool:
        """Whether the job has ended because a user or an administrator has cancelled it."""
        return self.state is JobState.FAILED and self.reason.startswith(CANCELLED)

    @property
    def age_s(self) -> float | None:
        """Seconds since the machine that runs the job reported this status. None if the job runs on
        this machine.
        """
        return None if self.heard_at is None else max(0.0, time.time() - self.heard_at)

    @property
    def age(self) -> str | None:
        """Age of this status as a text such as `3 min`. None if the job runs on this machine."""
        return None if self.age_s is None else mirror.age_text(self.age_s)

    @property
    def late_age(self) -> str | None:
        """Age of this status as a text such as `3 min`, if the machine that runs the job should
        have sent a newer report. None if the status is fresh.
        """
        return self.age if self.age_s is not None and self.age_s > mirror.LATE_S else None


class _Verdict(NamedTuple):
    """State of a job as one source decides it, with the reason. `exit_code` is None unless the job
    has ended.
    """

    state: JobState
    reason: str
    exit_code: int | None = None


def read_status(run_dir: Path, *, waits: bool = True) -> JobStatus:
    """Returns the status of a job as far as this host can determine it. If this host cannot
    determine it, the field `reason` says so.

    If the heartbeat of a job looks old, the first call in a process takes some seconds. It watches
    whether the heartbeat changes, since the clock of this host may be wrong. If `waits` is false,
    the call does not wait, and such a job is not yet reported as stalled.
    """
    if run := mirror.mirror_of(run_dir):
        return _mirrored_status(run)
    state, answer = _read_sources(run_dir, waits)
    alive = is_alive(state)
    attempt = state.attempt if state else last_attempt(run_dir)
    # The exit report is read last. A process writes it before it ends, so the report of a process
    # that was found dead above is there now.
    report = _exit_report(run_dir, attempt)
    age_s = None
    if state is not None and state.state is not JobState.IMPORTED:
        age_s = heartbeats.heartbeat_age_s(run_dir, state, _stalled_after_s(state))

    if report is not None:
        verdict = _by_report(report)
    elif state is None:
        reason = "state.json is missing or damaged, and there is no exit.json"
        verdict = _Verdict(JobState.LOST, reason)
    elif state.state is JobState.IMPORTED:
        verdict = _Verdict(JobState.IMPORTED, state.reason)
    elif answer is not None:
        verdict = _by_scheduler(run_dir, state, answer, age_s)
    else:
        verdict = _by_process(run_dir, state, alive, age_s)

    status = JobStatus(
        state=verdict.state,
        reason=_with_full_disk(run_dir, verdict),
        attempt=attempt,
        heartbeat_age_s=age_s,
        exit_code=verdict.exit_code,
    )
    if state is None:
        return status
    starting_s = state.starting_s if verdict.state is JobState.STARTING else None
    return status.replace(step=state.step, starting_s=starting_s, has_joined=state.has_joined)


def _mirrored_status(run: mirror.MirroredRun) -> JobStatus:
    """Returns the status that the cluster behind the login node has reported last. The reason
    contains the age of the report, unless the report is fresh.
    """
    seen = run.update_report()
    if not seen.time:
        return JobStatus(
            state=JobState.QUEUED,
            reason=seen.trouble or "nothing heard yet",
            attempt=last_attempt(run.run_dir),
        )
    age_s = seen.age_s
    status = JobStatus.from_dict(seen.status).replace(heard_at=seen.time)
    if status.heartbeat_age_s is not None and not status.state.is_final:
        status = status.replace(heartbeat_age_s=status.heartbeat_age_s + age_s)
    if not seen.trouble and age_s < 3 * mirror.INTERVAL_S:
        return status
    trouble = f": {seen.trouble}" if seen.trouble else ""
    return status.replace(reason=f"{status.reason}; as of {seen.age} ago{trouble}")


def _read_sources(
    run_dir: Path, waits: bool
) -> tuple[RunState | None, poll.SchedulerAnswer | None]:
    """Returns (content of state.json, answer of the scheduler). The answer is None if no scheduler
    runs the job, or if the attempt has written an exit report.
    """
    state = read_state(run_dir)
    answer = None
    if state is None:
        return None, None
    if state.scheduler_job and not _exit_report(run_dir, state.attempt):
        heartbeats.record_sighting(run_dir, state)
        answer = poll.POLLER.answer(state.scheduler_job)
        state = read_state(run_dir) or state  # The call may have waited, so the state may be newer.
    is_over = _exit_report(run_dir, state.attempt) is not None
    if waits and not is_over and _depends_on_heartbeat(state, is_alive(state), answer):
        heartbeats.watch_heartbeats({run_dir: _stalled_after_s(state)})
        state = read_state(run_dir) or state
    return state, answer


def watch_silent(run_dirs: Iterable[Path]) -> None:
    """Watches the heartbeats of all jobs that look stalled, at the same time. Later calls of
    `read_status` for these jobs do not wait.
    """
    limits_s = {}
    for run_dir in run_dirs:
        state = read_state(run_dir)
        if state is None or mirror.mirror_of(run_dir) or _exit_report(run_dir, state.attempt):
            continue
        if _depends_on_heartbeat(state, is_alive(state), None):
            limits_s[run_dir] = _stalled_after_s(state)
    heartbeats.watch_heartbeats(limits_s)


def _depends_on_heartbeat(
    state: RunState, alive: bool | None, answer: poll.SchedulerAnswer | None
) -> bool:
    """Returns whether the age of its heartbeat decides on the status of a job that has no exit
    report.
    """
    if state.state.is_final or state.state in (JobState.STOPPING, *WAITING):
        return False
    if answer and answer.state:
        is_over = answer.state.is_final and answer.state is not JobState.LOST
        return not is_over and answer.state not in WAITING
    return bool(state.scheduler_job) or alive is not False


def _exit_report(run_dir: Path, attempt: int) -> ExitReport | None:
    """Returns the exit report of an attempt, or None if the attempt has written no report."""
    report = read_exit(run_dir)
    if report is not None and report.attempt == attempt:
        return report
    return None


def is_alive(state: RunState | None) -> bool | None:
    """Returns whether the process that is responsible for the job runs. Returns None if the process
    was started on another host or is unknown.
    """
    if state is None or state.process is None or not state.process.is_here:
        return None
    return state.process.is_alive


def why_unknown(state: RunState) -> str:
    """Returns why this host cannot know whether the process of a job runs."""
    if state.process is None:
        return "it was not started by a launcher, so only its heartbeat speaks for it"
    return f"it runs on {state.process.host}, so only its heartbeat speaks for it here"


def _by_report(report: ExitReport) -> _Verdict:
    state = JobState.FAILED if report.rc else JobState.DONE
    return _Verdict(state, report.reason, report.rc)


def _by_scheduler(
    run_dir: Path, state: RunState, answer: poll.SchedulerAnswer, age_s: float | None
) -> _Verdict:
    """Returns the state, with its reason, of a job that a scheduler runs and that has written no
    exit report. `answer` is the scheduler's report, `age_s` the age of the heartbeat.
    """
    by_heartbeat = _by_heartbeat(run_dir, state, age_s)
    # After a crash of slurmctld, Slurm may not know a job that still runs. A recent heartbeat then
    # decides.
    has_recent_heartbeat = (age_s or 0.0) <= _stalled_after_s(state)
    is_forgotten = answer.state is JobState.LOST and state.state is JobState.RUNNING
    if answer.state is None or (is_forgotten and has_recent_heartbeat):
        return by_heartbeat._replace(reason=f"{by_heartbeat.reason}; {answer.reason}")
    if answer.state is JobState.DONE:
        return _Verdict(answer.state, answer.reason, answer.exit_code)
    if answer.state.is_final:
        reason = with_end_reason(run_dir, state, answer.reason)
        return _Verdict(answer.state, reason, answer.exit_code)

    if answer.state in WAITING:
        # A new heartbeat shows that the job has started after the query to the scheduler.
        if heartbeats.has_changed_since(run_dir, state, answer.time):
            return by_heartbeat
        return _while_waiting(state, answer)
    # The attempt has ended, but Slurm still reports its job. Slurm takes long to end a job if a
    # node does not answer.
    if state.state in GIVEN_UP:
        return _Verdict(state.state, _between_attempts(state, answer))
    if answer.state in (JobState.STOPPING, JobState.STALLED):
        return _Verdict(answer.state, f"{answer.reason}; {by_heartbeat.reason}")
    if state.state is JobState.QUEUED:
        reason = f"{answer.reason}; no sign of life from its processes yet"
        return _Verdict(JobState.STARTING, reason)
    return by_heartbeat


def _while_waiting(state: RunState, answer: poll.SchedulerAnswer) -> _Verdict:
    """Returns the state, with its reason, of a job that waits in the queue of its scheduler."""
    assert answer.state is not None
    if state.state is JobState.QUEUED:
        return _Verdict(answer.state, answer.reason)
    if state.state in GIVEN_UP:
        return _Verdict(JobState.REQUEUED, _between_attempts(state, answer))
    return _Verdict(JobState.REQUEUED, answer.reason)


def _between_attempts(state: RunState, answer: poll.SchedulerAnswer) -> str:
    return f"attempt {state.attempt} ended: {state.reason}; {answer.reason}"


def _by_process(
    run_dir: Path, state: RunState, alive: bool | None, age_s: float | None
) -> _Verdict:
    """Returns the state, with its reason, of a job that no scheduler runs and that has written no
    exit report. `alive` is the result of `is_alive` for its process.
    """
    if alive is False:
        return _Verdict(JobState.LOST, _why_lost(run_dir, state))
    by_heartbeat = _by_heartbeat(run_dir, state, age_s)
    if alive is None:
        return by_heartbeat._replace(reason=f"{by_heartbeat.reason}; {why_unknown(state)}")
    return by_heartbeat


def _with_full_disk(run_dir: Path, verdict: _Verdict) -> str:
    """Returns the reason in `verdict`, the state that was found for a job. If the job is
    unfinished, lost or failed and its disk is full, a note about the disk follows.
    """
    if verdict.state in (JobState.DONE, JobState.IMPORTED):
        return verdict.reason
    full = why_full(run_dir)
    return f"{verdict.reason}; {full}" if full else verdict.reason


def _why_lost(run_dir: Path, state: RunState) -> str:
    """Returns the reason for the loss of a job whose process on this host has ended without an exit
    report.
    """
    # The supervisor may have written the end only to its log, if the run directory was moved away
    # at that time and moved back later.
    for file in script_logs(run_dir, state):
        if reason := unrecorded_end(file, state.attempt):
            return f"{reason}. This is recorded in {file.relative_to(run_dir)} only"
    assert state.process is not None
    reason = (
        f"process {state.process.pid} on {state.process.host} is gone and left no exit.json: "
        f"it was killed, or the machine went down, while {state.state}"
    )
    return with_end_reason(run_dir, state, reason)


def with_end_reason(run_dir: Path, state: RunState, reason: str) -> str:
    """Returns `reason`, followed by the line that explains the end in the log of the batch script
    or the supervisor. A line about an earlier attempt is left out: one supervisor starts several
    attempts, and a killed supervisor writes no line about its last one.
    """
    for file in script_logs(run_dir, state):
        tail = log_tail(file)
        said = end_reason(tail)
        # The log of a compile job names only the tasks that failed. The reason is in the log of the
        # first one. The other tasks are ended after it.
        task = re.search(r"tasks? (\d+)\S*: (Exited|Out Of|Killed|Segm)", tail)
        if task and file == compile_log(run_dir, state.attempt):
            own = run_dir / "logs" / f"compile_rank_{int(task[1]):05d}.log"
            said = end_reason(log_tail(own)) or said
        earlier = re.search(r"\battempt (\d+): ", said)
        if said and not (earlier and int(earlier[1]) < state.attempt):
            return f"{reason}. {file.relative_to(run_dir)} ends with: {said}"
    return reason


def _by_heartbeat(run_dir: Path, state: RunState, age_s: float | None) -> _Verdict:
    """Returns the state, with its reason, of a job that has probably not ended. It is derived from
    the job's state.json, heartbeat and requests.
    """
    seen = "no heartbeat yet"
    if age_s is not None:
        seen = f"last heartbeat {age_s:.0f} s ago"
    stop_asked = read_pending_request(run_dir, "stop")
    if stop_asked is not None:
        # The text has the time of day, not an age, since the time may come from the clock of
        # another machine.
        asked_at = time.strftime("%H:%M:%S", time.localtime(stop_asked.asked_at))
        return _Verdict(JobState.STOPPING, f"asked to stop at {asked_at}; {seen}")
    limit_s = _stalled_after_s(state)
    is_saving = state.state is JobState.STOPPING  # The last save may take long.
    if age_s is not None and not is_saving and age_s > limit_s:
        reason = f"{seen} while {state.state}; stalled after {limit_s:.0f} s"
        return _Verdict(JobState.STALLED, reason)

    doing = state.reason or "no step yet"
    if state.state is not JobState.STARTING and state.step is not None:
        doing = f"step {state.step}"
    elif state.state is JobState.STARTING and state.starting_s:
        doing = f"{doing}, for {state.starting_s:.0f} s"
    notice = f"; {state.notice}" if state.notice else ""
    return _Verdict(state.state, f"{doing}; {seen}{notice}")


def _stalled_after_s(state: RunState) -> float:
    """Returns the age of a heartbeat, in seconds, from which a job counts as stalled."""
    # If `starting_s` is set, the supervisor writes heartbeats before the first step, so the shorter
    # limit applies.
    if state.state is JobState.STARTING and state.starting_s is not None:
        return STALLED_AFTER_S
    if state.state in (JobState.QUEUED, JobState.CONFIGURING, JobState.STARTING):
        return STALLED_START_S
    return max(STALLED_AFTER_S, STALLED_AFTER_STEPS * (state.step_time_s or 0.0))
