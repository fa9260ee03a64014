"""The supervisor of a job: starts the ranks, monitors them, decides what follows the end of an
attempt, and records the end of the job.

`Supervisor.run` is the loop for every launcher. The subclasses in `cluster.local.supervisor` and
`cluster.slurm.supervisor` implement the differences: how ranks are started, observed and ended,
whether their nodes still answer, and how the job obtains other nodes.

Causes of the end of an attempt, each with the decision that follows (`AttemptOutcome.fate`):

    all ranks ended with code 0                      end: the job is done
    a rank failed before the job's first step        end: the job has failed
    a rank was killed, or failed after a step        restart: the next attempt starts here
    a rank failed and a node no longer answers       requeue: the job gets other nodes
    the time limit is near, or Slurm preempts        requeue, after a checkpoint
    the run directory was deleted                    end: nothing can be recorded
    a newer attempt owns the run directory           taken: nothing is recorded

A job is given up after more than `JobSpec.max_restarts` starts in a row without a new step.
Standard library, Linux.
"""

import abc
import dataclasses
import signal
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from cluster.attempts import USELESS_TO_RETRY, AttemptOutcome, record_end
from cluster.directory_handle import RunDirectory, retry_disk
from cluster.files import FULL, ignore_output_errors, print_line
from cluster.heartbeats import StartWatch
from cluster.job import JobSpec
from cluster.logs import log_tail
from cluster.ports import mentions_port_in_use
from cluster.process import become_subreaper
from cluster.record import counted
from cluster.state import (
    JobError,
    JobState,
    StaleAttemptError,
    is_stop_requested,
    log_path,
    read_complete_history,
    state_to_change,
)

LOOK_EVERY_S = 1.0
"""Seconds between two checks of the ranks and the run directory while no signal arrives."""
CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def become_supervisor(signals: Iterable[signal.Signals]) -> None:
    """Prepares this process for the work of a supervisor. Orphans of ranks become children of this
    process. The process continues if its log cannot be written. `signals` are blocked, so that they
    stay pending until `Supervisor.watch` receives them.
    """
    become_subreaper()
    ignore_output_errors()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # A caller may have set SIGCHLD to be ignored. Then no exit code of a rank could be read.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Supervisor(abc.ABC):
    """Base class of supervisors: runs the attempts of a job, beginning with the attempt that this
    process owns.
    """

    signals: frozenset[signal.Signals]
    """Signals for which `watch` waits. `become_supervisor` blocks them, so that they stay pending
    until then."""
    fate_after_disk_error: Literal["restart", "requeue"]
    """Value of `AttemptOutcome.fate` after an error of the file system that may be temporary, if
    the job has already taken a step."""

    def __init__(self, home: RunDirectory, spec: JobSpec, attempt: int) -> None:
        self.home = home
        self.run_dir = home.run_dir
        self.spec = spec
        self.attempt = attempt
        self.stop_reason: str | None = None
        """Reason for which this supervisor has asked the trainer to save and stop. None if this
        supervisor has not asked."""
        self.deadline = float("inf")
        """Time of the monotonic clock, in seconds, at which this process ends the attempt."""

    def run(self) -> int:
        """Runs attempts until the job has ended or continues in another allocation. Returns the
        exit code of this job.
        """
        while True:
            outcome = self.decide(self.run_ranks())
            print_line(self.summary(outcome))
            if outcome.fate != "restart":
                break
            try:
                self.attempt = self.begin_next(outcome.reason)
            except (JobError, OSError) as error:
                outcome = self.after_failed_begin(outcome, error)
                print_line(self.summary(outcome))
                break
        if outcome.fate == "end":
            record_end(self.home, self.attempt, outcome)
            return outcome.rc
        try:
            return self.leave(outcome)
        except StaleAttemptError as error:  # A newer attempt of the job has begun already.
            print_line(str(error))
            return 1

    def run_ranks(self) -> AttemptOutcome:
        """Runs all ranks of an attempt until the attempt ends, then ends all ranks that can be
        reached. Returns the outcome of the attempt.
        """
        try:
            outcome = self.start_ranks() or self.watch()
        except Exception as error:
            if not isinstance(error, JobError):
                traceback.print_exc()
            outcome = self.after_error(error)
        self.end_ranks(outcome)
        return outcome

    def watch(self) -> AttemptOutcome:
        """Waits until the attempt ends, and returns its outcome. The attempt ends if the check of
        the ranks (`poll_ranks`) returns an outcome, if the time limit is reached, or if the run
        directory is lost.
        """
        start = StartWatch(self.run_dir, self.attempt)
        while True:
            start.beat()
            remaining_s = max(0.0, self.deadline - time.monotonic())
            received = signal.sigtimedwait(self.signals, min(remaining_s, LOOK_EVERY_S))
            signal_number = received.si_signo if received else None
            outcome = self.poll_ranks(signal_number)
            if outcome is not None:
                return outcome
            if time.monotonic() >= self.deadline:
                return AttemptOutcome(
                    124, f"the time limit of {self.spec.time_limit_s:g} s was reached"
                )
            if lost := self.home.why_lost():
                return AttemptOutcome(1, lost)

    def decide(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Returns `outcome` with the final value of its field `fate`. `choose_nodes` may move the
        next attempt to other nodes. `limit_retries` ends the job if another start would be useless.
        """
        try:
            outcome = self.choose_nodes(outcome)
        except (JobError, OSError) as error:
            outcome = self.after_error(error)
        return limit_retries(outcome, self.home, self.spec.max_restarts)

    def summary(self, outcome: AttemptOutcome) -> str:
        """Returns a line for the log of this process about the end of the attempt."""
        return f"attempt {self.attempt}: {outcome.reason}: {outcome.fate}"

    def after_error(self, error: Exception) -> AttemptOutcome:
        """Returns the outcome of an attempt that ended because of `error`, an error in this
        process.

        An error of the file system may be temporary, so the job continues. It ends if it has taken
        no step yet, since its configuration may be wrong.
        """
        if isinstance(error, StaleAttemptError):
            return AttemptOutcome(1, str(error), fate="taken")
        may_pass = isinstance(error, OSError) and error.errno not in FULL
        outcome = AttemptOutcome(1, str(error) or repr(error))
        if may_pass and self.spec.max_restarts > 0 and has_taken_steps(self.home):
            return dataclasses.replace(outcome, fate=self.fate_after_disk_error)
        return outcome

    def after_failed_begin(self, outcome: AttemptOutcome, error: Exception) -> AttemptOutcome:
        """Returns the outcome of the ended attempt if the next attempt could not begin in this
        allocation because of `error`.
        """
        fate = self.after_error(error).fate
        if fate == "restart":
            fate = "end"
        reason = f"{outcome.reason}; not started again: {error}"
        return dataclasses.replace(outcome, fate=fate, reason=reason)

    def ended_well(self) -> AttemptOutcome:
        """Returns the outcome of an attempt whose ranks have all ended with code 0."""
        num_ranks = self.spec.num_processes
        who = "the one rank" if num_ranks == 1 else f"all {num_ranks} ranks"
        return self.stopped() or AttemptOutcome(0, f"{who} ended with code 0")

    def stopped(self) -> AttemptOutcome | None:
        """Returns the outcome of an attempt whose trainer has saved and stopped on request. Returns
        None if the trainer has not stopped on request.
        """
        state = retry_disk(lambda: state_to_change(self.run_dir), self.home)
        if state is None or state.state is not JobState.STOPPING:
            return None
        if self.stop_reason is None or is_stop_requested(self.run_dir):
            return AttemptOutcome(0, f"stopped on request at step {state.step}")
        return AttemptOutcome(0, f"{self.stop_reason}; saved at step {state.step}", fate="requeue")

    @abc.abstractmethod
    def start_ranks(self) -> AttemptOutcome | None:
        """Starts all ranks of the attempt and returns None. If the ranks must not be started,
        returns an outcome instead.
        """

    @abc.abstractmethod
    def poll_ranks(self, signal_number: int | None) -> AttemptOutcome | None:
        """Checks the ranks. Returns the outcome if the attempt ends now, otherwise None.
        `signal_number` is the signal that this process has just received, or None.
        """

    @abc.abstractmethod
    def end_ranks(self, outcome: AttemptOutcome) -> None:
        """Ends all ranks that can be reached, and the processes that they have left behind."""

    @abc.abstractmethod
    def begin_next(self, reason: str) -> int:
        """Begins the next attempt after an attempt that ended for `reason`. Returns the number of
        the next attempt.

        Raises:
            StaleAttemptError: Another process has begun a newer attempt.
            JobError: The run directory belongs to another job.
            OSError: The file system fails, or the disk is full.
        """

    def choose_nodes(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Returns `outcome` with its final `fate`, which decides on which nodes the next attempt
        starts.

        This method returns `outcome` unchanged, since one machine has no other nodes. A subclass
        for several nodes sets the fate `requeue` if a node does not answer or if the job must leave
        its nodes.
        """
        return outcome

    def leave(self, outcome: AttemptOutcome) -> int:
        """Lets another job continue the run, and returns the exit code of this job. `outcome` has
        the fate `requeue` or `taken`.

        A subclass requeues this job, or submits another job, unless Slurm has requeued this job
        already. This method does neither.

        Raises:
            StaleAttemptError: A newer attempt owns the run directory, so the run continues without
                this job. No job was requeued or submitted.
        """
        return outcome.rc


def cause_order(code: int) -> tuple[bool, bool]:
    """Returns a sort key for the exit code of a rank. Among ranks that failed at the same time, the
    smallest key belongs to the most probable cause.

    USELESS_TO_RETRY comes first, then a crash by a signal. Other codes may be consequences, since
    a rank also fails after the loss of another rank.
    """
    return code != USELESS_TO_RETRY, -code not in CRASHES


def rank_failure(
    home: RunDirectory, attempt: int, rank: int, code: int, who: str
) -> AttemptOutcome:
    """Returns the outcome of an attempt in which a rank has failed. `code` is the return code of
    the rank. `who` names the rank in the reason.

    The ranks are started again if the rank was killed, if the job has already taken a step, or if
    another program used the rendezvous port. The next start uses another port.
    """
    words, rc = end_of(code)
    outcome = AttemptOutcome(rc, f"{who} {words}", rank)
    may_pass = rc > 128
    if not may_pass and code != USELESS_TO_RETRY:
        log = log_path(home.run_dir, attempt, rank)
        may_pass = has_taken_steps(home) or mentions_port_in_use(log_tail(log))
    if may_pass:
        return dataclasses.replace(outcome, fate="restart")
    return outcome


def has_taken_steps(home: RunDirectory) -> bool:
    """Returns whether any attempt of a run has taken a step. Returns False if the files of the run
    cannot be read.
    """
    try:
        return any(retry_disk(lambda: furthest_steps(home.run_dir), home).values())
    except OSError as error:
        print_line(f"how far the run got cannot be read: {error}")
        return False


def limit_retries(outcome: AttemptOutcome, home: RunDirectory, max_restarts: int) -> AttemptOutcome:
    """Returns `outcome`, with its `fate` changed to `end` if another start would be useless.

    A start is useless if the run directory was lost, if a stop was requested, or if too many starts
    in a row have taken no new step. After the loss of a node, the number of starts is not limited.
    If `max_restarts` is 0, `restart` also becomes `end`.
    """
    run_dir = home.run_dir
    reason = outcome.reason
    if lost := home.why_lost():
        reason = lost
    elif outcome.fate in ("end", "taken"):
        return outcome
    elif is_stop_requested(run_dir):
        reason = f"{reason}, after a request to stop"
    elif outcome.lost_node is not None:
        return outcome
    elif max_restarts and (fruitless := _fruitless_starts(home)) > max_restarts:
        reason = f"{reason}; given up after {counted(fruitless, 'start')} without a new step"
    elif max_restarts or outcome.fate == "requeue":
        return outcome
    return dataclasses.replace(outcome, fate="end", reason=reason, rc=outcome.rc or 1)


def furthest_steps(run_dir: Path) -> dict[int, int]:
    """Returns a dict from attempt number to the last step of the attempt, 0 for an attempt that
    took no step.

    Raises:
        OSError: The file system fails.
    """
    furthest: dict[int, int] = {}
    state = state_to_change(run_dir)
    for told in [*read_complete_history(run_dir), *([state] if state else [])]:
        furthest[told.attempt] = max(furthest.get(told.attempt, 0), told.step or 0)
    return furthest


def fruitless_starts(run_dir: Path) -> int:
    """Returns the number of attempts without a new step since the last attempt with a new step. A
    step is new if its number is higher than in all earlier attempts. Attempts that a lost node or a
    preemption ended are not counted, since no program of the job is at fault.
    """
    excused = {
        event.attempt
        for event in read_complete_history(run_dir)
        if event.lost_node or event.state == JobState.PREEMPTED
    }
    fruitless = best = 0
    for attempt, step in sorted(furthest_steps(run_dir).items()):
        if step > best:
            fruitless = 0
        elif attempt not in excused:
            fruitless += 1
        best = max(best, step)
    return fruitless


def _fruitless_starts(home: RunDirectory) -> int:
    """Returns the number of attempts without a new step (`fruitless_starts`), or 0 if the files of
    the run cannot be read.
    """
    try:
        return retry_disk(lambda: fruitless_starts(home.run_dir), home)
    except OSError as error:
        print_line(f"how far the run got cannot be read: {error}")
        return 0


def end_of(code: int) -> tuple[str, int]:
    """Returns (text, exit code) for the return code of a process. The text says how the process
    ended. As in a shell, the exit code is 128 + n if signal n ended the process.
    """
    if code >= 0:
        return f"ended with code {code}", code
    hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}", 128 - code
