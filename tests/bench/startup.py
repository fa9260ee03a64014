"""Waiting times of a user: for `import kit`, from `launch` to the first optimizer step of the demo
model, and from `git clone` to the first loss. The last time is measured by phase. The phases are
those of `make demo`, and package caches are left unchanged.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.data import Dataset
from kit.errors import RunError
from kit.launcher import launch
from kit.run import Run
from kit.show.results import Row, row
from tests.bench.turns import median_row
from tests.support.environments import ROOT

ONE = Plan(global_batch_size=16, micro_batch_size=4)
LAYOUTS = {
    "1 process": ONE,
    "TP2 x PP2, 4 processes": ONE.replace(tensor_parallel=2, pipeline_parallel=2),
}
REPEATS = 3


def measure(workplace: Path, dataset: Dataset) -> list[Row]:
    """Returns rows with import times, and with times from `launch` to the end of the first step."""
    rows = [_import_row(package) for package in ("kit", "cluster")]
    rows.append(row("`import torch`, for comparison", _import_s("torch", repeats=3)[0], "s"))
    for name, plan in LAYOUTS.items():
        times = [first_step_s(workplace / f"{name}-{i}", plan, dataset) for i in range(REPEATS)]
        rows.append(median_row(f"`kit launch` to the end of the first step, {name}", times, "s"))
    return rows


def first_step_s(directory: Path, plan: Plan, dataset: Dataset) -> float:
    """Returns the seconds from the call of `launch` to the end of the first optimizer step.

    Raises:
        RuntimeError: The run failed.
    """
    start = time.time()
    run = trained(directory, plan, dataset, num_steps=1, checkpoint_every=None)
    return float(run.metrics()["time"][0]) - start


def trained(directory: Path, plan: Plan, dataset: Dataset, **recipe: Any) -> Run:
    """Trains the demo model and returns the finished run.

    Raises:
        RuntimeError: The run failed.
    """
    return ended(launched(directory, plan, dataset, **recipe))


def launched(directory: Path, plan: Plan, dataset: Dataset, **recipe: Any) -> Run:
    """Starts a run of the demo model and returns it. Does not wait for the run's job."""
    asked = Recipe(data=str(dataset.directory), learning_rate=1e-3, **recipe)
    return launch(directory, spec=ModelSpec.preset("demo"), plan=plan, recipe=asked)


def ended(run: Run) -> Run:
    """Waits for a run's job and returns the run. Raises RuntimeError with the job's reason if it
    failed.
    """
    status = run.job.wait(600)
    if status.state != "done":
        raise RuntimeError(f"{run.directory} is {status.state}: {status.reason}")
    return run


def at_step(run: Run, step: int) -> Run:
    """Waits until a run's job has finished `step` steps and returns the run. Raises RuntimeError if
    the job ends before.
    """
    while ((status := run.job.status()).step or 0) < step:
        if status.state.is_final:
            raise RuntimeError(f"{run.directory} is {status.state}: {status.reason}")
        time.sleep(0.1)
    return run


def _import_row(package: str) -> Row:
    seconds, loaded = _import_s(package, repeats=9)
    note = f"in a new interpreter; torch is {'' if loaded else 'not '}imported"
    return row(f"`import {package}`", seconds, "s", at_most=0.3, note=note)


def _import_s(package: str, *, repeats: int) -> tuple[float, bool]:
    """Returns (median seconds of an import in a new interpreter, whether torch is imported too)."""
    code = (
        f"import sys, time; start = time.perf_counter(); import {package}; "
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    said = [_output([sys.executable, "-c", code], ROOT).split() for _ in range(repeats)]
    return statistics.median(float(seconds) for seconds, _ in said), said[0][1] == "True"


FIRST_STEP = """
import sys
from pathlib import Path
from tests.bench.startup import ONE, first_step_s
from kit.data import Dataset
print(first_step_s(Path(sys.argv[1]), ONE, Dataset.open(sys.argv[2])))
"""


def measure_cold(
    workplace: Path, *, install: bool = True, text_bytes: int | None = None
) -> list[Row]:
    """Returns rows with the seconds of each phase and their sum.

    Args:
        workplace: Folder for the clone and its environment, which take several GB.
        install: False skips phases that need a package index, and uses the running Python.
        text_bytes: Size of the dataset's text. The default is the text of the demo.

    Raises:
        RunError: The working directory is no clone, or a phase failed. The message has the last
            line of its output.
    """
    if not (ROOT / ".git").exists():
        raise RunError(
            f"{ROOT} is no clone of the repository. Run this in one: it is cloned again."
        )
    clone, python = workplace / "clone", sys.executable
    phases = {"git clone": _timed(["git", "clone", "--quiet", str(ROOT), str(clone)], workplace)}
    if install:
        python = str(clone / ".venv/bin/python")
        make = ["make", "--silent", f"PYTHON={sys.executable}"]
        phases["creation of the virtual environment"] = _timed([*make, ".venv/bin/python"], clone)
        phases["installation of the packages"] = _timed([*make, ".venv/notebooks-installed"], clone)
    size = [] if text_bytes is None else ["--max-megabytes", str(text_bytes / 1e6)]
    build = [python, "-m", "kit", "data", "build", "data/demo", *size]
    phases["build of the data set"] = _timed(build, clone)
    torch_s = _timed([python, "-c", "import torch"], clone)
    begun = time.perf_counter()
    told = _output([python, "-c", FIRST_STEP, "runs/first", "data/demo"], clone)
    first_s = float(told.split()[-1])
    python_s = max(0.0, time.perf_counter() - begun - first_s)
    phases["start of Python and imports in the process that launches"] = python_s
    whole, limit = sum(phases.values()) + first_s, 300.0 if install else None
    first = f"a Python process that only imports torch takes {torch_s:.1f} s"
    return [
        *(row(name, spent, "s") for name, spent in phases.items()),
        row("launch to the first loss", first_s, "s", note=first),
        row("from `git clone` to the first loss", whole, "s", at_most=limit),
    ]


def _timed(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    _output(command, folder)
    return time.perf_counter() - start


def _output(command: list[str], folder: Path) -> str:
    paths = {"PYTHONPATH": str(folder), "UV_CACHE_DIR": str(folder.parent / "uv")}
    environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RunError(f"`{' '.join(command[:4])} ...` failed: {words}")
    return done.stdout
