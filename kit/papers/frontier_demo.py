"""The Frontier study at demo scale: a few short runs of real processes on this machine, kept and
used again.

A process is a core: degrees 1 and 2 are compared by throughput per core, as the paper compares them
per GCD. Two processes share caches and memory, so a process alone is a little better off, whatever
the degree.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.tuning.objectives import MeasuredRate
from kit.estimate.tuning.tune import Trials, tune
from kit.papers.layers import WARM_UP, Runs, kept, note_load, open_runs, scale_of
from kit.run import Run

MODEL = ModelSpec.gpt(
    name="gpt-demo",
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    vocab_size=4096,
    sequence_length=256,
)
STEPS = 8
MICROBATCHES = 4
"""Micro-batches of a replica in the runs that do not vary their number."""
SPACE: dict[str, tuple] = {
    "tensor_parallel": (1, 2),
    "pipeline_parallel": (1, 2),
    "num_microbatches": (2, 4),
    "micro_batch_size": (1,),
    "num_nodes": (2,),
}
"""Parameters of the search on this machine. TP 2 with PP 2 would need four processes and fails."""
SEARCH = "search.journal"
"""File beside the runs in which `demo_search` keeps its trials."""
ATTENTION = "attention.json"
"""File in which `demo_attention` keeps its times."""
LENGTHS = (256, 512, 1024, 2048)
"""Sequence lengths of `demo_attention`, in tokens."""
REPETITIONS = 6
"""Timings of each kernel at each length in `demo_attention`."""
ALONE = {"tensor_parallel": 1, "pipeline_parallel": 1, "micro_batch_size": 1, "num_nodes": 2}
STUDY: list[dict[str, int]] = [
    *(ALONE | {"pipeline_parallel": 2, "num_microbatches": count} for count in (1, 2, 4, 8)),
    ALONE | {"tensor_parallel": 2, "num_microbatches": MICROBATCHES},
    ALONE | {"num_nodes": 1, "num_microbatches": MICROBATCHES},
]
"""Parameters of each run: degrees, micro-batches of a replica, processes (`num_nodes`)."""


def measured_objective(directory: str | Path, data: str | Path) -> MeasuredRate:
    """Returns what runs the demo model with given parameters in a folder below `directory`,
    once.
    """
    recipe = Recipe(data=str(data), num_steps=STEPS)
    return MeasuredRate(spec=MODEL, recipe=recipe, directory=Path(directory), num_devices=1)


def demo_runs(directory: str | Path, data: str | Path) -> list[Run]:
    """Returns the runs of the study; those that are not in `directory` yet are made, about eight
    seconds each.

    `data` is a dataset made by `kit data build` with a vocabulary of at most 4,096.

    Raises:
        TrialFailure: a run failed.
    """
    rate = measured_objective(directory, data)
    note_load(directory)
    for parameters in STUDY:
        rate(parameters)
    return open_runs([directory])


def demo_search(directory: str | Path, data: str | Path) -> Trials:
    """Returns a hyperparameter search on real runs of this machine; it shares the study's runs
    and its folder.
    """
    return tune(
        measured_objective(directory, data), SPACE, num_trials=8, storage=Path(directory) / SEARCH
    )


def demo_attention(directory: str | Path) -> list[dict[str, Any]]:
    """Returns seconds of causal attention, forward and backward, fused and with scores written out,
    on one core.

    The rows are kept in `directory` and used again: kernel, sequence_length, seconds of each
    repetition.
    """
    return kept(Path(directory) / ATTENTION, _timed_attention)


def _timed_attention() -> list[dict[str, Any]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from kit.measure.timing import one_thread, timed

    def attend() -> None:
        query, key, value = heads
        torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        ).sum().backward()

    backends = {"fused": SDPBackend.FLASH_ATTENTION, "scores written out": SDPBackend.MATH}
    rows = []
    for length in LENGTHS:
        heads = [
            torch.randn(1, 4, length, 64, requires_grad=True) for _ in ("queries", "keys", "values")
        ]
        for kernel, backend in backends.items():
            with one_thread(), sdpa_kernel(backend):
                seconds = [timed(attend) for _ in range(REPETITIONS)]
            rows.append({"kernel": kernel, "sequence_length": length, "seconds": seconds})
    return rows


def select(runs: Runs, **fields: Any) -> list[Run]:
    """Returns what belongs in a panel: all runs of clusters, and demo-scale runs whose plans
    have these fields.
    """
    found = []
    for run in open_runs(runs):
        matches = all(getattr(run.plan, name) == value for name, value in fields.items())
        if matches or scale_of(run) == "cluster":
            found.append(run)
    return found


def median_rate(runs: Runs, **fields: Any) -> tuple[float, float, float]:
    """Returns (median, lower, upper quartile) of tokens/s and device of the one demo-scale run
    with these fields.
    """
    chosen = [run for run in select(runs, **fields) if scale_of(run) == "demo"]
    if len(chosen) != 1:
        return math.nan, math.nan, math.nan
    low, middle, high = np.quantile(tokens_per_s_and_device(chosen[0])[WARM_UP:], (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


def run_hfu_percent(run: Run) -> np.ndarray:
    """Returns HFU of each step in per cent, NaN where the site's peak is not known."""
    metrics = run.metrics()
    hfu = metrics.hfu()
    if hfu is None:
        return np.full(len(metrics), math.nan)
    return 100 * hfu


def tokens_per_s_and_device(run: Run) -> np.ndarray:
    """Returns tokens/s of each step and device; processes that share a core count as one device."""
    devices = run.plan.num_devices
    if scale_of(run) == "demo":
        devices = min(devices, run.site.devices_per_node)
    return run.metrics().tokens_per_s / devices
