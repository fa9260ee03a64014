"""Hyperparameter search where evaluations may fail: Bayesian optimisation over layouts, and what mattered (SHAP)."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.record import ConfigError, Record, counted, field_doc, suggestion
from cluster.state import JobError
from kit.errors import MissingPackageError, RunError
from kit.estimate.theory.layouts import Array
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREY, VERMILION

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
    sampler: str = field_doc("who proposes: one of SAMPLERS")
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
            raise RunError(
                f"None of {counted(len(self.trials), 'trial')} succeeded ({'; '.join(map(str, list(reasons)[:3]))})."
            )
        return self.trials[int(np.nanargmax(self.values))]

    @property
    def filled(self) -> Array:
        """Value of each trial, failures at the lowest success (0 without one)."""
        values = self.values
        return np.where(np.isnan(values), np.nanmin(values) if not np.isnan(values).all() else 0.0, values)

    def indices(self) -> Array:
        """Returns which choice of each parameter each trial took, shape (trials, parameters)."""
        return np.array(
            [[choices.index(trial.parameters[name]) for name, choices in self.space.items()] for trial in self.trials],
            dtype=int,
        ).reshape(len(self.trials), len(self.space))


def tune(
    objective: Objective,
    space: Mapping[str, Sequence],
    *,
    num_trials: int,
    seed: int = 0,
    sampler: str = "optuna",
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
        sampler: `optuna`, its tree-structured Parzen estimator, or `random`.
        storage: JSON file that holds the trials, written after each; an existing one is continued.

    Raises:
        ConfigError: the space is empty, or the storage holds another search.
        MissingPackageError: optuna is not installed.
    """
    trials = Trials(space={name: tuple(c) for name, c in space.items()}, sampler=sampler, seed=seed)
    _check(trials, num_trials)
    if storage is not None and Path(storage).exists():
        trials = _continued(trials, Path(storage))
    size = math.prod(map(len, trials.space.values()))
    proposer = _Proposer(trials)
    while len(trials.trials) < min(num_trials, size):
        trial = _evaluate(objective, proposer.ask())
        proposer.tell(trial)
        trials = dataclasses.replace(trials, trials=(*trials.trials, trial))
        if storage is not None:
            Path(storage).parent.mkdir(parents=True, exist_ok=True)
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


class _Proposer:
    """An Optuna study that is asked for choices and told what came of them; failures are pruned trials.

    Pruned trials rank below every success. The sampler is made anew for each proposal, from the seed and the number of
    trials before, so that a search that goes on proposes what it would have proposed.
    """

    def __init__(self, trials: Trials) -> None:
        try:
            import optuna
        except ModuleNotFoundError as error:
            raise MissingPackageError("optuna", "plan", "Hyperparameter search") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._space, self._seed, self._sampler = optuna, trials.space, trials.seed, trials.sampler
        sizes = {name: len(choices) for name, choices in trials.space.items()}
        self._choices: dict[str, Any] = {n: optuna.distributions.IntDistribution(0, k - 1) for n, k in sizes.items()}
        self._study = optuna.create_study(direction="maximize")
        self._seen = list(map(tuple, trials.indices().tolist()))
        self._succeeded = not np.isnan(trials.values).all()
        self._asked: Any = None
        for index, trial in zip(self._seen, trials.trials, strict=True):
            self._study.add_trial(self._finished(index, trial))

    def ask(self) -> Parameters:
        """Returns what to evaluate next, which has not been evaluated before."""
        seed = int(np.random.SeedSequence([self._seed, len(self._seen)]).generate_state(1)[0])
        self._study.sampler = SAMPLERS[self._sampler](self._optuna.samplers, seed)
        if self._seen and not self._succeeded and self._sampler != "random":
            self._enqueue(self._far_from_all(seed))
        index = self._ask()
        if index in self._seen:
            self._study.tell(self._asked, state=self._optuna.trial.TrialState.FAIL)  # which no sampler looks at
            rest = set(itertools.product(*map(range, map(len, self._space.values())))) - set(self._seen)
            self._enqueue(sorted(rest)[np.random.default_rng(seed).integers(len(rest))])
            index = self._ask()
        self._seen.append(index)
        return {name: choices[i] for (name, choices), i in zip(self._space.items(), index, strict=True)}

    def tell(self, trial: Trial) -> None:
        """Takes what came of the proposal."""
        self._succeeded |= trial.value is not None
        self._study.tell(self._asked, trial.value, self._state(trial))

    def _state(self, trial: Trial) -> Any:
        known = self._optuna.trial.TrialState
        return known.PRUNED if trial.value is None else known.COMPLETE

    def _ask(self) -> tuple[int, ...]:
        self._asked = self._study.ask(self._choices)
        return tuple(self._asked.params[name] for name in self._space)

    def _enqueue(self, index: Sequence[int]) -> None:
        self._study.enqueue_trial(dict(zip(self._space, map(int, index), strict=True)))

    def _finished(self, index: Sequence[int], trial: Trial) -> Any:
        params = dict(zip(self._space, index, strict=True))
        return self._optuna.trial.create_trial(
            params=params, distributions=self._choices, value=trial.value, state=self._state(trial)
        )

    def _far_from_all(self, seed: int) -> Sequence[int]:
        """Returns of 64 random choices that farthest from all trials: the way out where everything has failed."""
        sizes = np.array([len(choices) for choices in self._space.values()])
        drawn = np.random.default_rng(seed).integers(sizes, size=(64, len(sizes)))
        apart = (drawn[:, None] - np.array(self._seen)) / np.maximum(1, sizes - 1)
        return drawn[np.square(apart).sum(axis=2).min(axis=1).argmax()].tolist()


STARTUP_TRIALS = 10
"""Random trials before the first proposal of a model."""
SAMPLERS: dict[str, Callable[[Any, int], Any]] = {
    "optuna": lambda known, seed: known.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS),
    "random": lambda known, seed: known.RandomSampler(seed=seed),
}


def trials_figure(trials: Trials, *, unit: str = "objective", control: Trials | None = None) -> tuple[Any, Rows]:
    """Returns a picture of a search: each trial's value, the best so far, failures below; and its table.

    The best so far of `control`, another search such as a random one, is drawn beside it.

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
    with new_figure(2, height=3.6, sharex=True, height_ratios=(8, 1)) as (figure, (axis, below)):
        axis.plot(number, values, "o", color=BLUE, alpha=0.55, label="trial")
        axis.step(number, best, where="post", color=BLUE, label="best so far")
        if control is not None:
            axis.step(np.arange(1, len(control.trials) + 1), control.best_so_far, where="post", color=GREY,
                      linestyle=(0, (4, 2)), linewidth=1.2, label=f"best so far, {control.sampler} search")  # fmt: skip
        axis.set_title(f"{unit}, by trial ({trials.sampler})")
        axis.set_ylim(min(0.0, np.nanmin(values)), 1.12 * top)
        axis.legend(loc="lower right", frameon=True)
        axis.tick_params(axis="x", length=0)
        below.vlines(number[failed], 0, 1, color=VERMILION, linewidth=1.4)
        below.set(yticks=[0.5], ylim=(0, 1), xlabel="trial", xlim=(0, len(values) + 1))
        below.set_yticklabels([f"failed: {failed.sum()}\nof {len(values)}"], color=VERMILION)
        below.grid(visible=False)
        below.tick_params(axis="y", length=0)
    return figure, rows
