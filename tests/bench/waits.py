"""Waiting times of a user after the start of a run: from `resume` to the next step, from a request
to a saved checkpoint or to the end of the run, and to the first picture of the first notebook.
"""

import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from rich.console import Console

from kit.data import Dataset
from kit.demo import TerminalClient
from kit.launcher import resume
from kit.run import Run
from kit.show.results import Row, row
from tests.bench.startup import LAYOUTS, ONE, REPEATS, at_step, ended, launched, trained
from tests.bench.turns import median_row
from tests.support.environments import ROOT

PICTURE = re.compile("<(img|svg)")


def measure(workplace: Path, dataset: Dataset, *, repeats: int = REPEATS) -> list[Row]:
    """Returns rows with the seconds to the next step of a resumed run, to a requested checkpoint,
    to a requested end, and to the first picture of the first notebook.
    """
    rows = []
    for name, plan in LAYOUTS.items():
        run = trained(workplace / name, plan, dataset, num_steps=1, checkpoint_every=None)
        times = [resumed_s(run.directory, 2 + i) for i in range(repeats)]
        rows.append(median_row(f"`kit resume` to the end of the next step, {name}", times, "s"))
    run = launched(workplace / "asked", ONE, dataset, num_steps=10**6, checkpoint_every=None)
    try:
        at_step(run, 2)
        times = [saved_s(run) for _ in range(repeats)]
        step_s = statistics.median(run.metrics()["step_time_s"][1:])
        start = time.time()
        run.job.stop()
        stopped = run.job.wait(60)
        stop_s = time.time() - start
    finally:
        run.job.cancel()
    step = f"the save waits for the end of the running step, and a step takes {step_s:.2f} s"
    picture_s, cell_s, cell = first_picture_s(workplace / "reader", dataset)
    shown = f"shown by the cell `{cell}`"
    return [
        *rows,
        median_row("`kit checkpoint` to the complete checkpoint, 1 process", times, "s", note=step),
        row("`kit stop` to the end of the job, 1 process", stop_s, "s", note=stopped.reason),
        row("opening of notebook 00 to its first picture", picture_s, "s", note=shown),
        row("opening of notebook 00 to the end of the cell with its first picture", cell_s, "s"),
    ]


def resumed_s(directory: Path, num_steps: int) -> float:
    """Returns the seconds from the call of `resume` to the end of the run's next step."""
    start = time.time()
    run = ended(resume(directory, num_steps=num_steps))
    return float(run.metrics()["time"][-1]) - start


def saved_s(run: Run) -> float:
    """Returns the seconds from requesting a checkpoint of a running job until it is complete."""
    before, start = run.checkpoints.steps(), time.time()
    run.job.checkpoint()
    while (steps := run.checkpoints.steps()) == before:
        if time.time() - start > 60:
            raise RuntimeError(f"{run.directory} has saved no checkpoint within a minute")
        time.sleep(0.01)
    return run.checkpoints.saved_at(steps[-1]) - start


class Reader(TerminalClient):
    """Client that runs a notebook and records when its first picture was shown."""

    drawn: float | None = None

    def process_message(self, msg: dict, cell: Any, cell_index: int) -> Any:
        shown = msg["content"].get("data", {})
        if "image/png" in shown or PICTURE.search(shown.get("text/html", "")):
            self.drawn = self.drawn or time.perf_counter()
        return super().process_message(msg, cell, cell_index)


def first_picture_s(folder: Path, dataset: Dataset) -> tuple[float, float, str]:
    """Runs a copy of notebook 00 in a new kernel. The notebook's dataset exists already. Returns
    (seconds to its first picture, seconds to the end of the cell with the picture, name of the
    cell).
    """
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "demo").symlink_to(dataset.directory.resolve())
    notebook = folder / "notebooks" / "00_quickstart.ipynb"
    notebook.parent.mkdir()
    shutil.copy(ROOT / "notebooks" / notebook.name, notebook)
    with tempfile.TemporaryDirectory(prefix="kit-kernel-") as sockets:
        start = time.perf_counter()
        document = nbformat.read(notebook, as_version=4)
        reader = Reader(document, notebook.parent, sockets, Console(quiet=True))
        with reader.setup_kernel():
            for index, cell in enumerate(document.cells):
                reader.execute_cell(cell, index)
                if reader.drawn is not None:
                    return reader.drawn - start, time.perf_counter() - start, cell.id
    raise RuntimeError(f"{notebook.name} has shown no picture")
