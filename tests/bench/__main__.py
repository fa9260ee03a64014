"""`python -m tests.bench [NAME ...]`: runs benchmarks on this machine and writes their tables into
`docs/benchmarks.md`.
"""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from kit.data import Dataset
from kit.errors import ConfigError
from kit.notebook import demo_dataset
from kit.show.results import Row
from tests.bench import gpu
from tests.bench.headlines import DOCUMENTS, refresh
from tests.bench.results import load_average, write_results
from tests.bench.tables import table


class Benchmark(NamedTuple):
    """Module and function of a benchmark. The module is imported when the benchmark runs, since
    some modules need optional packages such as a browser's client.
    """

    module: str
    function: str = "measure"
    reads_dataset: bool = False

    def measure(self, workplace: Path, dataset: Dataset | None, **options: str) -> list[Row]:
        """Returns the rows that the benchmark measures."""
        function = getattr(importlib.import_module(f"tests.bench.{self.module}"), self.function)
        return function(workplace, *([dataset] if self.reads_dataset else []), **options)


BENCHMARKS = {
    "train_speed": Benchmark("train_speed"),
    "engines": Benchmark("train_speed", "measure_engines"),
    "optimizers": Benchmark("train_speed", "measure_optimizers"),
    "startup": Benchmark("startup", reads_dataset=True),
    "cold_start": Benchmark("startup", "measure_cold"),
    "waits": Benchmark("waits", reads_dataset=True),
    "data": Benchmark("data", reads_dataset=True),
    "data_order": Benchmark("data_order", reads_dataset=True),
    "checkpoints": Benchmark("storage"),
    "conversion": Benchmark("conversion"),
    "overhead": Benchmark("overhead", reads_dataset=True),
    "beside": Benchmark("overhead", "measure_beside", reads_dataset=True),
    "slow_disk": Benchmark("slow_disk", reads_dataset=True),
    "evaluate": Benchmark("evaluate", reads_dataset=True),
    "scale": Benchmark("scale"),
    "growth": Benchmark("growth", reads_dataset=True),
    "groups": Benchmark("groups"),
    "planning": Benchmark("storage", "measure_planning"),
    "rehearsal": Benchmark("rehearsal", reads_dataset=True),
    "gpu": Benchmark("gpu"),
    "monitor": Benchmark("monitor"),
    "hour": Benchmark("hour"),
}
QUIET, PATIENCE_S = 2.0, 600.0
"""Load average below which a benchmark starts, and longest wait for this load in seconds. The load
of other programs makes measured ratios uncertain. The load before the benchmark is written under
its table."""


def quiet_load(console: Console) -> float:
    """Waits until the load average is below `QUIET`, at most `PATIENCE_S` seconds. Returns the load
    average.
    """
    end = time.monotonic() + PATIENCE_S
    with console.status(f"waiting for a load below {QUIET:g}, {PATIENCE_S / 60:g} minutes at most"):
        while load_average() >= QUIET and time.monotonic() < end:
            time.sleep(5)
    return load_average()


def main() -> int:
    """Runs the named benchmarks, by default all, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
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
    console = Console()
    names = options.names or [*BENCHMARKS]
    needs_dataset = any(BENCHMARKS[name].reads_dataset for name in names)
    dataset = demo_dataset(options.data) if needs_dataset else None
    for name in names:
        # The load of the host's cores hardly changes the speed of a GPU, so a GPU benchmark starts
        # at any load.
        is_on_gpu = name == "gpu" and torch.cuda.is_available()
        load = load_average() if is_on_gpu else quiet_load(console)
        console.rule(name)
        with (
            tempfile.TemporaryDirectory(prefix="kit-bench-") as workplace,
            console.status(f"measuring {name}"),
        ):
            model = {"model": options.model} if name == "gpu" else {}
            rows = BENCHMARKS[name].measure(Path(workplace), dataset, **model)
        command = f"python -m tests.bench {name}"
        if name == "gpu":  # each model of `gpu` has its own results file and table
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
