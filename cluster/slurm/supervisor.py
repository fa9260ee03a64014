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

import argparse
import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from cluster.attempts import take_over
from cluster.descendants import become_subreaper, kill_descendants
from cluster.files import outlive_full_log, unless_full
from cluster.heartbeats import MANY
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
from cluster.progress import fruitless_starts, has_ever_stepped, is_told_to_stop
from cluster.record import ConfigError, counted
from cluster.slurm import begin_elsewhere, requeue_this
from cluster.slurm.preflight import answering_nodes, check_nodes
from cluster.slurm.queries import native_state, slurm_command
from cluster.slurm.rank import Failure, failures_of
from cluster.state import (
    JobError,
    JobState,
    SchedulerJob,
    StaleAttemptError,
    ask,
    read_record,
    read_state,
    record_event,
    refuse_stale,
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
LOOK_EVERY_S, END_WAIT_S = 1.0, 15.0
REQUEUE_PATIENCE_S = 120.0
CUT_OFF_WAIT_S = 5.0


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
    """Or several, separated by commas."""


WHY_TERMINATED = {
    "CANCELLED": Ending("failed", "cancelled (scancel)", rc=128 + signal.SIGTERM),
    "TIMEOUT": Ending("requeue", "the time limit was reached before it could save", rc=124),
    "PENDING": Ending("taken", "requeued by Slurm or by its user", rc=128 + signal.SIGTERM),
    "NODE_FAIL": Ending("taken", "a node failed", rc=1),
}
"""By Slurm's word for the state of a job that it ends."""


class Supervisor:
    """One allocation of a job."""

    def __init__(self, run_dir: Path, command: list[str], job: SchedulerJob) -> None:
        self.run_dir, self.command, self.job = run_dir, command, job
        self.home, self.spec = Home(run_dir), JobSpec.read(run_dir / "job.json")
        self.attempt = 0
        self.stop_reason: str | None = None
        self.stop_state = JobState.REQUEUED
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
                ending = self._judge(self._without_lost(ending or self._attempt(starts)))
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
        port = int(os.environ.get("MASTER_PORT", "29500")) + starts
        environment = {key: value for key, value in os.environ.items() if key != "SLURM_EXPORT_ENV"}
        environment |= {"KIT_ATTEMPT": str(self.attempt), "MASTER_PORT": str(port)}
        if self.spec.num_processes > MANY:
            # As srun's --output: a file a node, each line with the number of its task.
            environment["SLURM_STDOUTMODE"] = (
                f"{self.run_dir}/logs/attempt_{self.attempt:02d}/node_%n.log"
            )
        self._note(
            JobState.STARTING,
            f"{counted(self.spec.num_processes, 'rank')} starting on"
            f" {os.environ['SLURM_JOB_NODELIST']}",
        )
        failures_of(self.run_dir, self.attempt).mkdir(parents=True, exist_ok=True)
        step = subprocess.Popen(
            self.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return self._watch(step)
        finally:
            self._end(step)

    def _watch(self, step: subprocess.Popen) -> Ending:
        failed_at = None
        while True:
            ready, _, _ = select.select([self.reader], [], [], LOOK_EVERY_S)
            signals = os.read(self.reader, 256) if ready else b""
            if step.poll() is not None:
                return self._after(step.returncode)
            if any(number in signals for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
                if ending := self._told_to_end():
                    return ending
            if signal.SIGUSR1 in signals or signal.SIGUSR2 in signals:
                self._ask_to_stop(JobState.REQUEUED, "the time limit is near")
            if lost := self.home.why_lost():
                return Ending("failed", lost, rc=1)
            if failed_at is None and self._failures():
                failed_at = time.monotonic()
            if failed_at and time.monotonic() - failed_at > END_WAIT_S:
                return self._after(1)  # srun waits for a node that does not answer its order to end

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

    def _without_lost(self, ending: Ending) -> Ending:
        """Returns a start elsewhere instead of one in this allocation, some of whose nodes no
        longer answer.
        """
        while ending.fate == "restart":
            names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
            nodes = slurm_command(names, self.job.config).split()
            lost = sorted({*nodes} - answering_nodes(len(nodes)))
            if os.environ["SLURMD_NODENAME"] not in lost:
                if not lost:
                    return ending
                answer = "answers" if len(lost) == 1 else "answer"
                reason = f"{', '.join(lost)} no longer {answer} ({ending.reason})"
                return dataclasses.replace(
                    ending, fate="requeue", reason=reason, lost_node=",".join(lost)
                )
            say("this node can start nothing any more: Slurm will start the job elsewhere")
            refuse_stale(self.run_dir, self.attempt)
            time.sleep(CUT_OFF_WAIT_S)
        return ending

    def _told_to_end(self) -> Ending | None:
        """Returns what a SIGTERM means: Slurm kills this process in a moment, or gives the ranks
        time to save.
        """
        ending = self._why_terminated()
        # srun may send it too, to ranks whose peer has failed.
        if ending is None and not self._failures():
            self._ask_to_stop(JobState.REQUEUED, "the scheduler sent SIGTERM")
        return ending

    def _why_terminated(self) -> Ending | None:
        """Asks Slurm why it signals this job.

        Returns how it ends, or None when it may still save and stop.
        """
        try:
            native = native_state(self.job)
        except JobError:
            return None
        if native == "PREEMPTED":
            self._ask_to_stop(JobState.PREEMPTED, "preempted by a job of higher priority")
        return WHY_TERMINATED.get(native)

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
        if ending.lost_node and begin_elsewhere(self.job, self.run_dir, self.attempt):
            return ending.rc
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
        with contextlib.suppress(OSError):  # a file system in trouble is no reason to end
            files = failures_of(self.run_dir, self.attempt).glob("rank_*.json")
            return [failure for file in files if (failure := read_record(Failure, file))]
        return []

    def _end(self, step: subprocess.Popen) -> None:
        """Ends srun and with it all ranks that can be reached."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if step.poll() is not None:
                break
            step.send_signal(number)
            # For a node that does not answer it would wait for ever.
            deadline = time.monotonic() + 3.0
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
