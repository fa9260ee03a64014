"""Starts the ranks of a job on this machine, monitors them, and records how they end.

    python -m cluster.local.supervisor RUN_DIR            start the next attempt in the foreground
    python -m cluster.local.supervisor RUN_DIR ATTEMPT    start an attempt that was claimed before

The program has two processes, the supervisor and its parent, the guard. The supervisor owns the
attempt: it starts the ranks, ends all ranks when one fails, restarts them after a crash
(`JobSpec.max_restarts`), and writes exit.json. The loop is in `cluster.supervisor`. The guard waits
until the supervisor has ended, even by SIGKILL, and then kills all remaining processes. Descendants
whose parents have died become children of the guard, so the guard finds all of them. Standard
library and Linux only.

Each rank finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
KIT_ATTEMPT in its environment.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

from cluster.attempts import AttemptOutcome, claim_attempt, next_attempt
from cluster.directory_handle import RunDirectory, retry_disk
from cluster.files import FULL, open_for_appending, print_line
from cluster.interpreter import from_source, started_module
from cluster.job import JobSpec
from cluster.local import STARTED
from cluster.local.forked import ForkedRank, fork_rank, import_once
from cluster.ports import reserve_port
from cluster.process import (
    END_SIGNALS,
    Process,
    become_rank,
    become_subreaper,
    kill_descendants,
)
from cluster.record import ConfigError, counted
from cluster.state import CANCELLED, JobError, JobState, log_path, read_state, update_state
from cluster.supervisor import Supervisor, become_supervisor, cause_order, rank_failure

WATCHED = frozenset({signal.SIGCHLD, *END_SIGNALS})
Ranks = dict[int, subprocess.Popen | ForkedRank]


def main() -> int:
    """Runs a job, beginning with the attempt in the arguments or with the next attempt. Returns the
    exit code of the job, 0 if all ranks succeeded.
    """
    run_dir = Path(sys.argv[1]).absolute()
    try:
        job = JobSpec.read(run_dir / "job.json")
        attempt = int(sys.argv[2]) if sys.argv[2:] else claim_attempt(run_dir)
    except (ConfigError, JobError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    # The process that submitted the job must read only the message STARTED from standard output, so
    # all other output goes to standard error.
    submitter = os.dup(1)
    os.dup2(2, 1)

    def started() -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(submitter, STARTED)

    return guard(lambda: supervise(run_dir, job, attempt, started))


def guard(supervisor: Callable[[], int]) -> int:
    """Runs `supervisor` in a child process and returns the child's exit code, after all descendants
    of the child have ended.
    """
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    pid = os.fork()
    if pid == 0:
        exit_with(supervisor)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, signal.SIGTERM))
    # The guard ignores these signals. A terminal sends them to the supervisor, too, which handles
    # them.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    ended = 0
    status = 0
    while ended != pid:
        ended, status = os.wait()
    kill_descendants()
    return os.waitstatus_to_exitcode(status) % 256


def supervise(run_dir: Path, job: JobSpec, attempt: int, started: Callable[[], object]) -> int:
    """Runs a job to its end in the process of the supervisor. Returns the exit code of the job.
    `started` is called when the ranks are started.
    """
    become_supervisor(WATCHED)
    return LocalSupervisor(RunDirectory(run_dir), job, attempt, started).run()


class LocalSupervisor(Supervisor):
    """Runs the ranks of a job as children of this process."""

    signals = WATCHED
    fate_after_disk_error = "restart"

    def __init__(
        self, home: RunDirectory, spec: JobSpec, attempt: int, started: Callable[[], object]
    ) -> None:
        """`started` is called after all ranks were started. If ranks are forked, it is called
        earlier, before the import of their module.
        """
        super().__init__(home, spec, attempt)
        self.started = started
        self.ranks = Ranks()
        self.port: socket.socket | None = None
        """Network socket that reserves the rendezvous port until the ranks have ended. None before
        the first start."""
        if spec.time_limit_s is not None:
            self.deadline = time.monotonic() + spec.time_limit_s

    def start_ranks(self) -> None:
        """Starts all ranks, each in its own process group and with its own log.

        Ranks are not bound to the CPU socket to which their GPU is attached. On a node with two
        sockets a step therefore takes up to 3 % longer (estimated). Under Slurm, the site's options
        of `srun` bind the ranks.
        """
        spec = self.spec
        own = Process.current()
        retry_disk(lambda: update_state(self.run_dir, attempt=self.attempt, process=own), self.home)
        self.ranks = Ranks()
        self.port = reserve_port(address="127.0.0.1")
        common = self._common_environment(self.port)
        if spec.forks:
            module = started_module(spec.argv)[0]
            self._record_starting(f"{module} is being imported")
            self.started()
            import_once(module, {**common, **spec.environment})
        for rank in range(spec.num_processes):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **spec.environment}
            with open_for_appending(log_path(self.run_dir, self.attempt, rank)) as log:
                try:
                    self.ranks[rank] = start_rank(spec, environment, log)
                except OSError as error:
                    raise JobError(f"rank {rank} could not be started: {error}") from error
        processes = counted(spec.num_processes, "process", "processes")
        self._record_starting(f"{processes} started")
        if not spec.forks:
            self.started()

    def _common_environment(self, port: socket.socket) -> dict[str, str]:
        """Returns the environment variables that are equal on all ranks."""
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "WORLD_SIZE": str(self.spec.num_processes),
            "LOCAL_WORLD_SIZE": str(self.spec.num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
            "KIT_ATTEMPT": str(self.attempt),
            "PYTHONUNBUFFERED": "1",
            # Without this variable, restarted ranks that use gloo would read stale addresses.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def _record_starting(self, reason: str) -> None:
        """Records in state.json that the attempt starts. `reason` describes the current phase of
        the start. If the file system fails, prints the attempt and the reason instead.

        Raises:
            OSError: The disk is full.
        """
        try:
            update_state(
                self.run_dir,
                attempt=self.attempt,
                state=JobState.STARTING,
                reason=reason,
                heartbeat=time.time(),
            )
        except OSError as error:
            if error.errno in FULL:
                raise
            print_line(f"attempt {self.attempt} starts: {reason} (not recorded: {error})")

    def poll_ranks(self, signal_number: int | None) -> AttemptOutcome | None:
        """Returns the outcome of the attempt if all ranks have succeeded, if a rank has failed, or
        after a signal of END_SIGNALS. Returns None while the ranks run.
        """
        reap(self.ranks)
        codes = {rank: process.returncode for rank, process in self.ranks.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            first = min(failed, key=lambda rank: (cause_order(failed[rank]), rank))
            return rank_failure(self.home, self.attempt, first, failed[first], f"rank {first}")
        if all(code == 0 for code in codes.values()):
            return self.ended_well()
        if signal_number is not None and signal_number in END_SIGNALS:
            name = signal.Signals(signal_number).name
            return AttemptOutcome(128 + signal_number, f"{CANCELLED} by {name}")
        return None

    def end_ranks(self, outcome: AttemptOutcome) -> None:
        """Sends SIGTERM to the process groups of all running ranks, and SIGKILL after the job's
        `grace_s` seconds.
        """
        with contextlib.suppress(JobError, OSError):
            self.home.check()
            if outcome.rc:
                update_state(
                    self.run_dir,
                    attempt=self.attempt,
                    state=JobState.STOPPING,
                    reason=outcome.reason,
                )
        deadline = time.monotonic() + self.spec.grace_s
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.ranks.values():
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            while any(process.returncode is None for process in self.ranks.values()):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                signal.sigtimedwait({signal.SIGCHLD}, remaining_s)
                reap(self.ranks)
        if self.port is not None:
            self.port.close()
        kill_descendants()

    def begin_next(self, reason: str) -> int:
        def begin() -> int:
            state = read_state(self.run_dir)
            if state and state.attempt > self.attempt and state.process == Process.current():
                return state.attempt  # An earlier try has begun this attempt.
            return next_attempt(self.run_dir, self.attempt, reason)

        return retry_disk(begin, self.home)

    def summary(self, outcome: AttemptOutcome) -> str:
        return f"{self.spec.name}: attempt {self.attempt}: {outcome.reason}"


def start_rank(
    job: JobSpec, environment: dict[str, str], log: IO[bytes]
) -> subprocess.Popen | ForkedRank:
    """Starts a rank and returns its process. The rank is forked from this process if `job.forks`,
    otherwise it is a new process.
    """
    if job.forks:
        return fork_rank(job.argv, environment, job.working_directory, log)
    supervisor_pid = os.getpid()
    return subprocess.Popen(
        from_source(job.argv),
        env=environment,
        cwd=job.working_directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
        preexec_fn=lambda: become_rank(supervisor_pid),
    )


def reap(ranks: Ranks) -> None:
    """Reaps every child of this process that has ended, and stores the exit codes of ranks in
    `ranks`. The exit codes of orphans that became children of this process are ignored.
    """
    by_pid = {process.pid: process for process in ranks.values()}
    with contextlib.suppress(ChildProcessError):
        while any(ended := os.waitpid(-1, os.WNOHANG)):
            pid, status = ended
            if pid in by_pid:
                by_pid[pid].returncode = os.waitstatus_to_exitcode(status)


def exit_with(function: Callable[[], int]) -> NoReturn:
    """Ends a forked process with the return value of `function` as exit code, 1 after an error. The
    process never returns into the code of its parent.
    """
    code = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
