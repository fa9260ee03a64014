"""JobSpec, JobStatus and Job: a job as a run directory, whatever scheduler runs it.

A `Job` holds no connection and no state of its own. Everything is read from the run directory each time, so any
process may attach to any job, and the job does not notice when they go. Standard library only.
"""

import dataclasses
import html
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from cluster.process import Process
from cluster.record import ConfigError, Record, field_doc, html_table
from cluster.state import (
    JobError,
    JobState,
    RunState,
    ask,
    asked_at,
    last_attempt,
    locked,
    log_path,
    read_exit,
    read_state,
)

SET_BY_THE_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "KIT_ATTEMPT")
STALLED_AFTER_S = 60.0
STALLED_AFTER_STEPS = 10
STALLED_START_S = 1800.0  # before the first step: imports, rendezvous and compilation take long on a large machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec(Record):
    """What to run: one command, started as several processes that find each other by environment variables."""

    name: str = field_doc("shown in queues and titles")
    run_dir: str = field_doc("run directory; made absolute")
    argv: tuple[str, ...] = field_doc("the command of one rank")
    num_processes: int = field_doc("ranks over all nodes: one per device")
    num_nodes: int = field_doc("nodes they are spread over", default=1)
    environment: dict[str, str] = field_doc("added to the environment of every rank", default_factory=dict)
    working_directory: str = field_doc("where every rank starts", default_factory=os.getcwd)
    time_limit_s: float | None = field_doc("the job is ended after this time", default=None)
    grace_s: float = field_doc("from asking a rank to end (SIGTERM) to killing it (SIGKILL)", default=10.0)

    def __post_init__(self) -> None:
        for name in ("run_dir", "working_directory"):
            value = getattr(self, name)
            if isinstance(value, str | Path):
                object.__setattr__(self, name, os.path.abspath(os.path.expanduser(value)))
        super().__post_init__()
        if not self.name.strip() or not self.name.isprintable():
            raise ConfigError(f"job.name: {self.name!r} is not allowed. Give one line of printable characters.")
        if not self.argv or not self.argv[0]:
            raise ConfigError("job.argv: () is not allowed. Give the command of one rank, as a list of words.")
        if self.num_nodes < 1 or self.num_processes < 1 or self.num_processes % self.num_nodes:
            raise ConfigError(
                f"job.num_processes: {self.num_processes} on {self.num_nodes} nodes is not allowed. "
                f"Give a whole multiple of num_nodes, at least 1 per node."
            )
        for name, value in (("time_limit_s", self.time_limit_s), ("grace_s", self.grace_s)):
            if value is not None and not value > 0:
                raise ConfigError(f"job.{name}: {value} is not allowed. Give seconds above 0.")
        self._check_text()

    def _check_text(self) -> None:
        for key in self.environment:
            if key in SET_BY_THE_LAUNCHER:
                raise ConfigError(f"job.environment.{key}: the launcher sets it for each rank. Leave it out.")
            if not key or "=" in key:
                raise ConfigError(f"job.environment: {key!r} is not a name of a variable. Leave out '='.")
        words = (*self.argv, *self.environment, *self.environment.values(), self.run_dir, self.working_directory)
        for text in words:
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(f"job: {text!r} holds a NUL or is not valid text, so no command can take it.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus(Record):
    """What a job does now, and why we think so."""

    state: JobState = field_doc("in the words of JobState")
    reason: str = field_doc("one line for people")
    attempt: int = field_doc("counts the starts of this run directory from 1")
    step: int | None = field_doc("last finished optimizer step", default=None)
    heartbeat_age_s: float | None = field_doc("seconds since the last sign of life", default=None)
    exit_code: int | None = field_doc("of a job that has ended", default=None)


def read_status(run_dir: Path) -> JobStatus:
    """Returns the truth about a job as far as this host can know it; `reason` says when it cannot."""
    state = read_state(run_dir)
    alive = _is_alive(state)
    report = read_exit(run_dir)  # after the look at the process, which writes its report before it ends
    attempt = state.attempt if state else last_attempt(run_dir)
    age_s = max(0.0, time.time() - state.heartbeat) if state and state.heartbeat is not None else None
    if report and report.attempt == attempt:
        verdict, reason = JobState.FAILED if report.rc else JobState.DONE, report.reason
    elif state is None:
        verdict, reason = JobState.LOST, "state.json is missing or damaged, and there is no exit.json"
    elif alive is False:
        verdict, reason = JobState.LOST, _epitaph(state)
    else:
        verdict, reason = _living(run_dir, state, age_s)
        if alive is None:
            reason = f"{reason}; {_why_unknown(state)}"
    rc = report.rc if report and verdict in (JobState.DONE, JobState.FAILED) else None
    step = state.step if state else None
    return JobStatus(state=verdict, reason=reason, attempt=attempt, step=step, heartbeat_age_s=age_s, exit_code=rc)


def claim_attempt(run_dir: Path) -> int:
    """Makes the calling process the owner of the next attempt of a run directory, and returns its number.

    Requests to the attempt before are dropped. Left-overs of that attempt cannot write `state.json` from now on.

    Raises:
        JobError: a job is live in this directory.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with locked(run_dir):
        state, status = read_state(run_dir), read_status(run_dir)
        beyond_reach = status.state is JobState.STALLED and _is_alive(state) is None  # fenced off, should it come back
        if not status.state.is_final and not beyond_reach:
            raise JobError(
                f"{run_dir} is in use: attempt {status.attempt} is {status.state} ({status.reason}). "
                f"Attach to it with Job.attach, end it with .stop() or .cancel(), or use another run directory."
            )
        attempt = last_attempt(run_dir) + 1
        for request in (run_dir / "control").glob("request_*"):
            request.unlink(missing_ok=True)
        RunState(state=JobState.QUEUED, attempt=attempt, process=Process.current()).write(run_dir / "state.json")
        return attempt


class Job:
    """A submitted job: look at it, read its logs, end it. Made by a launcher's `submit`, or by `Job.attach`."""

    def __init__(self, run_dir: Path, spec: JobSpec) -> None:
        self.run_dir = run_dir
        self.spec = spec

    @classmethod
    def attach(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Returns the job of a run directory, running or ended.

        Raises:
            JobError: no job was ever submitted there.
        """
        path = Path(run_dir).expanduser().absolute()
        if not (path / "job.json").is_file():
            raise JobError(f"{path}: there is no job here (no job.json). Submit one, or give a job's run directory.")
        return cls(path, JobSpec.read(path / "job.json"))

    def status(self) -> JobStatus:
        """Returns what the job does now, with the reason."""
        return read_status(self.run_dir)

    def logs(self, rank: int = 0, attempt: int | None = None) -> str:
        """Returns everything a rank has printed in an attempt (default: the newest); empty before its first output.

        Raises:
            JobError: no such rank or attempt.
        """
        try:
            return self._log(rank, attempt).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def follow(self, rank: int = 0, poll_s: float = 0.2) -> Iterator[str]:
        """Yields the lines that a rank prints in the newest attempt, old ones first, until that attempt ends."""
        attempt, position, line = last_attempt(self.run_dir), 0, b""
        file = self._log(rank, attempt)
        while True:
            status = self.status()  # before reading, so that what was printed before the end is not missed
            if file.exists():
                with file.open("rb") as stream:
                    stream.seek(position)
                    *lines, line = (line + stream.read()).split(b"\n")
                    position = stream.tell()
                yield from (text.decode(errors="replace") for text in lines)
            if status.state.is_final or status.attempt != attempt:
                if line:
                    yield line.decode(errors="replace")
                return
            time.sleep(poll_s)

    def wait(self, timeout_s: float | None = None, poll_s: float = 0.2) -> JobStatus:
        """Returns the status once the job has ended. For scripts and tests; it blocks a notebook.

        Raises:
            TimeoutError: the job has not ended after `timeout_s`; it goes on.
        """
        start = time.monotonic()
        while not (status := self.status()).state.is_final:
            if timeout_s is not None and time.monotonic() - start >= timeout_s:
                raise TimeoutError(
                    f"{self.run_dir}: still {status.state} after {timeout_s:g} s ({status.reason}). The job goes on; "
                    f"wait longer, or end it with .stop() or .cancel()."
                )
            time.sleep(poll_s)
        return status

    def stop(self) -> None:
        """Asks the trainer to save a checkpoint and end, at its next step boundary."""
        if not self.status().state.is_final:
            ask(self.run_dir, "stop")

    def checkpoint(self) -> None:
        """Asks the trainer to save a checkpoint and go on, at its next step boundary."""
        if not self.status().state.is_final:
            ask(self.run_dir, "checkpoint")

    def cancel(self) -> None:
        """Ends the job without waiting for a step boundary: SIGTERM, then SIGKILL after the job's grace time.

        Raises:
            JobError: the job runs where no signal of ours can reach it.
        """
        state = read_state(self.run_dir)
        if self.status().state.is_final or state is None:
            return
        if state.process is None or not state.process.is_here:
            raise JobError(
                f"{self.run_dir}: cannot be cancelled from here: {_why_unknown(state)}. Use .stop() instead."
            )
        state.process.send_signal(signal.SIGTERM)

    def _log(self, rank: int, attempt: int | None) -> Path:
        newest = last_attempt(self.run_dir)
        if not 0 <= rank < self.spec.num_processes:
            raise JobError(f"{self.run_dir}: no rank {rank}. Allowed: 0 to {self.spec.num_processes - 1}.")
        if attempt is not None and not 1 <= attempt <= newest:
            raise JobError(f"{self.run_dir}: no attempt {attempt}. Allowed: 1 to {newest}.")
        return log_path(self.run_dir, attempt or newest, rank)

    def __repr__(self) -> str:
        return f"Job({self.spec.name!r}, {self.status().state}, {str(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        status = self.status()
        rows = [("state", f"{status.state}: {status.reason}"), ("attempt", status.attempt), ("step", status.step)]
        table = html_table(f"Job {self.spec.name}", [(key, "-" if value is None else value) for key, value in rows])
        return f"{table}<code>{html.escape(str(self.run_dir))}</code>"


def _is_alive(state: RunState | None) -> bool | None:
    """Returns whether the process that answers for the job runs, or None when this host cannot know."""
    if state is None or state.process is None or not state.process.is_here:
        return None
    return state.process.is_alive


def _why_unknown(state: RunState) -> str:
    if state.process is None:
        return "it was not started by a launcher, so only its heartbeat speaks for it"
    return f"it runs on {state.process.host}, so only its heartbeat speaks for it here"


def _epitaph(state: RunState) -> str:
    process = state.process
    assert process is not None
    return (
        f"process {process.pid} on {process.host} is gone and left no exit.json: "
        f"it was killed, or the machine went down, while {state.state}"
    )


def _living(run_dir: Path, state: RunState, age_s: float | None) -> tuple[JobState, str]:
    """Returns state and reason of a job that has not ended, as far as we know."""
    seen = "no heartbeat yet" if age_s is None else f"last heartbeat {age_s:.0f} s ago"
    stop_asked = asked_at(run_dir, "stop")
    if stop_asked is not None:
        return JobState.STOPPING, f"asked to stop {max(0.0, time.time() - stop_asked):.0f} s ago; {seen}"
    saving = state.state is JobState.STOPPING  # the last checkpoint takes its time
    if age_s is not None and not saving and age_s > _stalled_after_s(state):
        return JobState.STALLED, f"{seen} while {state.state}; stalled after {_stalled_after_s(state):.0f} s"
    doing = f"step {state.step}" if state.step is not None else (state.reason or "no step yet")
    return state.state, f"{doing}; {seen}"


def _stalled_after_s(state: RunState) -> float:
    if state.state in (JobState.QUEUED, JobState.CONFIGURING, JobState.STARTING):
        return STALLED_START_S
    return max(STALLED_AFTER_S, STALLED_AFTER_STEPS * (state.step_time_s or 0.0))
