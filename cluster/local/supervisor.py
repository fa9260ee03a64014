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
import dataclasses
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

from cluster.attempts import AttemptOutcome, claim_attempt, next_attempt, record_end
from cluster.files import FULL, appending, outlive_log, say
from cluster.heartbeats import StartWatch
from cluster.interpreter import from_source, started_module
from cluster.job import JobSpec
from cluster.local import STARTED
from cluster.local.forked import ForkedRank, fork_rank, import_once
from cluster.ports import reserve_port
from cluster.process import END_SIGNALS, Process, become_rank, become_subreaper, kill_descendants
from cluster.record import ConfigError, counted
from cluster.run_directory import RunDirectory, retry_disk
from cluster.state import JobError, JobState, log_path, read_state, update_state
from cluster.supervisor import cause_order, ended_well, failed, has_taken_steps, limit_retries

WATCHED = {signal.SIGCHLD, *END_SIGNALS}
LOOK_EVERY_S = 1.0
"""How often the run directory is looked for."""
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
    ended = 0
    status = 0
    while ended != pid:
        ended, status = os.wait()
    kill_descendants()
    return os.waitstatus_to_exitcode(status) % 256


def supervise(run_dir: Path, job: JobSpec, attempt: int, started: Callable[[], object]) -> int:
    """Runs attempts until one has not crashed or too many have, records the end, and returns the
    job's return code.
    """
    become_subreaper()
    outlive_log()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    # The caller may ignore it, and then no exit code could be read.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    home = RunDirectory(run_dir)
    deadline = time.monotonic() + (job.time_limit_s or float("inf"))
    while True:
        outcome = run_attempt(home, job, attempt, started, deadline)
        outcome = limit_retries(outcome, home, job.max_restarts)
        say(f"{job.name}: attempt {attempt}: {outcome.reason}")
        if outcome.fate != "restart":
            break
        try:
            attempt = begin_next(home, attempt, outcome.reason)
        except (JobError, OSError) as error:
            outcome = dataclasses.replace(
                outcome, reason=f"{outcome.reason}; not started again: {error}"
            )
            break
    record_end(home, attempt, outcome)
    return outcome.rc


def begin_next(home: RunDirectory, attempt: int, reason: str) -> int:
    """Begins the attempt after `attempt`, which ended for `reason`, and returns the new number.

    Raises:
        StaleAttemptError: another process has begun a newer attempt.
        OSError: as `retry_disk`.
    """

    def begin() -> int:
        state = read_state(home.run_dir)
        if state and state.attempt > attempt and state.process == Process.current():
            return state.attempt  # An earlier call wrote the state before it failed.
        return next_attempt(home.run_dir, attempt, reason)

    return retry_disk(begin, home)


def run_attempt(
    home: RunDirectory, job: JobSpec, attempt: int, started: Callable[[], object], deadline: float
) -> AttemptOutcome:
    """Runs all ranks to their end and returns it; none of them is left."""
    run_dir = home.run_dir
    ranks = Ranks()
    try:
        own = Process.current()
        retry_disk(lambda: update_state(run_dir, attempt=attempt, process=own), home)
        if job.forks:
            say_starting(home, attempt, f"{started_module(job.argv)[0]} is being imported")
            started()
        port = start_ranks(run_dir, job, attempt, ranks)
        say_starting(
            home,
            attempt,
            f"{counted(job.num_processes, 'process', 'processes')} started",
        )
        if not job.forks:
            started()
        start = StartWatch(run_dir, attempt)
        outcome = watch(ranks, job.time_limit_s, deadline, home, start)
        port.close()
        state = read_state(run_dir)
        if outcome.rc == 0 and state and state.state is JobState.STOPPING:
            outcome = AttemptOutcome(0, f"stopped on request at step {state.step}")
    except Exception as error:
        traceback.print_exc()
        # An error of the file system may pass. Before the first step it is taken for a wrong
        # configuration, and the job is not restarted.
        is_transient = isinstance(error, OSError) and error.errno not in FULL
        fate = "restart" if is_transient and has_taken_steps(home) else "end"
        outcome = AttemptOutcome(1, str(error) or repr(error), fate=fate)
    with contextlib.suppress(JobError, OSError):
        home.check()
        if outcome.rc:
            update_state(run_dir, attempt=attempt, state=JobState.STOPPING, reason=outcome.reason)
    end_ranks(ranks, job.grace_s)
    kill_descendants()
    return outcome


def say_starting(home: RunDirectory, attempt: int, reason: str) -> None:
    """Records that an attempt starts, and how far it is. If the file system is in trouble, only
    prints it.
    """
    try:
        update_state(
            home.run_dir,
            attempt=attempt,
            state=JobState.STARTING,
            reason=reason,
            heartbeat=time.time(),
        )
    except OSError as error:
        if error.errno in FULL:
            raise
        say(f"attempt {attempt} starts: {reason} (not recorded: {error})")


def start_ranks(run_dir: Path, job: JobSpec, attempt: int, ranks: Ranks) -> socket.socket:
    """Starts all ranks into `ranks`, each in its own process group and with its own log.

    Ranks are not bound to the CPU socket to which their GPU is attached. On a node with two sockets
    a step therefore takes up to 3 % longer (estimated). Under Slurm, the site's options of `srun`
    bind the ranks.

    Returns the network socket that reserves the port of the ranks. The caller keeps the socket open
    until the ranks have ended.
    """
    port = reserve_port(address="127.0.0.1")
    common = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "WORLD_SIZE": str(job.num_processes),
        "LOCAL_WORLD_SIZE": str(job.num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.getsockname()[1]),
        "KIT_ATTEMPT": str(attempt),
        "PYTHONUNBUFFERED": "1",
        # With gloo, ranks that restart would else read stale addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if job.forks:
        import_once(started_module(job.argv)[0], {**common, **job.environment})
    for rank in range(job.num_processes):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **job.environment}
        with appending(log_path(run_dir, attempt, rank)) as log:
            try:
                ranks[rank] = start_rank(job, environment, log)
            except OSError as error:
                raise JobError(f"rank {rank} could not be started: {error}") from error
    return port


def start_rank(
    job: JobSpec, environment: dict[str, str], log: IO[bytes]
) -> subprocess.Popen | ForkedRank:
    """Returns one rank, forked from this process or started anew."""
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


def watch(
    ranks: Ranks,
    time_limit_s: float | None,
    deadline: float,
    home: RunDirectory,
    start: StartWatch,
) -> AttemptOutcome:
    """Waits until all ranks have ended well, one has failed, the time is over, the run directory is
    lost, or a signal asks for the end."""
    while True:
        start.beat()
        reap(ranks)
        codes = {rank: process.returncode for rank, process in ranks.items() if process.returncode}
        if codes:
            first = min(codes, key=lambda rank: (cause_order(codes[rank]), rank))
            return failed(home, first, codes[first], f"rank {first}")
        if all(process.returncode == 0 for process in ranks.values()):
            return AttemptOutcome(0, ended_well(len(ranks)))
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return AttemptOutcome(124, f"the time limit of {time_limit_s:g} s was reached")
        if lost := home.why_lost():
            return AttemptOutcome(1, lost)
        received = signal.sigtimedwait(WATCHED, min(remaining_s, LOOK_EVERY_S))
        if received and received.si_signo != signal.SIGCHLD:
            return AttemptOutcome(
                128 + received.si_signo, f"cancelled by {signal.Signals(received.si_signo).name}"
            )


def reap(ranks: Ranks) -> None:
    """Collects every child that has ended: ranks get their return code, adopted orphans are
    forgotten.
    """
    by_pid = {process.pid: process for process in ranks.values()}
    with contextlib.suppress(ChildProcessError):
        while any(ended := os.waitpid(-1, os.WNOHANG)):
            pid, status = ended
            if pid in by_pid:
                by_pid[pid].returncode = os.waitstatus_to_exitcode(status)


def end_ranks(ranks: Ranks, grace_s: float) -> None:
    """Asks the process groups of all running ranks to end, and kills them after the grace time."""
    deadline = time.monotonic() + grace_s
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ranks.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        while any(process.returncode is None for process in ranks.values()):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            signal.sigtimedwait({signal.SIGCHLD}, remaining_s)
            reap(ranks)


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
