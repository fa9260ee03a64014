"""What Slurm starts for each task: `python -m cluster.slurm.rank COMMAND...` runs one rank and
looks after it.

- SIGTERM, which Slurm sends to every process at preemption and time limit, does not reach the
  command. The first task passes it on to the supervisor, which asks the trainer to save and stop at
  a step boundary. Where a rank has failed, it is srun that sends it, and the command is killed.
- When the command ends, everything it left behind on this node is killed. A failure is recorded in
  ranks/failed_attempt_NN/, so that the first culprit can be told from those that failed for want of
  it.

Standard library, Linux.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cluster.directory_handle import RunDirectory
from cluster.files import outlive_log
from cluster.process import become_rank, become_subreaper, child_pids, kill_descendants
from cluster.record import Record, field_doc
from cluster.state import JobError, state_to_change

STATE_TRIES = 10
"""Number of times that state.json is read, one second apart, while the file system is in trouble.
Slurm kills the job soon after the signal."""
NOT_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure(Record):
    """ranks/failed_attempt_NN/rank_NNNNN.json: a rank that did not end well."""

    rank: int = field_doc("global rank")
    code: int = field_doc("its exit code; -n for signal n")
    node: str = field_doc("node that it ran on")
    time: float = field_doc("unix time of its end")


def failures_of(run_dir: Path, attempt: int) -> Path:
    """Returns the folder of an attempt's failures. Its supervisor makes it: NFS remembers for a
    while what was not there.
    """
    return run_dir / "ranks" / f"failed_attempt_{attempt:02d}"


def run_rank(home: RunDirectory, command: list[str]) -> int:
    """Runs a rank's command and answers for it; returns its exit code, 128 + n for signal n."""
    keeper = os.getpid()
    folder = failures_of(home.run_dir, int(os.environ.get("KIT_ATTEMPT", "1")))
    killed = []

    def on_signal(number: int, frame: object) -> None:
        if number == signal.SIGTERM and _exist(folder):
            killed.append(number)
            for pid in child_pids(keeper):
                os.kill(pid, signal.SIGKILL)
        elif number == signal.SIGTERM and os.environ.get("SLURM_PROCID") == "0":
            _tell_supervisor(home)

    become_subreaper()
    for number in NOT_FOR_RANKS:
        signal.signal(number, on_signal)
    rank = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: _become_deaf_rank(keeper),
    )
    code = rank.wait()
    if code and not killed:
        _record(home, folder, code)
    kill_descendants()
    return 128 - code if code < 0 else code


def _exist(failures: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(failures.iterdir())
    return False


def _tell_supervisor(home: RunDirectory) -> None:
    """Passes a SIGTERM on to the supervisor, on whose node the first task runs."""
    for _ in range(STATE_TRIES):
        try:
            state = state_to_change(home.run_dir)
        except OSError:  # The file system is in trouble.
            time.sleep(1.0)
            continue
        if state and state.process:
            state.process.send_signal(signal.SIGTERM)
        return


def _record(home: RunDirectory, folder: Path, code: int) -> None:
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    failure = Failure(rank=rank, code=code, node=socket.gethostname(), time=time.time())
    # A full disk or a deleted directory must not hide the exit code.
    with contextlib.suppress(OSError, JobError):
        home.check()
        failure.write(folder / f"rank_{rank:05d}.json")


def _become_deaf_rank(keeper_pid: int) -> None:
    """Runs in the child before the command: the rank dies with its keeper, and only then."""
    become_rank(keeper_pid)
    for number in NOT_FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    outlive_log()
    sys.exit(run_rank(RunDirectory(Path(os.environ["KIT_RUN_DIR"])), sys.argv[1:]))
