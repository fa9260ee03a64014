"""Parts that several commands use: common options, settings in the form KEY=VALUE, and functions
that print.
"""

import contextvars
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from kit.config.other_names import find_setting
from kit.errors import ConfigError, kit_command
from kit.show.terminal import PlainConsole, Table

AS_JSON = contextvars.ContextVar("as_json", default=False)
"""Whether the user has given the option `--json`. Commands then print their result as JSON."""

RunArgument = Annotated[Path, typer.Argument(help="Run directory.", metavar="RUN")]
SiteOption = Annotated[
    str | None,
    typer.Option(help="Machine: the name of a packaged site (`kit plan --list`) or a .toml file."),
]
StepOption = Annotated[
    int | None, typer.Option(help="Checkpoint to use, by its step. Default: the newest.")
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        help="Time limit of each job, in minutes. A run that needs longer is resubmitted"
        " until it is done. Default: the site's limit."
    ),
]
MODEL = "Model: a preset (`kit plan --list`), a spec.json, or a Hugging Face config.json."
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output if it exists.")
]


def parse_values(settings: list[str] | None) -> dict[str, Any]:
    """Returns the values of settings in the form KEY=VALUE, by key. For example,
    `plan.compile=true` gives {"plan.compile": True}. A value is read as JSON. If it is not valid
    JSON, it is a string.

    Raises:
        ConfigError: A setting does not have the form KEY=VALUE.
    """
    values = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not (key and equals):
            raise ConfigError(f"--set {setting!r} is not allowed. Give KEY=VALUE.")
        try:
            values[key] = json.loads(value)
        except (ValueError, RecursionError):
            values[key] = value
    return values


def parse_settings(
    settings: list[str] | None, allowed: tuple[str, ...] = ("spec", "plan", "recipe")
) -> dict[str, dict[str, Any]]:
    """Returns the values of settings in the form RECORD.FIELD=VALUE, by record and field. For
    example, `plan.tensor_parallel=2` gives {"plan": {"tensor_parallel": 2}, ...}. `allowed` are the
    names of the records that may be set.

    Raises:
        ConfigError: The key of a setting has no allowed record, or no field.
    """
    changes: dict[str, dict[str, Any]] = {name: {} for name in allowed}
    for key, value in parse_values(settings).items():
        record, _, field = key.partition(".")
        if not field or record not in allowed:
            wanted = " or ".join(f"{name}.KEY=VALUE" for name in allowed)
            setting = find_setting(key).partition("=")[0]
            if setting.partition(".")[0] in allowed:
                wanted = f"{setting}=VALUE"
            raise ConfigError(f"--set {key!r} is not allowed. Give {wanted}.")
        changes[record][field] = value
    return changes


def strict_json(value: Any) -> str:
    """Returns JSON text that every JSON parser accepts. NaN and infinity are written as strings,
    since JSON does not have these numbers. `value` consists of dicts, lists, texts and numbers.
    """
    lenient = json.dumps(value)
    return json.dumps(json.loads(lenient, parse_constant=str), allow_nan=False)


def refuse_options(options: dict[str, Any], why: str) -> None:
    """Raises ConfigError if the user has given one of `options`, which would have no effect
    together with other options.

    Args:
        options: values of options, by the name of the option. None, False and [] mean that the
            option is not given.
        why: reason why the options have no effect. The message prints it after the option.
    """
    for flag, value in options.items():
        if value is not None and value is not False and value != []:
            raise ConfigError(f"{flag}: {why}")


def print_result(values: Any, *parts: RenderableType) -> None:
    """Prints the result of a command. If the option `--json` is given, prints `values` as JSON.
    Otherwise prints `parts`, one below the other. Values that take long to compute are given as a
    function, which is called only for JSON.
    """
    if AS_JSON.get():
        if callable(values):
            values = values()
        # A command that follows a job prints several results, and each must be readable at once.
        print(strict_json(values), flush=True)
        return
    for part in parts:
        # Lines of text are not wrapped, so that a command or a path in them can be copied.
        PlainConsole().print(part, soft_wrap=isinstance(part, str | Text))


def print_record(title: str, values: dict[str, Any]) -> None:
    """Prints keys and values as a table with one row per key, or as JSON if `--json` is given."""
    rows = []
    for key, value in values.items():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        rows.append((key, text))
    print_result(values, names_table(title, rows))


def names_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Returns a table with one row per (name, text) and without column headings."""
    rows = [(Text(name, style="dim"), text) for name, text in facts]
    return Table("", "", title=title, rows=rows)


def advice(text: str, *words: str | Path) -> Text:
    """Returns `text`, followed by a kit command for the user. `words` are the arguments of the
    command.
    """
    return Text.assemble(f"{text} ", (kit_command(*words), "bold"))


def hint(text: str, *words: str | Path) -> None:
    """Prints `text`, followed by a kit command for the user, as the result of a command. `words`
    are the arguments of the kit command.
    """
    print_result({"said": text, "command": kit_command(*words)}, advice(text, *words))


def next_step(text: str, *words: str | Path) -> None:
    """Prints the user's next step to standard error: `text`, followed by a kit command with the
    arguments `words`. Prints nothing if the option `--json` is given.
    """
    if not AS_JSON.get():
        note(advice(text, *words))


def note(text: str | Text) -> None:
    """Prints a text to standard error, so that standard output contains only results."""
    PlainConsole(stderr=True, soft_wrap=True).print(text)


def owned_output(out: Path | None, default: Path, option: str = "--out") -> Path:
    """Returns the file or folder that a command writes: `out`, or `default` if `out` is None.
    `option` is the option with which the user gives `out`.

    Raises:
        JobError: The path is in a run directory of another user. Or `out` is None, and the folder
            of `default` belongs to another user.
    """
    from cluster.ownership import refuse_other_owner

    path = out or default
    if out is None or (path.parent / "spec.json").exists():
        refuse_other_owner(
            path.parent, f"write {path.name} into it, so give it another place with {option}"
        )
    return path


def run_on_cluster(run: str | Path) -> None:
    """If `run` is the local mirror of a run behind a login node, runs this command on the login
    node and exits with its exit code. Does nothing for other runs.

    Raises:
        NoConnectionError: The login node cannot be reached.
        JobError: The mirror belongs to another user.
    """
    from cluster.login.mirror import mirror_of

    remote = mirror_of(Path(run).expanduser())
    if remote is None:
        return
    words = []
    for word in sys.argv[1:]:
        is_run = word == str(run) or Path(word) == run
        words.append(remote.mirror.directory if is_run else word)
    raise typer.Exit(remote.run_command(words))
