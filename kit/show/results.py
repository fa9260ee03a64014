"""Results of measurements: rows in `results/NAME.json`. No torch."""

import dataclasses
import datetime
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from cluster.record import ConfigError, Record, counted, field_doc

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
    load_before: float = field_doc(
        "other work: load average of the last minute, before the benchmark began"
    )
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

    `command` is told as a user would type it; `load_before` is `load_average()` before the
    measurement began.

    Raises:
        ConfigError: the name cannot be that of a file and a marker.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"results: {name!r} is not allowed as a name. Give lower-case letters, digits and '_'."
        )
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    results = Results(
        name=name,
        command=command,
        machine=machine(),
        date=date,
        load_before=load_before,
        rows=tuple(rows),
    )
    results.write(directory / f"{name}.json")
    return results


def format_value(value: float, unit: str) -> str:
    """Returns a number to three significant digits with its unit; a fraction is printed in per
    cent.
    """
    number = 100 * value if unit == "fraction" else value
    digits = (
        f"{number:,.0f}"
        if abs(number) >= 100 or number == int(number)
        else f"{number:#.3g}".rstrip(".")
    )
    return digits + {"fraction": " %", "": "", "x": "x"}.get(unit, f" {unit}")


def machine() -> str:
    """Returns cores and CPU model of this machine, for people."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), flags=re.M)
        model = match[1].strip() if match else model
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return f"{counted(cores, 'core')}, {model}"


def load_average() -> float:
    """Returns how many processes wanted a core in the last minute, on average."""
    return os.getloadavg()[0]
