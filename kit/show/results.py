"""Results of measurements: rows in `results/NAME.json`, and the tables of a document made from these files.

A document holds `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`, each on a line of its own; what stands between them
is replaced, so that no measured number is ever typed. No torch.
"""

import dataclasses
import datetime
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from cluster.record import ConfigError, Record, field_doc, write_atomic

RESULTS = Path("results")
"""Where results are kept, under the current directory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One measured number."""

    name: str = field_doc("what was measured")
    value: float = field_doc("the number; a fraction of 1 where the unit is `fraction`")
    unit: str = field_doc("s, ms, tokens/s, x, fraction ...", default="")
    target: str = field_doc("what it should be, in words; empty where it only informs", default="")
    ok: bool | None = field_doc("whether it is", default=None)
    note: str = field_doc("spread, conditions", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results(Record):
    """The rows of one benchmark, and under what conditions they were taken."""

    name: str = field_doc("of the benchmark, and of its file")
    command: str = field_doc("that measured it")
    machine: str = field_doc("cores and CPU model")
    date: str = field_doc("UTC, to the minute")
    load_before: float = field_doc("other work: load average of the last minute, before the benchmark began")
    rows: tuple[Row, ...] = field_doc("in the order of the table")


def row(
    name: str,
    value: float,
    unit: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Row:
    """Returns a row, judged by one limit if there is one."""
    target, ok = "", None
    if at_least is not None:
        target, ok = f"≥ {format_value(at_least, unit)}", value >= at_least
    elif at_most is not None:
        target, ok = f"≤ {format_value(at_most, unit)}", value <= at_most
    return Row(name=name, value=value, unit=unit, target=target, ok=ok, note=note)


def write_results(
    name: str, rows: Iterable[Row], *, command: str, load_before: float, directory: Path = RESULTS
) -> Results:
    """Writes `directory`/NAME.json and returns what it holds.

    Args:
        name: of the benchmark: lower-case letters, digits and `_`.
        rows: what was measured.
        command: as a user would type it.
        load_before: `load_average()` before the measurement began.
        directory: is made if absent.

    Raises:
        ConfigError: the name cannot be that of a file and a marker.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"results: {name!r} is not allowed as a name. Give lower-case letters, digits and '_'.")
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    results = Results(
        name=name, command=command, machine=machine(), date=date, load_before=load_before, rows=tuple(rows)
    )
    results.write(directory / f"{name}.json")
    return results


def write_tables(document: Path, *, directory: Path = RESULTS) -> tuple[list[str], list[str]]:
    """Replaces the tables of `document` and returns the names written, and those kept for want of results.

    Args:
        document: has the markers; it is written only if all of them, and all results, are in order.
        directory: of the results.

    Raises:
        ConfigError: the document is missing, a marker has no partner, or a results file is damaged.
    """
    if not document.is_file():
        raise ConfigError(f"{document}: no such file; expected a document with <!-- bench:NAME --> markers.")
    text = document.read_text()
    _check_markers(document, text)
    written, kept = [], []

    def replaced(match: re.Match) -> str:
        file = directory / f"{match[1]}.json"
        if not file.exists():
            kept.append(match[1])
            return match[0]
        written.append(match[1])
        return f"<!-- bench:{match[1]} -->\n{table(Results.read(file))}\n<!-- /bench:{match[1]} -->"

    changed = re.sub(r"^<!-- bench:(\w+) -->$.*?^<!-- /bench:\1 -->$", replaced, text, flags=re.M | re.S)
    if changed != text:
        write_atomic(document, changed)
    return written, kept


def table(results: Results) -> str:
    """Returns the rows as a Markdown table, then one line with machine, date, load and command."""
    lines = ["| | measured | target | met | |", "|---|--:|--:|:-:|---|"]
    for item in results.rows:
        met = {True: "yes", False: "**no**", None: ""}[item.ok]
        cells = (item.name, format_value(item.value, item.unit), item.target, met, item.note)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += ["", f"{results.machine}; {results.date} UTC, load before {results.load_before:.1f}; `{results.command}`"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Returns text as a cell of a Markdown table: on one line, without what would end the cell or begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def format_value(value: float, unit: str) -> str:
    """Returns a number to three significant digits with its unit; a fraction is printed in per cent."""
    number = 100 * value if unit == "fraction" else value
    digits = f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:#.3g}".rstrip(".")
    return digits + {"fraction": " %", "": "", "x": "x"}.get(unit, f" {unit}")


def machine() -> str:
    """Returns cores and CPU model of this machine, for people."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), flags=re.M)
        model = match[1].strip() if match else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, {model}"


def load_average() -> float:
    """Returns how many processes wanted a core in the last minute, on average."""
    return os.getloadavg()[0]


def _check_markers(document: Path, text: str) -> None:
    """Refuses anything but open, close, open, close of equal names: a lost partner would swallow text in between."""
    opened = None
    for match in re.finditer(r"^<!-- (/?)bench:(\w+) -->$", text, flags=re.M):
        closing, name = match[1] == "/", match[2]
        if closing != (opened is not None) or (closing and name != opened):
            raise ConfigError(
                f"{document}: marker {match[0]!r} has no partner. Each table stands between <!-- bench:NAME --> and "
                f"<!-- /bench:NAME -->, each on a line of its own, not nested."
            )
        opened = None if closing else name
    if opened is not None:
        raise ConfigError(f"{document}: marker '<!-- bench:{opened} -->' has no <!-- /bench:{opened} --> after it.")
