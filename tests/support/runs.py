"""Run directories as a launch writes them, without a job."""

from pathlib import Path

from cluster.files import write_atomic
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.run import Run
from kit.run.checkpoint import Manifest


def new_run(
    directory: str | Path, *, spec: ModelSpec, plan: Plan, recipe: Recipe, site: Site
) -> Run:
    """Returns a run whose directory holds the files that a launch writes: spec, plan, recipe and
    site.
    """
    plan.check(spec)
    run = Run.prepare(directory, spec=spec, plan=plan, recipe=recipe, site=site)
    run.directory.mkdir(parents=True, exist_ok=True)
    for name, text in run.configuration_texts().items():
        write_atomic(run.directory / name, text)
    return run


def seal(run: Run, step: int) -> None:
    """Writes the manifest of a checkpoint, with checksums of the checkpoint's present files. The
    trainer does this after a save, and an attacker can do this after a change of files.
    """
    folder = run.checkpoints.path(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    samples = run.plan.global_batch_size * step
    manifest = Manifest(
        step=step,
        attempt=1,
        samples=samples,
        tokens=samples * run.spec.sequence_length,
        seed=run.recipe.seed,
        time=0.0,
        spec=run.spec,
        plan=run.plan,
        files={file.name: file.stat().st_size for file in folder.iterdir()},
    )
    run.checkpoints.complete(folder, manifest)
