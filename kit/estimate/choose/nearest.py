"""The published run most similar to a layout, and the error of the planner's predicted step time
for this run.
"""

import dataclasses
from functools import cache
from typing import Any

import numpy as np

from cluster.record import counted
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.choose.search import seconds_text
from kit.estimate.fit import published
from kit.estimate.fit.measured_rows import hardware_of
from kit.estimate.fit.published import PublishedRun
from kit.estimate.fit.store import run_table, sizes_of
from kit.estimate.fit.stored import stored_results
from kit.estimate.theory.hardware import NARROW, Coefficients, Hardware
from kit.estimate.theory.step_time import step_time

WEIGHTS = (1, 0.5, 1, 1, 0.5, 0.5, 4)
"""Weights of the sizes of a run (`sizes_of`) in its distance from a layout. The peak FLOP/s of a
device has the largest weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearestRun:
    """The published run most similar to a layout, with the error of its predicted step time."""

    run: PublishedRun
    distance: float
    """Distance between run and layout: the weighted sum of |ln(run / layout)| over parameters,
    devices, tensor and pipeline degree, sequence length, micro-batch size and peak FLOP/s of a
    device. The distance is 0 if all these sizes are equal."""
    residual: float
    """Relative error of the run's predicted step time: predicted over measured, minus 1."""

    def __str__(self) -> str:
        run = self.run
        plan = self.run.plan
        told = "derived" if run.is_derived else "measured"
        assert run.step_time_s
        predicted_s = run.step_time_s * (1 + self.residual)
        off = f"{self.residual:+.0%}"
        sequences = counted(plan.global_batch_size, "sequence")
        tokens = plan.global_batch_size * run.spec.sequence_length
        return (
            f"{run.spec.name} on {run.num_devices} {run.device} (TP{plan.tensor_parallel}"
            f" PP{plan.pipeline_parallel} DP{plan.data_parallel} micro {plan.micro_batch_size},"
            f" recompute {plan.recompute}, global batch {sequences} = {tokens:,} tokens;"
            f" {run.source}): {seconds_text(run.step_time_s)} s {told};"
            f" {seconds_text(predicted_s)} s by the planner, whose fit has seen this run"
            f" ({off})"
        )


def nearest_run(
    spec: ModelSpec, plan: Plan, hardware: Hardware, coefficients: Coefficients
) -> NearestRun:
    """Returns the published run most similar to the layout `plan`, with the error of the run's
    predicted step time. `coefficients` are the efficiencies and latencies with which this step time
    is predicted.
    """
    table = _run_table()
    here = sizes_of(spec, plan, float(hardware.peak_flops_per_s), plan.precision)
    distances = (np.abs(np.log(np.array(table["sizes"]) / here)) * WEIGHTS).sum(axis=1)
    best = int(distances.argmin())
    run = published.run_on_line(table["lines"][best])
    predicted = float(step_time(run.layouts(), hardware_of(run), coefficients).total_s.item())
    assert run.step_time_s
    return NearestRun(
        run=run, distance=float(distances[best]), residual=predicted / run.step_time_s - 1
    )


def measured_mfu(device: str, precision: str, *, is_causal: bool = False) -> float | None:
    """Returns the highest MFU of published runs on a device, as a fraction of the bf16 peak.
    Returns None if there is no comparable run.

    If `precision` is narrower than bf16, only runs in a narrower precision are comparable.
    Otherwise only runs in 16 bits or more are comparable. With `is_causal`, the FLOPs that the
    causal mask excludes are not counted (`causal_mfu`).
    """
    width = "narrow" if precision in NARROW else "wide"
    table = "highest_causal_mfu" if is_causal else "highest_mfu"
    return _run_table()[table].get(device, {}).get(width)


@cache
def _run_table() -> dict[str, Any]:
    """Returns the facts about all published runs that `run_table` describes."""
    return stored_results() or run_table()
