"""Fits what the memory model does not count from shapes, to measured bytes or out-of-memory labels."""

from collections.abc import Callable

import numpy as np

from kit.errors import ConfigError
from kit.estimate.theory.activations import Kernels
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.memory import memory
from kit.estimate.theory.out_of_memory import Reserve

# How far, in ln, a number may believably be from where the fit starts.
RESERVE_SPREAD = {"factor": 0.15, "extra_bytes": 0.4, "sharpness": 0.3}
KERNEL_SPREAD = {"logit_bytes": 0.25, "score_bytes": 0.7}


def fit_reserve(state: Array, dynamic: Array, used_bytes: Array, *, start: Reserve, source: str) -> Reserve:
    """Returns the reserve whose factor and extra bytes come closest to measured bytes: two fitted numbers.

    The mean absolute relative error is minimised, since single readings in published tables are wrong.

    State (weights, gradients and optimizer) and the rest are modelled for the device that was measured, one per run;
    used bytes are as a monitor or the allocator showed them. The sharpness of `start` is kept.
    """
    if len(used_bytes) < 3:
        raise ConfigError(f"fit_reserve: {len(used_bytes)} measured runs are too few. Give at least 3.")

    def loss(values: Array) -> float:
        used = state + values[0] * dynamic + values[1]
        return float(np.mean(np.abs(used / used_bytes - 1)))

    factor, extra = minimise(loss, np.array([start.factor, start.extra_bytes]))
    return start.replace(factor=float(np.clip(factor, 0.5, 3)), extra_bytes=float(extra), source=source)


def fit_out_of_memory(
    layouts: Layouts, is_out_of_memory: Array, device_bytes: float, *, kernels: Kernels, reserve: Reserve, source: str
) -> tuple[Reserve, Kernels]:
    """Returns (reserve, kernels) that make the labels most likely: five fitted numbers.

    They are the three of the reserve, and what the code base keeps of a logit and of a score (the latter only where
    some layout writes scores out). Each is drawn towards where it starts with the spread of a log-normal prior; flags
    of `kernels` stay as they are.
    """
    labels = np.asarray(is_out_of_memory, dtype=bool)
    if labels.all() or not labels.any():
        raise ConfigError("fit_out_of_memory: all labels are alike. Give runs that fitted and runs that did not.")
    spread = RESERVE_SPREAD | KERNEL_SPREAD
    if not np.any(layouts.flash_attention == 0):
        spread = {name: width for name, width in spread.items() if name != "score_bytes"}
    start = np.array([getattr(reserve if name in RESERVE_SPREAD else kernels, name) for name in spread])
    width = np.array(list(spread.values()))

    def model(values: Array) -> tuple[Reserve, Kernels]:
        fitted = dict(zip(spread, map(float, values), strict=True))
        part = {name: value for name, value in fitted.items() if name in RESERVE_SPREAD}
        rest = {name: value for name, value in fitted.items() if name in KERNEL_SPREAD}
        part["factor"] = min(3.0, max(0.5, part["factor"]))
        return reserve.replace(**part, source=source), kernels.replace(**rest)

    def loss(values: Array) -> float:
        fitted, flavour = model(values)
        odds = fitted.sharpness * np.log(memory(layouts, kernels=flavour, reserve=fitted).used_bytes / device_bytes)
        prior = 0.5 * np.sum((np.log(values / start) / width) ** 2)
        return float(np.sum(np.logaddexp(0, np.where(labels, -odds, odds))) + prior)

    return model(minimise(loss, start))


def minimise(loss: Callable[[Array], float], start: Array) -> Array:
    """Returns positive numbers at which `loss` is smallest near `start`: compass search on their logarithms."""
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
