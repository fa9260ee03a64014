"""Reads the reason why an attempt ended from the logs of its run.

Standard library only.
"""

import contextlib
import re
from pathlib import Path

from cluster.files import opened, write_atomic
from cluster.record import shortened
from cluster.state import find_log, log_path

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
UNRECORDED_END = re.compile(r"the end of attempt (\d+) \((.*)\) could not be recorded: .*")
"""Line of a supervisor's log: number of an attempt whose end it could not record, and the reason of
that end."""
LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 16384
NODE_TAIL_BYTES = 1 << 20


def log_tail(file: Path) -> str:
    """Returns the last lines of a log."""
    try:
        with opened(file) as stream:
            stream.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
            text = stream.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-LOG_TAIL_LINES:])


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
            return shortened(f"{message}{cause}", 600)
    lines = [line for line in lines if not EMPTY_REMARK.match(line)] or lines
    words = [line for line in lines if not SLURM_REMARK.match(line)] or lines
    return shortened(words[-1], 600) if words else ""


def unrecorded_end(log: Path, attempt: int) -> str | None:
    """Returns why an attempt ended, if the last line of its supervisor's log says that the end
    could not be recorded in the run directory. Otherwise returns None.
    """
    match = UNRECORDED_END.fullmatch(log_tail(log).rpartition("\n")[2])
    return match[2] if match and int(match[1]) == attempt else None


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
