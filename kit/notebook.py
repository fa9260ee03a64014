"""The few things that only notebooks need: what they train on their reader's cluster, a fresh run
directory, a table from rows.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.render import check_submittable
from cluster.site import Site
from kit.cli.asked import ask_for
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.data.dataset import DESCRIPTION, Dataset
from kit.engines.build import check_engine
from kit.errors import ConfigError, check_known
from kit.show.table import Table as Table

SCALES = ("demo", "cluster")
LENGTHS = (
    "num_steps",
    "warmup_steps",
    "decay_steps",
    "validation_every",
    "validation_sequences",
    "checkpoint_every",
    "keep_last",
    "keep_every",
)
"""Fields of a recipe that a notebook sets at either scale: it tells a story of so many steps."""
DEMO = (
    'Demo scale: nothing is sent to a cluster. With SCALE = "cluster" the next cell trains there.'
)
WEEK_S = 7 * 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What a reader gives a notebook to train on a cluster; at demo scale nothing.

    Attributes:
        site: where.
        spec: the model.
        plan: its layout and batch.
        dataset: what it reads.
        stated: fields of the recipe.
        patience_s: how long a cell waits for a job, its time in the queue included.
    """

    site: Site | None = None
    spec: ModelSpec | None = None
    plan: Plan | None = None
    dataset: Dataset | None = None
    stated: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    patience_s: float = 600.0

    @property
    def other_plan(self) -> Plan | None:
        """The plan on half as many replicas, where they are even in number."""
        if self.plan is None or self.plan.data_parallel % 2:
            return self.plan
        return self.plan.replace(data_parallel=self.plan.data_parallel // 2)

    def recipe(self, demo: Recipe) -> Recipe:
        """Returns the reader's recipe for as many steps, validations and checkpoints as the
        notebook's own.
        """
        if self.dataset is None:
            return demo
        lengths = {name: getattr(demo, name) for name in LENGTHS}
        return Recipe.from_dict({**self.stated, **lengths, "data": str(self.dataset.directory)})

    def __str__(self) -> str:
        if self.site is None or self.spec is None or self.plan is None:
            return DEMO
        return (
            f"Cluster scale: {self.spec.name} on {self.plan.num_devices:,} devices of site"
            f" {self.site.name!r}, for as many steps as the demo. Its nodes must see ../runs and"
            " the data."
        )


def at_scale(
    scale: str,
    *,
    site: str,
    recipe: str,
    data: str,
    model: str | None = None,
    plan: str | None = None,
) -> Given:
    """Returns what a notebook trains at a scale, after checking it; the rest is as for `kit
    launch`.

    The scale is demo, where nothing else is looked at, or cluster. Model and plan are by default
    those of the published recipe.

    Raises:
        ConfigError, DataError, MissingPackageError: what is unknown or missing, does not fit, or is
        still to fill in.
    """
    check_known("SCALE", str(scale), SCALES)
    if scale == "demo":
        return Given()
    place = Site.load(site)
    check_submittable(place)
    if Path(recipe).suffix in (".toml", ".json") and (model is None or plan is None):
        raise ConfigError(
            f"MODEL, PLAN: {recipe} is a recipe without either. Give a preset or spec.json, and"
            " a plan.json made by `kit plan --out`."
        )
    unchanged = {"spec": {}, "plan": {}, "recipe": {}}
    asked = ask_for(model, recipe, None if plan is None else Path(plan), {}, unchanged)
    asked.plan.check(asked.spec)
    check_engine(asked.plan)
    return Given(
        site=place,
        spec=asked.spec,
        plan=asked.plan,
        dataset=Dataset.open(data),
        stated=asked.fields,
        patience_s=WEEK_S,
    )


def demo_dataset(directory: str | Path) -> Dataset:
    """Returns the dataset in a folder; where there is none, it is built first, from the text of
    this installation.

    What is there is kept although that text changes with every package that is installed: the demo
    wants any text, and `dataset.json` says which it was.

    Raises:
        DataError: the folder holds something else, or a damaged dataset.
    """
    if (Path(directory) / DESCRIPTION).exists():
        return Dataset.open(directory)
    from kit.data import build_dataset

    return build_dataset(directory, progress=False)


def new_run_directory(parent: str | Path, name: str) -> Path:
    """Makes and returns a new NAME-001, NAME-002, ... in `parent`; two callers never get the
    same.
    """
    parent = Path(parent)
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(found.name[len(name) + 1 :]) for found in parent.glob(f"{name}-[0-9][0-9][0-9]")]
    directory = parent / f"{name}-{max(taken, default=0) + 1:03d}"
    try:
        directory.mkdir()
    except FileExistsError:  # another caller was faster
        return new_run_directory(parent, name)
    return directory
