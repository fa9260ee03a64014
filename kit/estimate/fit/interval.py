"""Intervals of predicted step times, and the range of layouts for which runs were measured.

The logarithm of the step time has a Student-t distribution around the prediction. Its variance is
the sum of three variances. The first is the uncertainty of the coefficients. The second is the
error of the step time formula on this machine (misfit). This error has a prior value, which is
corrected by the errors of the machine's runs. The errors of the runs are computed for one neural
network at a time, as if its runs had not been fitted. The third is for features that no fitted run
had (untried traits). The scales of the variances were chosen on machines and code bases that were
left out of the fit (`make validate`).
"""

import dataclasses
from typing import Self

import numpy as np

from kit.estimate.fit.fitting import HIGH, LOW, Fit, Rows, log_time_and_slopes
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layer import layer_params
from kit.estimate.theory.layouts import Array, Layouts
from kit.show.results import parameters_text, short_number

NORMAL = 1.6449
"""95 % quantile of the standard normal distribution. 5 % of the values lie above it."""
UNMEASURED_FEATURE_SPREAD = 0.05
"""Standard deviation, on the log scale, that is added to a prediction for each untried trait, a
feature of the layout that no fitted run had. Runs with such features hardly determine this number:
values from 0 to 0.1 are about equally likely."""
OTHER_STACK = 0.08
"""Standard deviation, on the log scale, of the ratio of step times between a new trainer or release
and the published runs of its machine. It is the smallest value with which intervals contain 85 % of
the published times of software stacks, models and formats that were left out of the fit."""
MARGIN = 1.25
"""Factor by which a size of a layout or a rate of a device may lie outside the measured range. No
warning is given up to this factor."""
BALANCES = {
    "memory bytes/s": (0.00415, 0.0128),
    "node link bytes/s": (0.000491, 0.00238),
    "network bytes/s": (2.23e-05, 1e-4),
}
"""Maps each kind of bandwidth of a device to (lowest, highest) ratio among the fitted machines. The
ratio is bytes/s of one device per FLOP/s that its matrix products reach in bf16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Numbers that determine the width of prediction intervals. These numbers give the narrowest
    intervals that contain 90 % of the step times of machines that were left out of the fit (`make
    validate`).
    """

    misfit: float = 0.04
    """Standard deviation, on the log scale, of the error of the step time formula on a machine
    without measured runs."""
    prior_models: float = 6.0
    """Weight of the prior value `misfit` against measured errors. The measured error of each neural
    network that ran on the machine has weight 1."""
    variance_factor: float = 2.0
    """Factor by which the variance of a prediction that comes from the coefficients is multiplied.
    Coefficients of new machines vary more than those of the fitted machines."""

    def misfit_after(self, error: Array, variance: Array) -> float:
        """Returns the standard deviation, on the log scale, of the error of the step time formula
        on a machine with measured runs. `error` and `variance` are `Fit.left_out_error` and
        `Fit.left_out_variance`, with one element per neural network.
        """
        own = np.maximum(error**2 - self.variance_factor * variance, 0.0).sum()
        return float(
            np.sqrt((self.prior_models * self.misfit**2 + own) / (self.prior_models + len(error)))
        )

    def half_width(
        self, variance: Array, misfit: float, num_untried: Array, num_runs: int
    ) -> Array:
        """Returns half the width of each 90 % interval, in ln seconds. The distribution is
        Student's t, whose tails are thinner if there are more runs.

        `variance` comes from the uncertainty of the coefficients. `num_untried` is the number of
        features of each layout that no fitted run had.
        """
        misfit_variance = misfit**2
        if num_runs:
            # The step times of the fitted runs also differ from the formula. This adds misfit^2 /
            # num_runs to the variance of the prediction.
            misfit_variance = (1 + 1 / num_runs) * misfit**2
        untried_variance = num_untried * UNMEASURED_FEATURE_SPREAD**2
        deviation = np.sqrt(self.variance_factor * variance + misfit_variance + untried_variance)
        return student_quantile(self.prior_models + num_runs) * deviation


SCALES = Scales()
"""Numbers that determine the width of all prediction intervals of the kit."""


def student_quantile(freedom: float) -> float:
    """Returns the 95 % quantile of Student's t distribution with `freedom` degrees of freedom. From
    4 degrees of freedom on, its relative error is at most 0.2 %.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def log_time_and_variance(
    layouts: Layouts, hardware: Hardware, values: Array, covariance: Array
) -> tuple[Array, Array]:
    """Returns (ln seconds per step, variance of ln seconds), two arrays with one element per
    layout. `values` are logarithms of the coefficients, and `covariance` is their covariance
    matrix.
    """
    centre, slopes = log_time_and_slopes(layouts, hardware, np.clip(values, LOW, HIGH))
    return centre, np.einsum("ij,jk,ik->i", slopes, covariance, slopes)


def prediction_errors(
    rows: Rows, found: Fit, runs: Rows | None, other_stack: float = 0.0
) -> tuple[Array, Array]:
    """Returns (relative error of the predicted step time, whether the measured time lies in the
    90 % interval), two arrays with one element per run in `rows`.

    `runs` are the runs of the machine that were fitted, or None. `other_stack` is the standard
    deviation, on the log scale, of the ratio of step times between the software stacks of `rows`
    and of `runs`.
    """
    centre, variance = log_time_and_variance(
        rows.layouts, rows.hardware, found.values, found.covariance
    )
    off = centre - np.log(rows.step_time_s)
    measured = None
    num_runs = 0
    if runs is not None:
        measured = MeasuredRange.of(runs.layouts, runs.hardware)
        num_runs = len(runs)
    count = sum(
        unmeasured_feature_counts(rows.layouts, rows.hardware, measured).values(),
        np.zeros(len(rows)),
    )
    misfit = SCALES.misfit_after(found.left_out_error, found.left_out_variance)
    misfit = float(np.hypot(misfit, other_stack))
    return np.expm1(off), np.abs(off) <= SCALES.half_width(variance, misfit, count, num_runs)


def balances(hardware: Hardware) -> dict[str, Array]:
    """Returns the ratios of a device's bandwidths to its rate of bf16 products, in bytes/s per
    FLOP/s. The result maps the names of BALANCES (memory, node links, network) to the ratios.
    """
    rate = np.asarray(hardware.attention_flops_per_s)
    network = np.asarray(hardware.network_bytes_per_s) / hardware.node_devices
    moved = (hardware.memory_bytes_per_s, hardware.node_bytes_per_s, network)
    return {name: np.asarray(each) / rate for name, each in zip(BALANCES, moved, strict=True)}


def rare_traits(layouts: Layouts, hardware: Hardware) -> dict[str, Array]:
    """Returns the features of layouts that at most one code base among the fitted runs has. The
    result maps the name of a feature to a Boolean array with one element per layout.

    The fit cannot separate the effect of a feature that only one code base has from the effect of
    this code base.
    """
    x = layouts
    found = {
        "number format below bf16": hardware.is_narrow,
        "ZeRO 3 (FSDP2)": x.zero_stage >= 3,
        "compiled blocks": x.compiled,
        "context parallelism": x.context_parallel > 1,
        "fewer micro-batches than stages": x.num_microbatches < x.pipeline_parallel,
        "asynchronous tensor parallelism": x.tensor_overlap & (x.tensor_parallel > 1),
    }
    return {name: np.broadcast_to(each, x.shape) for name, each in found.items()}


def unmeasured_feature_counts(
    layouts: Layouts,
    hardware: Hardware,
    measured: "MeasuredRange | None",
    known: dict[str, tuple] = BALANCES,
) -> dict[str, Array]:
    """Returns the features of layouts that no fitted run had. The result maps the name of a feature
    to a Boolean array with one element per layout.

    `measured` is the range of the machine's own runs, or None. `known` maps each kind of bandwidth
    to the (lowest, highest) ratio of this bandwidth to the FLOP/s of matrix products among the
    fitted machines. `known` is used only if the machine has no runs, since runs of the machine show
    the effect of its bandwidths.
    """
    tried = frozenset() if measured is None else measured.traits
    widest = 1.0 if measured is None else measured.bounds["tensor_parallel"][1]
    found = {}
    for name, count in rare_traits(layouts, hardware).items():
        if name not in tried:
            found[name] = count
    if measured is None:
        is_unlike = np.zeros(layouts.shape, bool)
        for name, balance in balances(hardware).items():
            low, high = known[name]
            is_unlike = is_unlike | (balance < low / MARGIN) | (balance > high * MARGIN)
        found["device unlike those of the fit"] = is_unlike
    is_wide = layouts.tensor_parallel > np.maximum(hardware.node_devices, widest)
    found["tensor parallelism across nodes"] = np.broadcast_to(is_wide, layouts.shape)
    return found


def layout_features(layouts: Layouts) -> dict[str, Array]:
    """Returns the sizes of layouts that must lie in the range of the measured runs for a reliable
    prediction. The result maps the name of a size to an array with one element per layout.
    """
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
    """Sizes and features of measured runs. Predictions for other sizes or features are less
    reliable.
    """

    bounds: dict[str, tuple[float, float]]
    """Maps each size of `layout_features`, e.g. `devices`, to its (lowest, highest) value among the
    measured runs."""
    traits: frozenset[str]
    """Names of the features of `rare_traits`, e.g. `context parallelism`, that at least one
    measured run had."""

    @classmethod
    def of(cls, layouts: Layouts, hardware: Hardware) -> Self:
        """Returns the range of the sizes of measured runs, and their rare features. `layouts` and
        `hardware` describe the layouts and the machines of these runs.
        """
        bounds = {}
        for name, values in layout_features(layouts).items():
            bounds[name] = (float(np.min(values)), float(np.max(values)))
        tried = [name for name, count in rare_traits(layouts, hardware).items() if count.any()]
        return cls(bounds=bounds, traits=frozenset(tried))

    def warnings(self, layouts: Layouts) -> tuple[str, ...]:
        """Returns a tuple with one sentence that names the sizes which lie outside the measured
        range by more than the factor `MARGIN`. If no layout has such a size, the tuple is empty.
        """
        outside = []
        for name, column in layout_features(layouts).items():
            low, high = self.bounds[name]
            values = np.broadcast_to(column, layouts.shape)
            is_outside = (values < low / MARGIN) | (values > high * MARGIN)
            if is_outside.any():
                show = parameters_text if name == "parameters" else short_number
                value = show(float(values[is_outside][0]))
                outside.append(f"{name} {value} ({show(low)} to {show(high)})")
        if not outside:
            return ()
        return (f"{', '.join(outside)}: an extrapolation from the measured range.",)
