"""Maximum a posteriori fits of the coefficients of the step time formula. The prior of a
coefficient is its distribution over the published machines (the population).

Coefficients are fitted as logarithms. Each has a normal prior and bounds. Residuals are
ln(predicted / measured) of the measured runs. They have Student-t tails, since some published runs
were disturbed. All runs of one machine together have at most the weight of `MAX_ROWS` runs, since
their errors are not independent. The module needs NumPy only.
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
"""Standard deviation of the residuals ln(predicted / measured) of a fit. Two measurements of one
layout on one machine differ by 3 to 5 %."""
TAIL = 5.0
"""Degrees of freedom of the Student-t distribution of the residuals ln(predicted / measured)."""
MAX_ROWS = 100.0
"""Largest summed weight of the measured runs of one machine in a fit. Up to 100 runs have weight 1
each. With more runs, each has the weight 100 / number of runs."""
STACK_SPREAD = 0.15
"""Standard deviation, on the log scale, of the ratio of step times between software stacks on one
machine."""
MAX_LEVERAGE = 0.98
"""Largest leverage, 0 to 1, that is used for the runs of a neural network on their own prediction.
Larger values are reduced to this limit. Near a leverage of 1, the linear estimate of the error that
the prediction would have without these runs is meaningless."""
MIN_MEMORY_RUNS = 3
"""Smallest number of measured memory values for a fit of the two numbers of a memory reserve."""
ROUNDS = 3
"""Number of iterations that compute the prior from all machines. Each iteration fits every machine
with the current prior, then computes the next prior from these fits."""
LOW = np.log([BOUNDS[name][0] for name in NAMES])
"""Logarithms of the lowest allowed values of the fitted coefficients, in the order of NAMES."""
HIGH = np.log([BOUNDS[name][1] for name in NAMES])
"""Logarithms of the highest allowed values of the fitted coefficients, in the order of NAMES."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Measured runs as arrays, with one element per run: layout, machine, step time and software
    stack.
    """

    layouts: Layouts
    hardware: Hardware
    step_time_s: Array
    """Measured seconds per optimizer step of each run."""
    stack: Array
    """Number of the software stack of each run, counted from 0. Runs with equal numbers used one
    software stack."""

    def __len__(self) -> int:
        return len(self.step_time_s)

    def select(self, rows: Array) -> Self:
        """Returns the runs that `rows` selects. `rows` is an array of indices or a Boolean mask."""
        return type(self)(
            layouts=self.layouts.select(rows),
            hardware=self.hardware.select(rows),
            step_time_s=self.step_time_s[rows],
            stack=self.stack[rows],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prior:
    """Normal prior of the logarithm of each coefficient of the step time formula."""

    mean: Array
    """Mean of the logarithm of each coefficient, in the order of NAMES."""
    spread: Array
    """Standard deviation of the logarithm of each coefficient, in the order of NAMES. A coefficient
    with standard deviation 0 is not fitted and keeps its mean."""

    @classmethod
    def default(cls) -> Self:
        """Returns the prior from published machines: the defaults of `Coefficients` as means, and
        `hardware.SPREAD` as standard deviations.
        """
        defaults = Coefficients()
        return cls(
            mean=np.log([getattr(defaults, name) for name in NAMES]),
            spread=np.array([SPREAD[n] for n in NAMES]),
        )

    @classmethod
    def guess(cls) -> Self:
        """Returns the prior that was assumed before any machine was fitted (`hardware.GUESS`)."""
        return cls(
            mean=np.log([GUESS[name][0] for name in NAMES]),
            spread=np.array([GUESS[name][1] for name in NAMES]),
        )

    def only(self, names: Sequence[str]) -> Self:
        """Returns a copy of the prior with which only the coefficients `names` are fitted. All
        other coefficients have a standard deviation of 0 and keep their mean.
        """
        return type(self)(mean=self.mean, spread=np.where(np.isin(NAMES, names), self.spread, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of a fit: the most probable logarithms of the coefficients, their covariance, and
    errors of predictions for neural networks whose runs were left out.
    """

    values: Array
    """Fitted logarithms of the coefficients, in the order of NAMES."""
    covariance: Array
    """Covariance matrix of the logarithms of the coefficients at the maximum of the posterior, with
    rows and columns in the order of NAMES."""
    stack_factors: Array
    """Logarithm of the fitted step time factor of each software stack. The array is empty if no
    factors were fitted."""
    left_out_error: Array
    """Root mean square of ln(predicted / measured) over the runs of each neural network, one
    element per network. A network is a number of layers and a hidden size. Each network is
    predicted as if none of its runs had been fitted, since the errors of its runs are similar. No
    second fit is made: the effect of the left-out runs is computed from their leverage."""
    left_out_variance: Array
    """Mean variance, on the log scale, of the predicted times of each left-out neural network, one
    element per network. The variance contains only the uncertainty of the coefficients."""

    @property
    def coefficients(self) -> Coefficients:
        """Fitted coefficients of the step time formula. Factors of software stacks are not
        included.
        """
        low, high = np.array([BOUNDS[name] for name in NAMES]).T
        # The rounding error of the exponential may exceed a bound by a relative 1e-16.
        values = np.clip(np.exp(self.values), low, high)
        return Coefficients(**dict(zip(NAMES, values.tolist(), strict=True)))


def log_time(layouts: Layouts, hardware: Hardware, values: Array) -> Array:
    """Returns the logarithm of the modelled seconds per step, with one element per layout on the
    last axis. `hardware` is one machine, or one machine per layout. `values` are logarithms of
    coefficients, with the order of NAMES on the last axis.
    """
    columns = {name: np.exp(values[..., i, None]) for i, name in enumerate(NAMES)}
    return np.log(step_time(layouts, hardware, types.SimpleNamespace(**columns)).total_s)  # type: ignore[arg-type]


def log_time_and_slopes(layouts: Layouts, hardware: Hardware, values: Array) -> tuple[Array, Array]:
    """Returns (ln seconds per step, derivatives), with the shapes [N] and [N, number of
    coefficients] for N layouts. The derivatives of ln seconds by the logarithm of each coefficient
    are finite differences.
    """
    step = np.where(values + 1e-4 <= HIGH, 1e-4, -1e-4)
    all_values = np.concatenate([values[None], values + np.diag(step)])
    times = log_time(layouts, hardware, all_values)
    times = np.broadcast_to(times, (len(NAMES) + 1, *layouts.shape))
    return times[0], ((times[1:] - times[0]) / step[:, None]).T


def fit(
    rows: Rows, prior: Prior, *, start: Array | None = None, stacks: bool = False, steps: int = 15
) -> Fit:
    """Returns the most probable coefficients, given measured runs and a prior. The algorithm is
    Levenberg-Marquardt.

    If there are no runs, the result is the prior. A coefficient whose prior has `spread` 0 keeps
    its mean. `start` has the logarithms of coefficients from which the iteration starts, by default
    the mean of the prior. With `stacks`, a time factor of each software stack is fitted in addition
    to the coefficient `factor`. `steps` is the largest number of iterations.
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
    """Returns (root mean squared error, mean variance) on the log scale, two arrays with one
    element per neural network. A network is a number of layers and a hidden size.

    The runs of each network are predicted as if they had not been fitted. No second fit is made:
    the effect of these runs on the coefficients is computed from their leverage.
    """
    shapes = np.stack(np.broadcast_arrays(layouts.num_layers, layouts.hidden_size, error)[:2])
    model = np.unique(shapes, axis=1, return_inverse=True)[1].ravel()
    told = []
    for rows in (model == each for each in range(model.max() + 1)):
        root = np.sqrt(weights[rows])
        own = root[:, None] * (slopes[rows] @ covariance @ slopes[rows].T) * root
        leverage, axes = np.linalg.eigh(own)
        leverage = np.clip(leverage, 0.0, MAX_LEVERAGE)
        off = axes @ (axes.T @ (root * error[rows]) / (1 - leverage)) / root
        variance = axes**2 @ (leverage / (1 - leverage)) / root**2
        told.append((np.sqrt(np.mean(off**2)), np.mean(variance)))
    off, variance = np.array(told).T
    return NOISE * off, NOISE**2 * variance


def prior_only(prior: Prior) -> Fit:
    """Returns the result of a fit without any run. Its coefficients and variances are equal to
    those of the prior.
    """
    none = np.zeros(0)
    return Fit(
        values=prior.mean,
        covariance=np.diag(prior.spread**2),
        stack_factors=none,
        left_out_error=none,
        left_out_variance=none,
    )


def population(machines: Sequence[Rows]) -> Prior:
    """Returns mean and standard deviation of the logarithms of the coefficients over machines
    (empirical Bayes). This mean and this standard deviation are the prior of a new machine.

    Each iteration fits every machine with the current prior, then computes the next prior from the
    mean and the standard deviation of these fits. A machine has more weight in the mean if its runs
    determine the coefficient better. The first prior (`Prior.guess`) counts as one more machine for
    the mean, and as two more machines for the standard deviation.
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


def torch_prior(prior: Prior, code_bases: Sequence[Rows]) -> Prior:
    """Returns a copy of the prior with mean and standard deviation of `torch_factor` over the runs
    of plain torch code (empirical Bayes). Each element of `code_bases` has the runs of one code
    base on one machine.

    Each iteration fits every code base with the current prior, as `population` does. The first
    prior of `torch_factor` (`Prior.guess`) counts as one more code base for the mean, and as two
    more for the standard deviation. All other coefficients keep their prior.
    """
    place = NAMES.index("torch_factor")
    guess = Prior.guess()
    mean = prior.mean.copy()
    spread = prior.spread.copy()
    mean[place] = guess.mean[place]
    spread[place] = guess.spread[place]
    for _ in range(ROUNDS):
        fits = [fit(rows, Prior(mean=mean, spread=spread)) for rows in code_bases]
        values = np.array([each.values[place] for each in fits])
        variance = np.array([each.covariance[place, place] for each in fits])
        weights = 1 / (variance + spread[place] ** 2)
        own = 1 / guess.spread[place] ** 2
        centre = (weights @ values + own * guess.mean[place]) / (weights.sum() + own)
        deviation = (values - centre) ** 2 + variance
        square = (2 * guess.spread[place] ** 2 + deviation.sum()) / (2 + len(fits))
        mean = mean.copy()
        spread = spread.copy()
        mean[place] = centre
        spread[place] = np.sqrt(square)
    return Prior(mean=mean, spread=spread)


def _normal_equations(
    error: Array, slopes: Array, weight: float, values: Array, mean: Array, spread: Array
) -> tuple:
    """Returns (curvature, gradient): the approximate second and the first derivatives of half the
    loss with respect to the fitted values. Each run is weighted by the Student-t distribution, so
    that a large error has less weight.
    """
    weights = weight * (TAIL + 1) / (TAIL + error**2)
    curvature = slopes.T @ (slopes * weights[:, None]) + np.diag(1 / spread**2)
    return curvature, slopes.T @ (weights * error) + (values - mean) / spread**2


def fit_reserve(
    state: Array, dynamic: Array, used_bytes: Array, *, start: Reserve, source: str
) -> Reserve:
    """Returns the memory reserve with the factor and the extra bytes that agree best with measured
    memory. These two numbers are fitted.

    The fit minimises the mean absolute relative error, since some values in published tables are
    wrong, and a mean of squares would give them more weight. `state` (weights, gradients and
    optimizer) and `dynamic` (allocated in each step) are modelled bytes on the measured device, one
    element per run. `used_bytes` are the measured bytes, which a monitor or the allocator showed.
    The sharpness is copied from `start`.

    Raises:
        ConfigError: There are fewer than MIN_MEMORY_RUNS measured runs.
    """
    if len(used_bytes) < MIN_MEMORY_RUNS:
        raise ConfigError(
            f"fit_reserve: {len(used_bytes)} measured runs are too few. Give at least"
            f" {MIN_MEMORY_RUNS}."
        )

    def loss(values: Array) -> float:
        used = state + values[0] * dynamic + values[1]
        return float(np.mean(np.abs(used / used_bytes - 1)))

    factor, extra = minimise(loss, np.array([start.factor, start.extra_bytes]))
    return start.replace(
        factor=float(np.clip(factor, 0.5, 3)), extra_bytes=float(extra), source=source
    )


def minimise(loss: Callable[[Array], float], start: Array) -> Array:
    """Returns the positive numbers near `start` at which `loss` is smallest. The algorithm is a
    compass search on the logarithms of the numbers.
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
        # Trial point: all moves of this round are made a second time.
        onwards = best * (best / before)
        if best is before:
            step /= 2
        elif (new := loss(onwards)) < value:
            best = onwards
            value = new
    return best
