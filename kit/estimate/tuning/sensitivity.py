"""What mattered in a hyperparameter search: exact Shapley values of each parameter, and their picture."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kit.errors import MissingPackageError
from kit.estimate.theory.layouts import Array
from kit.estimate.tuning.tune import Trials
from kit.show.style import Rows, new_figure
from kit.show.theme import CHOICES, GREY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How much each parameter's choice adds to the objective, by trial: Shapley values, shape (trials, parameters)."""

    space: Mapping[str, tuple]
    indices: Array
    values: Array
    mean: float
    """Of the objective over the background; a row of `values` sums to its trial's objective less this."""

    @property
    def importance(self) -> dict[str, float]:
        """Mean absolute Shapley value of each parameter, largest first."""
        size = dict(zip(self.space, np.abs(self.values).mean(axis=0).tolist(), strict=True))
        return dict(sorted(size.items(), key=lambda item: -item[1]))


def sensitivity(trials: Trials, grid: Array | None = None) -> Sensitivity:
    """Returns exact Shapley values of each parameter at each trial, against all trials as background.

    Failures count as the lowest success, as for the sampler. `grid` is the objective on the whole space, one axis per
    parameter, NaN where it fails (`EstimatedRate.rates`); without it, that of a random forest that is fitted to the
    trials, as SHAP's tree explainer would.

    Raises:
        RunError: no trial succeeded.
        MissingPackageError: there is no grid, and scikit-learn is not installed.
    """
    _ = trials.best
    indices = trials.indices()
    if grid is None:
        grid = _forest(trials)
    filled = np.where(np.isnan(grid), np.nanmin(grid), grid)
    values, mean = shapley(lambda columns: filled[tuple(columns)], indices, indices)
    return Sensitivity(space=trials.space, indices=indices, values=values, mean=mean)


def shapley(function: Callable[[list[Array]], Array], points: Array, background: Array) -> tuple[Array, float]:
    """Returns the Shapley values of each parameter at each point, shape (points, parameters), and the base value.

    Exact: all 2^n coalitions. A coalition's worth is the mean of `function` with its members taken from the point and
    the others from each row of the background, shape (rows, parameters).

    Source: Lundberg and Lee, arXiv 1705.07874, equations 4 and 8 (interventional expectation).
    """
    count = points.shape[1]
    worth = {
        members: function(
            [points[:, None, i] if i in members else background[None, :, i] for i in range(count)]
        ).mean(axis=1)
        for size in range(count + 1)
        for members in itertools.combinations(range(count), size)
    }  # fmt: skip
    values = np.zeros(points.shape, dtype=float)
    for members, without in worth.items():
        weight = 1 / (math.comb(count - 1, len(members)) * count) if len(members) < count else 0.0
        for i in set(range(count)).difference(members):
            values[:, i] += weight * (worth[tuple(sorted((*members, i)))] - without)
    return values, float(np.mean(worth[()]))


def _forest(trials: Trials) -> Array:
    """Returns what a random forest that has seen the trials expects on the whole space, one axis per parameter."""
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError as error:
        raise MissingPackageError("scikit-learn", "plan", "sensitivity without a grid") from error

    shape = [len(choices) for choices in trials.space.values()]
    forest = RandomForestRegressor(n_estimators=200, random_state=trials.seed).fit(trials.indices(), trials.filled)
    return forest.predict(np.indices(shape).reshape(len(shape), -1).T).reshape(shape)


def sensitivity_figure(result: Sensitivity, *, unit: str = "objective") -> tuple[Any, Rows]:
    """Returns a picture of Shapley values, a dot per trial, most important parameter on top, and its table."""
    from matplotlib.colors import LinearSegmentedColormap

    names = list(result.importance)
    rows = [{"parameter": name, "importance": size} for name, size in result.importance.items()]
    with new_figure(height=0.45 * len(names) + 1.0) as (figure, axis):
        shades = LinearSegmentedColormap.from_list("choices", CHOICES)
        dots = None
        for place, name in enumerate(names):
            column = list(result.space).index(name)
            values, choice = result.values[:, column], result.indices[:, column]
            shade = choice / max(1, len(result.space[name]) - 1)
            dots = axis.scatter(values, place + _spread(values), c=shade, cmap=shades, vmin=0, vmax=1, s=14,
                                linewidth=0, alpha=0.9)  # fmt: skip
            axis.annotate(f"{result.importance[name]:.3g}", (1, place), xycoords=("axes fraction", "data"),
                          xytext=(4, 0), textcoords="offset points", va="center", color=GREY)  # fmt: skip
        axis.axvline(0, color=GREY, linewidth=0.8, zorder=1)
        axis.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
        axis.set_xlabel(f"effect on {unit}")
        axis.set_title("Shapley value of each trial's choice; grey: mean size")
        bar = figure.colorbar(dots, ax=axis, pad=0.1, aspect=15, shrink=0.8, ticks=[0, 1])
        bar.ax.set_yticklabels(["first\nchoice", "last"])
        bar.outline.set_visible(False)
    return figure, rows


def _spread(values: Array) -> Array:
    """Returns offsets in -0.35..0.35 that keep dots of nearly equal value apart."""
    bins = np.round((values - values.min()) / (np.ptp(values) or 1) * 60).astype(int)
    offsets = np.zeros(len(values))
    for each in np.unique(bins):
        where = np.flatnonzero(bins == each)
        offsets[where] = (np.arange(len(where)) - (len(where) - 1) / 2) * min(0.08, 0.7 / len(where))
    return offsets
