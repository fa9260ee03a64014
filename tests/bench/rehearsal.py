"""Counts of a rehearsal (size of a checkpoint, open files of rank 0) compared with a real job. The
job has eight training ranks on a real Slurm with four nodes. Without Slurm nothing is measured.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import kit
from cluster.sandbox import Sandbox, why_not
from kit.config.spec import ModelSpec
from kit.data import Dataset
from kit.estimate.rehearsal import RehearsalReport, rehearse
from kit.run import Run
from kit.show.results import Row, row
from tests.bench.startup import at_step

PLAN = kit.Plan(
    pipeline_parallel=2, tensor_parallel=2, data_parallel=2, zero_stage=1, global_batch_size=8
)


def measure(workplace: Path, dataset: Dataset) -> list[Row]:
    """Returns rows with the value that the rehearsal predicts and the observed value, for each
    requirement that a job of eight ranks can measure.
    """
    if missing := why_not():
        print(f"rehearsal: {missing}")
        return []
    recipe = kit.Recipe(data=str(dataset.directory), num_steps=100_000, checkpoint_every=50)
    spec, frontier = ModelSpec.preset("demo"), kit.Site.load("frontier")
    with contextlib.ExitStack() as stack:
        sandbox = Sandbox.start(workplace / "sandbox")
        stack.callback(sandbox.stop)
        os.environ.update(sandbox.environment)
        site = kit.Site.load(sandbox.site_file)
        # The rehearsal needs device speeds, which the sandbox does not state, so those of Frontier
        # are used. Step times are not compared.
        priced = site.replace(device=frontier.device, links=frontier.links)
        told = rehearse(spec, PLAN, recipe, priced)
        run = kit.launch(workplace / "run", spec=spec, plan=PLAN, recipe=recipe, site=site)
        stack.callback(run.job.wait, 60)
        stack.callback(run.job.cancel)
        return _compare(told, at_step(run, 60))


def _compare(told: RehearsalReport, run: Run) -> list[Row]:
    counts: dict[str, Any] = {count.what: count.value for count in told.requirements}
    newest = run.checkpoints.path(run.checkpoints.newest())
    written = sum(file.stat().st_size for file in newest.iterdir())
    size = counts["size of the kept checkpoints"] * 1e12 / (run.recipe.keep_last + 1)
    files, listed = (
        "open files of rank 0",
        [len(os.listdir(f"/proc/{pid}/fd")) for pid in _ranks(run)],
    )
    checkpoint, archives = "size of a checkpoint", "includes names of tensors and zip archives"
    most = "open files of the rank with the most open files"
    rank_0 = "one of 8 ranks; the rehearsal assumes that rank 0 has the most"
    return [
        *_pair((checkpoint, checkpoint), size / 1e6, written / 1e6, "MB", archives),
        *_pair((files, most), counts[files], max(listed), "", rank_0),
    ]


def _pair(names: tuple[str, str], told: float, seen: float, unit: str, note: str) -> list[Row]:
    """Returns (row of the predicted value, row of the measured value). `names` are the names of
    these values.
    """
    predicted, measured = names
    return [
        row(f"{predicted}, predicted by the rehearsal", told, unit, note="for 8 ranks"),
        row(f"{measured}, measured", seen, unit, at_most=1.05 * told, note=note),
    ]


def _ranks(run: Run) -> list[int]:
    """Returns the process ids of a job's ranks on all nodes of the sandbox."""
    mark, found = f"KIT_RUN_DIR={run.directory}\0", []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended since it was listed
            environment, command = (
                (process / file).read_text(errors="replace") for file in ("environ", "cmdline")
            )
            if mark in environment and "\0kit.train\0" in command:
                found.append(int(process.name))
    return found
