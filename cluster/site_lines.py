"""Turns the shell lines of a site file (`setup`, `task_setup`) into lines of a batch script, which
ends as soon as one of them fails. Standard library only.

A line fails under the conditions of `set -e`. A command that decides an `if` or a `while`, or that
comes before `||`, may fail. A single command inside a sourced file or a function may fail, too,
since only the exit status of the line counts. One condition is stricter than under `set -e`. A line
with `&&` also fails if the part before `&&` fails, unless the line contains a test, as in `[ -d
FOLDER ] && ...`.
"""

import functools
import os
import re
import subprocess

from cluster.logs import MESSAGE_MARK
from cluster.record import ConfigError, shortened
from cluster.scheduler import quote

TEST = re.compile(r"(^|[\s;&|(])(\[{1,2}|\(\(|!|test|grep|command|type|which|hash)\s")
"""Pattern of a shell command that tests a condition. Its exit code is a result, so a failure of
such a command is not an error."""


def checked_lines(lines: tuple[str, ...], name: str, exit_code: int = 1) -> list[str]:
    """Returns script lines that run `lines`. The first line that fails ends the script with a
    message and `exit_code`.

    `name` is the field of the site file, such as `site.slurm.setup`.

    Raises:
        ConfigError: Bash cannot parse the lines.
    """
    if not lines:
        return []
    said = f'echo "{MESSAGE_MARK}{name.rpartition(".")[2]}: ${{KIT_LINE[0]}}'
    script = [
        f"# Lines of {name}. One that fails ends the script, unless it ends with `|| true`.",
        "KIT_DEPTH=${#BASH_SOURCE[@]}",
        'trap \'KIT_CODE=$?; [ ${#BASH_SOURCE[@]} != "$KIT_DEPTH" ] || { trap - EXIT;'
        f" {said} failed with code $KIT_CODE\" >&2; exit {exit_code}; }}' ERR",
        f"trap '{said} ended the shell with code $?\" >&2; exit {exit_code}' EXIT",
    ]
    for command in complete_commands(lines, name):
        script.append(f"KIT_LINE=({_quoted(shortened(' '.join(command.split()), 200))})")
        # The command stays one string. Callers indent only the beginning of each string, and so do
        # not change a here-document.
        script.append(command)
        if "&&" in command and not TEST.search(command):
            script.append("(exit $?)")
    return [*script, "trap - ERR EXIT"]


def _quoted(text: str) -> str:
    """Returns a shell word whose value is exactly this text. The form `$'...'` is used because
    shellcheck warns of variables in plain single quotes.
    """
    if not text.isprintable():
        return quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{escaped}'"


@functools.cache
def complete_commands(lines: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Returns the complete commands that shell lines contain. Lines that form one command, such as
    an `if` block, are joined by line breaks.

    Raises:
        ConfigError: Bash cannot parse the lines.
    """
    commands: list[str] = []
    part: list[str] = []
    complaint = ""
    for line in lines:
        part.append(line)
        complaint = _complaint("\n".join(part))
        if not complaint:
            commands.append("\n".join(part))
            part = []
    if part:
        line = shortened(part[0], 200)
        raise ConfigError(
            f"{name}[{len(lines) - len(part)}]: bash cannot read {line!r} and what"
            f" follows it: {complaint}. Correct the line. A block such as `if ...; then` may go"
            " over several lines of the list, up to its `fi`."
        )
    return tuple(commands)


def _complaint(text: str) -> str:
    """Returns why bash does not accept a text as a complete command, or an empty text if bash
    accepts it.
    """
    if re.search(r"(?<!\\)(\\\\)*\\$", text):
        return "the last line ends with a backslash"
    environment = {**os.environ, "LC_ALL": "C"}
    environment.pop("BASH_ENV", None)
    try:
        done = subprocess.run(
            ["bash", "-O", "extglob", "-n"],
            input=f"{text}\n",
            capture_output=True,
            text=True,
            env=environment,
        )
    except FileNotFoundError:  # This machine has no bash. The bash of the cluster reads the lines.
        return ""
    # Standard error decides, not the exit code: for an open here-document bash prints a warning and
    # exits with code 0.
    said = done.stderr.strip().splitlines()
    return re.sub(r"^bash: (line \d+: )?", "", said[0]) if said else ""
