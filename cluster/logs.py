"""Finds the reason for the end of an attempt in the logs of its run.

Standard library only.
"""

import contextlib
import re
from pathlib import Path

from cluster.files import open_for_reading, write_atomic
from cluster.record import shortened
from cluster.state import find_log, log_path

MESSAGE_MARK = "kit: "
"""Beginning of each line in which a batch script of the kit prints the reason for its end."""
SUPERVISOR_LINE = re.compile(r"attempt \d{1,9} of .{1,4300} in job \S{1,99} on ")
"""Pattern of the first line that the supervisor of a Slurm job prints in each attempt."""
SLURM_REMARK = re.compile(r"(\d{1,9}: )?(srun|slurmstepd\S*): ")
"""Pattern of the beginning of a line that Slurm itself prints, with or without the task number of
`--label`. Such a line is used as reason only if the job has printed nothing, since output of the
job explains more."""
EMPTY_REMARK = re.compile(r'Try "\S+ --help"|srun: (launch/\S+|Terminating|Job step aborted|Force)')
"""Pattern of the beginning of a line that srun prints after its error message. Such a line contains
no reason for the error."""
ERROR_WORDS = re.compile(
    r"error|not ?found|no such|denied|cannot|can't|could not|unable|unknown|invalid|fail", re.I
)
"""Pattern of the words that mark a line as an error message."""
CAUSE_LINES = 15
"""Number of lines before a message of the kit's script that are searched for the error of the
failing command. Lmod prints about ten lines after its error."""
UNRECORDED_END = re.compile(r"the end of attempt (\d+) \((.*)\) could not be recorded: .*")
"""Pattern of a line in a supervisor's log about an attempt whose end could not be recorded. Groups:
the number of the attempt, and the reason of its end."""
LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 16384
NODE_TAIL_BYTES = 1 << 20


def log_tail(file: Path) -> str:
    """Returns the last LOG_TAIL_LINES lines of a log, of at most LOG_TAIL_BYTES bytes. Returns an
    empty text if the log cannot be read.
    """
    try:
        with open_for_reading(file) as stream:
            stream.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
            text = stream.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-LOG_TAIL_LINES:])


def end_reason(text: str) -> str:
    """Returns one line that explains why a program ended, from the end of its log.

    The line is the last message of a script of the kit, followed by the error before the message.
    Without such a message, the line is the last line that Slurm itself did not print. If Slurm
    printed all lines, the line is the last line that does not match EMPTY_REMARK, or else the last
    line.
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
    """Writes a log for a failed rank that has no log of its own. Its lines are the last lines of
    the rank in the log of its node. If the node has no log, they come from `script_log`, the log of
    the batch script.

    In both logs each line begins with the number of the task that printed the line (`srun
    --label`).
    """
    own = log_path(run_dir, attempt, rank)
    said = find_log(run_dir, attempt, rank, ranks_per_node)
    if not said.exists() or not said.stat().st_size:
        said = script_log
    elif not said.name.startswith("node_"):
        return
    with contextlib.suppress(OSError), open_for_reading(said) as stream:
        stream.seek(max(0, said.stat().st_size - NODE_TAIL_BYTES))
        text = stream.read(NODE_TAIL_BYTES)
        # The pattern matches only at the start of a line, with or without the label of srun. A
        # search at each place of a long line would take time that grows with the square of its
        # length.
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
