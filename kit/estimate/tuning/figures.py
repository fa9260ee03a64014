"""Figures of a hyperparameter search: the objective of each trial, and the importance of each
parameter.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.estimate.tuning.tune import Trials
from kit.show.style import Rows, new_figure
from kit.show.theme import BLUE, GREY, VERMILION


def trials_figure(
    trials: Trials, *, unit: str = "objective", control: Trials | None = None
) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure shows the objective of each trial and the best objective
    up to each trial. Failed trials are marked in a panel below. The rows are a table of the trials.

    `unit` names the objective and its unit in the title. `control` is another search, e.g. a random
    search. If it is given, its best objective up to each trial is drawn for comparison.

    Raises:
        RunError: No trial succeeded.
    """
    values = trials.values
    best = trials.best_so_far
    highest = trials.best.value
    rows = [
        {
            "trial": number,
            **trial.parameters,
            "value": trial.value,
            "best": best[number - 1],
            "failure": trial.failure,
        }
        for number, trial in enumerate(trials.trials, start=1)
    ]
    number = np.arange(1, len(values) + 1)
    failed = np.isnan(values)
    with new_figure(2, height=3.6, sharex=True, height_ratios=(8, 1)) as (figure, (axis, below)):
        axis.plot(number, values, "o", color=BLUE, alpha=0.55, label="trial")
        axis.step(number, best, where="post", color=BLUE, label="best so far")
        if control is not None:
            axis.step(
                np.arange(1, len(control.trials) + 1),
                control.best_so_far,
                where="post",
                color=GREY,
                linestyle=(0, (4, 2)),
                linewidth=1.2,
                label=f"best so far, {control.sampler} search",
            )
        axis.set(
            title=f"{unit}, by trial ({trials.sampler}); best {highest:,.4g}",
            ylim=(min(0.0, np.nanmin(values)), 1.08 * axis.dataLim.y1),
        )
        figure.legend(loc="outside lower left", ncols=3)
        axis.tick_params(axis="x", length=0)
        below.vlines(number[failed], 0, 1, color=VERMILION, linewidth=1.4)
        below.set(ylim=(0, 1), xlabel="trial", xlim=(0, len(values) + 1))
        below.set_yticks([0.5], [f"failed: {failed.sum()}\nof {len(values)}"], color=VERMILION)
        below.grid(visible=False)
        below.tick_params(axis="y", length=0)
    return figure, rows


def sensitivity_figure(shares: Mapping[str, float]) -> tuple[Any, Rows]:
    """Returns (figure, rows). The figure has one bar per parameter with the share of the
    objective's variance in % that the parameter explains. The largest share is on top. The rows are
    a table of the shares. `shares` is the result of `sensitivity`.
    """
    with new_figure(height=0.35 * len(shares) + 0.9) as (figure, axis):
        drawn = axis.barh(
            [name.replace("_", " ") for name in shares],
            [100 * share for share in shares.values()],
            color=BLUE,
            height=0.6,
        )
        axis.bar_label(drawn, fmt="%.0f %%", padding=3)
        axis.set(
            title="share of the variance, %",
            xlim=(0, 115 * max(shares.values())),
            ylim=(len(shares) - 0.5, -0.5),
        )
        axis.grid(visible=False)
    return figure, [
        {"parameter": name, "share of the variance": share} for name, share in shares.items()
    ]
