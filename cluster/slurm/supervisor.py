"""Runs inside the allocation, on its first node: starts the ranks, watches them, and decides what
follows their end.

    python -m cluster.slurm.supervisor RUN_DIR -- srun OPTIONS... python -m cluster.slurm.rank
    COMMAND...

What ends an attempt, and what follows:

    all ranks ended well                             done
    a rank failed for a reason that will not pass    failed
    a rank crashed                                   restart in the same allocation
    a node fell silent                               back to the queue; without that node when it
                                                     happens twice
    the run directory was deleted                    failed: ended, and nothing recorded
    preemption, time limit near                      request to stop, checkpoint, back to the queue
    scancel                                          failed: cancelled

The job is given up after `max_restarts` starts in a row that took no step that none had taken
before. The exit code is that of the first rank to fail, so that Slurm's own records tell the truth.
Standard library, Linux.
"""

import argparse
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
from typing import Literal

from cluster.attempts import take_over
from cluster.descendants import become_subreaper, kill_descendants
from cluster.files import outlive_full_log, unless_full
from cluster.heartbeats import COLLECT_EVERY_S, MANY, write_all_heartbeats
from cluster.home import Home
from cluster.job import JobSpec
from cluster.outcome import (
    CRASHES,
    USELESS_TO_RETRY,
    Outcome,
    end_of,
    ended_well,
    keep_words,
    record_end,
    say,
)
from cluster.progress import HangJudge, fruitless_starts, has_ever_stepped, is_told_to_stop
from cluster.record import ConfigError, counted
from cluster.slurm import requeue_this
from cluster.slurm.beat import VARIABLE, Switchboard
from cluster.slurm.preflight import check_nodes
from cluster.slurm.queries import native_state
from cluster.slurm.rank import Failure
from cluster.slurm.silence import SilenceJudge
from cluster.state import (
    JobError,
    JobState,
    SchedulerJob,
    StaleAttemptError,
    ask,
    read_state,
    record_event,
    update_state,
)

WATCHED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
LOOK_EVERY_S, END_WAIT_S = 1.0, 30.0
REQUEUE_PATIENCE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Ending:
    """How an attempt ended, and what becomes of the job."""

    fate: Literal["done", "failed", "restart", "requeue", "taken"]
    """`restart` in this allocation, `requeue` for another one, or `taken`: a newer attempt owns
    the run."""
    reason: str
    rc: int = 0
    state: JobState = JobState.REQUEUED
    """What the run directory says until the next attempt starts."""
    failing_rank: int | None = None
    lost_node: str | None = None


class Supervisor:
    """One allocation of a job."""

    def __init__(self, run_dir: Path, command: list[str], job: SchedulerJob) -> None:
        self.run_dir, self.command, self.job = run_dir, command, job
        self.home, self.spec = Home(run_dir), JobSpec.read(run_dir / "job.json")
        self.attempt = 0
        self.stop_reason: str | None = None
        self.stop_state = JobState.REQUEUED
        self.told: list[bytes] = []
        self.reader, writer = os.pipe()
        for end in (self.reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in WATCHED:
            signal.signal(number, lambda number, frame: None)

    def run(self) -> int:
        """Runs attempts until the job's fate is decided; returns its exit code."""
        starts = 0
        while True:
            self.attempt = take_over(self.run_dir, self.job)
            nodes = os.environ["SLURM_JOB_NODELIST"]
            say(f"attempt {self.attempt} of {self.spec.name} in job {self.job.id} on {nodes}")
            try:
                ending = self._check_nodes() if starts == 0 else None
                ending = self._judge(ending or self._attempt(starts))
                say(f"attempt {self.attempt}: {ending.reason}: {ending.fate}")
                if ending.fate != "restart":
                    return self._finish(ending)
                self._note(JobState.REQUEUED, f"{ending.reason}; restarting in the same allocation")
            except StaleAttemptError as error:
                say(str(error))
                return 1
            except OSError as error:  # a full disk, say
                return self._finish(Ending("failed", str(error), rc=1))
            starts += 1

    def _check_nodes(self) -> Ending | None:
        """Returns how it ends when the nodes do not see the same run directory, or do not
        answer, before any start.
        """
        try:
            problem = check_nodes(
                self.spec, int(os.environ.get("SLURM_NNODES", self.spec.num_nodes))
            )
        except JobError as error:  # a node on its way out, or back: the queue may have better ones
            return Ending("requeue", str(error), rc=1)
        return Ending("failed", problem, rc=USELESS_TO_RETRY) if problem else None

    def _attempt(self, starts: int) -> Ending:
        host = (
            os.environ.get("KIT_BEAT_HOST") or os.environ.get("MASTER_ADDR") or socket.gethostname()
        )
        board = Switchboard(host)
        port = int(os.environ.get("MASTER_PORT", "29500")) + starts
        environment = {key: value for key, value in os.environ.items() if key != "SLURM_EXPORT_ENV"}
        environment |= {
            "KIT_ATTEMPT": str(self.attempt),
            "MASTER_PORT": str(port),
            VARIABLE: board.address,
        }
        if (
            self.spec.num_processes > MANY
        ):  # as srun's --output: a file a node, each line with the number of its task
            environment["SLURM_STDOUTMODE"] = (
                f"{self.run_dir}/logs/attempt_{self.attempt:02d}/node_%n.log"
            )
        self._note(
            JobState.STARTING,
            f"{counted(self.spec.num_processes, 'rank')} starting on"
            f" {os.environ['SLURM_JOB_NODELIST']}",
        )
        step = subprocess.Popen(
            self.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return self._watch(step, board)
        finally:
            self._end(step, board)
            self._collect(board)
            board.close()

    def _watch(self, step: subprocess.Popen, board: Switchboard) -> Ending:  # noqa: C901 - one flat case per event
        failed_at, early, judge, silence = (
            None,
            None,
            HangJudge(),
            SilenceJudge(board, self.job.config),
        )
        collected = 0.0
        while True:
            ready, _, _ = select.select([self.reader], [], [], LOOK_EVERY_S)
            signals = os.read(self.reader, 256) if ready else b""
            reports = board.taken()
            if time.monotonic() - collected >= COLLECT_EVERY_S:
                collected = time.monotonic()
                self._collect(board)
            if step.poll() is not None:
                return early or self._after(step.returncode)
            if any(number in signals for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
                if ending := self._told_to_end():
                    return ending
            if signal.SIGUSR1 in signals or signal.SIGUSR2 in signals:
                self._ask_to_stop(JobState.REQUEUED, "the time limit is near")
            if any(report["event"] == "terminate" for report in reports) and not board.ending:
                if early is None and (early := self._why_terminated()):
                    board.end()
            if board.ending and failed_at is None:
                failed_at = time.monotonic()
            if lost := self.home.why_lost():
                return Ending("failed", lost, rc=1)
            if lost := silence.lost():
                return Ending("requeue", lost[1], rc=1, lost_node=lost[0])
            if (
                failed_at
                and time.monotonic() - failed_at > END_WAIT_S + self.spec.grace_s
                and not early
            ):
                return self._after(1)
            if reason := judge.why_hung(self.run_dir):
                return Ending("restart", reason, rc=1)

    def _after(self, code: int) -> Ending:
        """Returns what follows when srun has ended, or when it should have."""
        if failures := self._failures():
            # Several at once: what cannot pass comes first, then a crash; an error for a lost peer
            # is a consequence.
            first = min(
                failures, key=lambda f: (f.code != USELESS_TO_RETRY, -f.code not in CRASHES, f.time)
            )
            return self._failure(first)
        if code:
            reason = f"srun ended with code {code}; see logs/slurm-{self.job.id}.log"
            return self._why_terminated() or Ending("restart", reason, rc=code % 256)
        return self._stopped() or Ending("done", ended_well(self.spec.num_processes))

    def _stopped(self) -> Ending | None:
        """Returns what follows when the trainer has saved and stopped because it was asked to."""
        state = read_state(self.run_dir)
        if state is None or state.state is not JobState.STOPPING:
            return None
        if self.stop_reason is None or is_told_to_stop(self.run_dir):
            return Ending("done", f"stopped on request at step {state.step}")
        return Ending(
            "requeue", f"{self.stop_reason}; saved at step {state.step}", state=self.stop_state
        )

    def _failure(self, failure: Failure) -> Ending:
        # Under torchrun a task is the agent of all ranks of a node.
        ranks_per_task = max(
            1,
            self.spec.num_processes // int(os.environ.get("SLURM_NTASKS", self.spec.num_processes)),
        )
        rank = failure.rank * ranks_per_task
        where = (
            f"rank {rank} on {failure.node}" if ranks_per_task == 1 else f"a rank on {failure.node}"
        )
        words, rc = end_of(failure.code)
        per_node = self.spec.num_processes // self.spec.num_nodes
        keep_words(self.run_dir, self.attempt, rank, failure.rank, per_node)
        tried = failure.code < 0 or (
            failure.code != USELESS_TO_RETRY and has_ever_stepped(self.run_dir)
        )
        return Ending("restart" if tried else "failed", f"{where} {words}", rc, failing_rank=rank)

    def _collect(self, board: Switchboard) -> None:
        """Writes what the ranks did last, for all who watch."""
        if (told := list(board.ranks.values())) != self.told and self.home.why_lost() is None:
            self.told = told
            with contextlib.suppress(OSError):
                write_all_heartbeats(self.run_dir, told)

    def _told_to_end(self) -> Ending | None:
        """Returns what a SIGTERM to this very process means: Slurm kills it in a moment."""
        ending = self._why_terminated()
        if ending is None:
            self._ask_to_stop(JobState.REQUEUED, "SIGTERM was sent to the job")
        return ending

    def _why_terminated(self) -> Ending | None:
        """Asks Slurm why it signals this job.

        Returns how it ends, or None when it may still save and stop.
        """
        try:
            native = native_state(self.job)
        except JobError as error:
            native = str(error)
        if native == "CANCELLED":
            return Ending("failed", "cancelled (scancel)", rc=128 + signal.SIGTERM)
        if native == "TIMEOUT":
            return Ending("requeue", "the time limit was reached before it could save", rc=124)
        if native == "PENDING":
            return Ending("taken", "requeued by Slurm or by its user", rc=128 + signal.SIGTERM)
        if native == "NODE_FAIL":
            return Ending("taken", "a node failed", rc=1)
        if native == "PREEMPTED":
            self._ask_to_stop(JobState.PREEMPTED, "preempted by a job of higher priority")
        elif native == "RUNNING":
            self._ask_to_stop(JobState.REQUEUED, "the scheduler sent SIGTERM")
        return None

    def _ask_to_stop(self, state: JobState, reason: str) -> None:
        if self.stop_reason is None and not is_told_to_stop(self.run_dir):
            self.stop_reason, self.stop_state = reason, state
            say(f"{reason}: asking the ranks to save and stop")
            with unless_full():  # it could not save either
                ask(self.run_dir, "stop", by_person=False)
            if (current := read_state(self.run_dir)) is not None:
                record_event(self.run_dir, current.replace(state=JobState.STOPPING, reason=reason))

    def _judge(self, ending: Ending) -> Ending:
        """Returns a failure instead of a restart that would lead nowhere, and a requeue that has
        been asked for.
        """
        if lost := self.home.why_lost():
            return Ending("failed", lost, rc=ending.rc or 1)
        if ending.fate not in ("restart", "requeue"):
            return ending
        is_told = is_told_to_stop(self.run_dir)
        if (self.stop_reason is None or is_told) and (stopped := self._stopped()):
            return (
                stopped  # all is saved: a rank or a node that was lost after that changes nothing
            )
        if is_told:
            return dataclasses.replace(
                ending, fate="failed", reason=f"{ending.reason}, after a request to stop"
            )
        fruitless = fruitless_starts(self.run_dir, self.attempt)
        if fruitless > self.spec.max_restarts:
            reason = (
                f"{ending.reason}; given up after {counted(fruitless, 'start')} without a new step"
            )
            return dataclasses.replace(ending, fate="failed", reason=reason, rc=ending.rc or 1)
        if (
            ending.fate == "restart" and self.stop_reason is not None
        ):  # time is short: start again with a fresh limit
            return dataclasses.replace(ending, fate="requeue")
        return ending

    def _finish(self, ending: Ending) -> int:
        if ending.fate in ("done", "failed"):
            record_end(
                self.home, self.attempt, Outcome(ending.rc, ending.reason, ending.failing_rank)
            )
            return ending.rc
        with contextlib.suppress(OSError):
            self._note(ending.state, ending.reason, ending.lost_node)
        return self._requeue(ending) if ending.fate == "requeue" else ending.rc

    def _requeue(self, ending: Ending) -> int:
        deadline = time.monotonic() + REQUEUE_PATIENCE_S
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # a requeue sends it to the very commands that ask for it
        while True:
            try:
                requeue_this(self.job, self.run_dir)
                return ending.rc
            except JobError as error:  # the controller may be restarting
                say(f"not requeued: {error}")
                if time.monotonic() > deadline:
                    reason = (
                        f"{ending.reason}; and it could not be requeued: {error}. `kit resume`"
                        " starts it again"
                    )
                    record_end(self.home, self.attempt, Outcome(ending.rc or 1, reason))
                    return ending.rc or 1
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
        folder, found = self.run_dir / "ranks" / f"failed_attempt_{self.attempt:02d}", []
        for file in folder.glob("rank_*.json"):
            with contextlib.suppress(ConfigError, OSError):
                found.append(Failure.read(file))
        return found

    def _end(self, step: subprocess.Popen, board: Switchboard) -> None:
        """Ends srun and with it all ranks that can be reached."""
        board.end()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if step.poll() is not None:
                break
            step.send_signal(number)
            deadline = time.monotonic() + (
                0.5 if board.silent() else 3.0
            )  # of a silent node it would wait for ever
            while step.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        step.wait()
        kill_descendants()


def main() -> int:
    """Returns the job's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.slurm.supervisor", description="Supervise a Slurm job."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- srun ...")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        job = SchedulerJob(
            scheduler="slurm", id=os.environ["SLURM_JOB_ID"], config=os.environ.get("SLURM_CONF")
        )
        outlive_full_log()
        become_subreaper()
        return Supervisor(options.run_dir.absolute(), command, job).run()
    except KeyError as error:
        print(
            f"{error} is not set: run this inside a Slurm job, as submit.sh does", file=sys.stderr
        )
    except (ConfigError, JobError, OSError) as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
