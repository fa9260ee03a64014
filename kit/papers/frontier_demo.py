"""The study for the Frontier figures at demo scale: a few short training runs on this machine. The
runs are stored and used again.

Each process runs on one core. Degrees of parallelism 1 and 2 are compared by throughput per core,
as the paper compares degrees by throughput per GCD (half of an MI250X). Two processes share caches
and memory, so a process that runs alone is a little faster at any degree.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.tuning.objectives import MeasuredRate
from kit.estimate.tuning.tune import Trials, tune
from kit.papers.layers import WARM_UP, Runs, open_runs, read_or_make, record_load, scale_of
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
"""Number of training steps of each short run on this machine."""
MICROBATCHES = 4
"""Number of micro-batches per replica in the runs on this machine that compare degrees of
parallelism. Other runs compare numbers of micro-batches."""
SPACE: dict[str, tuple] = {
    "tensor_parallel": (1, 2),
    "pipeline_parallel": (1, 2),
    "num_microbatches": (2, 4),
    "micro_batch_size": (1,),
    "num_nodes": (2,),
}
"""Maps each parameter of the hyperparameter search on this machine to its allowed values. A trial
with tensor and pipeline parallel degree 2 fails, since it needs four processes and a trial has only
two (`num_nodes`)."""
SEARCH = "search.journal"
"""Name of the file with the trials of the hyperparameter search on this machine. The file is in the
folder that contains the runs."""
ATTENTION = "attention.json"
"""Name of the file with the times of attention that were measured on this machine."""
LENGTHS = (256, 512, 1024, 2048)
"""Sequence lengths, in tokens, at which the time of attention is measured on this machine."""
REPETITIONS = 6
"""Number of time measurements of each attention kernel at each sequence length."""
ALONE = {"tensor_parallel": 1, "pipeline_parallel": 1, "micro_batch_size": 1, "num_nodes": 2}
"""Default parameters of the short runs on this machine that `STUDY` lists. `num_nodes` is here the
number of processes."""
STUDY: list[dict[str, int]] = [
    *(ALONE | {"pipeline_parallel": 2, "num_microbatches": count} for count in (1, 2, 4, 8)),
    ALONE | {"tensor_parallel": 2, "num_microbatches": MICROBATCHES},
    ALONE | {"num_nodes": 1, "num_microbatches": MICROBATCHES},
]
"""Parameters of each short run on this machine: degrees of parallelism, number of micro-batches per
replica, and number of processes (key `num_nodes`)."""


def measured_objective(directory: str | Path, data: str | Path) -> MeasuredRate:
    """Returns an objective (callable) for a hyperparameter search. For given parameters, the
    objective trains the demo model and returns the measured tokens per second.

    Each set of parameters is run only once, in a separate folder below `directory`.
    """
    recipe = Recipe(data=str(data), num_steps=STEPS)
    return MeasuredRate(spec=MODEL, recipe=recipe, directory=Path(directory), num_devices=1)


def demo_runs(directory: str | Path, data: str | Path) -> list[Run]:
    """Returns the short training runs that `STUDY` lists. Runs that do not exist in `directory` yet
    are trained first, which takes about eight seconds per run.

    `data` is a dataset made by `kit data build` with a vocabulary of at most 4,096.

    Raises:
        TrialFailure: A run failed.
    """
    rate = measured_objective(directory, data)
    record_load(directory)
    for parameters in STUDY:
        rate(parameters)
    return open_runs([directory])


def search_demo_layouts(directory: str | Path, data: str | Path) -> Trials:
    """Returns the trials of a hyperparameter search that measures real runs of this machine.

    The search stores its runs in `directory`. Runs that `directory` already contains are used again
    and not repeated.
    """
    return tune(
        measured_objective(directory, data), SPACE, num_trials=8, storage=Path(directory) / SEARCH
    )


def demo_attention(directory: str | Path) -> list[dict[str, Any]]:
    """Returns measured times of the forward and backward pass of causal attention on one core.

    Fused attention is compared with attention whose scores are written to memory. The rows are
    stored in `directory` and read again later. Columns: kernel, sequence_length (tokens), and
    seconds (a list with one time per repetition).
    """
    return read_or_make(Path(directory) / ATTENTION, _timed_attention)


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


def select_runs(runs: Runs, **fields: Any) -> list[Run]:
    """Returns the runs that a panel shows. Runs of clusters are always included. A run of this
    machine is included if the fields of its plan have the values in `fields`.
    """
    found = []
    for run in open_runs(runs):
        matches = all(getattr(run.plan, name) == value for name, value in fields.items())
        if matches or scale_of(run) == "cluster":
            found.append(run)
    return found


def median_rate(runs: Runs, **fields: Any) -> tuple[float, float, float]:
    """Returns (median, lower quartile, upper quartile) of tokens per second per device of one run
    of this machine.

    This run is the only run of this machine whose plan has the values in `fields`. If no run or
    more than one run has these values, all three numbers are NaN.
    """
    chosen = [run for run in select_runs(runs, **fields) if scale_of(run) == "demo"]
    if len(chosen) != 1:
        return math.nan, math.nan, math.nan
    low, middle, high = np.quantile(tokens_per_s_per_device(chosen[0])[WARM_UP:], (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


def run_hfu_percent(run: Run) -> np.ndarray:
    """Returns the HFU of each step in per cent, as an array. All values are NaN if the site has no
    peak FLOP/s.
    """
    metrics = run.metrics()
    hfu = metrics.hfu()
    if hfu is None:
        return np.full(len(metrics), math.nan)
    return 100 * hfu


def tokens_per_s_per_device(run: Run) -> np.ndarray:
    """Returns the tokens per second per device of each step. On this machine, processes that share
    a core count as one device.
    """
    devices = run.plan.num_devices
    if scale_of(run) == "demo":
        devices = min(devices, run.site.devices_per_node)
    return run.metrics().tokens_per_s / devices
