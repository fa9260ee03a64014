"""Hyperparameter search by Optuna's Bayesian optimisation. Evaluations of the objective may fail,
for example if a layout runs out of memory.
"""

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
"""Number of random trials at the start of a search. All later trials are proposed by Optuna's
Bayesian sampler."""
# `constant_liar` is False, so that the sampler ignores trials in state RUNNING. A killed search
# leaves its last trial in this state.
SAMPLERS: dict[str, Callable[[Any, int], Any]] = {
    "optuna": lambda known, seed: known.TPESampler(
        seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS, constant_liar=False
    ),
    "random": lambda known, seed: known.RandomSampler(seed=seed),
}


MALFORMED = (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""Exceptions that are raised when Optuna reads a file that is missing or is not an Optuna
journal."""


class TrialFailure(Exception):
    """Exception that an objective raises if it cannot evaluate the parameters of a trial. The
    message is the reason, for example out of memory, indivisible sizes, or a crash.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One evaluation of the objective. `value` is the objective (larger is better), or None if the
    evaluation failed. `failure` is the reason of the failure, or None.
    """

    parameters: Parameters
    value: float | None
    failure: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """All trials of one search in the order of their evaluation. Failed trials are included."""

    space: Mapping[str, tuple]
    """Maps each parameter to its allowed values. Numbers and other values with an order are
    sorted, since the sampler models the index of a value."""
    sampler: str
    """Name of the algorithm that proposes the parameters of trials: `optuna` or `random`."""
    seed: int
    """Seed of the random numbers with which trials are proposed."""
    trials: tuple[Trial, ...] = ()

    @classmethod
    def read(cls, storage: str | Path) -> Self:
        """Returns the trials of a search that have ended. They are read from the file `storage` to
        which `tune` wrote them.

        Raises:
            ConfigError: The file is missing, or `tune` did not write it.
            MissingPackageError: Optuna is not installed.
        """
        try:
            journal = _journal(Path(storage).resolve(strict=True))
            return cls.of(optuna().load_study(study_name=None, storage=journal))
        except MALFORMED as error:
            raise ConfigError(f"{storage}: not a search of `tune`. Give a file of one.") from error

    @classmethod
    def of(cls, study: Any) -> Self:
        """Returns the completed and failed trials of an Optuna study. The name of the study is JSON
        text (`Trials.study_name`) with the space, the sampler and the seed of the search.
        """
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
    def study_name(self) -> str:
        """JSON text with seed, sampler and space of the search: the name of the Optuna study."""
        return json.dumps({"seed": self.seed, "sampler": self.sampler, "space": self.space})

    @property
    def values(self) -> Array:
        """Objective of each trial, in the order of evaluation. The element of a failed trial is
        NaN.
        """
        return np.array(
            [math.nan if trial.value is None else trial.value for trial in self.trials], dtype=float
        )

    @property
    def best_so_far(self) -> Array:
        """Largest objective up to each trial, including this trial, in the order of evaluation.
        Elements before the first successful trial are NaN.
        """
        return np.fmax.accumulate(self.values) if self.trials else self.values

    @property
    def best(self) -> Trial:
        """Trial with the largest objective.

        Raises:
            RunError: All trials failed.
        """
        if np.isnan(self.values).all():
            reasons = {trial.failure for trial in self.trials}
            raise RunError(
                f"None of {counted(len(self.trials), 'trial')} succeeded"
                f" ({'; '.join(map(str, list(reasons)[:3]))})."
            )
        return self.trials[int(np.nanargmax(self.values))]

    def indices(self) -> list[dict[str, int]]:
        """Returns one dict per trial. It maps each parameter to the index of the trial's value
        among the allowed values in `space`.
        """
        return [
            {name: choices.index(trial.parameters[name]) for name, choices in self.space.items()}
            for trial in self.trials
        ]

    def distributions(self) -> dict[str, Any]:
        """Returns the search space for Optuna, as a dict from parameter to a distribution of whole
        numbers. Optuna proposes indices of the allowed values, not the values themselves.
        """
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
    """Searches for the parameters with the largest value of `objective`, and returns all trials. No
    combination of parameters is evaluated twice.

    A trial is recorded as failed if the objective raises TrialFailure, ConfigError, RunError,
    JobError or MemoryError, or returns a number that is not finite. The sampler learns to avoid
    failures. A proposal depends only on the earlier trials and the seed. A search that was
    interrupted therefore continues with the proposals that it would have made without interruption.

    Args:
        objective: Function that takes a dict with one value per parameter and returns a number.
        space: Maps each parameter to its allowed values. Numbers should be sorted, since the
            sampler models the index of a value.
        num_trials: Number of trials, including the trials that `storage` already contains. The
            search ends earlier if all combinations of parameters have been evaluated.
        seed: Seed of the random numbers with which trials are proposed.
        sampler: `optuna` for Optuna's tree-structured Parzen estimator, or `random`.
        storage: File to which trials are added, in the format of Optuna's journal. If the file
            contains trials of this search, the search continues after these trials.

    Raises:
        ConfigError: `num_trials`, the sampler or the space is not allowed, or the file `storage`
            contains the trials of another search.
        MissingPackageError: Optuna is not installed.
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
        else:  # For the sampler, a pruned trial is worse than every completed trial.
            asked.set_user_attr("failure", failure)
            study.tell(asked, state=optuna().trial.TrialState.PRUNED)
    return trials


def optuna() -> Any:
    """Imports and returns the package optuna. Its log level is set, so that only warnings and
    errors are printed.

    Raises:
        MissingPackageError: Optuna is not installed.
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
    """Returns the Optuna study of a search. If the file `storage` contains the study, it is loaded.
    Otherwise a new study is created, whose name is the JSON text `Trials.study_name`.

    Raises:
        ConfigError: The file contains the trials of another search.
    """
    file = None if storage is None else Path(storage)
    if file is not None and file.exists() and file.stat().st_size:
        old = Trials.read(file)
        if dataclasses.replace(old, trials=()) != new:
            raise ConfigError(
                f"{file} holds another search: {old.study_name}, not {new.study_name}. Use"
                " another file."
            )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    return optuna().create_study(
        study_name=new.study_name,
        storage=file and _journal(file),
        direction="maximize",
        load_if_exists=True,
    )


def _ask(study: Any, trials: Trials) -> Any:
    """Returns Optuna's next trial. Its combination of parameters has not been evaluated before.

    For each trial a new sampler is created. Its seed is computed from the seed of the search and
    the number of earlier trials. A search that was interrupted therefore makes the proposals that
    it would have made without interruption.
    """
    seen = trials.indices()
    choices = trials.distributions()
    seed = int(np.random.SeedSequence([trials.seed, len(seen)]).generate_state(1)[0])
    study.sampler = SAMPLERS[trials.sampler](optuna().samplers, seed)
    if seen and np.isnan(trials.values).all() and trials.sampler != "random":
        study.enqueue_trial(_far_from_all(trials, seed))
    asked = study.ask(choices)
    if asked.params in seen:
        # Optuna proposed a combination that was evaluated before. The proposed trial is ended in
        # state FAIL, since samplers ignore trials in this state. It is replaced by a trial with a
        # random combination that was not evaluated.
        study.tell(asked, state=optuna().trial.TrialState.FAIL)
        every = itertools.product(*(range(len(each)) for each in trials.space.values()))
        rest = [index for index in every if dict(zip(trials.space, index, strict=True)) not in seen]
        index = rest[np.random.default_rng(seed).integers(len(rest))]
        study.enqueue_trial(dict(zip(trials.space, index, strict=True)))
        asked = study.ask(choices)
    return asked


def _far_from_all(trials: Trials, seed: int) -> dict[str, int]:
    """Draws 64 random combinations of parameters and returns the combination that is farthest from
    all earlier trials. The result maps each parameter to the index of its value. It is used if all
    earlier trials have failed.
    """
    sizes = np.array([len(choices) for choices in trials.space.values()])
    drawn = np.random.default_rng(seed).integers(sizes, size=(64, len(sizes)))
    taken = np.array([list(index.values()) for index in trials.indices()])
    apart = (drawn[:, None] - taken) / np.maximum(1, sizes - 1)
    farthest = drawn[np.square(apart).sum(axis=2).min(axis=1).argmax()]
    return dict(zip(trials.space, farthest.tolist(), strict=True))


def _evaluate(objective: Objective, parameters: Parameters) -> tuple[float | None, str | None]:
    """Evaluates the objective and returns (value, failure). After a success, `failure` is None.
    After a failure, `value` is None and `failure` is the reason.
    """
    try:
        value = float(objective(parameters))
    except (TrialFailure, ConfigError, RunError, JobError, MemoryError) as error:
        return None, str(error) or type(error).__name__
    return (value, None) if math.isfinite(value) else (None, f"value {value}")


def sensitivity(trials: Trials) -> dict[str, float]:
    """Returns a dict from parameter to the share of the objective's variance that the parameter
    explains, largest first. The shares sum to 1.

    The method is functional ANOVA of a random forest that is fitted to the trials. For a failed
    trial, the lowest value of all successful trials is used. SHAP values are another measure: they
    state the sizes of effects in the unit of the objective.

    Source: Hutter, Hoos and Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter
    Importance", ICML 2014.

    Raises:
        RunError: All trials have an equal value, so there is no variance to explain.
        MissingPackageError: Optuna is not installed.
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
