"""What commands share: their common options, settings by dotted key, and the console."""

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from cluster.login.connection import pass_through
from cluster.login.mirror import mirror_of
from cluster.state import refuse_other_owner
from kit.errors import ConfigError, kit_command
from kit.measure.device import DeviceName
from kit.show.terminal import PlainConsole, Table

RunArgument = Annotated[Path, typer.Argument(help="run directory", metavar="RUN")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
DeviceOption = Annotated[
    DeviceName | None,
    typer.Option(help="of ranks on this machine; default: its GPUs, where there is one for each"),
]
MinutesOption = Annotated[
    float | None, typer.Option(help="time limit of one job; on a cluster a longer run comes back")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="dotted.key=value, e.g. plan.tensor_parallel=2")
]


def parse_settings(
    settings: list[str] | None, allowed: tuple[str, ...] = ("spec", "plan", "recipe")
) -> dict[str, dict]:
    """Returns {"plan": {"tensor_parallel": 2}, ...} from `plan.tensor_parallel=2`; values are
    JSON or plain words.
    """
    changes: dict[str, dict[str, Any]] = {name: {} for name in allowed}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        record, dot, field = key.partition(".")
        if not (equals and dot and record in allowed):
            wanted = " or ".join(f"{name}.KEY=VALUE" for name in allowed)
            raise ConfigError(f"--set {setting!r} is not allowed. Give {wanted}.")
        try:
            changes[record][field] = json.loads(value)
        except json.JSONDecodeError:
            changes[record][field] = value
    return changes


def strict_json(value: Any) -> str:
    """Returns plain values as JSON that every parser takes: NaN and infinity, which JSON lacks,
    become their names.
    """

    def named(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: named(inner) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [named(inner) for inner in part]
        if isinstance(part, float) and not math.isfinite(part):
            return "NaN" if math.isnan(part) else "Infinity" if part > 0 else "-Infinity"
        return part

    return json.dumps(named(value), allow_nan=False)


def tell(values: Any, as_json: bool, *parts: RenderableType) -> None:
    """Prints plain values as JSON, or else what people read, one part below the other."""
    if as_json:
        print(strict_json(values), flush=True)  # one that follows is read as it goes
    else:
        for part in parts:
            console().print(part)


def print_record(title: str, values: dict[str, Any], as_json: bool) -> None:
    """Prints keys and values as a table, or as JSON."""
    texts = {
        key: f"{value:,}" if isinstance(value, int) else str(value) for key, value in values.items()
    }
    tell(values, as_json, facts_table(title, texts.items()))


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Returns names and what is known of them as a table."""
    return Table(
        "", "", title=title, rows=[(Text(name, style="dim"), text) for name, text in facts]
    )


def hint(text: str, name: str, *words: str | Path) -> None:
    """Prints a text that ends in a command of the kit; however long its path, it can be copied
    as a whole.
    """
    console().print(Text.assemble(f"{text} ", (kit_command(name, *words), "bold")), soft_wrap=True)


def console() -> PlainConsole:
    """Returns the console of a command."""
    return PlainConsole()


def check_not_in_a_strangers_run(file: Path) -> Path:
    """Returns a file that is to be written; raises JobError where it would lie in somebody
    else's run directory.
    """
    if (file.parent / "spec.json").exists():
        refuse_other_owner(
            file.parent, f"write {file.name} into it, so give it another place with --out"
        )
    return file


def run_there(run: str | Path) -> None:
    """Runs the same command where the run lies and ends with its exit status, if `run` is a mirror
    of one.

    Raises:
        NoConnectionError, JobError: it cannot be run there, or the mirror is somebody else's.
    """
    if mirror := mirror_of(Path(run).expanduser()):
        refuse_other_owner(Path(run).expanduser(), "run this where it mirrors a run")
        words = [
            mirror.directory if word == str(run) or Path(word) == run else word
            for word in sys.argv[1:]
        ]
        raise typer.Exit(pass_through(mirror.login, mirror.command("kit", *words)))
