"""How far a prediction may be off: intervals from the posterior of the coefficients, and the measured range."""

import dataclasses
from typing import Self

import numpy as np

from kit.estimate.fit.fitting import HIGH, LOW, Fit, Rows, sensitivity
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.step_time import layer_params

MISFIT = 0.075
"""ln-scale of what the formula itself gets wrong, on top of coefficients that are not known exactly."""
QUANTILE = 1.645
"""Of a normal distribution: 5 % lie above."""
MARGIN = 1.25
"""How far outside the measured values a layout may lie without a warning."""


def spread(
    layouts: Layouts, hardware: Hardware, values: Array, covariance: Array, misfit: float = MISFIT
) -> tuple[Array, Array]:
    """Returns (ln seconds, its standard deviation) given ln coefficients and their covariance."""
    centre, slopes = sensitivity(layouts, hardware, np.clip(values, LOW, HIGH))
    variance = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
    return centre, np.sqrt(variance + misfit**2)


def errors(rows: Rows, found: Fit) -> tuple[Array, Array]:
    """Returns (relative error of each prediction, whether the measurement lies in its 90 % interval)."""
    centre, deviation = spread(rows.layouts, rows.hardware, found.values, found.covariance)
    off = centre - np.log(rows.seconds)
    return np.expm1(off), np.abs(off) <= QUANTILE * deviation


def features(layouts: Layouts) -> dict[str, Array]:
    """Returns what a layout must have in common with measured ones for its prediction to be trusted."""
    x = layouts
    params = x.num_layers * layer_params(x) + x.vocab_size * x.hidden_size
    return {
        "parameters": params,
        "devices": x.num_devices,
        "sequence length": x.sequence_length,
        "tensor_parallel": x.tensor_parallel,
        "pipeline_parallel": x.pipeline_parallel,
        "tokens per micro-batch": x.micro_batch_size * x.sequence_length / x.context_parallel,
        "micro-batches": x.num_microbatches,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRange:
    """Lowest and highest value of each feature among measured runs."""

    bounds: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, layouts: Layouts) -> Self:
        """Returns the range of these layouts."""
        values = features(layouts)
        return cls(bounds={name: (float(np.min(v)), float(np.max(v))) for name, v in values.items()})

    def warnings(self, layouts: Layouts) -> tuple[str, ...]:
        """Returns a sentence for each feature of which some layout lies outside the measured range by `MARGIN`."""
        found = []
        for name, column in features(layouts).items():
            (low, high), values = self.bounds[name], np.broadcast_to(column, layouts.shape)
            off = (values < low / MARGIN) | (values > high * MARGIN)
            if off.any():
                found.append(
                    f"{name} {float(values[off][0]):.4g} is outside the measured range {low:.4g} to {high:.4g} "
                    f"({int(off.sum())} of {off.size} layouts): the prediction is an extrapolation."
                )
        return tuple(found)
