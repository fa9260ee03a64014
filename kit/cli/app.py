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
"""The commands in the order of `kit --help`, under its headings."""
EXAMPLES = """\
Build token files, train the demo model on them, choose a layout:

kit data build data/demo

kit launch runs/first --data data/demo --steps 60

kit plan llama3-8b --site dgx-h100 --devices 64 --batch 1024
"""
LONG = 200
PATHLIB = ("Symlink loop from", "Could not determine home directory")
"""Messages of the standard library for two kinds of wrong paths, whose errors have no type of their
own."""


class Commands(TyperGroup):
    """The commands, in the panels and the order of PANELS."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {name: self.commands[name] for names in PANELS.values() for name in names}
        for panel, names in PANELS.items():
            for name in names:
                self.commands[name].rich_help_panel = panel  # pyright: ignore[reportAttributeAccessIssue]
                _join_lines(self.commands[name])

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Takes `--json` wherever it stands."""
        moved = ["--json"] if "--json" in args else []
        return super().parse_args(ctx, moved + [word for word in args if word != "--json"])


def _join_lines(command: Any) -> None:
    """Makes a line of each paragraph of a command's help, for the terminal to fold."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help)
    for inner in getattr(command, "commands", {}).values():
        _join_lines(inner)


def _tell_version(asked: bool) -> None:
    from importlib.metadata import PackageNotFoundError, version

    if asked:
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
        typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True),
    ] = False,
) -> None:
    """Keeps what every command is asked."""
    AS_JSON.set(as_json)


for part in (launching, runs, planning, machines, data, scores, exchange):
    app.add_typer(part.app)


def run() -> None:
    """Runs the command line; an error that the user can mend is told without a traceback."""
    try:
        with plain_streams():
            app(standalone_mode=True)
    except (ConfigError, DataError, RunError, JobError, MissingPackageError) as error:
        _tell(type(error).__name__, str(error))
    except (OSError, UnicodeEncodeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(PATHLIB):
            raise
        _tell(type(error).__name__, _of_paths(error))


def _of_paths(error: Exception) -> str:
    """Returns an error of a path that was given, or of a disk, in one line: a traceback would
    explain nothing.
    """
    if not isinstance(error, OSError):
        return f"{error}. Give another path."
    named = [
        os.fsdecode(name)
        for name in (error.filename, error.filename2)
        if isinstance(name, str | bytes)
    ]
    where = " to ".join(
        f"{name[:LONG]}… ({len(name)} characters)" if len(name) > LONG else name for name in named
    )
    if not where:
        return f"{error.strerror or error}."
    return f"{where}: {error.strerror}. Give another path, or see who may read and write there."


def _tell(kind: str, what: str) -> None:
    PlainConsole(stderr=True).print(Text.assemble((f"{kind}: ", "red"), what))
    sys.exit(1)
