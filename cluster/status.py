"""The present state of a job, from its run directory, its process and its scheduler.

The sources in order, each asked only where those before it give no answer: exit.json of this
attempt; the process, on this host; the scheduler (squeue, scontrol, sacct); the last heartbeat,
whose age `cluster.liveness` judges. Standard library only.
"""

import dataclasses
import re
import time
from collections.abc import Iterable
from pathlib import Path

from cluster import liveness, poll
from cluster.files import why_full
from cluster.login import mirror
from cluster.outcome import last_words, log_tail, unrecorded_end
from cluster.record import field_doc
from cluster.state import (
    GIVEN_UP,
    AttemptState,
    ExitReport,
    JobState,
    RunState,
    compile_log,
    last_attempt,
    read_asked,
    read_exit,
    read_state,
    script_logs,
)

STALLED_AFTER_S = 60.0
STALLED_AFTER_STEPS = 10
STALLED_START_S = 1800.0
"""Seconds without a heartbeat before the first step, where no supervisor writes one: imports,
rendezvous and compilation take long on a large machine."""
WAITING = (JobState.QUEUED, JobState.REQUEUED, JobState.CONFIGURING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus(AttemptState):
    """What a job does now, and why we think so."""

    heartbeat_age_s: float | None = field_doc("seconds since the last sign of life", default=None)
    exit_code: int | None = field_doc("exit code of a job that has ended", default=None)
    starting_s: float | None = field_doc(
        "before the first step: seconds that what `reason` says has lasted", default=None
    )
    has_joined: bool = field_doc(
        "whether all ranks of this attempt have found each other", default=False
    )
    heard_at: float | None = field_doc(
        "unix time at which the machine that runs the job said this; none: it is this machine, or"
        " nothing was heard yet",
        default=None,
    )

    @property
    def age_s(self) -> float | None:
        """Seconds since the machine that runs the job said this, or None if it is this machine."""
        return None if self.heard_at is None else max(0.0, time.time() - self.heard_at)

    @property
    def age(self) -> str | None:
        """The same for people."""
        return None if self.age_s is None else mirror.age_text(self.age_s)

    @property
    def late_age(self) -> str | None:
        """Age of this status for people, if the machine that runs the job should have said more
        since. None if it is fresh.
        """
        return self.age if self.age_s is not None and self.age_s > mirror.LATE_S else None


def read_status(run_dir: Path, *, waits: bool = True) -> JobStatus:
    """Returns the truth about a job as far as this host can know it; `reason` says when it
    cannot.

    This takes some seconds at the first look of this process at a job whose heartbeat looks old:
    the heartbeat is watched first, since the clock here may be wrong. With `waits` false such a job
    is not yet taken for stalled.
    """
    if run := mirror.mirror_of(run_dir):
        return _mirrored(run)
    state, answer = _newest(run_dir, waits)
    alive = is_alive(state)
    attempt = state.attempt if state else last_attempt(run_dir)
    # After the look at the process, which writes its report before it ends, and the question.
    report = _report(run_dir, attempt)
    age_s = liveness.heartbeat_age_s(run_dir, state, _stalled_after_s(state)) if state else None
    rc = None
    if report:
        verdict = JobState.FAILED if report.rc else JobState.DONE
        reason = report.reason
        rc = report.rc
    elif state is None:
        verdict = JobState.LOST
        reason = "state.json is missing or damaged, and there is no exit.json"
    elif state.state is JobState.IMPORTED:
        verdict = state.state
        reason = state.reason
        age_s = None
    elif answer:
        verdict, reason, rc = _scheduled(run_dir, state, answer, age_s)
    elif alive is False and state.process:
        verdict = JobState.LOST
        reason = (
            f"process {state.process.pid} on {state.process.host} is gone and left no exit.json: "
            f"it was killed, or the machine went down, while {state.state}"
        )
        reason = _unrecorded(run_dir, state) or _with_last_words(run_dir, state, reason)
    else:
        verdict, reason = _living(run_dir, state, age_s)
        if alive is None:
            reason = f"{reason}; {why_unknown(state)}"
    if verdict not in (JobState.DONE, JobState.IMPORTED) and (full := why_full(run_dir)):
        reason = f"{reason}; {full}"
    step = state.step if state else None
    return JobStatus(
        state=verdict,
        reason=reason,
        attempt=attempt,
        step=step,
        heartbeat_age_s=age_s,
        exit_code=rc,
        starting_s=state.starting_s if state and verdict is JobState.STARTING else None,
        has_joined=bool(state and state.has_joined),
    )


def _newest(run_dir: Path, waits: bool) -> tuple[RunState | None, poll.SchedulerAnswer | None]:
    """Returns what state.json says, and the scheduler's answer where one runs the job."""
    state = read_state(run_dir)
    answer = None
    if state is None:
        return None, None
    if state.scheduler_job and not _report(run_dir, state.attempt):
        liveness.see(run_dir, state)
        answer = poll.POLLER.answer(state.scheduler_job)
        state = read_state(run_dir) or state  # it may have waited for an answer
    is_over = _report(run_dir, state.attempt) is not None
    if waits and not is_over and _lives_by_heartbeat(state, is_alive(state), answer):
        liveness.watch({run_dir: _stalled_after_s(state)})
        state = read_state(run_dir) or state
    return state, answer


def watch_silent(run_dirs: Iterable[Path]) -> None:
    """Watches the heartbeats of many jobs that look stalled at the same time, so that `read_status`
    waits for none of them.
    """
    limits_s = {}
    for run_dir in run_dirs:
        state = read_state(run_dir)
        if state is None or mirror.mirror_of(run_dir) or _report(run_dir, state.attempt):
            continue
        if _lives_by_heartbeat(state, is_alive(state), None):
            limits_s[run_dir] = _stalled_after_s(state)
    liveness.watch(limits_s)


def _lives_by_heartbeat(
    state: RunState, alive: bool | None, answer: poll.SchedulerAnswer | None
) -> bool:
    """Returns whether the age of its heartbeat decides what a job without exit report does."""
    if state.state.is_final or state.state in (JobState.STOPPING, *WAITING):
        return False
    if answer and answer.state:
        is_over = answer.state.is_final and answer.state is not JobState.LOST
        return not is_over and answer.state not in WAITING
    return bool(state.scheduler_job) or alive is not False


def _report(run_dir: Path, attempt: int) -> ExitReport | None:
    """Returns how an attempt has ended, or None while it has left no report."""
    report = read_exit(run_dir)
    return report if report and report.attempt == attempt else None


def _mirrored(run: mirror.MirroredRun) -> JobStatus:
    """Returns what was last heard of a run elsewhere, and how old that is unless it is fresh."""
    seen = run.refresh()
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


def is_alive(state: RunState | None) -> bool | None:
    """Returns whether the process that answers for the job runs, or None when this host cannot
    know.
    """
    if state is None or state.process is None or not state.process.is_here:
        return None
    return state.process.is_alive


def why_unknown(state: RunState) -> str:
    if state.process is None:
        return "it was not started by a launcher, so only its heartbeat speaks for it"
    return f"it runs on {state.process.host}, so only its heartbeat speaks for it here"


def _scheduled(
    run_dir: Path, state: RunState, answer: poll.SchedulerAnswer, age_s: float | None
) -> tuple[JobState, str, int | None]:
    """Returns state, reason and exit code of a job that a scheduler runs and that has left no
    exit report.
    """
    living = _living(run_dir, state, age_s)
    # After a crash the controller may have forgotten a job that goes on.
    goes_on = (
        answer.state is JobState.LOST
        and state.state is JobState.RUNNING
        and (age_s or 0.0) <= _stalled_after_s(state)
    )
    if answer.state is None or goes_on:
        return living[0], f"{living[1]}; {answer.reason}", None
    if answer.state is JobState.DONE:
        return answer.state, answer.reason, answer.exit_code
    if answer.state.is_final:
        return answer.state, _with_last_words(run_dir, state, answer.reason), answer.exit_code
    between = f"attempt {state.attempt} ended: {state.reason}; {answer.reason}"
    if answer.state in WAITING:
        # The job has started since the scheduler was asked.
        if liveness.has_changed_since(run_dir, state, answer.time):
            return *living, None
        if state.state is not JobState.QUEUED:
            return JobState.REQUEUED, between if state.state in GIVEN_UP else answer.reason, None
        return answer.state, answer.reason, None
    if state.state in GIVEN_UP:  # Slurm takes its time, above all for a node that does not answer
        return state.state, between, None
    if answer.state in (JobState.STOPPING, JobState.STALLED):
        return answer.state, f"{answer.reason}; {living[1]}", None
    if state.state is JobState.QUEUED:
        return JobState.STARTING, f"{answer.reason}; no sign of life from its processes yet", None
    return *living, None


def _unrecorded(run_dir: Path, state: RunState) -> str | None:
    """Returns the reason of an end that the supervisor could only write to its log, because the run
    directory had been moved away and has come back since.
    """
    for file in script_logs(run_dir, state):
        if reason := unrecorded_end(file, state.attempt):
            return f"{reason}. This is recorded in {file.relative_to(run_dir)} only"
    return None


def _with_last_words(run_dir: Path, state: RunState, reason: str) -> str:
    """Returns a reason with what the log of the script or supervisor says about its end."""
    for file in script_logs(run_dir, state):
        said = last_words(log_tail(file))
        # A compile job names the task that failed. Each task has a log.
        task = re.search(r"tasks? (\d+)\S*: (Exited|Out Of|Killed|Segm)", said)
        if task and file == compile_log(run_dir, state.attempt):
            own = run_dir / "logs" / f"compile_rank_{int(task[1]):05d}.log"
            said = last_words(log_tail(own)) or said
        if said:
            return f"{reason}. {file.relative_to(run_dir)} ends with: {said}"
    return reason


def _living(run_dir: Path, state: RunState, age_s: float | None) -> tuple[JobState, str]:
    """Returns state and reason of a job that has not ended, as far as we know."""
    seen = "no heartbeat yet" if age_s is None else f"last heartbeat {age_s:.0f} s ago"
    stop_asked = read_asked(run_dir, "stop")
    if stop_asked is not None:
        # A time of day, since the request may bear the time of another machine's clock.
        asked_at = time.localtime(stop_asked.asked_at)
        return (
            JobState.STOPPING,
            f"asked to stop at {time.strftime('%H:%M:%S', asked_at)}; {seen}",
        )
    saving = state.state is JobState.STOPPING  # the last checkpoint takes its time
    if age_s is not None and not saving and age_s > _stalled_after_s(state):
        return (
            JobState.STALLED,
            f"{seen} while {state.state}; stalled after {_stalled_after_s(state):.0f} s",
        )
    doing = state.reason or "no step yet"
    if state.state is not JobState.STARTING and state.step is not None:
        doing = f"step {state.step}"
    elif state.state is JobState.STARTING and state.starting_s:
        doing = f"{doing}, for {state.starting_s:.0f} s"
    notice = f"; {state.notice}" if state.notice else ""
    return state.state, f"{doing}; {seen}{notice}"


def _stalled_after_s(state: RunState) -> float:
    # Only a supervisor that waits for the first step writes `starting_s`, with a heartbeat.
    if state.state is JobState.STARTING and state.starting_s is not None:
        return STALLED_AFTER_S
    if state.state in (JobState.QUEUED, JobState.CONFIGURING, JobState.STARTING):
        return STALLED_START_S
    return max(STALLED_AFTER_S, STALLED_AFTER_STEPS * (state.step_time_s or 0.0))
