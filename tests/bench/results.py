"""Results of measurements: each file `results/NAME.json` has the rows of one benchmark."""

import dataclasses
import datetime
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from cluster.record import Record, counted, field_doc
from kit.show.results import Row

RESULTS = Path("results")
"""Folder of the results, relative to the current directory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results(Record):
    """The rows of one benchmark, and the conditions of the measurement."""

    name: str = field_doc("of the benchmark, and of its file")
    command: str = field_doc("that measured it")
    machine: str = field_doc("cores and CPU model")
    date: str = field_doc("UTC, to the minute")
    load_before: float = field_doc(
        "other work: load average of the last minute, before the benchmark began"
    )
    rows: tuple[Row, ...] = field_doc("in the order of the table")


def write_results(
    name: str, rows: Iterable[Row], *, command: str, load_before: float, directory: Path = RESULTS
) -> Results:
    """Writes `directory`/NAME.json and returns its content.

    `command` is the command as a user types it. `load_before` is `load_average()` before the
    measurement.
    """
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


def machine() -> str:
    """Returns a text with the cores and the CPU model of this machine."""
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
    """Returns the load average of the last minute: the mean number of processes that ran or waited
    for a core.
    """
    return os.getloadavg()[0]
