"""How long a user waits: for `import kit`, and from `launch` to the first optimizer step of the
demo model.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from kit.data import Dataset
from kit.launcher import launch
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.show.results import Row, row
from kit.spec import ModelSpec

LAYOUTS = {
    "1 process": Plan(global_batch_size=16, micro_batch_size=4),
    "TP2 x PP2, 4 processes": Plan(
        global_batch_size=16, micro_batch_size=4, tensor_parallel=2, pipeline_parallel=2
    ),
}


def measure(workplace: Path, dataset: Dataset) -> list[Row]:
    """Returns import times, and times from `launch` to the end of the first step.

    Args:
        workplace: an empty folder.
        dataset: to train on; its vocabulary must fit the demo model.
    """
    rows = [_import_row(package) for package in ("kit", "cluster")]
    rows.append(row("`import torch`, for comparison", _import_s("torch", repeats=3)[0], "s"))
    for name, plan in LAYOUTS.items():
        times = [first_step_s(workplace / f"{name}-{i}", plan, dataset) for i in range(3)]
        note = f"median of 3, {min(times):.1f} to {max(times):.1f} s"
        rows.append(
            row(f"`kit launch` to first step, {name}", statistics.median(times), "s", note=note)
        )
    return rows


def first_step_s(directory: Path, plan: Plan, dataset: Dataset) -> float:
    """Returns the seconds from the call of `launch` to the end of the first optimizer step.

    Raises:
        RuntimeError: the run failed.
    """
    recipe = Recipe(
        data=str(dataset.directory), num_steps=1, learning_rate=1e-3, checkpoint_every=None
    )
    start = time.time()
    run = launch(directory, spec=ModelSpec.preset("demo"), plan=plan, recipe=recipe)
    wait_until_done(run)
    return float(run.metrics()["time"][0]) - start


def wait_until_done(run: Run, *, limit_s: float = 600) -> None:
    """Waits for the end of a run.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    status = run.job.wait(limit_s)
    if status.state != "done":
        raise RuntimeError(f"{run.directory} is {status.state}: {status.reason}")


def _import_row(package: str) -> Row:
    seconds, loaded = _import_s(package, repeats=9)
    note = "in a new interpreter; " + ("torch is imported" if loaded else "torch is not imported")
    return row(f"`import {package}`", seconds, "s", at_most=0.3, note=note)


def _import_s(package: str, *, repeats: int) -> tuple[float, bool]:
    """Returns the median seconds of an import in a new interpreter, and whether torch came with
    it.
    """
    code = (
        f"import sys, time; start = time.perf_counter(); import {package}; "
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    said = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(repeats)
    ]
    return statistics.median(float(seconds) for seconds, _ in said), said[0][1] == "True"
