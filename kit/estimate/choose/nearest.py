"""The published run most similar to a layout, and the error of the planner's predicted step time
for this run.
"""

import dataclasses
from functools import lru_cache

import numpy as np

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.fit import published
from kit.estimate.fit.measured_rows import hardware_of
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.hardware import NARROW, Coefficients, Hardware
from kit.estimate.theory.layouts import Array
from kit.estimate.theory.step_time import step_time

A100_PEAK = 312e12
"""Peak FLOP/s of an A100 in bf16. It is assumed for a published run whose source does not state the
peak of its device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest:
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
        return (
            f"{run.spec.name} on {run.num_devices} {run.device} (TP{plan.tensor_parallel}"
            f" PP{plan.pipeline_parallel} DP{plan.data_parallel} micro {plan.micro_batch_size},"
            f" recompute {plan.recompute}; {run.source}): {run.step_time_s:.4g} s {told},"
            f" {predicted_s:.4g} s predicted for that run's own software ({off})"
        )


def nearest_run(
    spec: ModelSpec, plan: Plan, hardware: Hardware, coefficients: Coefficients
) -> Nearest:
    """Returns the published run most similar to the layout `plan`, with the error of the run's
    predicted step time. `coefficients` are the efficiencies and latencies with which this step time
    is predicted.
    """
    here = _position(spec, plan, float(hardware.peak_flops_per_s), plan.precision)
    distances = np.abs(_positions() - here).sum(axis=1)
    best = int(distances.argmin())
    run = _measured()[best]
    predicted = float(step_time(run.layouts(), hardware_of(run), coefficients).total_s.item())
    assert run.step_time_s
    return Nearest(
        run=run, distance=float(distances[best]), residual=predicted / run.step_time_s - 1
    )


def measured_mfu(device: str, precision: str) -> float | None:
    """Returns the highest MFU of published runs on a device, as a fraction of the bf16 peak.
    Returns None if there is no comparable run.

    If `precision` is narrower than bf16, only runs in a narrower precision are comparable.
    Otherwise only runs in 16 bits or more are comparable.
    """
    best = [
        rate / run.peak_flops_per_s
        for run in _measured()
        if (site := run.site())
        and site.device.name == device
        and (run.precision in NARROW) == (precision in NARROW)
        and run.peak_flops_per_s
        and (rate := run.flops_per_s())
    ]
    return max(best, default=None)


@lru_cache(maxsize=1)
def _measured() -> tuple[PublishedRun, ...]:
    return tuple(run for run in published.load() if run.step_time_s)


@lru_cache(maxsize=1)
def _positions() -> Array:
    return np.stack(
        [
            _position(run.spec, run.plan, run.peak_flops_per_s or A100_PEAK, run.precision)
            for run in _measured()
        ]
    )


def _position(spec: ModelSpec, plan: Plan, peak_flops_per_s: float, precision: str) -> Array:
    """Returns the coordinates of a run or layout: weighted logarithms of model size, number of
    devices, tensor and pipeline degree, sequence length, micro-batch size and peak FLOP/s of a
    device. The distance of two runs is the sum of the absolute differences of their coordinates.

    The peak FLOP/s has the largest weight. For a precision narrower than bf16, the bf16 peak is
    multiplied by the largest speedup of this precision over bf16.
    """
    values = (
        spec.num_params,
        plan.num_devices,
        plan.tensor_parallel,
        plan.pipeline_parallel,
        spec.sequence_length,
        plan.micro_batch_size,
        peak_flops_per_s * published.SPEEDUP.get(precision, 1),
    )
    return np.log(values) * [1, 0.5, 1, 1, 0.5, 0.5, 4]
