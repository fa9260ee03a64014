"""Hyperparameter search where evaluations may fail: Bayesian optimisation by Optuna."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from cluster.record import ConfigError, counted, suggestion
from cluster.state import JobError
from kit.errors import RunError, needed
from kit.estimate.theory.layouts import Array

Parameters = dict[str, Any]
Objective = Callable[[Parameters], float]
STARTUP_TRIALS = 10
"""Random trials before the first proposal of a model."""
# A killed search leaves its trial as running; without the constant liar, that has no say.
SAMPLERS: dict[str, Callable[[Any, int], Any]] = {
    "optuna": lambda known, seed: known.TPESampler(
        seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS, constant_liar=False
    ),
    "random": lambda known, seed: known.RandomSampler(seed=seed),
}


MALFORMED = (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""What Optuna raises of a file that is not there, or is not its journal."""


class TrialFailure(Exception):
    """Raised by an objective whose evaluation failed, with the reason: out of memory, does not
    divide, crashed.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One evaluation: its value (more is better), or why there is none."""

    parameters: Parameters
    value: float | None
    failure: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """All evaluations of one search, failed ones too, in order."""

    space: Mapping[str, tuple]
    """The choices of each parameter, in order where they have one."""
    sampler: str
    """Who proposes: one of SAMPLERS."""
    seed: int
    """Of the proposals."""
    trials: tuple[Trial, ...] = ()

    @classmethod
    def read(cls, storage: str | Path) -> Self:
        """Returns the trials so far of a search that `tune` keeps in a file.

        Raises:
            ConfigError: there is none.
            MissingPackageError: optuna is not installed.
        """
        try:
            journal = _journal(Path(storage).resolve(strict=True))
            return cls.of(optuna().load_study(study_name=None, storage=journal))
        except MALFORMED as error:
            raise ConfigError(f"{storage}: not a search of `tune`. Give a file of one.") from error

    @classmethod
    def of(cls, study: Any) -> Self:
        """Returns what has ended of a search, which is told by the name of its study."""
        search = json.loads(study.study_name)
        states = optuna().trial.TrialState
        space = {name: tuple(choices) for name, choices in search["space"].items()}
        trials = tuple(
            Trial(
                parameters={name: choices[trial.params[name]] for name, choices in space.items()},
                value=trial.value,
                failure=trial.user_attrs.get("failure"),
            )
            for trial in study.get_trials(states=(states.COMPLETE, states.PRUNED))
        )
        return cls(space=space, sampler=search["sampler"], seed=search["seed"], trials=trials)

    @property
    def words(self) -> str:
        """What is searched and how, as JSON: the name of the study."""
        return json.dumps({"seed": self.seed, "sampler": self.sampler, "space": self.space})

    @property
    def values(self) -> Array:
        """Value of each trial, NaN where it failed."""
        return np.array(
            [math.nan if trial.value is None else trial.value for trial in self.trials], dtype=float
        )

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
                f"None of {counted(len(self.trials), 'trial')} succeeded"
                f" ({'; '.join(map(str, list(reasons)[:3]))})."
            )
        return self.trials[int(np.nanargmax(self.values))]

    def indices(self) -> list[dict[str, int]]:
        """Returns which choice of each parameter each trial took."""
        return [
            {name: choices.index(trial.parameters[name]) for name, choices in self.space.items()}
            for trial in self.trials
        ]

    def distributions(self) -> dict[str, Any]:
        """Returns the space as Optuna knows it: places in the choices of each parameter."""
        places = optuna().distributions.IntDistribution
        return {name: places(0, len(choices) - 1) for name, choices in self.space.items()}


def tune(
    objective: Objective,
    space: Mapping[str, Sequence],
    *,
    num_trials: int,
    seed: int = 0,
    sampler: str = "optuna",
    storage: str | Path | None = None,
) -> Trials:
    """Returns the trials of a search for the largest value of `objective`; no choice is evaluated
    twice.

    A trial that raises TrialFailure, ConfigError, RunError, JobError or MemoryError, or whose value
    is not a finite number, is kept as a failure, and the sampler learns to stay away. A proposal
    depends on the trials before it and the seed only, so a search that was cut off goes on as if it
    had not been.

    Args:
        objective: of one choice per parameter, by name.
        space: the choices of each parameter; numbers in order.
        num_trials: evaluations in all, those in `storage` included; at most the size of the space.
        seed: of the proposals.
        sampler: `optuna`, its tree-structured Parzen estimator, or `random`.
        storage: file of Optuna's journal, to which trials are added; what it holds is continued.

    Raises:
        ConfigError: the space is empty, or the storage holds another search.
        MissingPackageError: optuna is not installed.
    """
    trials = Trials(space={name: tuple(c) for name, c in space.items()}, sampler=sampler, seed=seed)
    _check(trials, num_trials)
    study = _study(trials, storage)
    size = math.prod(map(len, trials.space.values()))
    while len((trials := Trials.of(study)).trials) < min(num_trials, size):
        asked = _ask(study, trials)
        parameters = {name: choices[asked.params[name]] for name, choices in trials.space.items()}
        value, failure = _evaluate(objective, parameters)
        if failure is None:
            study.tell(asked, value)
        else:  # pruned trials rank below every success
            asked.set_user_attr("failure", failure)
            study.tell(asked, state=optuna().trial.TrialState.PRUNED)
    return trials


def optuna() -> Any:
    """Returns the package, which tells warnings only.

    Raises:
        MissingPackageError: it is not installed.
    """
    with needed("optuna", "plan", "Hyperparameter search"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _check(trials: Trials, num_trials: int) -> None:
    if num_trials < 1:
        raise ConfigError(f"num_trials: {num_trials} is not allowed. Give a whole number from 1.")
    if trials.sampler not in SAMPLERS:
        raise ConfigError(
            f"sampler: {trials.sampler!r} is not known. {suggestion(trials.sampler, SAMPLERS)}"
        )
    if not trials.space:
        raise ConfigError("space: it has no parameters. Give at least one, with its choices.")
    for name, choices in trials.space.items():
        if not choices or len(set(choices)) < len(choices):
            raise ConfigError(
                f"space.{name}: {choices} is not allowed. Give at least one choice, each once."
            )


def _journal(storage: Path) -> Any:
    storages = optuna().storages
    return storages.JournalStorage(storages.journal.JournalFileBackend(str(storage)))


def _study(new: Trials, storage: str | Path | None) -> Any:
    """Returns the study of a search, named by its words: a new one, or that in the storage."""
    file = None if storage is None else Path(storage)
    if file is not None and file.exists() and file.stat().st_size:
        old = Trials.read(file)
        if dataclasses.replace(old, trials=()) != new:
            raise ConfigError(
                f"{file} holds another search: {old.words}, not {new.words}. Use another file."
            )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    return optuna().create_study(
        study_name=new.words,
        storage=file and _journal(file),
        direction="maximize",
        load_if_exists=True,
    )


def _ask(study: Any, trials: Trials) -> Any:
    """Returns Optuna's next trial, of a choice that has not been evaluated before.

    The sampler is made anew for each, from the seed and the number of trials before, so that a
    search that goes on proposes what it would have proposed.
    """
    seen = trials.indices()
    choices = trials.distributions()
    seed = int(np.random.SeedSequence([trials.seed, len(seen)]).generate_state(1)[0])
    study.sampler = SAMPLERS[trials.sampler](optuna().samplers, seed)
    if seen and np.isnan(trials.values).all() and trials.sampler != "random":
        study.enqueue_trial(_far_from_all(trials, seed))
    asked = study.ask(choices)
    if asked.params in seen:
        study.tell(asked, state=optuna().trial.TrialState.FAIL)  # which no sampler looks at
        every = itertools.product(*(range(len(each)) for each in trials.space.values()))
        rest = [index for index in every if dict(zip(trials.space, index, strict=True)) not in seen]
        index = rest[np.random.default_rng(seed).integers(len(rest))]
        study.enqueue_trial(dict(zip(trials.space, index, strict=True)))
        asked = study.ask(choices)
    return asked


def _far_from_all(trials: Trials, seed: int) -> dict[str, int]:
    """Returns of 64 random choices that farthest from all trials: the way out where all have
    failed.
    """
    sizes = np.array([len(choices) for choices in trials.space.values()])
    drawn = np.random.default_rng(seed).integers(sizes, size=(64, len(sizes)))
    taken = np.array([list(index.values()) for index in trials.indices()])
    apart = (drawn[:, None] - taken) / np.maximum(1, sizes - 1)
    farthest = drawn[np.square(apart).sum(axis=2).min(axis=1).argmax()]
    return dict(zip(trials.space, farthest.tolist(), strict=True))


def _evaluate(objective: Objective, parameters: Parameters) -> tuple[float | None, str | None]:
    """Returns the value, or why there is none."""
    try:
        value = float(objective(parameters))
    except (TrialFailure, ConfigError, RunError, JobError, MemoryError) as error:
        return None, str(error) or type(error).__name__
    return (value, None) if math.isfinite(value) else (None, f"value {value}")


def sensitivity(trials: Trials) -> dict[str, float]:
    """Returns the share of the objective's variance that each parameter explains, largest first.

    They sum to 1. Functional ANOVA of a random forest that is fitted to the trials; failures count
    as the lowest success. SHAP values are another measure: sizes of effects, in its unit.

    Source: Hutter, Hoos and Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter
    Importance", ICML 2014.

    Raises:
        RunError: there is one value only, failures counted.
        MissingPackageError: optuna is not installed.
    """
    lowest = min((trial.value for trial in trials.trials if trial.value is not None), default=0.0)
    values = np.nan_to_num(trials.values, nan=lowest)
    if np.ptp(values) == 0:
        raise RunError(
            f"{counted(len(values), 'trial')}, one value: nothing to explain. Make more."
        )
    study = optuna().create_study(direction="maximize")
    choices = trials.distributions()
    for index, value in zip(trials.indices(), values.tolist(), strict=True):
        study.add_trial(
            optuna().trial.create_trial(params=index, distributions=choices, value=value)
        )
    forest = optuna().importance.FanovaImportanceEvaluator(seed=trials.seed)
    shares = optuna().importance.get_param_importances(study, evaluator=forest)
    return {name: float(share) for name, share in shares.items()}
