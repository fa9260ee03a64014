"""What mattered in a hyperparameter search: each parameter's share of the variance, in a
picture.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.record import counted
from kit.errors import RunError
from kit.estimate.tuning.tune import Trials, optuna
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE


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
    study, choices = optuna().create_study(direction="maximize"), trials.distributions()
    for index, value in zip(trials.indices(), values.tolist(), strict=True):
        study.add_trial(
            optuna().trial.create_trial(params=index, distributions=choices, value=value)
        )
    forest = optuna().importance.FanovaImportanceEvaluator(seed=trials.seed)
    shares = optuna().importance.get_param_importances(study, evaluator=forest)
    return {name: float(share) for name, share in shares.items()}


def sensitivity_figure(shares: Mapping[str, float]) -> tuple[Any, Rows]:
    """Returns a picture of what `sensitivity` found, the largest share on top, and its table."""
    with new_figure(height=0.35 * len(shares) + 0.9) as (figure, axis):
        drawn = axis.barh(
            [name.replace("_", " ") for name in shares],
            [100 * share for share in shares.values()],
            color=BLUE,
            height=0.6,
        )
        axis.bar_label(drawn, fmt="%.0f %%", padding=3)
        axis.set(title="share of the variance, %", xlim=(0, 115 * max(shares.values())))
        axis.invert_yaxis()
        axis.grid(visible=False)
    return figure, [
        {"parameter": name, "share of the variance": share} for name, share in shares.items()
    ]
