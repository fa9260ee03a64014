"""`JobSpec`, the description of a job, and `Job`, the handle of a submitted job, for every
scheduler.

A `Job` keeps no connection and no state in memory. Each call reads the run directory, so any
process may attach to any job. A job is not affected by the end of a process that has attached to
it. Standard library only.
"""

import codecs
import contextlib
import dataclasses
import html
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from cluster import poll
from cluster.attempts import AttemptOutcome, write_end
from cluster.files import open_for_reading
from cluster.login import mirror
from cluster.ownership import Owned
from cluster.record import (
    ConfigError,
    Record,
    counted,
    field_doc,
    html_table,
    kit_command,
    must,
    one_line,
)
from cluster.scheduler import SECRET_VALUE, check_environment
from cluster.state import (
    CANCELLED,
    Event,
    JobError,
    JobState,
    Request,
    StaleAttemptError,
    last_attempt,
    read_history,
    read_state,
    write_request,
)
from cluster.status import JobStatus as JobStatus
from cluster.status import is_alive, why_unknown
from cluster.status import read_status as read_status

CHUNK_BYTES = 2**20
LOG_BYTES = 64 << 20
"""Maximum number of bytes of a log that `Job.logs` returns, counted from the end of the log.
`Job.read_logs` returns larger logs in pieces."""
SET_BY_THE_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "KIT_ATTEMPT"}

positive_seconds = must(lambda value: value > 0, "Give seconds above 0.")


def check_command_line(argv: tuple[str, ...], path: str) -> None:
    """Raises ConfigError if a command is empty, or if a word of it looks like a secret."""
    if not argv or not argv[0]:
        raise ConfigError(
            f"{path}: () is not allowed. Give the command of one rank, as a list of words."
        )
    pairs = [f"{word} {following}" for word, following in itertools.pairwise([*argv, ""])]
    if any(SECRET_VALUE.search(pair) for pair in pairs):
        raise ConfigError(
            f"{path}: a word of the command looks like a secret, and everyone who may read the run"
            " directory could read it there. Leave it out, and export it as a variable in the shell"
            " or notebook that submits: the job inherits it."
        )


def check_for_ranks(variables: dict[str, str], path: str) -> None:
    """Raises ConfigError for a variable that no shell can export, that looks like a secret, or that
    the launcher sets for each rank.
    """
    check_environment(variables, path)
    if given := variables.keys() & SET_BY_THE_LAUNCHER:
        raise ConfigError(f"{path}.{min(given)}: the launcher sets it for each rank. Leave it out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec(Record):
    """Description of a job: one command, started as several processes that find each other by
    environment variables.
    """

    name: str = field_doc("name of the job in queues and titles", one_line)
    run_dir: str = field_doc("run directory; a relative path is made absolute")
    argv: tuple[str, ...] = field_doc("command of one rank, as a list of words", check_command_line)
    num_processes: int = field_doc("number of ranks over all nodes: one per device")
    num_nodes: int = field_doc("number of nodes over which the ranks are spread", default=1)
    forks: bool = field_doc(
        "whether ranks on this machine may be forked from one process that has imported MODULE,"
        " to save import time; argv must be `python -P -m MODULE ...`",
        default=False,
    )
    environment: dict[str, str] = field_doc(
        "variables added to the environment of every rank", check_for_ranks, default_factory=dict
    )
    working_directory: str = field_doc(
        "working directory in which every rank starts", default_factory=os.getcwd
    )
    time_limit_s: float | None = field_doc(
        "time in seconds after which the job is ended; default: no limit",
        positive_seconds,
        default=None,
    )
    grace_s: float = field_doc(
        "seconds between asking a rank to end (SIGTERM) and killing it (SIGKILL)",
        positive_seconds,
        default=10.0,
    )
    max_restarts: int = field_doc(
        "maximum number of restarts in a row without a new optimizer step in between; after one"
        " more crash the job has failed; 0: no restart",
        must(lambda number: number >= 0, "Give 0 or more."),
        default=2,
    )

    def __post_init__(self) -> None:
        for name in ("run_dir", "working_directory"):
            value = getattr(self, name)
            if isinstance(value, str | Path):
                object.__setattr__(self, name, os.path.abspath(os.path.expanduser(value)))
        super().__post_init__()
        if self.num_nodes < 1 or self.num_processes < 1 or self.num_processes % self.num_nodes:
            raise ConfigError(
                f"job.num_processes: {self.num_processes} on {counted(self.num_nodes, 'node')} is"
                " not allowed. Give a whole multiple of num_nodes, at least 1 per node."
            )
        words = (
            *self.argv,
            *self.environment,
            *self.environment.values(),
            self.run_dir,
            self.working_directory,
        )
        for text in words:
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(
                    f"job: {text!r} holds a NUL or is not valid text, so no command can take it."
                )

    def check_command(self) -> None:
        """Raises ConfigError if the command or the working directory does not exist on this
        machine.
        """
        if not Path(self.working_directory).is_dir():
            raise ConfigError(
                f"job.working_directory: {self.working_directory!r} is not a directory. Create it"
                " first."
            )
        in_directory = "/" in self.argv[0]  # A command without a slash is searched in PATH.
        command = (
            os.path.join(self.working_directory, self.argv[0]) if in_directory else self.argv[0]
        )
        if shutil.which(command, path=self.environment.get("PATH")) is None:
            raise ConfigError(
                f"job.argv: {self.argv[0]!r} is not an executable file. Check the path, or"
                " install it."
            )


def _size_of(file: Path) -> int:
    """Returns the size of a log in bytes, or 0 if the log is missing.

    Raises:
        JobError: The log cannot be read.
    """
    try:
        with open_for_reading(file, follows=True) as stream:
            return os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise JobError(f"{file}: {error.strerror}.") from error


def _pieces_of(file: Path, begin: int = 0) -> Iterator[str]:
    """Yields the text of a log from byte `begin` to its present end, in pieces of at most
    CHUNK_BYTES bytes. A log may be larger than the memory. Yields nothing if the log is missing.

    Raises:
        JobError: The log cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        with open_for_reading(file, follows=True) as stream:
            left = os.fstat(stream.fileno()).st_size - begin
            stream.seek(begin)
            while left > 0 and (chunk := stream.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                yield decoder.decode(chunk)
    except FileNotFoundError:
        return
    except OSError as error:
        raise JobError(f"{file}: {error.strerror}.") from error
    yield decoder.decode(b"", final=True)


def _end_of(file: Path) -> str:
    """Returns the text of a log. For a log larger than LOG_BYTES, returns the last LOG_BYTES bytes,
    after a line that says how many bytes are left out.

    Raises:
        JobError: The log cannot be read.
    """
    begin = max(0, _size_of(file) - LOG_BYTES)
    text = "".join(_pieces_of(file, begin))
    return f"[the first {begin:,} bytes of {file} are left out here]\n{text}" if begin else text


def log_file(
    run_dir: Path, attempt: int, rank: int, ranks_per_node: int, *, waits: bool = False
) -> Path:
    """Returns the path of the file that contains the output of a rank.

    A log on another machine is copied to this machine. With `waits`, the function waits until the
    content was copied.
    """
    return mirror.fetch_log(run_dir, attempt, rank, ranks_per_node, waits)


class Job(Owned):
    """Handle of a submitted job: returns its status and its logs, sends requests to it and ends it.

    `cluster.submission.submit` returns the handle of a new job. `Job.attach` returns the handle of
    the job in a run directory.
    """

    def __init__(self, run_dir: Path, spec: JobSpec) -> None:
        self.run_dir = run_dir
        self.spec = spec

    @property
    def owned_folder(self) -> Path:
        return self.run_dir

    @classmethod
    def attach(cls, run_dir: str | os.PathLike[str]) -> Self:
        """Returns the handle of the job in a run directory. The job may still run or may have
        ended.

        Raises:
            JobError: The directory has no job.json, so no job was ever submitted in it.
        """
        path = Path(run_dir).expanduser().absolute()
        if not (path / "job.json").is_file():
            raise JobError(
                f"{path}: there is no job here (no job.json). Start one: `kit launch`; or give its"
                " directory."
            )
        return cls(path, JobSpec.read(path / "job.json"))

    def status(self) -> JobStatus:
        """Returns the current status of the job, with the reason for its state."""
        return read_status(self.run_dir)

    @property
    def state(self) -> JobState:
        """Current state of the job."""
        return self.status().state

    @property
    def history(self) -> list[Event]:
        """All changes of the job's state, over all attempts, oldest first. The last event contains
        the current state, even if the job could not record it.
        """
        events = read_history(self.run_dir)
        status = self.status()
        if events and events[-1].state is not status.state:
            now = events[-1].replace(
                time=time.time(), state=status.state, reason=status.reason, step=status.step
            )
            events.append(now.replace(attempt=status.attempt, lost_node=None))
        return events

    def logs(self, rank: int = 0, attempt: int | None = None) -> str:
        """Returns the output of a rank in an attempt, by default in the newest attempt. The
        beginning of a log larger than LOG_BYTES is left out. `read_logs` returns complete logs.

        The text is empty before the first output. If the job has ended and the rank has printed
        nothing, returns the output of the batch script, the supervisor or the pods (`find_logs`).

        Raises:
            JobError: The rank or the attempt does not exist, or the log cannot be read.
        """
        text = _end_of(self._log(rank, attempt))
        if not text and self.status().state.is_final:
            return self.find_logs(rank, attempt)[1]
        return text

    def find_logs(self, rank: int = 0, attempt: int | None = None) -> tuple[str, str]:
        """Returns (source, text): the file or command from which the text is, and the output of a
        rank. If the rank has printed nothing, the text is the output of the batch script, the
        supervisor or the pods. The beginning of a text larger than LOG_BYTES is left out.

        Raises:
            JobError: The rank or the attempt does not exist, or the log cannot be read.
        """
        where, text = self._log_source(rank, attempt)
        if text is None:
            text = _end_of(Path(where))
        return str(where), text

    def read_logs(self, rank: int = 0, attempt: int | None = None) -> tuple[str, Iterator[str]]:
        """Returns (source, pieces): the file or command from which the output of a rank is, as in
        `find_logs`, and the complete output in pieces. Each piece has at most CHUNK_BYTES bytes, so
        that a log may be larger than the memory.

        Raises:
            JobError: The rank or the attempt does not exist, or the log cannot be read. The error
                may also occur while the pieces are read.
        """
        where, text = self._log_source(rank, attempt)
        if text is None:
            return str(where), _pieces_of(Path(where))
        pieces = [text] if text else []
        return str(where), iter(pieces)

    def _log_source(self, rank: int, attempt: int | None) -> tuple[Path | str, str | None]:
        """Finds the output of a rank and returns (source, text). If a log has output, the source is
        the log and the text is None. If a command of the scheduler has output, returns the command
        and its output. If there is no output, returns the log of the rank and an empty text.
        """
        own = self._log(rank, attempt)
        if _size_of(own):
            return own, None
        state = read_state(self.run_dir)
        if state is None or attempt not in (None, state.attempt):
            return own, ""
        for file in mirror.fetch_script_logs(self.run_dir, state):
            if _size_of(file):
                return file, None
        if state.scheduler_job and not mirror.mirror_of(self.run_dir):
            where, text = poll.backend(state.scheduler_job.scheduler).output(state.scheduler_job)
            if text:
                return where, text
        return own, ""

    def follow(self, rank: int = 0, poll_s: float = 0.2) -> Iterator[str]:
        """Yields the lines of a rank in the newest attempt, from the first line on, until this
        attempt ends. Reads the log every `poll_s` seconds. A line longer than CHUNK_BYTES is
        yielded in parts. If the rank has printed nothing, yields at the end the output of the batch
        script, the supervisor or the pods (`find_logs`).
        """
        attempt = last_attempt(self.run_dir)
        position = 0
        line = b""
        file = self._log(rank, attempt)
        while True:
            # The status is read before the log. In the other order, lines that are printed just
            # before the end would be missed.
            status = self.status()
            if file.exists():
                with open_for_reading(file, follows=True) as stream:
                    stream.seek(position)
                    while chunk := stream.read(CHUNK_BYTES):  # A log may be larger than the memory.
                        *lines, line = (line + chunk).split(b"\n")
                        if len(line) > CHUNK_BYTES:
                            lines.append(line)
                            line = b""
                        yield from (text.decode(errors="replace") for text in lines)
                    position = stream.tell()
            if status.state.is_final or status.attempt != attempt:
                if line:
                    yield line.decode(errors="replace")
                elif position == 0:
                    yield from self.find_logs(rank, attempt)[1].splitlines()
                return
            time.sleep(poll_s)

    def wait(self, timeout_s: float | None = None, poll_s: float = 0.2) -> JobStatus:
        """Waits until the job has ended, and returns its status. If the supervisor of the job runs
        on this machine, also waits for its end. Meant for scripts, since the call would block a
        notebook.

        Raises:
            TimeoutError: The job has not ended after `timeout_s` seconds. The job continues.
        """
        start = time.monotonic()
        while not (status := self.status()).state.is_final:
            if timeout_s is not None and time.monotonic() - start >= timeout_s:
                raise TimeoutError(
                    f"{self.run_dir}: still {status.state} after {timeout_s:g} s ({status.reason})."
                    " The job goes on; wait longer, or end it:"
                    f" `{kit_command('stop', self.run_dir)}`."
                )
            time.sleep(poll_s)
        # The supervisor writes the final state after exit.json. After the end of the supervisor no
        # process of the job writes into the run directory.
        while is_alive(read_state(self.run_dir)):
            time.sleep(0.01)
        return status

    def stop(self) -> None:
        """Asks the trainer to save a checkpoint at its next step boundary and then to end."""
        self._ask("stop")

    def checkpoint(self) -> None:
        """Asks the trainer to save a checkpoint at its next step boundary and then to continue."""
        self._ask("checkpoint")

    def cancel(self) -> None:
        """Ends the job without waiting for a step boundary. Its ranks receive SIGTERM, and SIGKILL
        after `JobSpec.grace_s` seconds.

        Raises:
            JobError: This process can send no signal to the job, or its scheduler refuses. Or the
                run directory names a process or a scheduler's job that belongs to another run.
        """
        self.check_writable("end it")
        if mirror.forward(self.run_dir, "cancel"):
            return
        state = read_state(self.run_dir)
        status = self.status()
        if status.state.is_final or state is None:
            return
        if job := state.scheduler_job:
            poll.backend(job.scheduler).cancel(job, self.run_dir)
            poll.POLLER.forget(job)
            if status.state in (JobState.QUEUED, JobState.REQUEUED):
                # A waiting job has no process that could record its end, and the scheduler forgets
                # the job. If the job has just started, its supervisor receives the signal and
                # records the end itself.
                end = AttemptOutcome(128 + signal.SIGTERM, f"{CANCELLED} while it waited")
                with contextlib.suppress(StaleAttemptError):
                    write_end(self.run_dir, state.attempt, end)
        elif state.process is None or not state.process.is_here:
            raise JobError(
                f"{self.run_dir}: it cannot be ended from here: {why_unknown(state)}. `kit stop`"
                " without --now asks it to end."
            )
        elif state.process.is_alive and not state.process.names(self.run_dir):
            raise JobError(
                f"{self.run_dir}: process {state.process.pid} is alive, but does not belong to"
                " this run. It was left running."
            )
        else:
            state.process.send_signal(signal.SIGTERM)

    def _ask(self, request: Request) -> None:
        self.check_writable(f"ask for a {request}")
        if mirror.forward(self.run_dir, request):
            return
        if not self.status().state.is_final:
            write_request(self.run_dir, request)

    def requeue(self) -> None:
        """Starts the next attempt of the job. If an attempt is running, ends it first.

        Raises:
            ConfigError: The job cannot be started again. A running attempt was not ended.
            JobError: The running attempt does not end, or the scheduler refuses.
        """
        self.check_writable("start it again")
        if mirror.forward(self.run_dir, "requeue"):
            return
        state = read_state(self.run_dir)
        scheduled = state.scheduler_job if state else None
        if scheduled is None:
            poll.backend("local").requeue(self, None)
        else:
            poll.backend(scheduled.scheduler).requeue(self, scheduled)
            poll.POLLER.forget(scheduled)

    def _log(self, rank: int, attempt: int | None) -> Path:
        newest = last_attempt(self.run_dir)
        if not 0 <= rank < self.spec.num_processes:
            raise JobError(
                f"{self.run_dir}: no rank {rank}. Allowed: 0 to {self.spec.num_processes - 1}."
            )
        if attempt is not None and not 1 <= attempt <= newest:
            raise JobError(f"{self.run_dir}: no attempt {attempt}. Allowed: 1 to {newest}.")
        per_node = self.spec.num_processes // self.spec.num_nodes
        return log_file(self.run_dir, attempt or newest, rank, per_node, waits=True)

    def __repr__(self) -> str:
        return f"Job({self.spec.name!r}, {self.status().state}, {str(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        status = self.status()
        step = "-" if status.step is None else status.step
        rows = [
            ("state", f"{status.state}: {status.reason}"),
            ("attempt", status.attempt),
            ("step", step),
        ]
        table = html_table(f"Job {self.spec.name}", rows)
        return f"{table}<code>{html.escape(str(self.run_dir))}</code>"
