"""The files of a run directory that describe the state of its job, and the only functions that
write these files.

    state.json                state, attempt, step, heartbeat, identity of the process that is
                              responsible for the job
    exit.json                 how an attempt ended: return code, reason, first failing rank and the
                              last lines of its log
    ranks/                    heartbeats: `cluster.heartbeats`
    control/request_stop      a request to the trainer (also request_checkpoint). `touch` can create
                              it, too
    control/taken_stop        when the trainer of this attempt took its last request (also
                              taken_checkpoint)
    logs/attempt_01/          rank_00000.log, rank_00001.log, ... In jobs of many ranks only rank 0
                              and failed ranks have such a log. Other ranks share node_0.log, ...
    history.jsonl             one line per change of state, append only
    .reserve                  disk space that an attempt reserves for the record of its end

All files but the logs and the history are replaced by atomic rename. Readers return None for a file
that is missing, torn, or was written by another program. They ignore keys that a newer version may
have added. A process of an older attempt cannot write them: `update_state` raises
StaleAttemptError. Standard library only.
"""

import contextlib
import dataclasses
import enum
import json
import os
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from cluster.files import (
    NO_RECORD,
    append_lines,
    lock_file,
    read_small,
    try_lock,
    user_name,
)
from cluster.process import Process
from cluster.record import Record, field_doc, must

LOCK_WAIT_S = 5.0
FOLDERS = (
    "checkpoints",
    "control",
    "eval",
    "logs",
    "monitor",
    "profile",
    "ranks",
    "tensorboard",
    "wandb",
)
"""Folders of a run directory in which the kit writes, replaces and deletes files."""

Request = Literal["stop", "checkpoint"]


class JobError(RuntimeError):
    """A job cannot be started, reached or ended."""


class StaleAttemptError(JobError):
    """The run directory belongs to a newer attempt. This process belongs to an older attempt and
    must end.
    """


class JobState(enum.StrEnum):
    """State of a job. The states are common to all schedulers: each scheduler's own states are
    mapped to them.
    """

    QUEUED = "queued"
    CONFIGURING = "configuring"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    IMPORTED = "imported"
    """The run was imported from the log of another trainer, so the kit never runs a job for it."""

    @property
    def is_final(self) -> bool:
        """Whether an attempt in this state will never run again."""
        return self in (JobState.DONE, JobState.FAILED, JobState.LOST, JobState.IMPORTED)


GIVEN_UP = (JobState.PREEMPTED, JobState.REQUEUED)
"""States of an attempt that has ended and that another attempt will follow."""
ENDED = (JobState.DONE, JobState.FAILED)
"""Final states that a supervisor records. LOST is not among them: it means that the fate of the
attempt is unknown, and its processes may still report."""


CANCELLED = "cancelled"
"""First word of the reason for the end of an attempt that a user or an administrator has
cancelled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerJob(Record):
    """Identification of a job in its scheduler."""

    scheduler: Literal["slurm", "kubernetes"] = field_doc("scheduler that runs the job")
    # The id becomes an argument of commands. A command would read an id that begins with - as an
    # option.
    id: str = field_doc(
        "number or name of the job in its scheduler",
        must(
            re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*").fullmatch,
            "Give letters, digits and . _ / -, not - first.",
        ),
    )
    config: str | None = field_doc(
        "path of slurm.conf (SLURM_CONF) or context of kubectl, by which commands reach the"
        " scheduler; default: the commands use their own default",
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRecord(Record):
    """State of an attempt: base class of the records of state.json, history.jsonl and the
    status.
    """

    state: JobState = field_doc("state of the job, one of the values of JobState")
    attempt: int = field_doc(
        "number of the attempt, counted from 1; each start of the run's ranks is one attempt"
    )
    step: int | None = field_doc("number of the last finished optimizer step", default=None)
    reason: str = field_doc("reason for the state, in one line for people", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState(StateRecord):
    """Content of state.json: the state that the job has last reported. `read_status` checks whether
    the report still holds.
    """

    heartbeat: float | None = field_doc("Unix time of the last heartbeat, in seconds", default=None)
    step_time_s: float | None = field_doc("duration of a recent step, in seconds", default=None)
    starting_s: float | None = field_doc(
        "seconds for which a starting job has had the present `reason`, by the clock of the"
        " supervisor",
        default=None,
    )
    has_joined: bool = field_doc(
        "whether all ranks of this attempt have passed the rendezvous", default=False
    )
    process: Process | None = field_doc(
        "process that is responsible for the job: its supervisor", default=None
    )
    scheduler_job: SchedulerJob | None = field_doc(
        "job of Slurm or Kubernetes that runs this attempt; None: no scheduler runs it",
        default=None,
    )
    notice: str = field_doc("message of the ranks to the user while training continues", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event(StateRecord):
    """A line of history.jsonl: a change of the job's state."""

    time: float = field_doc("Unix time of the change, in seconds")
    job_id: str | None = field_doc(
        "number or name of the job in Slurm or Kubernetes; None: no scheduler runs the job",
        default=None,
    )
    lost_node: str | None = field_doc(
        "name of the node that no longer answered when the attempt ended, or several names with"
        " commas between them",
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitReport(Record):
    """Content of exit.json: how an attempt ended."""

    attempt: int = field_doc("number of the attempt that ended")
    rc: int = field_doc(
        "return code of the attempt: 0, or the return code of the first failing rank; 128 + n for"
        " signal n, as in a shell"
    )
    reason: str = field_doc("reason for the end, in one line for people")
    host: str = field_doc("name of the host that wrote the report")
    time: float = field_doc("Unix time of the end, in seconds")
    failing_rank: int | None = field_doc(
        "global number of the rank that failed first", default=None
    )
    log_tail: str = field_doc("last lines of the log of the rank that failed first", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRecord(Record):
    """Content of control/request_stop or control/request_checkpoint: a request that the trainer has
    not taken yet.
    """

    asked_at: float = field_doc("Unix time of the request, in seconds")
    by_person: bool = field_doc(
        "whether a person made the request; false: the supervisor made it, for example near the"
        " time limit, and the run continues in a new attempt",
        default=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakenRequest(RequestRecord):
    """Content of control/taken_stop or control/taken_checkpoint: the last request of this attempt
    that the trainer has taken.
    """

    taken_at: float = field_doc("Unix time at which the trainer read the request, in seconds")
    step: int | None = field_doc(
        "number of the optimizer step after which the trainer acts on the request", default=None
    )


def read_state(run_dir: Path) -> RunState | None:
    """Returns the content of state.json, or None if it is missing, damaged or cannot be read."""
    return RunState.read_or_none(run_dir / "state.json")


def state_to_change(run_dir: Path) -> RunState | None:
    """Returns the content of state.json for a caller that will change the file. Returns None if the
    file is missing or damaged.

    Raises:
        OSError: The file system fails. The file may contain fields that must not be lost.
    """
    return RunState.read_present(run_dir / "state.json")


def read_exit(run_dir: Path) -> ExitReport | None:
    """Returns the content of exit.json, which describes the attempt that ended last. Returns None
    if the file is missing, damaged or cannot be read.
    """
    return ExitReport.read_or_none(run_dir / "exit.json")


def update_state(
    run_dir: Path, *, attempt: int, lost_node: str | None = None, **changes: Any
) -> RunState:
    """Changes fields of state.json and returns the new content. The first update of an attempt
    resets all other fields to their defaults.

    `attempt` is the attempt of the caller (`KIT_ATTEMPT` in the environment of a rank). `changes`
    are fields of `RunState`. `lost_node` is the node that no longer answers, for the history. If
    the state changes and no reason is given, the reason becomes empty, since the old reason
    explained the old state.

    Raises:
        StaleAttemptError: A newer attempt owns the directory, or the caller's attempt was given up
            or has ended. The caller must end without writing anything.
        ConfigError: A field is unknown or has a value of the wrong type.
        OSError: The file state.json could not be read or written. It is unchanged.
    """
    with lock_state(run_dir):
        refuse_stale(run_dir, attempt)
        old = state_to_change(run_dir)
        fresh = old is None or old.attempt < attempt
        state = RunState(state=JobState.RUNNING, attempt=attempt) if old is None or fresh else old
        if changes.get("state", state.state) is not state.state:
            changes = {"reason": "", **changes}
        new = state.replace(**changes)
        is_over = not fresh and state.state in (*GIVEN_UP, *ENDED)
        # A rank may outlive the end of its attempt, for instance while a scheduler cancels the job.
        if is_over and not (new.state in GIVEN_UP or new.state.is_final):
            what = "was given up" if state.state in GIVEN_UP else "has ended"
            raise StaleAttemptError(
                f"{run_dir}: attempt {attempt} {what}: {state.reason}. End this process."
            )
        new.write(run_dir / "state.json")
        if old is None or fresh or new.state is not old.state:
            record_event(run_dir, new, lost_node)
        return new


def record_event(run_dir: Path, state: RunState, lost_node: str | None = None) -> None:
    """Appends the current state of the job to history.jsonl. If the disk is full or the file system
    fails, prints a warning instead of an error, since state.json contains the state, too.
    """
    event = Event(
        time=time.time(),
        attempt=state.attempt,
        state=state.state,
        reason=state.reason,
        step=state.step,
        job_id=state.scheduler_job.id if state.scheduler_job else None,
        lost_node=lost_node,
    )
    try:
        append_lines(run_dir / "history.jsonl", f"{json.dumps(event.to_dict())}\n".encode())
    except OSError as error:
        with contextlib.suppress(OSError):
            print(
                f"WARNING: the state {event.state} of attempt {event.attempt} is not in"
                f" {run_dir / 'history.jsonl'}: {error}",
                file=sys.stderr,
                flush=True,
            )


def read_history(run_dir: Path) -> list[Event]:
    """Returns all changes of state in history.jsonl, oldest first. Torn lines are left out. Returns
    an empty list if the file is missing or cannot be read.
    """
    try:
        return read_complete_history(run_dir)
    except OSError:
        return []


def read_complete_history(run_dir: Path) -> list[Event]:
    """Returns all changes of state in history.jsonl, oldest first, for a decision about the job.
    Unlike `read_history`, raises an error if events may be missing.

    Raises:
        OSError: The file system fails, so the file may contain more events.
    """
    try:
        lines = read_small(run_dir / "history.jsonl").splitlines()
    except OSError as error:
        if error.errno not in NO_RECORD:
            raise
        return []
    events = [Event.parsed(line) for line in lines]
    return [event for event in events if event]


def write_exit(run_dir: Path, report: ExitReport) -> None:
    """Writes exit.json.

    Raises:
        StaleAttemptError: A newer attempt owns the directory.
    """
    with lock_state(run_dir):
        refuse_stale(run_dir, report.attempt)
        report.write(run_dir / "exit.json")


def last_attempt(run_dir: Path) -> int:
    """Returns the number of the newest attempt found in state.json, exit.json or the names of logs,
    or 0.

    Raises:
        OSError: The file system fails.
    """
    report = ExitReport.read_present(run_dir / "exit.json")
    found = [record.attempt for record in (state_to_change(run_dir), report) if record]
    names = (re.match(r"attempt_(\d+)", file.name) for file in (run_dir / "logs").glob("attempt_*"))
    return max([0, *found, *(int(match[1]) for match in names if match)])


def log_path(run_dir: Path, attempt: int, rank: int) -> Path:
    """Returns the path of a rank's own log, with its standard output and error. In jobs of many
    ranks, most ranks write to the log of their node instead.
    """
    return run_dir / "logs" / f"attempt_{attempt:02d}" / f"rank_{rank:05d}.log"


def rank_logs(run_dir: Path, attempt: int, rank: int, ranks_per_node: int) -> tuple[Path, Path]:
    """Returns (log of the rank, log of its node). The output of the rank is in the first of the two
    that is not empty.
    """
    own = log_path(run_dir, attempt, rank)
    return own, own.with_name(f"node_{rank // ranks_per_node}.log")


def script_logs(run_dir: Path, state: RunState) -> list[Path]:
    """Returns the paths of the logs of the processes that start the ranks of an attempt.

    Under Slurm these are the log of the batch script, which also runs the supervisor, and the log
    of the script that compiles before the run. On this machine it is the log of the supervisor.
    Under Kubernetes there are no such files, since the output is in the logs of the pods.
    """
    job = state.scheduler_job
    logs = run_dir / "logs"
    if job is None:
        # One supervisor may have started several attempts.
        started = [
            file
            for file in sorted(logs.glob("attempt_*_supervisor.log"))
            if file.name <= f"attempt_{state.attempt:02d}_supervisor.log"
        ]
        return started[-1:]
    # The state.json of another user may have a path as id.
    if job.scheduler == "slurm" and job.id.isdigit():
        return [logs / f"slurm-{job.id}.log", compile_log(run_dir, state.attempt)]
    return []


def compile_log(run_dir: Path, attempt: int) -> Path:
    """Returns the path of the log of the job that compiles before an attempt."""
    return run_dir / "logs" / f"attempt_{attempt:02d}_compile.log"


def find_log(run_dir: Path, attempt: int, rank: int, ranks_per_node: int) -> Path:
    """Returns the log that contains the output of a rank: the log of the rank or the log of its
    node. Returns the path of the log of the rank if neither log has content.
    """
    logs = rank_logs(run_dir, attempt, rank, ranks_per_node)
    return next((file for file in logs if file.exists() and file.stat().st_size), logs[0])


def write_request(run_dir: Path, request: Request, *, by_person: bool = True) -> None:
    """Writes a request to the trainer, which reads it at a step boundary. The request of a person
    replaces a waiting request of the supervisor.

    Raises:
        JobError: Another user has put a link in place of a folder of the run.
    """
    refuse_planted_links(run_dir)
    RequestRecord(asked_at=time.time(), by_person=by_person).write(
        run_dir / "control" / f"request_{request}"
    )


def read_pending_request(run_dir: Path, request: Request) -> RequestRecord | None:
    """Returns a request that the trainer has not taken yet. Returns None if there is no request, or
    if the file cannot be read now.
    """
    file = run_dir / "control" / f"request_{request}"
    try:
        changed = file.stat().st_mtime
        # A file that `touch` made is empty and counts as a request.
        return RequestRecord.read_present(file) or RequestRecord(asked_at=changed)
    except OSError:
        return None


def take_request(run_dir: Path, request: Request, *, step: int | None = None) -> bool:
    """Takes a waiting request: writes control/taken_REQUEST and removes the file of the request.
    Returns whether there was a request. Only rank 0 of the trainer calls this function.

    Raises:
        OSError: The disk is full or the file system fails. The request is still waiting.
    """
    asked = read_pending_request(run_dir, request)
    if asked is None:
        return False
    taken = TakenRequest(
        asked_at=asked.asked_at, by_person=asked.by_person, taken_at=time.time(), step=step
    )
    taken.write(run_dir / "control" / f"taken_{request}")
    (run_dir / "control" / f"request_{request}").unlink(missing_ok=True)
    return True


def record_request_step(run_dir: Path, request: Request, step: int) -> None:
    """Records in control/taken_REQUEST after which optimizer step the trainer acts on the request.

    Raises:
        OSError: The file could not be read or written.
    """
    file = run_dir / "control" / f"taken_{request}"
    taken = TakenRequest.read_present(file)
    if taken is not None:
        taken.replace(step=step).write(file)


def read_taken_request(run_dir: Path, request: Request) -> TakenRequest | None:
    """Returns the last request of the kind `request` that the trainer of this attempt has taken, or
    None.
    """
    return TakenRequest.read_or_none(run_dir / "control" / f"taken_{request}")


def is_stop_requested(run_dir: Path) -> bool:
    """Returns whether a person asked the newest attempt to stop. The trainer may have taken the
    request already.
    """
    requests = (read_pending_request(run_dir, "stop"), read_taken_request(run_dir, "stop"))
    return any(request is not None and request.by_person for request in requests)


@contextlib.contextmanager
def lock_state(run_dir: Path) -> Iterator[None]:
    """Locks a run directory during the `with` block, so that only one process at a time changes
    state.json, exit.json or the attempt number.

    If the lock is not free after LOCK_WAIT_S seconds, or if the file system supports no locks, the
    block runs without the lock. Each file is still replaced atomically, and a frozen process must
    not block a training run. The lock file of a frozen process is deleted. Later writers then lock
    a new file and do not wait for the frozen process.
    """
    with lock_file(run_dir / ".state.lock") as stream:
        if not try_lock(stream, LOCK_WAIT_S) and os.fstat(stream.fileno()).st_nlink:
            (run_dir / ".state.lock").unlink(missing_ok=True)
        yield


def refuse_planted_links(run_dir: Path) -> None:
    """Raises JobError if one of a run's FOLDERS, or a folder in one of FOLDERS, is a link that
    another user made. Links of this user and of root are allowed.

    Files would be written and deleted in the folder to which the link points. A link of this user,
    such as a link from `checkpoints` to a larger disk, is followed.
    """
    for name in FOLDERS:
        folder = run_dir / name
        refuse_planted_link(folder)
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            # A link to a file needs no check, since an atomic rename replaces the link and does not
            # follow it.
            if entry.is_symlink() and os.path.isdir(entry.path):
                refuse_planted_link(Path(entry.path))


def refuse_planted_link(folder: Path) -> None:
    """Raises JobError if a folder is a link that neither this user nor root made."""
    try:
        about = os.lstat(folder)
    except OSError:
        return
    if stat.S_ISLNK(about.st_mode) and about.st_uid not in (os.geteuid(), 0):
        owner = user_name(about.st_uid)
        raise JobError(
            f"{folder}: it is a link that {owner} made, to {os.readlink(folder)}. Only links"
            " that you or root made are allowed there. Remove it with"
            f" `rm {shlex.quote(str(folder))}`, and let nobody else write in the run directory."
        )


def refuse_stale(run_dir: Path, attempt: int) -> None:
    """Raises StaleAttemptError if a newer attempt owns a run directory, or OSError if the file
    system fails.
    """
    state = state_to_change(run_dir)
    owner = state.attempt if state else last_attempt(run_dir)
    if attempt < owner:
        raise StaleAttemptError(
            f"{run_dir}: attempt {attempt} may not write, the directory belongs to attempt {owner}"
            f" now. This process is a left-over of attempt {attempt}; end it."
        )
