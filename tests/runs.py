"""A run as a launch leaves it, without its job."""

from pathlib import Path

from cluster.files import write_atomic
from cluster.site import Site
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec


def new_run(
    directory: str | Path, *, spec: ModelSpec, plan: Plan, recipe: Recipe, site: Site
) -> Run:
    """Returns a run whose directory holds what it was asked for."""
    plan.check(spec)
    run = Run.prepare(directory, spec=spec, plan=plan, recipe=recipe, site=site)
    run.directory.mkdir(parents=True, exist_ok=True)
    for name, text in run.asked().items():
        write_atomic(run.directory / name, text)
    return run
