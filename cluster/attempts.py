"""Begins and ends the attempts of a run. An attempt is one start of the ranks. Its owner, a process
or a scheduler's job, is recorded in the run directory.

Standard library only.
"""

import contextlib
import dataclasses
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from cluster.directory_handle import RunDirectory, retry_disk
from cluster.files import FULL, RESERVE, RESERVE_BYTES, open_for_reading, print_line, write_atomic
from cluster.logs import end_reason, log_tail
from cluster.ownership import refuse_other_owner
from cluster.process import Process
from cluster.record import kit_command
from cluster.state import (
    ExitReport,
    JobError,
    JobState,
    RunState,
    SchedulerJob,
    is_stop_requested,
    last_attempt,
    lock_state,
    log_path,
    read_state,
    record_event,
    refuse_planted_links,
    refuse_stale,
    state_to_change,
    update_state,
    write_exit,
    write_request,
)
from cluster.status import is_alive, read_status, watch_silent

FOLLOWS = "KIT_FOLLOWS"
"""Environment variable with value `JOB/ATTEMPT`: the job and attempt that this job replaces, and
whose run directory it takes over."""
USELESS_TO_RETRY = os.EX_CONFIG
"""Exit code of a failure that would occur again after a restart, such as wrong input or a full
disk."""
Files = Mapping[str, str | None]
"""Text of each file, by the name of the file in the run directory. If the text is None, the file is
removed."""


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
    """The end of an attempt and the decision about its job."""

    rc: int
    reason: str
    """Reason for the end of the attempt, in one line for people."""
    failing_rank: int | None = None
    """Global number of the rank that failed first. None if no rank has failed."""
    fate: Literal["end", "restart", "requeue", "taken"] = "end"
    """Decision: `end` the job, `restart` the ranks in this allocation, or `requeue` the job for
    another allocation. `taken` means that Slurm has requeued the job already, or that a newer
    attempt owns the run."""
    lost_node: str | None = None
    """Name of the node that no longer answers, or several names separated by commas. None if all
    nodes answer."""


def claim_attempt(run_dir: Path) -> int:
    """Makes the calling process the owner of the next attempt of a run directory. Returns the
    number of this attempt.

    Deletes the requests to the previous attempt. After this call, processes of the previous attempt
    cannot write `state.json`.

    Raises:
        JobError: A job is live in this directory, or the directory belongs to another user.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    # `watch_silent` waits for a new heartbeat of a running job. The lock is taken later, since the
    # running job needs it to write its heartbeat.
    watch_silent([run_dir])
    with lock_state(run_dir):
        refuse_live(run_dir)
        return _begin(run_dir, state=JobState.QUEUED, process=Process.current())


@contextlib.contextmanager
def claimed(run_dir: Path, files: Files) -> Iterator[int]:
    """Claims the next attempt of a run directory, writes `files` into it, and yields the number of
    the attempt. The block of the `with` statement then starts the job.

    If the block raises an error, it has started no job. All files of the directory, requests
    included, are then restored to their content before the call.

    Raises:
        JobError: A job is live in this directory, or the directory belongs to another user.
    """
    with new_folders(run_dir, run_dir / "logs", run_dir / "control"):
        ours = ("state.json", "exit.json", "history.jsonl", ".state.lock", RESERVE)
        written = [run_dir / name for name in (*files, *ours)]
        before = _contents([*written, *_requests(run_dir)])
        attempt = claim_attempt(run_dir)
        try:
            write_files(run_dir, files)
            yield attempt
        except Exception:
            _put_back(run_dir, before, [*written, *_requests(run_dir)], attempt)
            raise


def write_files(run_dir: Path, files: Files) -> None:
    """Writes `files` into a run directory. Removes each file whose text is None."""
    for name, text in files.items():
        if text is None:
            (run_dir / name).unlink(missing_ok=True)
        else:
            write_atomic(run_dir / name, text)


@contextlib.contextmanager
def new_folders(*folders: Path) -> Iterator[None]:
    """Creates folders and their parents. If the block raises an error, removes the new folders that
    are empty.
    """
    new = set[Path]()
    for folder in folders:
        new |= {path for path in (folder, *folder.parents) if not path.exists()}
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in sorted(new, reverse=True):  # Inner folders are removed before outer folders.
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def refuse_live(run_dir: Path) -> None:
    """Raises JobError if a run directory belongs to another user, or if a job is live in it."""
    refuse_other_owner(run_dir, "start a job in it")
    watch_silent([run_dir])
    state = read_state(run_dir)
    status = read_status(run_dir, waits=False)
    scheduled = state is not None and state.scheduler_job is not None
    # A stalled process that this host cannot examine does not block the run directory. If the
    # process continues later, its writes are refused, since a newer attempt owns the directory.
    beyond_reach = status.state is JobState.STALLED and is_alive(state) is None and not scheduled
    if not status.state.is_final and not beyond_reach:
        raise JobError(
            f"{run_dir} is in use: attempt {status.attempt} is {status.state} ({status.reason})."
            f" End it with `{kit_command('stop', run_dir)}` (--now: at once), or use another run"
            " directory."
        )


def next_attempt(run_dir: Path, attempt: int, reason: str) -> int:
    """Begins the next attempt after `attempt` has ended. The calling process, the supervisor of
    `attempt`, also owns the new attempt. Returns the number of the new attempt.

    Raises:
        StaleAttemptError: Another process has begun a newer attempt.
    """
    with lock_state(run_dir):
        refuse_stale(run_dir, attempt)
        return _begin(
            run_dir,
            state=JobState.STARTING,
            process=Process.current(),
            heartbeat=time.time(),
            reason=f"restarting: {reason}",
        )


def hand_over(run_dir: Path, attempt: int, job: SchedulerJob) -> None:
    """Records in state.json that the scheduler's job owns the attempt. Before this call, the owner
    is the submitting process, which is about to end.

    The job may have started before this call. Fields that the job has written are kept.
    """
    with lock_state(run_dir):
        state = state_to_change(run_dir)
        if state is None or state.attempt != attempt or state.scheduler_job is not None:
            return
        if state.state is JobState.QUEUED:
            state = state.replace(process=None, reason=f"submitted to {job.scheduler} as {job.id}")
        state.replace(scheduler_job=job).write(run_dir / "state.json")


def take_over(run_dir: Path, job: SchedulerJob) -> int:
    """Makes the calling process, a supervisor that the scheduler has started, the owner of an
    attempt.

    Returns the number of the attempt. This is the queued attempt, or the next attempt after a
    requeue or a restart.

    Raises:
        JobError: The run directory belongs to another job, which has not ended.
    """
    with lock_state(run_dir):
        state = state_to_change(run_dir)
        known = state.scheduler_job if state else None
        follows = os.environ.get(FOLLOWS)
        ours = (
            not (state and known) or known.id == job.id or follows == f"{known.id}/{state.attempt}"
        )
        # The field `config` says how the submitter reaches the scheduler, so the old value is kept.
        job = job.replace(config=known.config) if known and ours else job
        here = {
            "state": JobState.STARTING,
            "process": Process.current(),
            "scheduler_job": job,
            "heartbeat": time.time(),
            "reason": f"started by job {job.id} on {os.uname().nodename}",
        }
        if state and ours and state.state is JobState.QUEUED:
            begun = state.replace(**here)
            begun.write(run_dir / "state.json")
            record_event(run_dir, begun)
            return state.attempt
        if not ours and not read_status(run_dir, waits=False).state.is_final:
            assert known is not None
            raise JobError(
                f"{run_dir} belongs to job {known.id} now, this is job {job.id}. Nothing was"
                " started."
            )
        told = ours and is_stop_requested(run_dir)
        attempt = _begin(run_dir, **here)
        # Slurm itself requeued the job after a person had asked it to stop. `_begin` has deleted
        # this request, whether or not the trainer had taken it, so it is written again.
        if told:
            write_request(run_dir, "stop")
        return attempt


def record_end(home: RunDirectory, attempt: int, outcome: AttemptOutcome) -> None:
    """Writes exit.json, then the final state of an attempt. After an error of the file system,
    `retry_disk` repeats the writes for two minutes.

    The files of a newer attempt or of another run are not changed. If the end cannot be recorded,
    prints the reason.
    """
    try:
        home.check()
        retry_disk(lambda: write_end(home.run_dir, attempt, outcome), home)
    except (JobError, OSError) as error:
        print_line(
            f"the end of attempt {attempt} ({outcome.reason}) could not be recorded: {error}"
        )


def write_end(run_dir: Path, attempt: int, outcome: AttemptOutcome) -> None:
    """Writes exit.json, then the final state in state.json, for an attempt that has just ended on
    this host.

    The reason ends with the last line of the rank that failed first. If the disk is full, deletes
    the file RESERVE to make room for the record. The reason then also says that the disk is full.

    Raises:
        StaleAttemptError: A newer attempt owns the directory.
    """
    rank = outcome.failing_rank
    reason = outcome.reason
    tail = "" if rank is None else log_tail(log_path(run_dir, attempt, rank))
    if said := end_reason(tail):
        reason = f"{reason}: {said}"
    report = ExitReport(
        attempt=attempt,
        rc=outcome.rc,
        reason=reason,
        host=socket.gethostname(),
        time=time.time(),
        failing_rank=rank,
        log_tail=tail,
    )
    try:
        _end(run_dir, report)
    except OSError as error:
        if error.errno not in FULL:
            raise
        (run_dir / RESERVE).unlink(missing_ok=True)
        full = "" if str(error.strerror) in reason else f"; {error.strerror}"
        _end(run_dir, report.replace(reason=reason + full))


def _requests(run_dir: Path) -> list[Path]:
    return list((run_dir / "control").glob("*"))


def _contents(files: list[Path]) -> dict[Path, bytes]:
    """Returns a dict from path to content for each file that exists.

    Links are left out, since a link that another user made may point to a private file of this
    user. Its content would be written into the run directory when the files are restored.
    """
    found = {}
    for file in files:
        with contextlib.suppress(OSError), open_for_reading(file) as stream:
            found[file] = stream.read()
    return found


def _put_back(run_dir: Path, before: dict[Path, bytes], written: list[Path], attempt: int) -> None:
    """Restores each file in `before` to its old content after a failed start. Removes the other
    files in `written`, and the logs of the attempt that was not started.
    """
    after = _contents(list(before))
    for file, content in before.items():
        if after.get(file) != content:
            write_atomic(file, content)
    new = [file for file in written if file not in before]
    for file in [*new, *(run_dir / "logs").glob(f"attempt_{attempt:02d}_*")]:
        file.unlink(missing_ok=True)
    shutil.rmtree(log_path(run_dir, attempt, 0).parent, ignore_errors=True)


def _begin(run_dir: Path, **fields: Any) -> int:
    """Writes the files of the next attempt and returns its number. `fields` are values for fields
    of state.json (`RunState`).

    Raises:
        JobError: Another user has put a link in place of a folder of the run.
    """
    refuse_planted_links(run_dir)
    begun = RunState(attempt=last_attempt(run_dir) + 1, **fields)
    # The control folder is created now, so that `touch RUN/control/request_stop` works from the
    # start.
    with new_folders(log_path(run_dir, begun.attempt, 0).parent, run_dir / "control"):
        # Random bytes cannot be compressed, so the file takes its full size on every file system.
        write_atomic(run_dir / RESERVE, os.urandom(RESERVE_BYTES))
        for left_over in _requests(run_dir):
            left_over.unlink(missing_ok=True)
        begun.write(run_dir / "state.json")
    record_event(run_dir, begun)
    return begun.attempt


def _end(run_dir: Path, report: ExitReport) -> None:
    write_exit(run_dir, report)
    state = JobState.FAILED if report.rc else JobState.DONE
    update_state(run_dir, attempt=report.attempt, state=state, reason=report.reason)
