"""What Slurm starts for each task: `python -m cluster.slurm.rank COMMAND...` runs one rank and
looks after it.

- SIGTERM, which Slurm sends to every process at preemption and time limit, does not reach the
  command. The supervisor learns of it and asks the trainer to save and stop at a step boundary.
- When the command ends, everything it left behind on this node is killed. A failure is recorded in
  ranks/failed_attempt_NN/, so that the first culprit can be told from those that failed for want of
  it.
- A node that loses its supervisor ends its ranks itself, so that it cannot write into a newer
  attempt's files. The second node is the deputy: where the whole first node is gone, it gives the
  job back to Slurm, since nobody else can.

Standard library, Linux.
"""

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cluster.descendants import become_rank, become_subreaper, kill_descendants
from cluster.files import outlive_full_log
from cluster.heartbeats import PLACE
from cluster.home import Home
from cluster.process import child_pids
from cluster.record import Record, field_doc
from cluster.slurm.beat import ALONE_AFTER_S, BEAT_EVERY_S, DEPUTY_AFTER_S, VARIABLE, Line
from cluster.state import JobError, JobState, SchedulerJob, locked, read_state, record_event

ANSWER_WAIT_S = 10.0
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure(Record):
    """ranks/failed_attempt_NN/rank_NNNNN.json: a rank that did not end well."""

    rank: int = field_doc("global rank")
    code: int = field_doc("its exit code; -n for signal n")
    node: str = field_doc("where")
    time: float = field_doc("unix time of its end")


class Keeper:
    """Runs one command and answers for it."""

    def __init__(self, run_dir: Path, command: list[str]) -> None:
        self.run_dir, self.home, self.command = run_dir, Home(run_dir), command
        self.attempt = int(os.environ.get("KIT_ATTEMPT", "1"))
        self.rank = int(os.environ.get("SLURM_PROCID", "0"))
        self.is_leader = os.environ.get("SLURM_LOCALID", "0") == "0"
        self.is_deputy = self.is_leader and os.environ.get("SLURM_NODEID") == "1"
        self.line = Line(is_leader=self.is_leader) if VARIABLE in os.environ else None
        self.next_beat = self.next_look = time.monotonic()
        self.warned_at: float | None = None
        self.is_orphan = False

    def run(self) -> int:
        """Runs the command and returns its exit code, 128 + n for signal n."""
        become_subreaper()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in HANDLED:
            signal.signal(number, lambda number, frame: None)
        keeper = os.getpid()
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=lambda: become_deaf_rank(keeper),
            env={**os.environ, PLACE: self.line.place} if self.line else None,
        )
        while process.poll() is None:
            self._wait(reader)
            if self._must_end():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                self._warn_others()
                process.wait()
        code = process.returncode
        if (
            self.line and self.is_leader
        ):  # however it ended: who is missed is the node that does not end
            self.line.send(event="left")
        if code and not self._ordered():
            self._record(code)
        kill_descendants()
        if self.is_orphan and self.is_deputy:
            self._requeue()
        return 128 - code if code < 0 else code

    def _wait(self, reader: int) -> None:
        now = time.monotonic()
        if now >= self.next_beat:
            self.next_beat = now + BEAT_EVERY_S
            if self.line and self.is_leader:
                self.line.send()
        sources = [reader, *([self.line.socket, self.line.ear] if self.line else [])]
        ready, _, _ = select.select(
            sources, [], [], min(self.next_beat - now, 1.0 if self.warned_at else BEAT_EVERY_S)
        )
        numbers = os.read(reader, 256) if reader in ready else b""
        if signal.SIGTERM in numbers:
            self.warned_at = time.monotonic()
        if self.line:
            if self.warned_at and not self._ordered() and self.line.answered_before(self.warned_at):
                self.line.send(event="terminate", rank=self.rank)
            self.line.receive()

    def _must_end(self) -> bool:
        """Whether the command must end now: by order, or because nobody is there who could give
        one.
        """
        if self._ordered():
            return True
        if self.line is None:
            return self.warned_at is not None
        if self.warned_at is not None and self.line.answered_before(self.warned_at):
            if time.monotonic() - self.warned_at > ANSWER_WAIT_S:
                return True
        if not self.is_leader or (self.line.alone_s < ALONE_AFTER_S and not self._must_stand_in()):
            return False
        print(
            f"{self.line.node}: no word from the supervisor for {self.line.alone_s:.0f} s; ending.",
            file=sys.stderr,
        )
        self.is_orphan = True
        return True

    def _warn_others(self) -> None:
        """Has the other keepers of the node, children of the same slurmstepd, ask whether they
        must end too.
        """
        with contextlib.suppress(OSError):
            parent = os.getppid()
            if self.is_leader and Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                for pid in {*child_pids(parent)} - {os.getpid()}:
                    os.kill(pid, signal.SIGTERM)

    def _must_stand_in(self) -> bool:
        """Whether the deputy must act: the supervisor may be held up for long, but its node does
        not answer either.
        """
        if not self.is_deputy or self.line is None or self.line.alone_s < DEPUTY_AFTER_S:
            return False
        if time.monotonic() < self.next_look:
            return False
        gone = not self.line.reaches_first_node()
        self.next_look = time.monotonic() + BEAT_EVERY_S
        return gone

    def _ordered(self) -> bool:
        return self.line is not None and self.line.order == "end"

    def _requeue(self) -> None:
        from cluster.slurm import requeue_this

        job = SchedulerJob(
            scheduler="slurm", id=os.environ["SLURM_JOB_ID"], config=os.environ.get("SLURM_CONF")
        )
        host = os.environ["MASTER_ADDR"]  # the first node of the job, where the supervisor was
        with locked(self.run_dir):
            state = read_state(self.run_dir)
            if state is None or state.attempt != self.attempt:
                return  # a newer attempt owns the directory
            if (
                state.state is not JobState.REQUEUED
            ):  # each node comes here, and one loss must count once
                lost = state.replace(
                    state=JobState.REQUEUED, reason=f"{host} fell silent, with the supervisor on it"
                )
                lost.write(self.run_dir / "state.json")
                record_event(self.run_dir, lost, lost_node=host)
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # a requeue sends it to the very commands that ask for it
        try:
            requeue_this(job, self.run_dir)
        except JobError as error:
            print(error, file=sys.stderr)

    def _record(self, code: int) -> None:
        failure = Failure(rank=self.rank, code=code, node=socket.gethostname(), time=time.time())
        folder = self.run_dir / "ranks" / f"failed_attempt_{self.attempt:02d}"
        with contextlib.suppress(
            OSError, JobError
        ):  # a full disk or a deleted directory must not hide the exit code
            self.home.check()
            folder.parent.mkdir(exist_ok=True)
            failure.write(folder / f"rank_{self.rank:05d}.json")
        if self.line:
            self.line.send(event="failed", rank=self.rank, code=code)


def become_deaf_rank(keeper_pid: int) -> None:
    """Runs in the child before the command: the rank dies with its keeper, and only then."""
    become_rank(keeper_pid)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def main() -> int:
    """Returns the exit code of the command."""
    outlive_full_log()
    return Keeper(Path(os.environ["KIT_RUN_DIR"]), sys.argv[1:]).run()


if __name__ == "__main__":
    sys.exit(main())
