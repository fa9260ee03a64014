"""How far the memory model is off from bytes that somebody read from a monitor. No torch."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kit.estimate.fit import published
from kit.estimate.fit.memory_fit import fit_reserve
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.memory import DYNAMIC, STATE, memory
from kit.estimate.theory.out_of_memory import MONITOR_RESERVE
from kit.show.results import Row, row


def readings(runs: Sequence[PublishedRun]) -> list[Row]:
    """Returns the error on measured bytes per device, two numbers fitted, a model shape held
    out.
    """
    if len(runs) < 3:
        return []
    layouts, measured = memory_layouts(runs), np.array([run.memory_bytes for run in runs])
    terms = memory(layouts, kernels=MEGATRON, reserve=MONITOR_RESERVE).terms()
    state, dynamic = (np.sum([terms[name] for name in names], axis=0) for names in (STATE, DYNAMIC))
    shape = np.array([f"{run.spec.num_layers} x {run.spec.hidden_size}" for run in runs])

    def used(train: Array) -> Array:
        fitted = fit_reserve(
            state[train], dynamic[train], measured[train], start=MONITOR_RESERVE, source=""
        )
        return fitted.used_bytes(state, dynamic)

    error = np.abs(without_group(shape, used) / measured - 1)
    everywhere = float(np.mean(np.abs(used(np.ones(len(runs), bool)) / measured - 1)))
    median, most = np.quantile(error, (0.5, 0.9))
    note = f"median {median:.1%}, 90 % within {most:.1%}, worst {error.max():.0%}; 2 numbers fitted"
    name = f"Memory: readings, a shape held out ({len(runs)})"
    return [
        row(name, float(error.mean()), "fraction", at_most=0.05, note=note),
        row(
            "Memory: readings, fitted on all", everywhere, "fraction", note="floor of the 2 numbers"
        ),
    ]


def memory_layouts(runs: Sequence[PublishedRun]) -> Layouts:
    """Returns the runs with the width of gradients that their code keeps.

    BigScience ran Megatron-DeepSpeed: fp16 gradients with fp16, but a bf16 gradient and its fp32
    sum with bf16.
    """
    layouts = published.layouts(runs)
    wide = [
        6.0 if run.precision == "bf16" and run.source.startswith("bigscience") else 2.0
        for run in runs
    ]
    return dataclasses.replace(layouts, gradient_bytes=np.array(wide))


def without_group(group: Array, predict: Callable[[Array], Array]) -> Array:
    """Returns predictions for each row by a fit on the rows of all other groups."""
    result = np.empty(len(group))
    for name in sorted(set(group)):
        result[group == name] = predict(group != name)[group == name]
    return result
