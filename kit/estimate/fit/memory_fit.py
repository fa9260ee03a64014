"""Fits what the memory model does not count from shapes, to measured bytes."""

from collections.abc import Callable

import numpy as np

from kit.errors import ConfigError
from kit.estimate.theory.layouts import Array
from kit.estimate.theory.out_of_memory import Reserve


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
    if len(used_bytes) < 3:
        raise ConfigError(
            f"fit_reserve: {len(used_bytes)} measured runs are too few. Give at least 3."
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
    best, value, step = np.asarray(start, dtype=float), loss(start), 0.2
    while step > 1e-3:
        before = best
        for i in range(len(best)):
            for sign in (step, -step):
                trial = best.copy()
                trial[i] *= np.exp(sign)
                if (new := loss(trial)) < value:
                    best, value = trial, new
                    break
        onwards = best * (best / before)  # along the sum of the moves
        if best is before:
            step /= 2
        elif (new := loss(onwards)) < value:
            best, value = onwards, new
    return best
