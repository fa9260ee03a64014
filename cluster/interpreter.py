"""Command lines that start Python. All Python processes of `kit` and `cluster` are started by
commands of this module.

`python -m MODULE` and `python -c CODE` put the working directory first on `sys.path`. If it
contains a file that is named like a module (`token.py`, `random.py`, `torch.py`), Python imports
this file, and the process fails or runs the user's code. All commands of this module therefore
contain `-P`, which leaves the working directory out. PYTHONPATH stays in effect, since module
systems and containers use it. Standard library only.
"""

import sys
from pathlib import Path

PACKAGE_ROOT = Path(__file__).parents[1]
"""Folder that contains the packages `kit` and `cluster`."""
CONTAINER_PYTHON = "python3"
"""Command that starts Python in a container. More images have `python3` on PATH than `python`."""


def module_command(module: str, *words: str) -> tuple[str, ...]:
    """Returns the command `PYTHON -P -m MODULE WORDS...`. Records of jobs contain commands in this
    form, which works on every machine where the kit is installed. `from_source` returns a command
    that needs no installation.
    """
    return (sys.executable, "-P", "-m", module, *words)


def code_command(code: str, *words: str) -> tuple[str, ...]:
    """Returns the command `PYTHON -P -c CODE WORDS...`."""
    return (sys.executable, "-P", "-c", code, *words)


def from_source(command: tuple[str, ...], source: Path | str = PACKAGE_ROOT) -> tuple[str, ...]:
    """Returns `command` with each `-P -m MODULE` replaced by `-P SOURCE/cluster/start.py MODULE`.
    The new command runs `kit` and `cluster` from a source tree, without an installation.
    """
    words = list(command)
    for index, pair in enumerate(zip(command, command[1:], strict=False)):
        if pair == ("-P", "-m"):
            words[index + 1] = f"{source}/cluster/start.py"
    return tuple(words)


def source_command(
    module: str, *words: str, python: str = sys.executable, source: Path | str = PACKAGE_ROOT
) -> tuple[str, ...]:
    """Returns the command `PYTHON -P SOURCE/cluster/start.py MODULE WORDS...`, which runs a module
    of the kit from a source tree, without an installation.
    """
    return (python, "-P", f"{source}/cluster/start.py", module, *words)


def started_module(command: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Returns (module, words after the module) of a command `PYTHON [-P] -m MODULE WORDS...`.

    Raises:
        ValueError: The command contains no `-m`.
    """
    index = command.index("-m") + 1
    return command[index], command[index + 1 :]
