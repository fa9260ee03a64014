"""Maximum a posteriori fits of step-time coefficients, and the population of machines that gives
them their prior.

Coefficients are fitted as logarithms, each with a normal prior, inside its bounds. Residuals are
ln(predicted / measured) with Student-t tails, since some published runs were disturbed; many rows
of one machine count as no more than `MAX_ROWS`, since their misfits are not independent. NumPy
only.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from kit.errors import ConfigError
from kit.estimate.theory.hardware import BOUNDS, GUESS, NAMES, SPREAD, Coefficients, Hardware
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.out_of_memory import Reserve
from kit.estimate.theory.step_time import step_time

NOISE = 0.04
"""ln-scale of what a fitted model leaves over: same layout, same machine, measured twice differs
by 3 to 5 %."""
TAIL = 5.0
"""Degrees of freedom of the Student-t distribution."""
MAX_ROWS = 100.0
STACK_SPREAD = 0.15
"""ln-spread of the factors of software stacks on one machine."""
MOST_LEVERAGE = 0.98
"""Of a model's runs on their own prediction: a linear left-out error means nothing beyond."""
FEWEST_READINGS = 3
"""Of memory, that two numbers of a reserve are fitted to."""
ROUNDS = 3
"""Of fitting all machines with the population, and the population to them."""
LOW = np.log([BOUNDS[name][0] for name in NAMES])
HIGH = np.log([BOUNDS[name][1] for name in NAMES])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Measured step times: layouts, the machine of each, and which software stack it ran."""

    layouts: Layouts
    hardware: Hardware
    step_time_s: Array
    stack: Array
    """Whole numbers from 0."""

    def __len__(self) -> int:
        return len(self.step_time_s)

    def select(self, rows: Array) -> Self:
        """Returns some of the rows, by index or mask."""
        return type(self)(
            layouts=self.layouts.select(rows),
            hardware=self.hardware.select(rows),
            step_time_s=self.step_time_s[rows],
            stack=self.stack[rows],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prior:
    """Mean and spread of ln of each coefficient, in the order of NAMES."""

    mean: Array
    spread: Array

    @classmethod
    def default(cls) -> Self:
        """Returns the population that ships with Coefficients."""
        defaults = Coefficients()
        return cls(
            mean=np.log([getattr(defaults, name) for name in NAMES]),
            spread=np.array([SPREAD[n] for n in NAMES]),
        )

    @classmethod
    def guess(cls) -> Self:
        """Returns what is believed before any machine was looked at."""
        return cls(
            mean=np.log([GUESS[name][0] for name in NAMES]),
            spread=np.array([GUESS[name][1] for name in NAMES]),
        )

    def only(self, names: Sequence[str]) -> Self:
        """Returns the same with every coefficient but `names` held at its mean."""
        return type(self)(mean=self.mean, spread=np.where(np.isin(NAMES, names), self.spread, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Where the posterior of ln coefficients is highest, and its covariance there."""

    values: Array
    """ln of the coefficients, in the order of NAMES."""
    covariance: Array
    stack_factors: Array
    """ln, one per stack."""
    left_out_error: Array
    """ln(predicted / measured) of the runs of each model, root of their mean square, as if the
    others alone had been fitted (by their leverage): runs of one model err alike."""
    left_out_variance: Array
    """Of these predictions, from the coefficients; the mean."""

    @property
    def coefficients(self) -> Coefficients:
        """The fitted coefficients, without stack factors."""
        low, high = np.array([BOUNDS[name] for name in NAMES]).T
        values = np.clip(np.exp(self.values), low, high)  # a bound, not 1e-16 beyond
        return Coefficients(**dict(zip(NAMES, values.tolist(), strict=True)))


def log_time(layouts: Layouts, hardware: Hardware, values: Array) -> Array:
    """Returns ln of modelled seconds [..., N] of N layouts on one machine or N, by ln
    coefficients [..., NAMES].
    """
    columns = {name: np.exp(values[..., i, None]) for i, name in enumerate(NAMES)}
    return np.log(step_time(layouts, hardware, types.SimpleNamespace(**columns)).total_s)  # type: ignore[arg-type]


def log_time_and_slopes(layouts: Layouts, hardware: Hardware, values: Array) -> tuple[Array, Array]:
    """Returns (ln seconds [N], its derivatives by ln coefficient [N, NAMES])."""
    step = np.where(values + 1e-4 <= HIGH, 1e-4, -1e-4)
    all_values = np.concatenate([values[None], values + np.diag(step)])
    times = log_time(layouts, hardware, all_values)
    times = np.broadcast_to(times, (len(NAMES) + 1, *layouts.shape))
    return times[0], ((times[1:] - times[0]) / step[:, None]).T


def fit(
    rows: Rows, prior: Prior, *, start: Array | None = None, stacks: bool = False, steps: int = 15
) -> Fit:
    """Returns the coefficients that rows and prior together make most likely (Levenberg-Marquardt).

    No rows give the prior back, and a spread of 0 keeps a coefficient at its mean. `start` are ln
    coefficients to begin from instead of that mean; with `stacks` each software stack has a factor
    beside the common one.
    """
    size = len(NAMES)
    count = int(rows.stack.max()) + 1 if stacks and len(rows) else 0
    one_hot = (rows.stack[:, None] == np.arange(count)).astype(float)
    mean = np.concatenate([prior.mean, np.zeros(count)])
    spread = np.concatenate([np.maximum(prior.spread, 1e-6), np.full(count, STACK_SPREAD)])
    low, high = (
        np.concatenate([bound, np.full(count, sign)]) for bound, sign in ((LOW, -1.0), (HIGH, 1.0))
    )
    weight = min(1.0, MAX_ROWS / max(1, len(rows)))
    measured = np.log(rows.step_time_s)

    def evaluate(values: Array) -> tuple[float, Array, Array]:
        times, slopes = log_time_and_slopes(rows.layouts, rows.hardware, values[:size])
        error = (times + one_hot @ values[size:] - measured) / NOISE
        loss = (
            weight * (TAIL + 1) * np.log1p(error**2 / TAIL).sum()
            + (((values - mean) / spread) ** 2).sum()
        )
        return loss, error, np.concatenate([slopes, one_hot], axis=1) / NOISE

    values = np.clip(mean if start is None else np.concatenate([start, np.zeros(count)]), low, high)
    if not len(rows):
        return prior_only(prior)
    loss, error, slopes = evaluate(values)
    damping = 1e-2
    for _ in range(steps):
        curvature, gradient = _normal_equations(error, slopes, weight, values, mean, spread)
        free = ~(((values <= low) & (gradient > 0)) | ((values >= high) & (gradient < 0)))
        improved = None
        for _ in range(8):
            damped = curvature + damping * np.diag(np.diag(curvature))
            move = np.zeros_like(values)
            move[free] = np.linalg.solve(damped[np.ix_(free, free)], gradient[free])
            trial = np.clip(values - move, low, high)
            improved = evaluate(trial)
            if improved[0] < loss:
                break
            damping = damping * 6
            improved = None
        if improved is None:
            break
        done = loss - improved[0] < 1e-4 * loss
        values, (loss, error, slopes), damping = trial, improved, max(damping / 5, 1e-6)
        if done:
            break
    curvature, _ = _normal_equations(error, slopes, weight, values, mean, spread)
    covariance = np.linalg.inv(curvature)
    weights = weight * (TAIL + 1) / (TAIL + error**2)
    off, variance = _left_out(rows.layouts, error, slopes, weights, covariance)
    return Fit(
        values=values[:size],
        covariance=covariance[:size, :size],
        stack_factors=values[size:],
        left_out_error=off,
        left_out_variance=variance,
    )


def _left_out(
    layouts: Layouts, error: Array, slopes: Array, weights: Array, covariance: Array
) -> tuple[Array, Array]:
    """Returns (root of the mean squared error, mean variance) of the rows of each model, as if all
    others alone had been fitted, by their leverage.
    """
    shapes = np.stack(np.broadcast_arrays(layouts.num_layers, layouts.hidden_size, error)[:2])
    model = np.unique(shapes, axis=1, return_inverse=True)[1].ravel()
    told = []
    for rows in (model == each for each in range(model.max() + 1)):
        root = np.sqrt(weights[rows])
        own = root[:, None] * (slopes[rows] @ covariance @ slopes[rows].T) * root
        leverage, axes = np.linalg.eigh(own)
        leverage = np.clip(leverage, 0.0, MOST_LEVERAGE)
        off = axes @ (axes.T @ (root * error[rows]) / (1 - leverage)) / root
        variance = axes**2 @ (leverage / (1 - leverage)) / root**2
        told.append((np.sqrt(np.mean(off**2)), np.mean(variance)))
    off, variance = np.array(told).T
    return NOISE * off, NOISE**2 * variance


def prior_only(prior: Prior) -> Fit:
    """Returns what is believed without any run."""
    none = np.zeros(0)
    return Fit(
        values=prior.mean,
        covariance=np.diag(prior.spread**2),
        stack_factors=none,
        left_out_error=none,
        left_out_variance=none,
    )


def population(machines: Sequence[Rows]) -> Prior:
    """Returns mean and spread of the coefficients among machines (empirical Bayes).

    Each round fits every machine with the present prior, then takes mean and spread of the fits,
    each weighted by how well its rows tell the coefficient. The guess to begin with counts as one
    more machine for the mean and two for the spread.
    """
    hyper = prior = Prior.guess()
    fits = [None] * len(machines)
    for _ in range(ROUNDS):
        fits = [
            fit(rows, prior, start=old.values if old else None, steps=8)
            for rows, old in zip(machines, fits, strict=True)
        ]
        values = np.array([each.values for each in fits])
        variance = np.array([np.diag(each.covariance) for each in fits])
        weights = 1 / (variance + prior.spread**2)
        own = 1 / hyper.spread**2
        mean = ((weights * values).sum(0) + own * hyper.mean) / (weights.sum(0) + own)
        spread = np.sqrt(
            (2 * hyper.spread**2 + ((values - mean) ** 2 + variance).sum(0)) / (2 + len(machines))
        )
        prior = Prior(mean=mean, spread=spread)
    return prior


def _normal_equations(
    error: Array, slopes: Array, weight: float, values: Array, mean: Array, spread: Array
) -> tuple:
    """Returns (curvature, gradient) of half the loss, with Student-t weights."""
    weights = weight * (TAIL + 1) / (TAIL + error**2)
    curvature = slopes.T @ (slopes * weights[:, None]) + np.diag(1 / spread**2)
    return curvature, slopes.T @ (weights * error) + (values - mean) / spread**2


def fit_reserve(
    state: Array, dynamic: Array, used_bytes: Array, *, start: Reserve, source: str
) -> Reserve:
    """Returns the reserve whose factor and extra bytes come closest to measured bytes: two fitted
    numbers.

    The mean absolute relative error is minimised, since single readings in published tables are
    wrong.

    State (weights, gradients and optimizer) and the rest are modelled for the device that was
    measured, one per run; used bytes are as a monitor or the allocator showed them. The sharpness
    of `start` is kept.
    """
    if len(used_bytes) < FEWEST_READINGS:
        raise ConfigError(
            f"fit_reserve: {len(used_bytes)} measured runs are too few. Give at least"
            f" {FEWEST_READINGS}."
        )

    def loss(values: Array) -> float:
        used = state + values[0] * dynamic + values[1]
        return float(np.mean(np.abs(used / used_bytes - 1)))

    factor, extra = minimise(loss, np.array([start.factor, start.extra_bytes]))
    return start.replace(
        factor=float(np.clip(factor, 0.5, 3)), extra_bytes=float(extra), source=source
    )


def minimise(loss: Callable[[Array], float], start: Array) -> Array:
    """Returns positive numbers at which `loss` is smallest near `start`: compass search on their
    logarithms.
    """
    best = np.asarray(start, dtype=float)
    value = loss(start)
    step = 0.2
    while step > 1e-3:
        before = best
        for i in range(len(best)):
            for sign in (step, -step):
                trial = best.copy()
                trial[i] *= np.exp(sign)
                if (new := loss(trial)) < value:
                    best = trial
                    value = new
                    break
        onwards = best * (best / before)  # along the sum of the moves
        if best is before:
            step /= 2
        elif (new := loss(onwards)) < value:
            best = onwards
            value = new
    return best
