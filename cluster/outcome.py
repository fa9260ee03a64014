"""How an attempt ended, what follows, and its record in the run directory, while that is still
there.

Standard library only.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from cluster.files import FULL, RESERVE, opened, write_atomic
from cluster.ports import says_port_taken
from cluster.record import counted, cut
from cluster.state import (
    ExitReport,
    JobError,
    JobState,
    find_log,
    history_to_judge,
    last_attempt,
    log_path,
    read_asked,
    read_state,
    read_taken,
    state_to_change,
    update_state,
    write_exit,
)

USELESS_TO_RETRY = os.EX_CONFIG
"""Exit code of a rank whose failure would come again: wrong input, a full disk."""
CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
MESSAGE_MARK = "kit: "
"""Beginning of each line in which a script of the kit prints why it ends."""
SUPERVISOR_LINE = re.compile(r"attempt \d{1,9} of .{1,4300} in job \S{1,99} on ")
"""First line that the supervisor of a Slurm job prints in each attempt."""
SLURM_REMARK = re.compile(r"(\d{1,9}: )?(srun|slurmstepd\S*): ")
"""Beginning of a line that Slurm itself prints, with or without the task number of `--label`.
Earlier output of the job explains more."""
EMPTY_REMARK = re.compile(r'Try "\S+ --help"|srun: (launch/\S+|Terminating|Job step aborted|Force)')
"""Beginning of a line that srun prints after its error and that contains no reason."""
ERROR_WORDS = re.compile(
    r"error|not ?found|no such|denied|cannot|can't|could not|unable|unknown|invalid|fail", re.I
)
"""Words by which a line counts as an error message."""
CAUSE_LINES = 15
"""Lines before a message of the kit's script in which the error of the failing command is sought.
Lmod prints about ten after its error."""
START_BEAT_S = 5.0
"""Seconds between two heartbeats of a supervisor whose ranks have taken no step yet."""
UNRECORDED_END = re.compile(r"the end of attempt (\d+) \((.*)\) could not be recorded: .*")
"""Line of a supervisor's log: number of an attempt whose end it could not record, and the reason of
that end."""
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Seconds between the calls in `retry_disk`. Their sum is two minutes, in which a metadata server
of a file system can restart."""
END_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that end a supervisor."""
LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 16384
NODE_TAIL_BYTES = 1 << 20


Result = TypeVar("Result")


class RunDirectory:
    """The run directory of a process, told apart from every other that may come to lie at its
    path.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError unless there is such a directory."""
        self.run_dir = run_dir
        # Kept open, so that the file system gives its number to no other directory.
        self.handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        self.number = os.fstat(self.handle).st_ino
        self.marks = [
            file for file in (run_dir / "job.json", run_dir / "spec.json") if file.exists()
        ]

    def why_lost(self) -> str | None:
        """Returns what has become of the directory, or None while it is there; a file system in
        trouble is no loss.
        """
        if _is_gone(self.run_dir):
            return f"{self.run_dir} was deleted or renamed"
        with contextlib.suppress(OSError):
            if os.stat(self.run_dir).st_ino != self.number:
                return f"{self.run_dir} is another directory now"
        if self.marks and all(map(_is_gone, self.marks)):
            return f"{self.run_dir} was emptied"
        return None

    def check(self) -> None:
        """Raises JobError unless the directory is there: whatever this process wrote now would
        be lost or mislead.
        """
        if lost := self.why_lost():
            raise JobError(f"{lost}: nothing can be recorded any more, so this process ends.")


def _is_gone(file: Path) -> bool:
    # not by Path.exists, which from Python 3.14 on takes a file system in trouble for a loss
    try:
        file.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
    """How the ranks ended, and what becomes of the job."""

    rc: int
    reason: str
    """One line for people."""
    failing_rank: int | None = None
    """The first to fail."""
    fate: Literal["end", "restart", "requeue", "taken"] = "end"
    """`restart` in this allocation, `requeue` for another one, or `taken`: a newer attempt owns
    the run."""
    lost_node: str | None = None
    """That no longer answers; of several, commas between."""


class StartWatch:
    """Writes heartbeats of an attempt until its first step, and for how many seconds the reason in
    state.json has been the same.

    The supervisor calls `beat` in its loop. The seconds are counted by the clock of this process,
    so readers need not compare two clocks.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.run_dir = run_dir
        self.attempt = attempt
        self.reason = ""
        self.since = time.monotonic()
        self.due = self.since + START_BEAT_S
        self.is_over = False
        """Whether the ranks have taken a step, or the attempt has ended."""

    def beat(self) -> None:
        """Writes a heartbeat every START_BEAT_S.

        Raises:
            StaleAttemptError: a newer attempt owns the directory.
        """
        now = time.monotonic()
        if self.is_over or now < self.due:
            return
        self.due = now + START_BEAT_S
        # An error of the file system must not end the job.
        with contextlib.suppress(OSError):
            state = read_state(self.run_dir)
            if state is None:
                return
            if state.attempt != self.attempt or state.state is not JobState.STARTING:
                self.is_over = True
                return
            if state.reason != self.reason:
                if self.reason:
                    self.since = now
                self.reason = state.reason
            update_state(
                self.run_dir,
                attempt=self.attempt,
                heartbeat=time.time(),
                starting_s=round(now - self.since, 1),
            )


def cause_order(code: int) -> tuple[bool, bool]:
    """Sorts the codes of ranks that failed at once by what explains the others.

    What cannot pass comes first, then a crash; an error for a lost peer is a consequence.
    """
    return code != USELESS_TO_RETRY, -code not in CRASHES


def failed(home: RunDirectory, rank: int, code: int, who: str) -> AttemptOutcome:
    """Returns the outcome of an attempt in which a rank has failed.

    The ranks are started again if the rank was killed, if the job has already taken a step, or if
    another program used the port at which the ranks meet: the next start uses another port.
    """
    words, rc = end_of(code)
    may_pass = rc > 128 or (
        code != USELESS_TO_RETRY and (has_taken_steps(home) or _port_was_taken(home, rank))
    )
    return AttemptOutcome(rc, f"{who} {words}", rank, "restart" if may_pass else "end")


def has_taken_steps(home: RunDirectory) -> bool:
    """Returns whether any attempt of a run has taken a step, as far as its files can be read."""
    try:
        return any(retry_disk(lambda: furthest_steps(home.run_dir), home).values())
    except OSError as error:
        say(f"how far the run got cannot be read: {error}")
        return False


def _port_was_taken(home: RunDirectory, rank: int) -> bool:
    """Returns whether the log of a rank says that another program used its port."""
    try:
        attempt = retry_disk(lambda: last_attempt(home.run_dir), home)
    except OSError:
        return False
    return says_port_taken(log_tail(log_path(home.run_dir, attempt, rank)))


def limit_retries(outcome: AttemptOutcome, home: RunDirectory, max_restarts: int) -> AttemptOutcome:
    """Returns an outcome, with an end instead of a start that would lead nowhere."""
    run_dir = home.run_dir
    reason = outcome.reason
    if lost := home.why_lost():
        reason = lost
    elif outcome.fate in ("end", "taken"):
        return outcome
    elif is_stop_requested(run_dir):
        reason = f"{reason}, after a request to stop"
    elif outcome.lost_node is not None:
        return outcome
    elif max_restarts and (fruitless := _fruitless_starts(home)) > max_restarts:
        reason = f"{reason}; given up after {counted(fruitless, 'start')} without a new step"
    elif max_restarts or outcome.fate == "requeue":
        return outcome
    return dataclasses.replace(outcome, fate="end", reason=reason, rc=outcome.rc or 1)


def furthest_steps(run_dir: Path) -> dict[int, int]:
    """Returns the last step of each attempt of a run, 0 for an attempt that took no step.

    Raises:
        OSError: the file system is in trouble.
    """
    furthest: dict[int, int] = {}
    state = state_to_change(run_dir)
    for told in [*history_to_judge(run_dir), *([state] if state else [])]:
        furthest[told.attempt] = max(furthest.get(told.attempt, 0), told.step or 0)
    return furthest


def fruitless_starts(run_dir: Path) -> int:
    """Returns how many of the newest attempts took no step that none had taken before. Attempts
    that a lost node ended are not counted, since no program of the job is at fault.
    """
    lost = {event.attempt for event in history_to_judge(run_dir) if event.lost_node}
    fruitless = best = 0
    for attempt, step in sorted(furthest_steps(run_dir).items()):
        if step > best:
            fruitless = 0
        elif attempt not in lost:
            fruitless += 1
        best = max(best, step)
    return fruitless


def _fruitless_starts(home: RunDirectory) -> int:
    """Returns `fruitless_starts`, or 0 if the files cannot be read."""
    try:
        return retry_disk(lambda: fruitless_starts(home.run_dir), home)
    except OSError as error:
        say(f"how far the run got cannot be read: {error}")
        return 0


def is_stop_requested(run_dir: Path) -> bool:
    """Returns whether a person asked the newest attempt to stop, whether or not its trainer has
    taken that yet.
    """
    requests = (read_asked(run_dir, "stop"), read_taken(run_dir, "stop"))
    return any(request is not None and request.by_person for request in requests)


def retry_disk(action: Callable[[], Result], home: RunDirectory | None = None) -> Result:
    """Returns what `action` returns. Calls it again, after each of RETRY_DELAYS_S, while it raises
    OSError: a file system in trouble must not end a job of days.

    `action` must tolerate that an earlier call has done a part of its work.

    Raises:
        OSError: the last call has failed. There is no further call if the disk is full, the run
            directory `home` is lost, or one of END_SIGNALS is pending.
    """
    for delay_s in RETRY_DELAYS_S:
        try:
            return action()
        except OSError as error:
            if error.errno in FULL or (home is not None and home.why_lost()):
                raise
            say(f"{error}: next try in {delay_s:g} s")
            deadline = time.monotonic() + delay_s
            while time.monotonic() < deadline:
                if END_SIGNALS & signal.sigpending():
                    raise
                time.sleep(min(0.5, delay_s))
    return action()


def record_end(home: RunDirectory, attempt: int, outcome: AttemptOutcome) -> None:
    """Writes exit.json, then the final state. Tries again while the file system is in trouble. The
    files of a newer attempt, or of another run, are left alone.
    """
    try:
        home.check()
        retry_disk(lambda: write_end(home.run_dir, attempt, outcome), home)
    except (JobError, OSError) as error:
        say(f"the end of attempt {attempt} ({outcome.reason}) could not be recorded: {error}")


def write_end(run_dir: Path, attempt: int, outcome: AttemptOutcome) -> None:
    """Writes how an attempt has ended, just now and on this host: exit.json, then the final state.

    The reason ends with the last line of the rank that failed first. On a full disk this takes the
    room that the attempt has kept back for it, and says so in the reason.

    Raises:
        StaleAttemptError: a newer attempt owns the directory.
    """
    rank = outcome.failing_rank
    reason = outcome.reason
    tail = "" if rank is None else log_tail(log_path(run_dir, attempt, rank))
    if said := last_words(tail):
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


def _end(run_dir: Path, report: ExitReport) -> None:
    write_exit(run_dir, report)
    state = JobState.FAILED if report.rc else JobState.DONE
    update_state(run_dir, attempt=report.attempt, state=state, reason=report.reason)


def keep_last_lines(
    run_dir: Path, attempt: int, rank: int, task: int, ranks_per_node: int, script_log: Path
) -> None:
    """Writes a log for a failed rank that has none, from its last lines in the log of its node. If
    there is no such log, takes the lines from the log of the batch script.

    In these logs each line begins with the number of the task that printed it (`srun --label`).
    """
    own = log_path(run_dir, attempt, rank)
    said = find_log(run_dir, attempt, rank, ranks_per_node)
    if not said.exists() or not said.stat().st_size:
        said = script_log
    elif not said.name.startswith("node_"):
        return
    with contextlib.suppress(OSError), opened(said) as stream:
        stream.seek(max(0, said.stat().st_size - NODE_TAIL_BYTES))
        text = stream.read(NODE_TAIL_BYTES)
        # The label of srun, or nothing, comes before it: a search at each place of a long line
        # would take time that grows with the square of its length.
        pattern = rf"(?m)^(?:\s*\d{{1,9}}: )?({SUPERVISOR_LINE.pattern})"
        attempts = list(re.finditer(pattern.encode(), text))
        begin = attempts[-1].start(1) if attempts else 0
        lines = (line.partition(b": ") for line in text[begin:].splitlines())
        write_atomic(
            own,
            b"".join(
                text + b"\n"
                for label, _, text in lines
                if label.strip().isdigit() and int(label) == task
            ),
        )


def ended_well(num_ranks: int) -> str:
    """Returns the reason of a job that is done."""
    return (
        "the one rank ended with code 0"
        if num_ranks == 1
        else f"all {num_ranks} ranks ended with code 0"
    )


def end_of(code: int) -> tuple[str, int]:
    """Returns how a process of this return code ended, in words, and its code as of a shell: 128
    + n for signal n.
    """
    if code >= 0:
        return f"ended with code {code}", code
    hint = " (often: out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}", 128 - code


def say(text: str) -> None:
    """Prints a line for people, if anyone can still read it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def log_tail(file: Path) -> str:
    """Returns the last lines of a log."""
    try:
        with opened(file) as stream:
            stream.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
            text = stream.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-LOG_TAIL_LINES:])


def unrecorded_end(log: Path, attempt: int) -> str | None:
    """Returns why an attempt ended, if the last line of its supervisor's log says that the end
    could not be recorded in the run directory. Otherwise returns None.
    """
    match = UNRECORDED_END.fullmatch(log_tail(log).rpartition("\n")[2])
    return match[2] if match and int(match[1]) == attempt else None


def last_words(text: str) -> str:
    """Returns one line that explains why a program ended, from the end of its log.

    The line is the last message of a script of the kit, followed by the error before the message.
    If there is no message, it is the last line that Slurm itself did not print. If Slurm printed
    all lines, it is the last one with a reason, or the last of all.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if SUPERVISOR_LINE.match(lines[index]):
            lines = lines[index + 1 :]
            break
        if lines[index].startswith(MESSAGE_MARK):
            message = lines[index].removeprefix(MESSAGE_MARK)
            before = lines[max(0, index - CAUSE_LINES) : index]
            errors = [line for line in before if ERROR_WORDS.search(line)]
            cause = f": {errors[-1]}" if errors else ""
            return cut(f"{message}{cause}", 600)
    lines = [line for line in lines if not EMPTY_REMARK.match(line)] or lines
    words = [line for line in lines if not SLURM_REMARK.match(line)] or lines
    return cut(words[-1], 600) if words else ""
