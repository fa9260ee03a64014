"""`python -m tests.benchmarks [NAME ...]`: measures side by side here; the tables go into
BENCHMARKS.md.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from kit.data import Dataset
from kit.errors import ConfigError
from kit.notebook import demo_dataset
from kit.show.results import Row
from tests.benchmarks import (
    conversion,
    data,
    data_order,
    evaluate,
    gpu,
    groups,
    growth,
    hour,
    monitor,
    overhead,
    rehearsal,
    scale,
    startup,
    storage,
    train_speed,
    waits,
)
from tests.benchmarks.headlines import DOCUMENTS, refresh
from tests.benchmarks.results import load_average, write_results
from tests.benchmarks.tables import table

BENCHMARKS: dict[str, Callable[[Path, Dataset], list[Row]]] = {
    "train_speed": lambda workplace, dataset: train_speed.measure(workplace),
    "engines": lambda workplace, dataset: train_speed.measure_engines(workplace),
    "startup": startup.measure,
    "cold_start": lambda workplace, dataset: startup.measure_cold(workplace),
    "waits": waits.measure,
    "data": data.measure,
    "data_order": data_order.measure,
    "checkpoints": lambda workplace, dataset: storage.measure(workplace),
    "conversion": lambda workplace, dataset: conversion.measure(workplace),
    "overhead": overhead.measure,
    "beside": overhead.measure_beside,
    "evaluate": evaluate.measure,
    "scale": lambda workplace, dataset: scale.measure(workplace),
    "growth": growth.measure,
    "groups": lambda workplace, dataset: groups.measure(workplace),
    "planning": lambda workplace, dataset: storage.measure_planning(workplace),
    "rehearsal": rehearsal.measure,
    "gpu": lambda workplace, dataset: gpu.measure(workplace),
    "monitor": lambda workplace, dataset: monitor.measure(workplace),
    "hour": lambda workplace, dataset: hour.measure(workplace),
}
QUIET, PATIENCE_S = 2.0, 600.0
"""Other work makes ratios uncertain; the load that was left stands under each table."""


def quiet_load(console: Console) -> float:
    """Returns the load average once it is below `QUIET`, or what it is after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    with console.status(f"waiting for a load below {QUIET:g}, {PATIENCE_S / 60:g} minutes at most"):
        while load_average() >= QUIET and time.monotonic() < end:
            time.sleep(5)
    return load_average()


def main() -> int:
    """Runs the named benchmarks, by default all, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default all"
    )
    models = gpu.models()
    parser.add_argument(
        "--model", choices=models, default=next(iter(models)), help="of gpu; default %(default)s"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data/demo"), help="dataset; built if absent"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. There are {', '.join(BENCHMARKS)}.")
    BENCHMARKS["gpu"] = lambda workplace, dataset: gpu.measure(workplace, model=options.model)
    console = Console()
    dataset = demo_dataset(options.data)
    for name in options.names or BENCHMARKS:
        load = quiet_load(console)
        console.rule(name)
        with (
            tempfile.TemporaryDirectory(prefix="kit-bench-") as workplace,
            console.status(f"measuring {name}"),
        ):
            rows = BENCHMARKS[name](Path(workplace), dataset)
        command = f"python -m tests.benchmarks {name}"
        if name == "gpu":  # a file and a table for each model
            name, command = gpu.results_name(options.model), f"{command} --model {options.model}"
        results = write_results(name, rows, command=command, load_before=load)
        console.print(Markdown(table(results)))
    try:
        for line in refresh(*DOCUMENTS):
            console.print(line)
    except ConfigError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
