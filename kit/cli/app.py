"""Everything that the notebooks do, from the terminal. COMMAND --help explains one command."""

import os
import re
import sys
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from cluster.state import JobError
from kit.cli import (
    data,
    exchange,
    launching,
    machines,
    planning,
    runs,
    scores,
)
from kit.cli.options import AS_JSON
from kit.errors import ConfigError, DataError, MissingPackageError, RunError
from kit.show.terminal import PlainConsole, plain_streams

PANELS = {
    "Start": ("doctor", "bench", "site", "data"),
    "Train": ("launch", "resume", "checkpoint", "stop"),
    "Look": ("status", "watch", "logs", "runs", "figure"),
    "Plan": ("plan", "validate", "calibrate"),
    "Score": ("eval-data", "eval", "generate"),
    "Convert": ("export", "import"),
}
"""Names of the commands by heading, in the order in which `kit --help` prints them."""
EXAMPLES = """\
Build token files, train the demo model on them, choose a layout:

kit data build data/demo

kit launch runs/first --data data/demo --steps 60

kit plan llama3-8b --site dgx-h100 --devices 64 --batch 1024
"""
LONG = 200
PATHLIB = ("Symlink loop from", "Could not determine home directory")
"""Starts of two error messages of Python's pathlib about wrong paths. These errors have no
exception type of their own, so the messages identify them."""


class Commands(TyperGroup):
    """Group of commands, listed by `kit --help` under the headings and in the order of PANELS."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        commands = dict(self.commands)
        self.commands = {}
        for panel, names in PANELS.items():
            for name in names:
                command = commands[name]
                command.rich_help_panel = panel  # pyright: ignore[reportAttributeAccessIssue]
                _join_lines(command)
                self.commands[name] = command

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses the words of a command line. The option `--json` is moved to the first position,
        so that the user may write it anywhere.
        """
        words = [word for word in args if word != "--json"]
        if "--json" in args:
            words.insert(0, "--json")
        return super().parse_args(ctx, words)


def _join_lines(command: Any) -> None:
    """Joins the lines of each paragraph of a command's help text into one line. The terminal then
    wraps the paragraph to its own width.
    """
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help)
    for inner in getattr(command, "commands", {}).values():
        _join_lines(inner)


def _print_version(is_given: bool) -> None:
    """If the option `--version` is given, prints the version of the kit and exits."""
    from importlib.metadata import PackageNotFoundError, version

    if not is_given:
        return
    try:
        print(f"kit {version('pretraining-notebook-kit')}")
    except PackageNotFoundError:
        print("kit, a checkout that is not installed: `git describe` tells its version")
    raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda word: word.replace("_", "-")},
    help=__doc__,
    epilog=EXAMPLES,
)


@app.callback(help=__doc__)
def everything(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print JSON instead of tables. It may stand anywhere, as in `kit status RUN"
            " --json`; watch, logs and generate print text all the same.",
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Stores the values of options that every command accepts."""
    AS_JSON.set(as_json)


for part in (launching, runs, planning, machines, data, scores, exchange):
    app.add_typer(part.app)


def run() -> None:
    """Runs the command line. An error that the user can correct is printed without a traceback."""
    try:
        with plain_streams():
            app(standalone_mode=True)
    except (ConfigError, DataError, RunError, JobError, MissingPackageError) as error:
        _fail(type(error).__name__, str(error))
    except (OSError, UnicodeEncodeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(PATHLIB):
            raise
        _fail(type(error).__name__, _path_error(error))


def _path_error(error: Exception) -> str:
    """Returns a message of one line for an error about a path or the disk. A traceback would not
    help the user.
    """
    if not isinstance(error, OSError):
        return f"{error}. Give another path."
    paths = []
    for name in (error.filename, error.filename2):
        if not isinstance(name, str | bytes):
            continue
        path = os.fsdecode(name)
        if len(path) > LONG:
            path = f"{path[:LONG]}… ({len(path)} characters)"
        paths.append(path)
    if not paths:
        return f"{error.strerror or error}."
    where = " to ".join(paths)
    return f"{where}: {error.strerror}. Give another path, or see who may read and write there."


def _fail(kind: str, what: str) -> None:
    """Prints an error message to standard error, and exits with code 1."""
    PlainConsole(stderr=True).print(Text.assemble((f"{kind}: ", "red"), what))
    sys.exit(1)
