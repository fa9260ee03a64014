"""What commands share: their common options, settings by key, and how they print."""

import contextvars
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from cluster.login.mirror import mirror_of
from cluster.ownership import refuse_other_owner
from kit.errors import ConfigError, kit_command
from kit.show.terminal import PlainConsole, Table

AS_JSON = contextvars.ContextVar("as_json", default=False)
"""Whether this command prints JSON: the option `--json`."""

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
        help="Time limit of each job, in minutes. A longer run is resubmitted until it is"
        " done. Default: the site's limit."
    ),
]
MODEL = "Model: a preset (`kit plan --list`), a spec.json, or a Hugging Face config.json."
FollowOption = Annotated[
    bool, typer.Option("--follow", help="Continue with what is new until the job ends.")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output if it exists.")
]


def parse_values(settings: list[str] | None) -> dict[str, Any]:
    """Returns {"plan.compile": True} from `plan.compile=true`; values are JSON or plain words."""
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
    """Returns {"plan": {"tensor_parallel": 2}, ...} from `plan.tensor_parallel=2`."""
    changes: dict[str, dict[str, Any]] = {name: {} for name in allowed}
    for key, value in parse_values(settings).items():
        record, _, field = key.partition(".")
        if not field or record not in allowed:
            wanted = " or ".join(f"{name}.KEY=VALUE" for name in allowed)
            raise ConfigError(f"--set {key!r} is not allowed. Give {wanted}.")
        changes[record][field] = value
    return changes


def strict_json(value: Any) -> str:
    """Returns plain values as JSON that every parser takes: NaN and infinity, which JSON lacks,
    become their names.
    """
    return json.dumps(json.loads(json.dumps(value), parse_constant=str), allow_nan=False)


def refuse(given: dict[str, Any], why: str) -> None:
    """Raises ConfigError for the first option that is given and of no use here, with the reason."""
    if unfit := [
        flag for flag, value in given.items() if value not in (None, []) and value is not False
    ]:
        raise ConfigError(f"{unfit[0]}: {why}")


def tell(values: Any, *parts: RenderableType) -> None:
    """Prints plain values as JSON if that was asked for, or else what people read, one part below
    the other.
    """
    if AS_JSON.get():
        # One that follows is read as it goes.
        print(strict_json(values), flush=True)
        return
    for part in parts:
        # The terminal breaks lines of text, so that a command or path in it is copied whole.
        PlainConsole().print(part, soft_wrap=isinstance(part, str | Text))


def tell_record(title: str, values: dict[str, Any]) -> None:
    """Prints keys and values as a table."""
    texts = {
        key: f"{value:,}" if isinstance(value, int) else str(value) for key, value in values.items()
    }
    tell(values, facts_table(title, texts.items()))


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Returns names and what is known of them as a table."""
    return Table(
        "", "", title=title, rows=[(Text(name, style="dim"), text) for name, text in facts]
    )


def advice(text: str, *words: str | Path) -> Text:
    """Returns a text that ends in a command of the kit."""
    return Text.assemble(f"{text} ", (kit_command(*words), "bold"))


def hint(text: str, *words: str | Path) -> None:
    """Prints a text that ends in a command of the kit."""
    tell({"said": text, "command": kit_command(*words)}, advice(text, *words))


def next_step(text: str, *words: str | Path) -> None:
    """Prints on standard error what to do next, as a command of the kit; nothing where JSON was
    asked for.
    """
    if not AS_JSON.get():
        note(advice(text, *words))


def note(text: str | Text) -> None:
    """Prints a text to standard error."""
    PlainConsole(stderr=True, soft_wrap=True).print(text)


def owned_output(out: Path | None, default: Path) -> Path:
    """Returns the file or folder that a command writes: `out`, or `default` if `out` is None.

    Raises:
        JobError: the output would lie in another user's run directory, or `out` is None and the
            folder of `default` belongs to another user.
    """
    path = out or default
    if out is None or (path.parent / "spec.json").exists():
        refuse_other_owner(
            path.parent, f"write {path.name} into it, so give it another place with --out"
        )
    return path


def run_there(run: str | Path) -> None:
    """Runs the same command where the run lies and ends with its exit status, if `run` is a mirror
    of one.

    Raises:
        NoConnectionError, JobError: it cannot be run there, or the mirror is somebody else's.
    """
    if remote := mirror_of(Path(run).expanduser()):
        words = [
            remote.mirror.directory if word == str(run) or Path(word) == run else word
            for word in sys.argv[1:]
        ]
        raise typer.Exit(remote.run_command(words))
