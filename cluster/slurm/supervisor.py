"""Runs inside the allocation, on its first node: starts the ranks, watches them, and decides what
follows their end.

    python -m cluster.slurm.supervisor RUN_DIR -- srun OPTIONS... python -m cluster.slurm.rank
    COMMAND...

What ends an attempt, and what follows:

    all ranks ended well                             done
    a rank failed for a reason that will not pass    failed
    a rank crashed                                   restart in the same allocation
    and a node no longer answers                     a new job, which begins elsewhere; or back to
                                                     the queue, where Slurm takes no new one
    and this node can start nothing any more         wait: Slurm starts the job elsewhere
    the run directory was deleted                    failed: ended, and nothing recorded
    preemption, time limit near                      request to stop, checkpoint, back to the queue
    scancel                                          failed: cancelled

The job is given up after `max_restarts` starts in a row that took no step that none had taken
before. The exit code is that of the first rank to fail, so that Slurm's own records tell the truth.
Standard library, Linux.
"""

import contextlib
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.attempts import USELESS_TO_RETRY, AttemptOutcome, record_end, take_over
from cluster.files import FULL, outlive_log, say
from cluster.heartbeats import MANY, StartWatch
from cluster.job import JobSpec
from cluster.logs import keep_last_lines, last_words, log_tail
from cluster.ports import FIRST_PORT, reserve_port
from cluster.process import END_SIGNALS, become_subreaper, kill_descendants
from cluster.record import ConfigError, counted
from cluster.run_directory import RunDirectory, retry_disk
from cluster.slurm import begin_elsewhere, requeue_this
from cluster.slurm.preflight import answering_nodes, check_nodes
from cluster.slurm.queries import matching_lines, native_state, slurm_command
from cluster.slurm.rank import Failure, failures_of
from cluster.state import (
    JobError,
    JobState,
    SchedulerJob,
    StaleAttemptError,
    ask,
    is_stop_requested,
    read_state,
    record_event,
    refuse_stale,
    state_to_change,
    update_state,
)
from cluster.supervisor import cause_order, ended_well, failed, has_taken_steps, limit_retries

WATCHED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LOOK_EVERY_S = 1.0
END_WAIT_S = 15.0
REQUEUE_PATIENCE_S = 120.0
CUT_OFF_WAIT_S = 5.0
WHY_TERMINATED = {
    "CANCELLED": AttemptOutcome(128 + signal.SIGTERM, "cancelled (scancel)"),
    "TIMEOUT": AttemptOutcome(
        124, "the time limit was reached before it could save", fate="requeue"
    ),
    "PENDING": AttemptOutcome(
        128 + signal.SIGTERM, "requeued by Slurm or by its user", fate="taken"
    ),
    "NODE_FAIL": AttemptOutcome(1, "a node failed", fate="taken"),
}
"""By Slurm's word for the state of a job that it ends."""


class Supervisor:
    """One allocation of a job."""

    def __init__(self, run_dir: Path, command: list[str], job: SchedulerJob) -> None:
        self.run_dir = run_dir
        self.command = command
        self.job = job
        self.home = RunDirectory(run_dir)
        self.spec = JobSpec.read(run_dir / "job.json")
        self.attempt = self.starts = 0
        self.stop_reason: str | None = None
        self.must_ask = False
        """Whether the request to stop, for `stop_reason`, still has to be written."""
        self.next_state = JobState.REQUEUED
        """What the run directory says until the next attempt starts, here or elsewhere."""
        # Waited for in `_watch`. The commands of Slurm inherit this, which is as well: a requeue
        # sends SIGTERM to the very command that asks for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def run(self) -> int:
        """Runs attempts until the job's fate is decided; returns its exit code."""
        while True:
            self.attempt = retry_disk(lambda: take_over(self.run_dir, self.job), self.home)
            nodes = os.environ["SLURM_JOB_NODELIST"]
            say(f"attempt {self.attempt} of {self.spec.name} in job {self.job.id} on {nodes}")
            try:
                outcome = None if self.starts else self._check_nodes()
                outcome = self._limit_retries(self._without_lost(outcome or self._attempt()))
                say(f"attempt {self.attempt}: {outcome.reason}: {outcome.fate}")
                if outcome.fate != "restart":
                    return self._finish(outcome)
                reason = f"{outcome.reason}; restarting in the same allocation"
                retry_disk(functools.partial(self._note, JobState.REQUEUED, reason), self.home)
            except StaleAttemptError as error:
                say(str(error))
                return 1
            except JobError as error:  # Slurm does not answer.
                return self._finish(AttemptOutcome(1, str(error)))
            except OSError as error:
                return self._finish(self._after_disk_error(error))

    def _after_disk_error(self, error: OSError) -> AttemptOutcome:
        """Returns what follows an error of the file system: the queue if it may pass, or the end if
        the disk is full, or if the job has taken no step, so that its configuration may be wrong.
        """
        is_transient = error.errno not in FULL and self.spec.max_restarts > 0
        fate = "requeue" if is_transient and has_taken_steps(self.home) else "end"
        outcome = AttemptOutcome(1, str(error), fate=fate)
        return limit_retries(outcome, self.home, self.spec.max_restarts)

    def _check_nodes(self) -> AttemptOutcome | None:
        """Returns how it ends when the nodes do not see the same run directory, or do not
        answer, before any start.
        """
        num_nodes = int(os.environ.get("SLURM_NNODES", self.spec.num_nodes))
        try:
            problem = check_nodes(self.spec, num_nodes, self._first_port())
        except JobError as error:  # a node on its way out, or back: the queue may have better ones
            outcome = self._without_lost(AttemptOutcome(1, str(error), fate="restart"))
            return dataclasses.replace(outcome, fate="requeue")
        if problem is None:
            return None
        # A job that has taken steps can run: its new nodes may be at fault.
        fate = "requeue" if has_taken_steps(self.home) else "end"
        return AttemptOutcome(USELESS_TO_RETRY, problem, fate=fate)

    def _attempt(self) -> AttemptOutcome:
        """Runs all ranks to their end and returns it; none that can be reached is left."""
        # Kept until the ranks have ended: other jobs on this node then take other ports.
        with reserve_port(self._first_port() + self.starts) as reserved:
            return self._run_ranks(reserved.getsockname()[1])

    def _first_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", FIRST_PORT))

    def _run_ranks(self, port: int) -> AttemptOutcome:
        wanted = self._first_port() + self.starts
        if port != wanted:
            say(f"port {wanted} is in use on this node: the ranks meet at port {port}")
        self.starts += 1
        environment = {key: value for key, value in os.environ.items() if key != "SLURM_EXPORT_ENV"}
        environment |= {"KIT_ATTEMPT": str(self.attempt), "MASTER_PORT": str(port)}
        if self.spec.num_processes > MANY:
            # As srun's --output: a file a node, each line with the number of its task.
            logs = f"{self.run_dir}/logs/attempt_{self.attempt:02d}"
            environment["SLURM_STDOUTMODE"] = f"{logs}/node_%n.log"
        ranks = counted(self.spec.num_processes, "rank")
        nodes = os.environ["SLURM_JOB_NODELIST"]
        starting = f"{ranks} starting on {nodes}"
        retry_disk(functools.partial(self._note, JobState.STARTING, starting), self.home)
        failures = failures_of(self.run_dir, self.attempt)
        retry_disk(lambda: failures.mkdir(parents=True, exist_ok=True), self.home)
        step = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
        )
        try:
            return self._watch(step)
        finally:
            self._end(step)

    def _watch(self, step: subprocess.Popen) -> AttemptOutcome:
        failed_at = None
        start = StartWatch(self.run_dir, self.attempt)
        while True:
            start.beat()
            received = signal.sigtimedwait(WATCHED, LOOK_EVERY_S)
            number = received.si_signo if received else None
            if step.poll() is not None:
                return self._after(step.returncode)
            if number in END_SIGNALS:
                if outcome := self._told_to_end():
                    return outcome
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._ask_to_stop("the time limit is near")
            self._write_request()
            if lost := self.home.why_lost():
                return AttemptOutcome(1, lost)
            if failed_at is None and self._failures():
                failed_at = time.monotonic()
            if failed_at and time.monotonic() - failed_at > END_WAIT_S:
                return self._after(1)  # srun waits for a node that does not answer its order to end

    def _after(self, code: int) -> AttemptOutcome:
        """Returns what follows when srun has ended, or when it should have."""
        if failures := self._failures():
            return self._failure(min(failures, key=lambda failure: cause_order(failure.code)))
        if code:
            log = self._script_log()
            reason = f"srun ended with code {code}; see {log.relative_to(self.run_dir)}"
            if said := last_words(log_tail(log)):
                reason += f", which ends with: {said}"
            return self._why_terminated() or AttemptOutcome(code % 256, reason, fate="restart")
        return self._stopped() or AttemptOutcome(0, ended_well(self.spec.num_processes))

    def _failure(self, failure: Failure) -> AttemptOutcome:
        # Under torchrun a task is the agent of all ranks of a node.
        num_ranks = self.spec.num_processes
        per_node = num_ranks // self.spec.num_nodes
        ranks_per_task = max(1, num_ranks // int(os.environ.get("SLURM_NTASKS", num_ranks)))
        rank = failure.rank * ranks_per_task
        keep_last_lines(
            self.run_dir, self.attempt, rank, failure.rank, per_node, self._script_log()
        )
        who = f"rank {rank}" if ranks_per_task == 1 else "a rank"
        return failed(self.home, rank, failure.code, f"{who} on {failure.node}")

    def _script_log(self) -> Path:
        """Returns where this process and srun write, as the batch script has it."""
        return self.run_dir / "logs" / f"slurm-{self.job.id}.log"

    def _stopped(self) -> AttemptOutcome | None:
        """Returns what follows when the trainer has saved and stopped because it was asked to."""
        state = retry_disk(lambda: state_to_change(self.run_dir), self.home)
        if state is None or state.state is not JobState.STOPPING:
            return None
        if self.stop_reason is None or is_stop_requested(self.run_dir):
            return AttemptOutcome(0, f"stopped on request at step {state.step}")
        return AttemptOutcome(0, f"{self.stop_reason}; saved at step {state.step}", fate="requeue")

    def _without_lost(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Returns a start elsewhere instead of one in this allocation, some of whose nodes no
        longer answer.
        """
        while outcome.fate == "restart":
            names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
            nodes = {match[0] for match in matching_lines(slurm_command(names), HOST_NAME)}
            lost = sorted(nodes - answering_nodes(len(nodes)))
            if not lost:
                break
            if os.environ["SLURMD_NODENAME"] not in lost:
                answer = "answers" if len(lost) == 1 else "answer"
                reason = f"{', '.join(lost)} no longer {answer} ({outcome.reason})"
                return dataclasses.replace(
                    outcome, fate="requeue", reason=reason, lost_node=",".join(lost)
                )
            say("this node can start nothing any more: Slurm will start the job elsewhere")
            refuse_stale(self.run_dir, self.attempt)
            time.sleep(CUT_OFF_WAIT_S)
        return outcome

    def _told_to_end(self) -> AttemptOutcome | None:
        """Returns what a SIGTERM means: Slurm kills this process in a moment, or gives the ranks
        time to save.
        """
        outcome = self._why_terminated()
        # srun may send it too, to ranks whose peer has failed.
        if outcome is None and not self._failures():
            self._ask_to_stop("the scheduler sent SIGTERM")
        return outcome

    def _why_terminated(self) -> AttemptOutcome | None:
        """Asks Slurm why it signals this job.

        Returns how it ends, or None when it may still save and stop.
        """
        try:
            native = native_state(self.job)
        except JobError:
            return None
        if native == "PREEMPTED":
            self._ask_to_stop("preempted by a job of higher priority", JobState.PREEMPTED)
        return WHY_TERMINATED.get(native)

    def _ask_to_stop(self, reason: str, next_state: JobState = JobState.REQUEUED) -> None:
        if self.stop_reason is None and not is_stop_requested(self.run_dir):
            self.stop_reason = reason
            self.next_state = next_state
            say(f"{reason}: asking the ranks to save and stop")
            self.must_ask = True
            self._write_request()
            if (current := read_state(self.run_dir)) is not None:
                record_event(self.run_dir, current.replace(state=JobState.STOPPING, reason=reason))

    def _write_request(self) -> None:
        """Writes the request to stop, if that is still to be done. `_watch` tries again each second
        if the disk is full or the file system is in trouble.
        """
        if not self.must_ask:
            return
        if is_stop_requested(self.run_dir):
            self.must_ask = False  # A person's request must not be replaced.
            return
        try:
            ask(self.run_dir, "stop", by_person=False)
            self.must_ask = False
        except OSError as error:
            say(f"the request to stop was not written: {error}")

    def _limit_retries(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Returns an end instead of a start that would lead nowhere, and a requeue that has been
        asked for.
        """
        starts = outcome.fate in ("restart", "requeue") and not self.home.why_lost()
        if starts and (self.stop_reason is None or is_stop_requested(self.run_dir)):
            # All is saved: a rank or a node that was lost after that changes nothing.
            outcome = self._stopped() or outcome
        outcome = limit_retries(outcome, self.home, self.spec.max_restarts)
        if outcome.fate == "restart" and self.stop_reason is not None:
            # Time is short: start again with a fresh limit.
            return dataclasses.replace(outcome, fate="requeue")
        return outcome

    def _finish(self, outcome: AttemptOutcome) -> int:
        if outcome.fate == "end":
            record_end(self.home, self.attempt, outcome)
            return outcome.rc
        note = functools.partial(self._note, self.next_state, outcome.reason, outcome.lost_node)
        with contextlib.suppress(OSError):
            retry_disk(note, self.home)
        if outcome.lost_node and begin_elsewhere(self.job, self.run_dir, self.attempt):
            return outcome.rc
        return self._requeue(outcome) if outcome.fate == "requeue" else outcome.rc

    def _requeue(self, outcome: AttemptOutcome) -> int:
        deadline = time.monotonic() + REQUEUE_PATIENCE_S
        while True:
            try:
                requeue_this(self.job)
                return outcome.rc
            except JobError as error:  # the controller may be restarting
                say(f"not requeued: {error}")
                if time.monotonic() > deadline:
                    tried = f"and it could not be requeued: {error}. `kit resume` starts it again"
                    end = AttemptOutcome(outcome.rc or 1, f"{outcome.reason}; {tried}")
                    record_end(self.home, self.attempt, end)
                    return end.rc
            time.sleep(3)

    def _note(self, state: JobState, reason: str, lost_node: str | None = None) -> None:
        beat = {"heartbeat": time.time()} if state is JobState.STARTING else {}
        update_state(
            self.run_dir,
            attempt=self.attempt,
            lost_node=lost_node,
            state=state,
            reason=reason,
            **beat,
        )

    def _failures(self) -> list[Failure]:
        """Returns the ranks of this attempt that did not end well, the first to fail first."""
        with contextlib.suppress(OSError):  # a file system in trouble is no reason to end
            files = list(failures_of(self.run_dir, self.attempt).glob("rank_*.json"))
            # In the order of the file system's clock: the clocks of the nodes may differ.
            files.sort(key=lambda file: file.stat().st_mtime_ns)
            return [failure for file in files if (failure := Failure.read_or_none(file))]
        return []

    def _end(self, step: subprocess.Popen) -> None:
        """Ends srun and with it all ranks that can be reached."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if step.poll() is None:
                step.send_signal(number)
                # For a node that does not answer it would wait for ever.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(3.0)
        step.wait()
        kill_descendants()


def main() -> int:
    """Returns the job's exit code."""
    if "SLURM_JOB_ID" not in os.environ or len(sys.argv) < 4:
        print("run this inside a Slurm job, as submit.sh does", file=sys.stderr)
        return 2
    run_dir, _, *command = sys.argv[1:]
    try:
        config = os.environ.get("SLURM_CONF")
        job = SchedulerJob(scheduler="slurm", id=os.environ["SLURM_JOB_ID"], config=config)
        outlive_log()
        become_subreaper()
        return Supervisor(Path(run_dir).absolute(), command, job).run()
    except (ConfigError, JobError, OSError) as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
