"""Runs one task of a job: Slurm starts `python -m cluster.slurm.rank COMMAND...` for each task.
This process, the keeper, runs the command of the rank as its child.

- SIGTERM, which Slurm sends to every process at preemption and at the time limit, does not reach
  the command. The first task forwards it to the supervisor, which asks the trainer to save and stop
  at a step boundary. After a rank has failed, srun sends SIGTERM, and the command is killed.
- When the command ends, all processes that it left on this node are killed. A failure is recorded
  in ranks/failed_attempt_NN/. The records distinguish the rank that failed first from ranks that
  failed as a consequence.

Standard library and Linux only.
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
from cluster.files import ignore_output_errors
from cluster.process import become_rank, become_subreaper, child_pids, kill_descendants
from cluster.record import Record, field_doc
from cluster.state import JobError, state_to_change

STATE_TRIES = 10
"""Maximum number of tries to read state.json, one second apart, while the file system fails. More
tries are useless, since Slurm kills the job soon after the signal."""
NOT_FOR_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure(Record):
    """Content of ranks/failed_attempt_NN/rank_NNNNN.json: which rank failed, and how."""

    rank: int = field_doc("global number of the rank")
    code: int = field_doc("return code of the rank; -n if signal n ended it")
    node: str = field_doc("name of the node on which the rank ran")
    time: float = field_doc("Unix time of the end of the rank, in seconds")


def failure_folder(run_dir: Path, attempt: int) -> Path:
    """Returns the folder of an attempt's `Failure` records. The supervisor creates it before the
    ranks start, because NFS clients cache for a while that a folder is missing.
    """
    return run_dir / "ranks" / f"failed_attempt_{attempt:02d}"


def run_rank(home: RunDirectory, command: list[str]) -> int:
    """Runs a rank's command and records its failure. Returns the command's exit code, or 128 + n if
    signal n ended the command.
    """
    keeper = os.getpid()
    folder = failure_folder(home.run_dir, int(os.environ.get("KIT_ATTEMPT", "1")))
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
    """Forwards a SIGTERM to the supervisor, which runs on the node of the first task."""
    for _ in range(STATE_TRIES):
        try:
            state = state_to_change(home.run_dir)
        except OSError:  # The error may be temporary.
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
    """Prepares a child process that will execute the command of a rank. The kernel kills the rank
    if its keeper dies. The rank ignores the signals NOT_FOR_RANKS.
    """
    become_rank(keeper_pid)
    for number in NOT_FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    ignore_output_errors()
    sys.exit(run_rank(RunDirectory(Path(os.environ["KIT_RUN_DIR"])), sys.argv[1:]))
