"""Run: the directory that is the contract between a job, a notebook and a scheduler. Imports no
torch.

spec.json plan.json recipe.json site.json     what was asked (plan.attempt_01.json,
                                              site.attempt_01.json: then)
job.json submit.sh env.json                   how it was started, and with which versions
state.json exit.json ranks/ logs/ control/    what the job does (written by cluster and the trainer)
metrics.jsonl checkpoints/ eval/ profile/     what came out
hook.py                                       the user's numbers of a step, where the recipe names
                                              such a file
alerts.jsonl                                   what deserved a look
"""

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cluster.job import Job
from cluster.login.mirror import mirror_of, refresh
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
"""The copy of the recipe's hook."""
LAUNCH_LOCK = ".launch.lock"
"""File that a launch locks and removes at its end. Only its owner can open it, so that readers of
the run cannot lock it."""
POLICY = ("on_nan", "on_spike", "hung_after_s", "hook", "profile_steps", "profile_ranks")
"""Fields of a recipe that may change when a run is resumed, beside its lengths: they do not
change a step."""


class Run(Owned):
    """One training run, as recorded in its directory, while it trains and afterwards.

    Example, on a run made by `kit.launch`:

        >>> import kit
        >>> run = kit.Run.open("runs/first")
        >>> print(run.job.status().state)
        done
        >>> loss = run.metrics().summary()["loss"]
        >>> run.checkpoints.steps()
        [5]

    `run.spec`, `run.plan`, `run.recipe` and `run.site` are what was asked for; `run.job` says what
    its job does and stops it; `run.metrics()` has the steps as columns. Next:
    `kit.monitor.run_figure(run)` draws it, `kit.evaluate.evaluate(run)` scores its last checkpoint,
    `kit.resume("runs/first", num_steps=10)` continues it.
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
        """Returns a run for a new directory, or for one of the same model that may go on otherwise;
        writes nothing.

        What has trained and is to go on for another number of steps, without a decay_steps, keeps
        its schedule's end.

        Raises:
            RunError: the directory holds something else, or a run of another model or recipe.
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

    def asked(self) -> dict[str, str]:
        """Returns what the run was asked for, as texts by the name of their file; spec.json is the
        last to be there.

        Raises:
            RunError: the hook's file cannot be read, and there is no copy of this file from an
                earlier launch.
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
            RunError: there is none.
        """
        directory = Path(directory).expanduser().resolve()
        refresh(directory)
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
        """The directory's own name."""
        return self.directory.name

    @property
    def job(self) -> Job:
        """The job of the newest attempt: `.status()`, `.logs()`, `.stop()`, `.cancel()`,
        `.wait()`.
        """
        return Job.attach(self.directory)

    @property
    def is_imported(self) -> bool:
        """Whether it was made from another trainer's log: its job, checkpoints and disk are
        elsewhere.
        """
        return (self.directory / "import.json").exists()

    @property
    def is_elsewhere(self) -> bool:
        """Whether checkpoints and disk of the run are out of reach: behind its site's login node,
        or with the trainer from whose log it was imported.
        """
        return self.is_imported or mirror_of(self.directory) is not None

    def differing(self, name: str, wanted: Record) -> dict[str, tuple[Any, Any]]:
        """Returns by dotted key what of this run's spec, plan or recipe is not as in another:
        here, and there.
        """
        own = getattr(self, name).to_dict()
        return {
            f"{name}.{key}": (own[key], value)
            for key, value in wanted.to_dict().items()
            if value != own[key]
        }

    def how_to_go_on(self, plan: Plan, num_steps: int) -> str:
        """Returns advice: the command that goes on with this run, on a plan until a step, and what
        that changes.

        A step that the run has been at before is no end to go on to: then the command leaves it to
        the reader.
        """
        changes = self.differing("plan", plan)
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
        """Returns the plan of each attempt that has started.

        Raises:
            ConfigError: one of their files is damaged; if `damaged` is given, it gets the reason in
                place of the error, by attempt.
        """
        return self._of_attempts(Plan, damaged)

    def other_sites(self, damaged: dict[int, str] | None = None) -> dict[int, Site]:
        """Returns the sites of attempts on another device than the newest's, whose site.json may
        be corrected later; `damaged` and errors as of `plans`.
        """
        sites = self._of_attempts(Site, damaged).items()
        here = self.site.name, self.site.device.name
        return {attempt: site for attempt, site in sites if (site.name, site.device.name) != here}

    def _of_attempts(self, record: type[Kind], damaged: dict[int, str] | None) -> dict[int, Kind]:
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
        """Returns the steps recorded so far. If `rows` are given, returns these rows of the file as
        they are, in their order and with repeated steps.
        """
        from kit.run.metrics import Metrics, rows_to_metrics

        facts = self.facts()
        if rows is not None:
            return rows_to_metrics(rows, **facts)
        return Metrics.read(self.directory / "metrics.jsonl", **facts)

    def facts(self) -> dict[str, Any]:
        """Returns what the derived values of `Metrics` rest on; an attempt whose plan or site is
        damaged has neither here, and its reason in `damaged`.
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
        """Returns the token files that the run reads."""
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
    may_change = {f"recipe.{name}" for name in ("num_steps", "decay_steps", *POLICY)}
    differing = {**old.differing("spec", spec), **old.differing("recipe", recipe)}
    told = [
        f"{key} = {own!r}, not {new!r}"
        for key, (own, new) in differing.items()
        if key not in may_change
    ]
    if told:
        advice = old.how_to_go_on(plan, recipe.num_steps)
        raise RunError(
            f"{old.directory} is a run with {'; '.join(told)}, which a run keeps. {advice}"
        )
