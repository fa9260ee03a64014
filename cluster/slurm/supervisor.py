"""Runs on the first node of the allocation: starts the ranks with srun, monitors them, and decides
what follows when they end.

    python -m cluster.slurm.supervisor RUN_DIR -- srun OPTIONS... python -m cluster.slurm.rank
    COMMAND...

`cluster.supervisor` contains the loop, and the reactions that are common to all schedulers. Under
Slurm, the supervisor also reacts to these events:

    a rank crashed, and a node no longer answers     a new job on other nodes, or a requeue if
                                                     Slurm accepts no new job
    a rank crashed, and this node starts no process  wait: Slurm starts the job elsewhere
    preemption, time limit near                      request to stop, checkpoint, requeue
    scancel                                          failed: cancelled

The exit code of this process is the exit code of the first rank that failed, so that Slurm's
accounting shows the cause. Standard library and Linux only.
"""

import contextlib
import dataclasses
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster.attempts import USELESS_TO_RETRY, AttemptOutcome, record_end, take_over
from cluster.directory_handle import RunDirectory, retry_disk
from cluster.files import print_line
from cluster.heartbeats import MAX_RANKS_WITH_FILES
from cluster.job import JobSpec
from cluster.logs import end_reason, keep_last_lines, log_tail
from cluster.ports import FIRST_PORT, reserve_port
from cluster.process import END_SIGNALS, kill_descendants
from cluster.record import ConfigError, counted
from cluster.slurm import requeue_this, submit_replacement_job
from cluster.slurm.preflight import answering_nodes, check_allocation
from cluster.slurm.queries import matching_lines, native_state, slurm_command
from cluster.slurm.rank import Failure, failure_folder
from cluster.state import (
    CANCELLED,
    JobError,
    JobState,
    SchedulerJob,
    is_stop_requested,
    read_state,
    record_event,
    refuse_stale,
    update_state,
    write_request,
)
from cluster.supervisor import (
    Supervisor,
    become_supervisor,
    cause_order,
    has_taken_steps,
    rank_failure,
)

LIMIT_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals by which Slurm warns the supervisor before the time limit (`sbatch --signal`)."""
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
END_WAIT_S = 15.0
REQUEUE_PATIENCE_S = 120.0
CUT_OFF_WAIT_S = 5.0
WHY_TERMINATED = {
    "CANCELLED": AttemptOutcome(128 + signal.SIGTERM, f"{CANCELLED} (scancel)"),
    "TIMEOUT": AttemptOutcome(
        124, "the time limit was reached before it could save", fate="requeue"
    ),
    "PENDING": AttemptOutcome(
        128 + signal.SIGTERM, "requeued by Slurm or by its user", fate="taken"
    ),
    "NODE_FAIL": AttemptOutcome(1, "a node failed", fate="taken"),
}
"""Outcome of an attempt whose job Slurm ends, by Slurm's own name of the job's state (see
`native_state`)."""


class SlurmSupervisor(Supervisor):
    """Supervisor of a Slurm job: runs the ranks in one allocation, and requeues or resubmits the
    job.
    """

    # Commands such as `scontrol requeue` inherit the blocked signals. Otherwise the SIGTERM that
    # Slurm sends to all processes of a requeued job would end the command that requeues it.
    signals = frozenset({signal.SIGCHLD, *END_SIGNALS, *LIMIT_SIGNALS})
    fate_after_disk_error = "requeue"

    def __init__(
        self,
        home: RunDirectory,
        spec: JobSpec,
        attempt: int,
        job: SchedulerJob,
        command: list[str],
    ) -> None:
        """`command` is the command line of srun."""
        super().__init__(home, spec, attempt)
        self.job = job
        self.command = command
        self.starts = 0
        """Number of starts of srun in this allocation."""
        self.step: subprocess.Popen | None = None
        """Process of srun, which starts the ranks. None before the first start."""
        self.port: socket.socket | None = None
        """Network socket that reserves the rendezvous port until the ranks have ended, so that
        other jobs on this node take other ports. None before the first start of the ranks."""
        self.failed_at: float | None = None
        """Time of the monotonic clock, in seconds, at which this process first saw a failed rank.
        None while no rank has failed."""
        self.must_request_stop = False
        """Whether the request to stop, with the reason `stop_reason`, still has to be written."""
        self.next_state = JobState.REQUEUED
        """State that state.json has between the end of this attempt and the start of the next
        attempt, REQUEUED or PREEMPTED."""

    def start_ranks(self) -> AttemptOutcome | None:
        if not self.starts:
            problem = self._check_nodes()
            if problem is not None:
                return problem
        wanted = self._first_port() + self.starts
        self.port = reserve_port(wanted)
        port = self.port.getsockname()[1]
        if port != wanted:
            print_line(f"port {wanted} is in use on this node: the ranks meet at port {port}")
        self.starts += 1
        self.failed_at = None
        environment = {key: value for key, value in os.environ.items() if key != "SLURM_EXPORT_ENV"}
        environment |= {"KIT_ATTEMPT": str(self.attempt), "MASTER_PORT": str(port)}
        if self.spec.num_processes > MAX_RANKS_WITH_FILES:
            # The variable is srun's option --output: one file per node, with the task number before
            # each line.
            logs = f"{self.run_dir}/logs/attempt_{self.attempt:02d}"
            environment["SLURM_STDOUTMODE"] = f"{logs}/node_%n.log"
        ranks = counted(self.spec.num_processes, "rank")
        nodes = os.environ["SLURM_JOB_NODELIST"]
        starting = f"{ranks} starting on {nodes}"
        retry_disk(functools.partial(self._note, JobState.STARTING, starting), self.home)
        failures = failure_folder(self.run_dir, self.attempt)
        retry_disk(lambda: failures.mkdir(parents=True, exist_ok=True), self.home)
        self.step = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
        )
        return None

    def _check_nodes(self) -> AttemptOutcome | None:
        """Returns the outcome of the attempt if a node fails the preflight check or does not
        answer, or None if all nodes pass. Runs before the first start of the ranks.
        """
        num_nodes = int(os.environ.get("SLURM_NNODES", self.spec.num_nodes))
        try:
            problem = check_allocation(self.spec, num_nodes, self._first_port())
        except JobError as error:  # A node is failing or rebooting: requeue for other nodes.
            outcome = self._without_lost(AttemptOutcome(1, str(error), fate="restart"))
            return dataclasses.replace(outcome, fate="requeue")
        if problem is None:
            return None
        # If the job has taken steps before, its configuration is right, and its new nodes may be at
        # fault.
        fate = "requeue" if has_taken_steps(self.home) else "end"
        return AttemptOutcome(USELESS_TO_RETRY, problem, fate=fate)

    def _first_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", FIRST_PORT))

    def poll_ranks(self, signal_number: int | None) -> AttemptOutcome | None:
        """Returns the outcome if srun has ended, if srun still runs END_WAIT_S seconds after a rank
        has failed, or if Slurm ends the job. Returns None while the ranks run. Asks the ranks to
        save and stop if Slurm leaves them time.
        """
        assert self.step is not None
        if self.step.poll() is not None:
            return self._after(self.step.returncode)
        if signal_number in END_SIGNALS:
            outcome = self._told_to_end()
            if outcome is not None:
                return outcome
        if signal_number in LIMIT_SIGNALS:
            self._ask_to_stop("the time limit is near")
        self._write_request()
        if self.failed_at is None and self._failures():
            self.failed_at = time.monotonic()
        if self.failed_at is not None and time.monotonic() - self.failed_at > END_WAIT_S:
            return self._after(1)  # srun waits for a node that does not answer.
        return None

    def _after(self, code: int) -> AttemptOutcome:
        """Returns the outcome of the attempt. `code` is srun's exit code, or 1 if srun still waits
        for a node that does not answer.
        """
        if failures := self._failures():
            return self._failure(min(failures, key=lambda failure: cause_order(failure.code)))
        if code:
            log = self._script_log()
            reason = f"srun ended with code {code}; see {log.relative_to(self.run_dir)}"
            if said := end_reason(log_tail(log)):
                reason += f", which ends with: {said}"
            return self._why_terminated() or AttemptOutcome(code % 256, reason, fate="restart")
        return self.ended_well()

    def _failure(self, failure: Failure) -> AttemptOutcome:
        # With torchrun, a task is the agent that starts all ranks of a node.
        num_ranks = self.spec.num_processes
        per_node = num_ranks // self.spec.num_nodes
        ranks_per_task = max(1, num_ranks // int(os.environ.get("SLURM_NTASKS", num_ranks)))
        rank = failure.rank * ranks_per_task
        keep_last_lines(
            self.run_dir, self.attempt, rank, failure.rank, per_node, self._script_log()
        )
        name = f"rank {rank}" if ranks_per_task == 1 else "a rank"
        who = f"{name} on {failure.node}"
        return rank_failure(self.home, self.attempt, rank, failure.code, who)

    def _script_log(self) -> Path:
        """Returns the log file of the batch script, to which this process and srun write."""
        return self.run_dir / "logs" / f"slurm-{self.job.id}.log"

    def _told_to_end(self) -> AttemptOutcome | None:
        """Returns the outcome of the attempt after a SIGTERM if Slurm will soon kill this process,
        otherwise None. Asks the ranks to save and stop if Slurm leaves them time and no rank has
        failed.
        """
        outcome = self._why_terminated()
        # After a failure, the SIGTERM may come from srun, which ends the other ranks.
        if outcome is None and not self._failures():
            self._ask_to_stop("the scheduler sent SIGTERM")
        return outcome

    def _why_terminated(self) -> AttemptOutcome | None:
        """Asks Slurm for the reason of its signal to this job. Returns the outcome of the attempt,
        or None if the ranks may still save and stop, or if Slurm does not answer.
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
            print_line(f"{reason}: asking the ranks to save and stop")
            self.must_request_stop = True
            self._write_request()
            if (current := read_state(self.run_dir)) is not None:
                record_event(self.run_dir, current.replace(state=JobState.STOPPING, reason=reason))

    def _write_request(self) -> None:
        """Writes the request to stop if it still has to be written. After an error of the disk or
        the file system, `poll_ranks` calls this function again each second.
        """
        if not self.must_request_stop:
            return
        if is_stop_requested(self.run_dir):
            self.must_request_stop = False  # A user's own request must not be replaced.
            return
        try:
            write_request(self.run_dir, "stop", by_person=False)
            self.must_request_stop = False
        except OSError as error:
            print_line(f"the request to stop was not written: {error}")

    def _failures(self) -> list[Failure]:
        """Returns the failed ranks of this attempt, in order of failure."""
        with contextlib.suppress(OSError):  # An error of the file system must not end the attempt.
            files = list(failure_folder(self.run_dir, self.attempt).glob("rank_*.json"))
            # Sorted by the clock of the file system, because the clocks of the nodes may differ.
            files.sort(key=lambda file: file.stat().st_mtime_ns)
            return [failure for file in files if (failure := Failure.read_or_none(file))]
        return []

    def end_ranks(self, outcome: AttemptOutcome) -> None:
        """Ends srun, which ends all ranks on nodes that still answer."""
        if self.step is not None:
            _end_step(self.step)
        if self.port is not None:
            self.port.close()
        kill_descendants()

    def choose_nodes(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Returns `outcome` with its final `fate`. The fate becomes `requeue` if a node no longer
        answers, or if the ranks were asked to leave this allocation. If all ranks have saved and
        stopped, returns the outcome of `stopped` instead.
        """
        outcome = self._without_lost(outcome)
        if outcome.fate not in ("restart", "requeue") or self.home.why_lost():
            return outcome
        if self.stop_reason is None or is_stop_requested(self.run_dir):
            # After all ranks have saved and stopped, the loss of a rank or node changes nothing.
            outcome = self.stopped() or outcome
        if outcome.fate == "restart" and self.stop_reason is not None and self.spec.max_restarts:
            # The job is requeued, since little time is left in this allocation. A requeued job has
            # its full time limit.
            return dataclasses.replace(outcome, fate="requeue")
        return outcome

    def _without_lost(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Returns `outcome` with the fate `requeue` instead of `restart` if nodes of this
        allocation no longer answer. Returns outcomes with another fate unchanged.
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
            print_line("this node can start nothing any more: Slurm will start the job elsewhere")
            refuse_stale(self.run_dir, self.attempt)
            time.sleep(CUT_OFF_WAIT_S)
        return outcome

    def begin_next(self, reason: str) -> int:
        reason = f"{reason}; restarting in the same allocation"
        retry_disk(functools.partial(self._note, JobState.REQUEUED, reason), self.home)
        return begin_attempt(self.home, self.spec, self.job)

    def leave(self, outcome: AttemptOutcome) -> int:
        """Records that the job continues elsewhere. Submits a new job if a node was lost, or
        requeues this job, unless Slurm itself has requeued it. Returns the exit code of this job.
        """
        note = functools.partial(self._note, self.next_state, outcome.reason, outcome.lost_node)
        with contextlib.suppress(OSError):
            # In a stale attempt, this raises StaleAttemptError, so that the job requeues and
            # submits nothing.
            retry_disk(note, self.home)
        if outcome.lost_node and submit_replacement_job(self.job, self.run_dir, self.attempt):
            return outcome.rc
        if outcome.fate == "requeue":
            return self._requeue(outcome)
        return outcome.rc

    def _requeue(self, outcome: AttemptOutcome) -> int:
        deadline = time.monotonic() + REQUEUE_PATIENCE_S
        while True:
            try:
                requeue_this(self.job)
                return outcome.rc
            except JobError as error:  # Slurm may be restarting.
                print_line(f"not requeued: {error}")
                if time.monotonic() > deadline:
                    tried = f"and it could not be requeued: {error}. `kit resume` starts it again"
                    end = AttemptOutcome(outcome.rc or 1, f"{outcome.reason}; {tried}")
                    record_end(self.home, self.attempt, end)
                    return end.rc
            time.sleep(3)

    def _note(self, state: JobState, reason: str, lost_node: str | None = None) -> None:
        changes: dict[str, Any] = {"state": state, "reason": reason}
        if state is JobState.STARTING:
            changes["heartbeat"] = time.time()
        update_state(self.run_dir, attempt=self.attempt, lost_node=lost_node, **changes)


def _end_step(step: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if step.poll() is None:
            step.send_signal(number)
            # The wait has a limit, since srun waits forever for a node that does not answer.
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(3.0)
    step.wait()


def begin_attempt(home: RunDirectory, spec: JobSpec, job: SchedulerJob) -> int:
    """Makes this process the owner of the next attempt, and returns the number of the attempt.

    Raises:
        JobError: The run directory belongs to another job, which has not ended.
        OSError: The run directory still cannot be written after the tries of `retry_disk`.
    """
    attempt = retry_disk(lambda: take_over(home.run_dir, job), home)
    nodes = os.environ["SLURM_JOB_NODELIST"]
    print_line(f"attempt {attempt} of {spec.name} in job {job.id} on {nodes}")
    return attempt


def main() -> int:
    """Runs the job to its end. Returns the exit code of the job, or 2 if the job could not be
    started.
    """
    if "SLURM_JOB_ID" not in os.environ or len(sys.argv) < 4:
        print("run this inside a Slurm job, as submit.sh does", file=sys.stderr)
        return 2
    folder, _, *command = sys.argv[1:]
    run_dir = Path(folder).absolute()
    try:
        config = os.environ.get("SLURM_CONF")
        job = SchedulerJob(scheduler="slurm", id=os.environ["SLURM_JOB_ID"], config=config)
        become_supervisor(SlurmSupervisor.signals)
        home = RunDirectory(run_dir)
        spec = JobSpec.read(run_dir / "job.json")
        attempt = begin_attempt(home, spec, job)
        return SlurmSupervisor(home, spec, attempt, job, command).run()
    except (ConfigError, JobError, OSError) as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
