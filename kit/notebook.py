"""Functions that only notebooks use: settings of a training at demo or cluster scale, the demo
dataset, a new run directory, and tables.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.render import check_submittable
from cluster.site import Site
from kit.cli.launch_settings import gather_settings
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
"""Fields of the recipe that have the notebook's own values at both scales, since the text and
figures of a notebook describe a fixed number of steps."""
DEMO = (
    'Demo scale: nothing is sent to a cluster. With SCALE = "cluster" the next cell trains there.'
)
WEEK_S = 7 * 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotebookSettings:
    """Settings with which the reader of a notebook trains on a cluster. At demo scale, all fields
    have their default values.

    Attributes:
        site: machine of the training.
        spec: sizes of the model.
        plan: layout and batch size.
        dataset: training data.
        stated: fields of the recipe that the reader has set, by name.
        patience_s: longest time, in seconds, for which a cell waits for a job, including the time
            in the queue.
    """

    site: Site | None = None
    spec: ModelSpec | None = None
    plan: Plan | None = None
    dataset: Dataset | None = None
    recipe_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    patience_s: float = 600.0

    @property
    def other_plan(self) -> Plan | None:
        """Plan with half as many replicas. If the number of replicas is odd, the plan itself."""
        if self.plan is None or self.plan.data_parallel % 2:
            return self.plan
        return self.plan.replace(data_parallel=self.plan.data_parallel // 2)

    def recipe(self, demo: Recipe) -> Recipe:
        """Returns the reader's recipe, with the numbers of steps, validations and checkpoints of
        the notebook's own recipe `demo`. At demo scale, returns `demo`.
        """
        if self.dataset is None:
            return demo
        lengths = {name: getattr(demo, name) for name in LENGTHS}
        return Recipe.from_dict(
            {**self.recipe_fields, **lengths, "data": str(self.dataset.directory)}
        )

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
) -> NotebookSettings:
    """Returns the checked settings of a notebook's training, as `NotebookSettings`.

    Args:
        scale: `demo` or `cluster`. At demo scale all other arguments are ignored.
        site, recipe, data: values as for the options --site, --recipe and --data of `kit launch`.
        model, plan: values as for the argument MODEL and the option --plan of `kit launch`.
            Default: model and layout of the published recipe.

    Raises:
        ConfigError, DataError, MissingPackageError: A setting is unknown or missing, does not fit
            the other settings, or must still be filled in.
    """
    check_known("SCALE", str(scale), SCALES)
    if scale == "demo":
        return NotebookSettings()
    place = Site.load(site)
    check_submittable(place)
    if Path(recipe).suffix in (".toml", ".json") and (model is None or plan is None):
        raise ConfigError(
            f"MODEL, PLAN: {recipe} is a recipe without either. Give a preset or spec.json, and"
            " a plan.json made by `kit plan --out`."
        )
    unchanged = {"spec": {}, "plan": {}, "recipe": {}}
    plan_file = None if plan is None else Path(plan)
    gathered = gather_settings(model, recipe, plan_file, {}, unchanged)
    gathered.refuse_to_edit(unused=("data", *LENGTHS))
    gathered.plan.check(gathered.spec)
    check_engine(gathered.plan)
    return NotebookSettings(
        site=place,
        spec=gathered.spec,
        plan=gathered.plan,
        dataset=Dataset.open(data),
        recipe_fields=gathered.recipe_fields,
        patience_s=WEEK_S,
    )


def demo_dataset(directory: str | Path) -> Dataset:
    """Returns the dataset in a folder. If the folder has no dataset, builds one from text files of
    this Python installation.

    An existing dataset is used as it is, although the text files change with every package that is
    installed. The demo can use any text. `dataset.json` names the text files.

    Raises:
        DataError: The folder has other files, or a damaged dataset.
    """
    if (Path(directory) / DESCRIPTION).exists():
        return Dataset.open(directory)
    from kit.data import build_dataset

    return build_dataset(directory, progress=False)


def new_run_directory(parent: str | Path, name: str) -> Path:
    """Creates a new folder in `parent` with the next unused name of NAME-001, NAME-002, ..., and
    returns its path. Two callers never receive the same folder.
    """
    parent = Path(parent)
    parent.mkdir(parents=True, exist_ok=True)
    earlier = parent.glob(f"{name}-[0-9][0-9][0-9]")
    taken = [int(folder.name.removeprefix(f"{name}-")) for folder in earlier]
    directory = parent / f"{name}-{max(taken, default=0) + 1:03d}"
    try:
        directory.mkdir()
    except FileExistsError:  # Another caller has created the folder in the meantime.
        return new_run_directory(parent, name)
    return directory
