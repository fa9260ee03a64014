"""Hyperparameter search where evaluations may fail: Bayesian optimisation over layouts, and what mattered (SHAP)."""

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from cluster.record import ConfigError, Record, field_doc, suggestion
from cluster.state import JobError
from kit.errors import MissingPackageError, RunError
from kit.estimate.layouts import Array
from kit.style import BLUE, GREY, VERMILION, Rows, figure_style

Parameters = dict[str, Any]
Objective = Callable[[Parameters], float]


class TrialFailure(Exception):
    """Raised by an objective whose evaluation failed, with the reason: out of memory, does not divide, crashed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Record):
    """One evaluation: its value, or why there is none."""

    parameters: dict[str, Any] = field_doc("one choice of each parameter")
    value: float | None = field_doc("of the objective; more is better", default=None)
    failure: str | None = field_doc("reason of a failed evaluation", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials(Record):
    """All evaluations of one search, failed ones too, in order."""

    space: dict[str, tuple[Any, ...]] = field_doc("the choices of each parameter, in order where they have one")
    sampler: str = field_doc("who proposes: deephyper, optuna or random")
    seed: int = field_doc("of the proposals")
    trials: tuple[Trial, ...] = field_doc("evaluations so far", default=())

    @property
    def values(self) -> Array:
        """Value of each trial, NaN where it failed."""
        return np.array([math.nan if trial.value is None else trial.value for trial in self.trials], dtype=float)

    @property
    def best_so_far(self) -> Array:
        """Best value up to each trial, NaN before the first success."""
        return np.fmax.accumulate(self.values) if self.trials else self.values

    @property
    def best(self) -> Trial:
        """The trial with the largest value.

        Raises:
            RunError: every evaluation failed.
        """
        if np.isnan(self.values).all():
            reasons = {trial.failure for trial in self.trials}
            raise RunError(f"None of {len(self.trials)} trials succeeded ({'; '.join(map(str, list(reasons)[:3]))}).")
        return self.trials[int(np.nanargmax(self.values))]

    @property
    def filled(self) -> Array:
        """Value of each trial, failures at the lowest success (0 without one): what the samplers learn from."""
        values = self.values
        return np.where(np.isnan(values), np.nanmin(values) if not np.isnan(values).all() else 0.0, values)

    def indices(self) -> Array:
        """Returns which choice of each parameter each trial took, shape (trials, parameters)."""
        return np.array(
            [[choices.index(trial.parameters[name]) for name, choices in self.space.items()] for trial in self.trials],
            dtype=int,
        ).reshape(len(self.trials), len(self.space))

    def with_trial(self, trial: Trial) -> Self:
        return dataclasses.replace(self, trials=(*self.trials, trial))


def tune(
    objective: Objective,
    space: Mapping[str, Sequence],
    *,
    num_trials: int,
    seed: int = 0,
    sampler: str | None = None,
    storage: str | Path | None = None,
) -> Trials:
    """Returns the trials of a search for the largest value of `objective`; no choice is evaluated twice.

    A trial that raises TrialFailure, ConfigError, RunError, JobError or MemoryError, or whose value is not a finite
    number, is kept as a failure, and the sampler learns to stay away. A proposal depends on the trials before it and
    the seed only, so a search that was cut off goes on as if it had not been.

    Args:
        objective: of one choice per parameter, by name.
        space: the choices of each parameter; numbers in order.
        num_trials: evaluations in all, those in `storage` included; at most the size of the space.
        seed: of the proposals.
        sampler: `deephyper` (CBO with a random forest and upper confidence bound, as in arXiv 2312.12705), `optuna`
            or `random`; default the first that is installed.
        storage: JSON file that holds the trials, written after each; an existing one is continued.

    Raises:
        ConfigError: the space is empty, or the storage holds another search.
        MissingPackageError: neither deephyper nor optuna is installed.
    """
    trials = Trials(space={name: tuple(c) for name, c in space.items()}, sampler=sampler or _installed(), seed=seed)
    _check(trials, num_trials)
    if storage is not None and Path(storage).exists():
        trials = _continued(trials, Path(storage))
    size = math.prod(map(len, trials.space.values()))
    while len(trials.trials) < min(num_trials, size):
        trials = trials.with_trial(_evaluate(objective, _proposal(trials)))
        if storage is not None:
            trials.write(Path(storage))
    return trials


def _check(trials: Trials, num_trials: int) -> None:
    if num_trials < 1:
        raise ConfigError(f"num_trials: {num_trials} is not allowed. Give a whole number from 1.")
    if trials.sampler not in SAMPLERS:
        raise ConfigError(f"sampler: {trials.sampler!r} is not known. {suggestion(trials.sampler, SAMPLERS)}")
    if not trials.space:
        raise ConfigError("space: it has no parameters. Give at least one, with its choices.")
    for name, choices in trials.space.items():
        if not choices or len(set(choices)) < len(choices):
            raise ConfigError(f"space.{name}: {choices} is not allowed. Give at least one choice, each once.")


def _continued(new: Trials, storage: Path) -> Trials:
    old = Trials.read(storage)
    for name in ("space", "sampler", "seed"):
        if getattr(old, name) != getattr(new, name):
            raise ConfigError(
                f"{storage} holds a search with {name} = {getattr(old, name)!r}, not {getattr(new, name)!r}. "
                f"Use another file, or continue it with its own {name}."
            )
    return old


def _evaluate(objective: Objective, parameters: Parameters) -> Trial:
    try:
        value = float(objective(parameters))
    except (TrialFailure, ConfigError, RunError, JobError, MemoryError) as error:
        return Trial(parameters=parameters, failure=str(error) or type(error).__name__)
    if not math.isfinite(value):
        return Trial(parameters=parameters, failure=f"value {value}")
    return Trial(parameters=parameters, value=value)


# Samplers: each returns an index per parameter for the next trial, from the trials so far and a seed ----------------


def _proposal(trials: Trials) -> Parameters:
    """Returns what to evaluate next: the sampler's proposal, or a random one if that has been evaluated already."""
    seed = int(np.random.SeedSequence([trials.seed, len(trials.trials)]).generate_state(1)[0])
    seen = set(map(tuple, trials.indices().tolist()))
    index = tuple(int(i) for i in SAMPLERS[trials.sampler](trials, seed))
    if index in seen:
        rest = [i for i in itertools.product(*map(range, map(len, trials.space.values()))) if i not in seen]
        index = rest[np.random.default_rng(seed).integers(len(rest))]
    return {name: choices[i] for (name, choices), i in zip(trials.space.items(), index, strict=True)}


def _random(trials: Trials, seed: int) -> Sequence[int]:
    return np.random.default_rng(seed).integers([len(choices) for choices in trials.space.values()]).tolist()


def _far_from(trials: Trials, seed: int, candidates: int = 64) -> Sequence[int]:
    """Returns the random choice that is farthest from all trials: the way out where everything has failed so far."""
    sizes = np.array([len(choices) for choices in trials.space.values()])
    drawn = np.random.default_rng(seed).integers(sizes, size=(candidates, len(sizes)))
    apart = (drawn[:, None] - trials.indices()) / np.maximum(1, sizes - 1)
    return drawn[np.square(apart).sum(axis=2).min(axis=1, initial=len(sizes)).argmax()].tolist()


def _optuna(trials: Trials, seed: int) -> Sequence[int]:
    import optuna

    if np.isnan(trials.values).all():
        return _far_from(trials, seed)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optimizer = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS)
    study = optuna.create_study(direction="maximize", sampler=optimizer)
    space: dict[str, Any] = {n: optuna.distributions.IntDistribution(0, len(c) - 1) for n, c in trials.space.items()}
    indices, failed = trials.indices().tolist(), np.isnan(trials.values)
    # This sampler looks at ranks only: failures rank below every success.
    for index, value in zip(indices, np.where(failed, trials.filled.min(initial=0) - 1, trials.filled), strict=True):
        params = dict(zip(space, index, strict=True))
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=float(value)))
    index: list[int] = []
    for _ in range(ASK_AGAIN):
        asked = study.ask(space).params
        index = [asked[name] for name in space]
        if index not in indices:
            break
    return index


def _deephyper(trials: Trials, seed: int) -> Sequence[int]:
    from deephyper.hpo import CBO, HpProblem  # type: ignore[reportMissingImports]

    problem = HpProblem()
    for name, choices in trials.space.items():
        problem.add((0, len(choices) - 1), name)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # among them: a proposal that has been evaluated, which is seen to here
        search = CBO(
            problem, random_state=seed % 2**31, log_dir=folder, surrogate_model="RF", acq_func="UCB",
            multi_point_strategy="cl_min", n_initial_points=STARTUP_TRIALS,
            acq_optimizer="sampling", acq_optimizer_kwargs={"n_points": 2000, "max_total_failures": -1},
        )  # fmt: skip
        rows = zip(trials.indices().tolist(), trials.trials, strict=True)
        told = [
            (dict(zip(trials.space, index, strict=True)), "F" if trial.value is None else trial.value)
            for index, trial in rows
        ]
        if told:
            search.tell(told)
        asked = search.ask()[0]
    return [asked[name] for name in trials.space]


def _installed() -> str:
    for name in ("deephyper", "optuna"):
        if importlib.util.find_spec(name):
            return name
    raise MissingPackageError("optuna", "plan", "Bayesian search (sampler='random' works without)")


STARTUP_TRIALS = 10
"""Random trials before the first proposal of a model."""
ASK_AGAIN = 8
"""Times a sampler is asked again when it proposes what has been evaluated."""
SAMPLERS: dict[str, Callable[[Trials, int], Sequence[int]]] = {
    "deephyper": _deephyper,
    "optuna": _optuna,
    "random": _random,
}


def trials_figure(trials: Trials, *, unit: str = "objective", control: Trials | None = None) -> tuple[Any, Rows]:
    """Returns a picture of a search: each trial's value, the best so far, failures below; and its table.

    Args:
        trials: of one search.
        unit: of the values, for the title.
        control: another search whose best so far is drawn beside it, such as random search.

    Raises:
        RunError: no trial succeeded.
    """
    values, best, highest = trials.values, trials.best_so_far, trials.best.value or 0.0
    top = float(np.nanmax(control.values, initial=highest)) if control else highest
    rows = [
        {"trial": number, **trial.parameters, "value": trial.value, "best": best[number - 1], "failure": trial.failure}
        for number, trial in enumerate(trials.trials, start=1)
    ]
    number = np.arange(1, len(values) + 1)
    failed = np.isnan(values)
    with figure_style() as plt:
        figure, (axis, below) = plt.subplots(
            2, figsize=(6.8, 3.4), sharex=True, height_ratios=(8, 1), gridspec_kw={"hspace": 0.02}
        )
        axis.plot(number, values, "o", color=BLUE, alpha=0.55, label="trial")
        axis.step(number, best, where="post", color=BLUE, label="best so far")
        if control is not None:
            axis.step(np.arange(1, len(control.trials) + 1), control.best_so_far, where="post", color=GREY,
                      linestyle=(0, (4, 2)), linewidth=1.2, label=f"best so far, {control.sampler} search")  # fmt: skip
        axis.set_title(f"{unit}, by trial ({trials.sampler})")
        axis.set_ylim(min(0.0, np.nanmin(values)), 1.12 * top)
        axis.legend(loc="lower right", frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
        axis.tick_params(axis="x", length=0)
        below.vlines(number[failed], 0, 1, color=VERMILION, linewidth=1.4)
        below.set(yticks=[0.5], ylim=(0, 1), xlabel="trial", xlim=(0, len(values) + 1))
        below.set_yticklabels([f"failed: {failed.sum()}\nof {len(values)}"], color=VERMILION)
        below.grid(visible=False)
        below.tick_params(axis="y", length=0)
    return figure, rows
