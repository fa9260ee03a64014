"""Starts the ranks of a job on this machine, watches them, and records the truth about their end.

    python -m cluster.local.supervisor RUN_DIR            start the next attempt in the foreground
    python -m cluster.local.supervisor RUN_DIR ATTEMPT    start one that was claimed for it

Two processes. The supervisor owns the attempt: it starts the ranks, waits, ends all when one fails,
starts them again when one has crashed (`JobSpec.max_restarts`), and writes exit.json.
Its parent, the guard, does nothing until the supervisor is gone, even by SIGKILL, and then kills
what is left: all descendants whose parents died become children of the guard, so that none can
hide. Standard library, Linux.

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

from cluster.attempts import claim_attempt
from cluster.files import appending
from cluster.job import JobSpec
from cluster.local import STARTED
from cluster.local.forked import ForkedRank, fork_rank, import_once
from cluster.outcome import Outcome, blame
from cluster.process import Process, become_rank, become_subreaper, kill_descendants
from cluster.record import ConfigError, counted
from cluster.state import JobError, JobState, log_path, update_state
from cluster.supervisor import ASKS_FOR_THE_END, WATCHED, Supervisor, become_supervisor

Ranks = dict[int, subprocess.Popen | ForkedRank]


def main() -> int:
    """Returns 0 when all ranks succeeded."""
    run_dir = Path(sys.argv[1]).absolute()
    try:
        job = JobSpec.read(run_dir / "job.json")
        attempt = int(sys.argv[2]) if sys.argv[2:] else claim_attempt(run_dir)
    except (ConfigError, JobError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    # Whoever has submitted the job reads one word from standard output, and no more.
    submitter = os.dup(1)
    os.dup2(2, 1)

    def started() -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(submitter, STARTED)

    return guard(lambda: supervise(run_dir, job, attempt, started))


def guard(supervisor: Callable[[], int]) -> int:
    """Runs `supervisor` in a child process and returns its exit code, after the last of its
    descendants is gone.
    """
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    pid = os.fork()
    if pid == 0:
        exit_with(supervisor)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, signal.SIGTERM))
    for ignored in (signal.SIGINT, signal.SIGHUP):  # a terminal sends these to the supervisor too
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    ended, status = 0, 0
    while ended != pid:
        ended, status = os.wait()
    kill_descendants()
    return os.waitstatus_to_exitcode(status) % 256


def supervise(run_dir: Path, spec: JobSpec, attempt: int, started: Callable[[], object]) -> int:
    """Runs a job to its end; returns its exit code."""
    become_supervisor()
    if spec.time_limit_s:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, spec.time_limit_s)
    return LocalSupervisor(run_dir, spec, attempt, started).run()


class LocalSupervisor(Supervisor):
    """Runs a job's ranks as children of this process."""

    def __init__(
        self, run_dir: Path, spec: JobSpec, attempt: int, started: Callable[[], object]
    ) -> None:
        """`started` is called when ranks are started, or are about to be forked."""
        super().__init__(run_dir, spec, attempt)
        self.started = started
        self.ranks = Ranks()

    def start_ranks(self) -> None:
        """Starts all ranks, each in its own process group and with its own log."""
        spec, self.ranks = self.spec, Ranks()
        update_state(self.run_dir, attempt=self.attempt, process=Process.current())
        self.port = reserve_port()
        common = self._environment()
        if spec.forks:
            self.note(JobState.STARTING, f"{spec.argv[2]} is being imported")
            self.started()
            import_once(spec.argv[2], {**common, **spec.environment})
        for rank in range(spec.num_processes):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **spec.environment}
            with appending(log_path(self.run_dir, self.attempt, rank)) as log:
                try:
                    self.ranks[rank] = start_rank(spec, environment, log)
                except OSError as error:
                    raise JobError(f"rank {rank} could not be started: {error}") from error
        processes = counted(spec.num_processes, "process", "processes")
        self.note(JobState.STARTING, f"{processes} started, no step yet")
        if not spec.forks:
            self.started()

    def _environment(self) -> dict[str, str]:
        """Returns the environment that all ranks have in common."""
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "WORLD_SIZE": str(self.spec.num_processes),
            "LOCAL_WORLD_SIZE": str(self.spec.num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port.getsockname()[1]),
            "KIT_ATTEMPT": str(self.attempt),
            "PYTHONUNBUFFERED": "1",
            # With gloo, ranks that restart would else read stale addresses.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def watch(self) -> Outcome:
        outcome = super().watch()
        if outcome.rc:
            with contextlib.suppress(JobError, OSError):
                self.home.check()
                self.note(JobState.STOPPING, outcome.reason)
        return outcome

    def look(self, signal_number: int | None) -> Outcome | None:
        """Returns an end when all ranks have ended well, one has failed, the time is over, or a
        signal asks for the end.
        """
        self._reap()
        codes = {rank: process.returncode for rank, process in self.ranks.items()}
        if all(code == 0 for code in codes.values()):
            return self.ended_well()
        if signal_number == signal.SIGALRM:
            return Outcome(124, f"the time limit of {self.spec.time_limit_s:g} s was reached")
        if signal_number and signal_number in ASKS_FOR_THE_END:
            name = signal.Signals(signal_number).name
            return Outcome(128 + signal_number, f"cancelled by {name}")
        if failures := {rank: code for rank, code in codes.items() if code}:
            first = min(failures, key=lambda rank: (blame(failures[rank]), rank))
            return self.failed(first, failures[first], f"rank {first}")
        return None

    def _reap(self) -> None:
        """Collects every child that has ended: ranks get their return code, adopted orphans are
        forgotten.
        """
        by_pid = {process.pid: process for process in self.ranks.values()}
        with contextlib.suppress(ChildProcessError):
            while info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if info.si_pid in by_pid:
                    by_pid[info.si_pid].wait()
                else:
                    os.waitpid(info.si_pid, 0)

    def end_ranks(self) -> None:
        """Asks the process groups of all running ranks to end, and kills them after the grace
        time.
        """
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
                self._reap()
        kill_descendants()


def start_rank(
    job: JobSpec, environment: dict[str, str], log: IO[bytes]
) -> subprocess.Popen | ForkedRank:
    """Returns one rank, forked from this process or started anew."""
    if job.forks:
        return fork_rank(job.argv, environment, job.working_directory, log)
    supervisor_pid = os.getpid()
    return subprocess.Popen(
        job.argv,
        env=environment,
        cwd=job.working_directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
        preexec_fn=lambda: become_rank(supervisor_pid),
    )


def reserve_port() -> socket.socket:
    """Returns a socket that keeps a free port from everyone but rank 0: bound, so that the kernel
    gives it to nobody else, and not listening, so that rank 0 can."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def exit_with(function: Callable[[], int]) -> NoReturn:
    """Ends a forked process with the return value of `function`, never returning into its
    parent's code.
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
