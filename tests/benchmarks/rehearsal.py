"""What a rehearsal counts, beside what a real job of eight training ranks does, on a real Slurm of
four nodes; nothing without Slurm.
"""

import os
import time
from pathlib import Path
from typing import Any

import kit
from cluster.job import Job
from cluster.sandbox import Sandbox, why_not
from kit.data import Dataset
from kit.rehearsal import Rehearsal, rehearse
from kit.run import Run
from kit.show.results import Row, row
from kit.spec import ModelSpec

PLAN = kit.Plan(
    pipeline_parallel=2, tensor_parallel=2, data_parallel=2, zero_stage=1, global_batch_size=8
)


def measure(workplace: Path, dataset: Dataset) -> list[Row]:
    """Returns what was counted and what was seen, for each count that eight ranks can show."""
    if missing := why_not():
        print(f"rehearsal: {missing}")
        return []
    recipe = kit.Recipe(data=str(dataset.directory), num_steps=100_000, checkpoint_every=50)
    sandbox = Sandbox.start(workplace / "sandbox")
    os.environ.update(sandbox.environment)
    try:
        site = kit.Site.load(sandbox.site_file)
        spec = ModelSpec.preset("demo")
        # Step times, which the sandbox does not state, are not compared.
        frontier = kit.Site.load("frontier")
        told = rehearse(
            spec, PLAN, recipe, site.replace(device=frontier.device, links=frontier.links)
        )
        run = kit.launch(workplace / "run", spec=spec, plan=PLAN, recipe=recipe, site=site)
        assert run.job is not None
        try:
            _wait_for(run.job, step=60)
            return _compare(told, run)
        finally:
            run.job.cancel()
            run.job.wait(60)
    finally:
        sandbox.stop()


def _wait_for(job: Job, step: int) -> None:
    while (job.status().step or 0) < step:
        if job.status().state.is_final:
            raise RuntimeError(f"rehearsal: the job has ended: {job.status().reason}")
        time.sleep(0.5)


def _compare(told: Rehearsal, run: Run) -> list[Row]:
    counts: dict[str, Any] = {count.what: count for count in told.counts}
    written = sum(
        file.stat().st_size for file in run.checkpoints.path(run.checkpoints.newest()).iterdir()
    )
    size = counts["kept"].value * 1e12 / (run.recipe.keep_last + 1)
    ranks = [pid for pid in _processes(run) if "\0kit.train\0" in _read(pid, "cmdline")]
    open_files = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in ranks)
    return [
        *_pair("a checkpoint", size / 1e6, written / 1e6, "MB", "names and zip archives included"),
        *_pair(
            "open files of rank 0",
            counts["open files of rank 0"].value,
            open_files,
            "",
            "the most of 8",
        ),
    ]


def _pair(what: str, told: float, seen: float, unit: str, note: str) -> list[Row]:
    return [
        row(f"{what}, rehearsed", told, unit, note="for 8 ranks"),
        row(f"{what}, seen", seen, unit, at_most=1.05 * told, note=note),
    ]


def _processes(run: Run) -> list[int]:
    """Returns the supervisor, the keepers and the ranks of a job, on all nodes of the sandbox."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    mark = f"KIT_RUN_DIR={run.directory}\0"
    return [pid for pid in pids if pid != os.getpid() and mark in _read(pid, "environ")]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""
