"""The command line: every button of the notebooks has a twin here. `kit --help` lists them."""

import os
import sys
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from cluster.state import JobError
from kit.commands import (
    convert,
    data,
    estimates,
    launching,
    monitor,
    papers,
    rehearsal,
    runs,
    scores,
    sites,
)
from kit.errors import ConfigError, DataError, MissingPackageError, RunError
from kit.show.terminal import PlainConsole

LONG = 200
PATHLIB = ("Symlink loop from", "Could not determine home directory")
"""How the standard library tells of two kinds of wrong paths, as errors without a type of their
own."""

WHY = "It is `kit status RUN --why` now."
GONE = {
    "alarm": (
        "Write on_alert = 'COMMAND' into ~/.config/kit/config.toml: `kit watch RUN` runs it for"
        " each alert."
    ),
    "alerts": "It is `kit status RUN` now.",
    "average": "Average the folders that `kit export-hf` writes, with mergekit for example.",
    "engine": (
        "What a run's engine is told lies in its directory, as deepspeed.json or neuron.json."
    ),
    "explain": WHY,
    "export-deepspeed": (
        "A checkpoint leaves by `kit export-hf`; files of DeepSpeed's go through its"
        " ds_to_universal."
    ),
    "goodput": WHY,
    "profile": "Name the steps to record: `kit resume RUN --set 'recipe.profile_steps=[10, 12]'`.",
    "smollm2": "In Python, kit.convert.smollm2.load_smollm2() returns the model.",
}
"""Commands that there were once, and what does their work now."""


class Commands(TyperGroup):
    """The commands; one that went is answered with what does its work now."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command of some words; UsageError where there is none."""
        if args[0] in GONE:
            ctx.fail(f"No such command {args[0]!r}. {GONE[args[0]]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=__doc__,
)
for part in (launching, rehearsal, runs, monitor, estimates, data, scores, convert, papers, sites):
    app.add_typer(part.app)


def run() -> None:
    """Runs the command line; an error that the user can mend is told without a traceback."""
    try:
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
