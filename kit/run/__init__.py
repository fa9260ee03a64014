"""The run directory, through whose files a job, a notebook and a scheduler exchange data. Imports
no torch.

spec.json plan.json recipe.json site.json     configuration of the run (plan.attempt_01.json and
                                              site.attempt_01.json: configuration of attempt 1)
job.json submit.sh env.json                   how the job was started, and versions of the software
state.json exit.json ranks/ logs/ control/    state of the job (written by cluster and the trainer)
metrics.jsonl checkpoints/ eval/ profile/     results
hook.py                                       copy of the recipe's hook, which computes the user's
                                              numbers of a step
alerts.jsonl                                  alerts
"""

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cluster.job import Job
from cluster.login.mirror import mirror_of, update_mirror
from cluster.ownership import Owned
from cluster.record import ConfigError, Record, html_table
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import RunError, kit_command
from kit.run.checkpoint import Checkpoints

if TYPE_CHECKING:
    from kit.data import Dataset
    from kit.run.metrics import Metrics


Kind = TypeVar("Kind", bound=Record)
HOOK = "hook.py"
"""Name of the copy of the recipe's hook in the run directory."""
LAUNCH_LOCK = ".launch.lock"
"""Name of the file that a launch locks, and removes when it ends. Only the file's owner can open
it, so that another user who may read the run cannot lock it."""
POLICY = ("on_nan", "on_spike", "hung_after_s", "hook", "profile_steps", "profile_ranks")
"""Fields of a recipe that may change when a run is resumed, since they do not change the result
of a normal step. Besides these fields, the numbers of steps (`num_steps`, `decay_steps`) may
change."""


class Run(Owned):
    """One training run, read from its run directory, while it trains and afterwards.

    Example, on a run made by `kit.launch`:

        >>> import kit
        >>> run = kit.Run.open("runs/first")
        >>> print(run.job.status().state)
        done
        >>> loss = run.metrics().summary()["loss"]
        >>> run.checkpoints.steps()
        [5]

    `run.spec`, `run.plan`, `run.recipe` and `run.site` are the configuration of the run. `run.job`
    reports the status of its job and stops it. `run.metrics()` has the steps as columns. Next:
    `kit.monitor.run_figure(run)` draws the run, `kit.evaluate.evaluate(run)` scores its last
    checkpoint, `kit.resume("runs/first", num_steps=10)` continues it.
    """

    def __init__(
        self, directory: Path, *, spec: ModelSpec, plan: Plan, recipe: Recipe, site: Site
    ) -> None:
        self.directory = directory
        self.spec = spec
        self.plan = plan
        self.recipe = recipe
        self.site = site
        self.checkpoints = Checkpoints(directory / "checkpoints")

    @classmethod
    def prepare(
        cls, directory: str | Path, *, spec: ModelSpec, plan: Plan, recipe: Recipe, site: Site
    ) -> Self:
        """Returns a run with this configuration. `directory` is new, or belongs to a run that can
        be resumed with this configuration. Writes nothing.

        If the run has a checkpoint, and `recipe` changes `num_steps` but does not set
        `decay_steps`, the learning-rate schedule still ends at its former step.

        Raises:
            RunError: The directory contains other files, or a run with another model or recipe.
        """
        directory = Path(directory).expanduser().resolve()
        if (directory / "spec.json").exists():
            old = cls.open(directory)
            is_longer_or_shorter = (
                recipe.num_steps != old.recipe.num_steps and old.checkpoints.steps()
            )
            if is_longer_or_shorter and recipe.decay_steps is None:
                recipe = recipe.replace(decay_steps=old.recipe.decay_steps or old.recipe.num_steps)
            _check_same_run(old, spec, plan, recipe)
        elif directory.is_dir() and {*os.listdir(directory)} - {LAUNCH_LOCK}:
            raise RunError(
                f"{directory} exists and is not a run directory. Give a new or empty directory."
            )
        return cls(directory, spec=spec, plan=plan, recipe=recipe, site=site)

    def configuration_texts(self) -> dict[str, str]:
        """Returns the texts of the run's configuration files, by file name.

        spec.json is last in the dict and must be written last: a directory with spec.json counts as
        a run.

        Raises:
            RunError: The hook's file cannot be read, and no earlier launch has copied this file to
                the run directory.
        """
        texts = {
            f"{name}.json": getattr(self, name).to_json()
            for name in ("plan", "recipe", "site", "spec")
        }
        if (hook := self.recipe.hook) is not None:
            try:
                return {HOOK: Path(hook).read_text(encoding="utf-8"), **texts}
            except (OSError, UnicodeDecodeError) as error:
                has_copy = self.is_elsewhere or (self.directory / HOOK).exists()
                if not has_copy or Recipe.read(self.directory / "recipe.json").hook != hook:
                    raise RunError(
                        f"recipe.hook: {hook!r} cannot be read ({error}). Give a Python file."
                    ) from error
        return texts

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Returns the run in a directory.

        Raises:
            RunError: The directory is not a run directory.
        """
        directory = Path(directory).expanduser().resolve()
        update_mirror(directory)
        if not (directory / "spec.json").exists():
            raise RunError(
                f"{directory} is not a run directory (no spec.json). Make one with `kit launch`."
            )
        return cls(
            directory,
            spec=ModelSpec.read(directory / "spec.json"),
            plan=Plan.read(directory / "plan.json"),
            recipe=Recipe.read(directory / "recipe.json"),
            site=Site.read(directory / "site.json"),
        )

    @property
    def owned_folder(self) -> Path:
        return self.directory

    @property
    def name(self) -> str:
        """Name of the run directory, without its path."""
        return self.directory.name

    @property
    def job(self) -> Job:
        """Job of the run's newest attempt. Its methods are `.status()`, `.logs()`, `.stop()`,
        `.cancel()` and `.wait()`.
        """
        return Job.attach(self.directory)

    @property
    def is_imported(self) -> bool:
        """Whether the run was converted from the log of another training code. Job, checkpoints and
        disk of such a run are not accessible.
        """
        return (self.directory / "import.json").exists()

    @property
    def is_elsewhere(self) -> bool:
        """Whether checkpoints and disk of the run are not accessible on this machine. Either they
        are on a cluster behind a login node, or the run was imported from the log of another
        training code.
        """
        return self.is_imported or self.is_mirror

    @property
    def is_mirror(self) -> bool:
        """Whether the directory is the local mirror of a run on a cluster behind a login node. What
        is written into a mirror does not reach the run.
        """
        return mirror_of(self.directory) is not None

    def differing_fields(self, name: str, wanted: Record) -> dict[str, tuple[Any, Any]]:
        """Returns the fields in which this run's configuration differs from `wanted`. The key is
        the field's dotted name, such as "plan.zero_stage". The value is (value in this run, value
        in `wanted`).

        `name` says which record is compared: "spec", "plan" or "recipe".
        """
        own = getattr(self, name).to_dict()
        return {
            f"{name}.{key}": (own[key], value)
            for key, value in wanted.to_dict().items()
            if value != own[key]
        }

    def resume_advice(self, plan: Plan, num_steps: int) -> str:
        """Returns a sentence with the command that resumes this run with `plan` up to `num_steps`
        steps, and with the fields of the plan that this changes.

        If the run already has a checkpoint of `num_steps` or of a later step, the command contains
        `--steps N`, and the user must choose N.
        """
        changes = self.differing_fields("plan", plan)
        is_done = num_steps <= max(self.checkpoints.steps(), default=0)
        words = [str(self.directory)]
        if is_done:
            words += ["--steps", "N"]
        elif num_steps != self.recipe.num_steps:
            words += ["--steps", str(num_steps)]
        for key, (_, new) in changes.items():
            value = new if isinstance(new, str) else json.dumps(new)
            words += ["--set", f"{key}={value}"]
        turned = ", ".join(f"{key} = {old!r} into {new!r}" for key, (old, new) in changes.items())
        which = f", which turns {turned}" if turned else ""
        return f"Continue it: `{kit_command('resume', *words)}`{which}. Or use another directory."

    def plans(self, damaged: dict[int, str] | None = None) -> dict[int, Plan]:
        """Returns the plan of each attempt that has started, by number of the attempt.

        If `damaged` is given, a damaged file raises no error. Instead, the reason is stored in
        `damaged`, by number of the attempt.

        Raises:
            ConfigError: The file of a plan is damaged, and `damaged` is None.
        """
        return self._of_attempts(Plan, damaged)

    def other_sites(self, damaged: dict[int, str] | None = None) -> dict[int, Site]:
        """Returns the sites of attempts that ran on a site or device other than the run's present
        one, by number of the attempt.

        For all other attempts, site.json is valid. This way, a corrected peak FLOP/s in site.json
        also applies to earlier attempts. `damaged` and errors are as in `plans`: reasons of damaged
        files are stored in `damaged` instead of raised.
        """
        sites = self._of_attempts(Site, damaged).items()
        here = self.site.name, self.site.device.name
        return {attempt: site for attempt, site in sites if (site.name, site.device.name) != here}

    def _of_attempts(self, record: type[Kind], damaged: dict[int, str] | None) -> dict[int, Kind]:
        """Returns the records of type `record` (Plan or Site) that were stored for attempts, by
        number of the attempt. If `damaged` is None, a damaged file raises ConfigError. Otherwise
        the reason is stored in `damaged`.
        """
        found: dict[int, Kind] = {}
        for file in sorted(self.directory.glob(f"{record.__name__.lower()}.attempt_*.json")):
            match = re.search(r"attempt_(\d+)\.json$", file.name)
            if match is None:
                continue
            attempt = int(match[1])
            try:
                found[attempt] = record.read(file)
            except ConfigError as error:
                if damaged is None:
                    raise
                damaged[attempt] = str(error).removeprefix(f"{self.directory}/")
        return found

    def metrics(self, rows: list[dict[str, Any]] | None = None) -> "Metrics":
        """Returns the steps that are recorded so far, as columns. If `rows` of metrics.jsonl are
        given, returns these rows instead, in their order and including repeated steps.
        """
        from kit.run.metrics import Metrics, rows_to_metrics

        facts = self.metrics_arguments()
        if rows is not None:
            return rows_to_metrics(rows, **facts)
        return Metrics.read(self.directory / "metrics.jsonl", **facts)

    def metrics_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `Metrics` from which speeds and MFU are computed: model,
        plans and sites.

        If the plan or site of an attempt is damaged, the attempt is left out of `plans` and
        `other_sites`. The reason is in `damaged`, by number of the attempt.
        """
        damaged: dict[int, str] = {}
        plans = self.plans(damaged)
        sites = self.other_sites(damaged)
        return {
            "spec": self.spec,
            "site": self.site,
            "is_imported": self.is_imported,
            "plans": {attempt: plan for attempt, plan in plans.items() if attempt not in damaged},
            "other_sites": sites,
            "damaged": damaged,
        }

    def dataset(self) -> "Dataset":
        """Returns the dataset (token files) on which the run trains."""
        from kit.data import Dataset

        return Dataset.open(Path(self.recipe.data))

    def _repr_html_(self) -> str:
        rows = [
            ("directory", self.directory),
            ("model", f"{self.spec.name}, {self.spec.num_params:,} parameters"),
            ("devices", self.plan.num_devices),
            ("steps recorded", self.metrics().summary()["step"]),
            ("checkpoints", ", ".join(map(str, self.checkpoints.steps())) or "none"),
        ]
        return html_table(f"Run {self.name}", rows)


def _check_same_run(old: Run, spec: ModelSpec, plan: Plan, recipe: Recipe) -> None:
    """Raises RunError if `spec` or `recipe` changes a field that may not change when a run is
    resumed. The message names the fields.
    """
    may_change = {f"recipe.{name}" for name in ("num_steps", "decay_steps", *POLICY)}
    differing = {**old.differing_fields("spec", spec), **old.differing_fields("recipe", recipe)}
    told = [
        f"{key} = {own!r}, not {new!r}"
        for key, (own, new) in differing.items()
        if key not in may_change
    ]
    if told:
        advice = old.resume_advice(plan, recipe.num_steps)
        raise RunError(
            f"{old.directory} is a run with {'; '.join(told)}, which a run keeps. {advice}"
        )
