"""Maximum a posteriori fits of step-time coefficients, and the population of machines as their
prior.

Coefficients are fitted as logarithms, each with a normal prior, inside its bounds. Residuals are
ln(predicted / measured). They have Student-t tails, since some published runs were disturbed. All
rows of one machine together have at most the weight of `MAX_ROWS` rows, since their errors are not
independent. Needs NumPy only.
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
"""Standard deviation, on the log scale, of the residuals of a fitted model. Two measurements of one
layout on one machine differ by 3 to 5 %."""
TAIL = 5.0
"""Degrees of freedom of the Student-t distribution of residuals."""
MAX_ROWS = 100.0
"""Largest total weight of the rows of one machine in a fit, as a number of rows."""
STACK_SPREAD = 0.15
"""Standard deviation, on the log scale, of the time factor between software stacks on one
machine."""
MOST_LEVERAGE = 0.98
"""Upper limit of the leverage of a model's runs on their own prediction. Above this limit the
linear estimate of a left-out error is meaningless."""
FEWEST_READINGS = 3
"""Smallest number of memory readings for a fit of the two numbers of a reserve."""
ROUNDS = 3
"""Number of rounds in which all machines are fitted with the population as prior, and then the
population to the machines."""
LOW = np.log([BOUNDS[name][0] for name in NAMES])
"""Logarithm of the lowest allowed value of each coefficient, in the order of NAMES."""
HIGH = np.log([BOUNDS[name][1] for name in NAMES])
"""Logarithm of the highest allowed value of each coefficient, in the order of NAMES."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Measured step times, each with the layout, the machine and the software stack of its run."""

    layouts: Layouts
    hardware: Hardware
    step_time_s: Array
    """Measured seconds per step of each row."""
    stack: Array
    """Number of the software stack of each row, from 0."""

    def __len__(self) -> int:
        return len(self.step_time_s)

    def select(self, rows: Array) -> Self:
        """Returns the rows that `rows`, an index or a mask, selects."""
        return type(self)(
            layouts=self.layouts.select(rows),
            hardware=self.hardware.select(rows),
            step_time_s=self.step_time_s[rows],
            stack=self.stack[rows],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prior:
    """Mean and standard deviation of the logarithm of each coefficient, in the order of NAMES."""

    mean: Array
    """Mean of the logarithm of each coefficient."""
    spread: Array
    """Standard deviation of the logarithm of each coefficient."""

    @classmethod
    def default(cls) -> Self:
        """Returns the population of published machines: the defaults of `Coefficients` and their
        spreads.
        """
        defaults = Coefficients()
        return cls(
            mean=np.log([getattr(defaults, name) for name in NAMES]),
            spread=np.array([SPREAD[n] for n in NAMES]),
        )

    @classmethod
    def guess(cls) -> Self:
        """Returns the prior before any machine was fitted (`hardware.GUESS`)."""
        return cls(
            mean=np.log([GUESS[name][0] for name in NAMES]),
            spread=np.array([GUESS[name][1] for name in NAMES]),
        )

    def only(self, names: Sequence[str]) -> Self:
        """Returns a copy in which only the coefficients `names` are free. All other coefficients
        are fixed at their mean by a spread of 0.
        """
        return type(self)(mean=self.mean, spread=np.where(np.isin(NAMES, names), self.spread, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Maximum of the posterior of the logarithms of coefficients, and their covariance at the
    maximum.
    """

    values: Array
    """Logarithms of the coefficients, in the order of NAMES."""
    covariance: Array
    """Covariance of the logarithms of the coefficients, [NAMES, NAMES]."""
    stack_factors: Array
    """Logarithm of the time factor of each software stack."""
    left_out_error: Array
    """Root mean square of ln(predicted / measured) over the runs of each model, one element per
    model. Each model is predicted as if the other models alone had been fitted, computed from the
    leverage of its runs. All runs of a model are left out together, since their errors are
    similar."""
    left_out_variance: Array
    """Mean variance of the left-out predictions of each model, on the log scale, one element per
    model. It contains only the uncertainty of the coefficients."""

    @property
    def coefficients(self) -> Coefficients:
        """The fitted coefficients, without stack factors."""
        low, high = np.array([BOUNDS[name] for name in NAMES]).T
        # Rounding of the exponential may exceed a bound by 1e-16.
        values = np.clip(np.exp(self.values), low, high)
        return Coefficients(**dict(zip(NAMES, values.tolist(), strict=True)))


def log_time(layouts: Layouts, hardware: Hardware, values: Array) -> Array:
    """Returns the logarithm of modelled seconds per step, [..., N], of N layouts on one machine or
    on N machines. `values` are logarithms of coefficients, [..., NAMES].
    """
    columns = {name: np.exp(values[..., i, None]) for i, name in enumerate(NAMES)}
    return np.log(step_time(layouts, hardware, types.SimpleNamespace(**columns)).total_s)  # type: ignore[arg-type]


def log_time_and_slopes(layouts: Layouts, hardware: Hardware, values: Array) -> tuple[Array, Array]:
    """Returns (ln seconds per step, slopes), [N] and [N, NAMES]. A slope is the derivative of ln
    seconds by the logarithm of a coefficient, computed as a finite difference.
    """
    step = np.where(values + 1e-4 <= HIGH, 1e-4, -1e-4)
    all_values = np.concatenate([values[None], values + np.diag(step)])
    times = log_time(layouts, hardware, all_values)
    times = np.broadcast_to(times, (len(NAMES) + 1, *layouts.shape))
    return times[0], ((times[1:] - times[0]) / step[:, None]).T


def fit(
    rows: Rows, prior: Prior, *, start: Array | None = None, stacks: bool = False, steps: int = 15
) -> Fit:
    """Returns the coefficients that are most likely given rows and prior (Levenberg-Marquardt).

    Without rows the result is the prior. A spread of 0 fixes a coefficient at its mean. `start` has
    logarithms of coefficients to start from, by default the mean of the prior. With `stacks` each
    software stack has its time factor in addition to the coefficient `factor`. `steps` limits the
    iterations.
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
    """Returns (root mean squared error, mean variance) of the predictions for the rows of each
    model, on the log scale, one element per model.

    The predictions are those of a fit without the rows of the model, computed from the leverage of
    the rows. A model is a number of layers and a hidden size.
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
    """Returns the fit without any run, which is the prior."""
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

    Each round fits every machine with the present prior, then computes mean and spread of the fits.
    In the mean a machine has more weight if its rows determine the coefficient better. The first
    prior (`Prior.guess`) counts as one more machine for the mean, and as two more machines for the
    spread.
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
    """Returns the reserve whose factor and extra bytes, the two fitted numbers, fit measured bytes
    best.

    The fit minimises the mean absolute relative error, since single readings in published tables
    are wrong. `state` (weights, gradients and optimizer) and `dynamic` are modelled bytes of the
    device that was measured, one per run. `used_bytes` are bytes that a monitor or the allocator
    showed. The sharpness is that of `start`.

    Raises:
        ConfigError: There are fewer than FEWEST_READINGS measured runs.
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
    """Returns the positive numbers near `start` at which `loss` is smallest, by a compass search on
    their logarithms.
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
        onwards = best * (best / before)  # the moves of this round, a second time
        if best is before:
            step /= 2
        elif (new := loss(onwards)) < value:
            best = onwards
            value = new
    return best
