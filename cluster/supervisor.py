"""The core of every supervisor: runs the attempts of a job, one after the other, and records how
they ended.

A launcher's supervisor says how its ranks are started, looked at and ended. What follows their end
is decided here. Standard library, Linux.
"""

import abc
import dataclasses
import signal
import time
import traceback
from pathlib import Path
from typing import Any

from cluster.attempts import next_attempt
from cluster.files import outlive_full_log
from cluster.job import JobSpec
from cluster.outcome import (
    USELESS_TO_RETRY,
    Home,
    Outcome,
    end_of,
    fruitless_starts,
    furthest_steps,
    is_told_to_stop,
    log_tail,
    say,
    write_end,
)
from cluster.process import become_subreaper
from cluster.record import counted, cut
from cluster.state import JobError, JobState, log_path, read_state, update_state

ASKS_FOR_THE_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
TIME_IS_SHORT = {signal.SIGUSR1, signal.SIGUSR2}
WATCHED = {signal.SIGCHLD, signal.SIGALRM, *ASKS_FOR_THE_END, *TIME_IS_SHORT}
LOOK_EVERY_S = 1.0
"""How often the run directory is looked for."""


def become_supervisor() -> None:
    """Prepares this process: it gets the orphans of what it starts, its log may be full, and its
    signals are waited for.
    """
    become_subreaper()
    outlive_full_log()
    # Commands inherit what is blocked. Slurm's give up a node that does not answer by SIGALRM.
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED - {signal.SIGALRM})
    # The caller may ignore it, and then no exit code could be read.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Supervisor(abc.ABC):
    """Runs a job from an attempt that this process owns."""

    def __init__(self, run_dir: Path, spec: JobSpec, attempt: int) -> None:
        self.run_dir, self.spec, self.attempt = run_dir, spec, attempt
        self.home = Home(run_dir)
        self.stop_reason: str | None = None
        """Why this supervisor has asked the trainer to save and stop, if it has."""

    @abc.abstractmethod
    def start_ranks(self) -> Outcome | None:
        """Starts all ranks of this attempt; returns how it ends where none should be started."""

    @abc.abstractmethod
    def look(self, signal_number: int | None) -> Outcome | None:
        """Returns how this attempt ends, or None while it goes on; a signal may just have come."""

    @abc.abstractmethod
    def end_ranks(self) -> None:
        """Ends all ranks that can be reached, and what they have left behind."""

    def begin_next(self, reason: str) -> int:
        """Begins the attempt that follows one that ended for `reason`; returns its number."""
        return next_attempt(self.run_dir, self.attempt, reason)

    def run(self) -> int:
        """Runs attempts until one is not followed by another here; returns the job's exit code."""
        while (outcome := self.run_attempt()).fate == "restart":
            try:
                self.attempt = self.begin_next(outcome.reason)
            except (JobError, OSError) as error:
                reason = f"{outcome.reason}; not started again: {error}"
                outcome = dataclasses.replace(outcome, fate="end", reason=reason)
                break
        return self.finish(outcome)

    def run_attempt(self) -> Outcome:
        """Runs all ranks to their end; returns it, with what follows."""
        try:
            outcome = self.judge(self.run_ranks())
        except Exception as error:  # a full disk, no word from the scheduler, a newer attempt
            traceback.print_exc()
            outcome = Outcome(1, str(error) or repr(error))
        say(f"attempt {self.attempt} of {self.spec.name}: {outcome.reason}: {outcome.fate}")
        return outcome

    def run_ranks(self) -> Outcome:
        """Starts, watches and ends all ranks; none that can be reached is left."""
        try:
            return self.start_ranks() or self.watch()
        finally:
            self.end_ranks()

    def watch(self) -> Outcome:
        """Waits until `look` says that the attempt ends, or the run directory is lost."""
        while True:
            received = signal.sigtimedwait(WATCHED, LOOK_EVERY_S)
            if outcome := self.look(received.si_signo if received else None):
                return outcome
            if lost := self.home.why_lost():
                return Outcome(1, lost)

    def failed(self, rank: int, code: int, who: str) -> Outcome:
        """Returns what follows when a rank has failed: a start, if it was killed, or if the job has
        shown that it can run.
        """
        words, rc = end_of(code)
        may_pass = rc > 128 or (
            code != USELESS_TO_RETRY and any(furthest_steps(self.run_dir).values())
        )
        return Outcome(rc, f"{who} {words}", rank, "restart" if may_pass else "end")

    def ended_well(self) -> Outcome:
        """Returns what follows when all ranks have ended with code 0."""
        if stopped := self.stopped():
            return stopped
        ranks = self.spec.num_processes
        who = "the one rank" if ranks == 1 else f"all {ranks} ranks"
        return Outcome(0, f"{who} ended with code 0")

    def stopped(self) -> Outcome | None:
        """Returns what follows when the trainer has saved and stopped because it was asked to."""
        state = read_state(self.run_dir)
        if state is None or state.state is not JobState.STOPPING:
            return None
        if self.stop_reason is None or is_told_to_stop(self.run_dir):
            return Outcome(0, f"stopped on request at step {state.step}")
        return Outcome(0, f"{self.stop_reason}; saved at step {state.step}", fate="requeue")

    def judge(self, outcome: Outcome) -> Outcome:
        """Returns an outcome, with an end instead of a start that would lead nowhere."""
        reason, max_restarts = outcome.reason, self.spec.max_restarts
        if lost := self.home.why_lost():
            reason = lost
        elif outcome.fate in ("end", "taken"):
            return outcome
        elif is_told_to_stop(self.run_dir):
            reason = f"{reason}, after a request to stop"
        elif max_restarts and (fruitless := fruitless_starts(self.run_dir)) > max_restarts:
            reason = f"{reason}; given up after {counted(fruitless, 'start')} without a new step"
        elif max_restarts or outcome.fate == "requeue":
            return outcome
        return dataclasses.replace(outcome, fate="end", reason=reason, rc=outcome.rc or 1)

    def finish(self, outcome: Outcome) -> int:
        """Records the end of the job, unless a newer attempt or another run has its directory;
        returns its exit code.
        """
        reason, rank = outcome.reason, outcome.failing_rank
        tail = "" if rank is None else log_tail(log_path(self.run_dir, self.attempt, rank))
        if tail:
            reason = f"{reason}: {cut(tail.splitlines()[-1].strip(), 600)}"
        try:
            self.home.check()
            write_end(
                self.run_dir,
                attempt=self.attempt,
                rc=outcome.rc,
                reason=reason,
                failing_rank=rank,
                log_tail=tail,
            )
        except (JobError, OSError) as error:
            say(f"the end of attempt {self.attempt} ({reason}) could not be recorded: {error}")
        return outcome.rc

    def note(self, state: JobState, reason: str, **more: Any) -> None:
        """Writes into state.json what this attempt does now."""
        if state is JobState.STARTING:
            more["heartbeat"] = time.time()
        update_state(self.run_dir, attempt=self.attempt, state=state, reason=reason, **more)
