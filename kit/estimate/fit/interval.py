"""Prediction intervals from the posterior of the coefficients, and the range of measured runs.

The step time is taken as log-normal around the prediction. Its variance has three parts. The first
is the uncertainty of the coefficients. The second is the error of the formula on this machine
(misfit). It has a prior value, which the errors of the machine's runs correct, where the runs of
each model are predicted as if left out of the fit. The third is for traits that no fit has seen
(untried). The scales were chosen on left-out machines and code bases (`make validate`).
"""

import dataclasses
from typing import Self

import numpy as np

from kit.estimate.fit.fitting import HIGH, LOW, Fit, Rows, log_time_and_slopes
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layer import layer_params
from kit.estimate.theory.layouts import Array, Layouts

NORMAL = 1.6449
"""Quantile of the standard normal distribution above which 5 % lie."""
UNTRIED = 0.05
"""Standard deviation, on the log scale, that each untried trait adds to a prediction. Left-out
machines with such traits hardly determine this number: values from 0 to 0.1 are about equally
likely."""
OTHER_CODE_BASE = 16
"""Number of untried traits that compiled blocks count for, since they amount to a code base that is
not in the fit. A fit to other machines and code bases alone misses published runs of torchtitan by
a third (0.2 to 0.3 on the log scale). With other runs of the same machine in the fit, it misses 64
A100 by 20 % and 64 MI250X by 2 %. Torchtitan's table for H100 with 500 W and 2.4 TB/s is missed by
18 % where half the products are recomputed (`selective op` of torchtitan)."""
OTHER_STACK = 0.08
"""Standard deviation, on the log scale, of the time factor between a trainer or release and the
published runs of its machine. It is the smallest value with which intervals contain 85 % of the
published times of software stacks, models and formats that were left out of the fit."""
MARGIN = 1.25
"""Factor by which a value of a layout or a device may lie outside the measured range without a
warning."""
BALANCES = {
    "memory bytes/s": (0.00415, 0.0128),
    "node link bytes/s": (0.000491, 0.00238),
    "network bytes/s": (2.23e-05, 1e-4),
}
"""(lowest, highest) value among the machines in the fit: bytes/s of one device per FLOP/s that its
matrix products reach in bf16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Scales of prediction intervals. They give the narrowest intervals in which 90 % of the times
    of left-out machines lie (`make validate`).
    """

    misfit: float = 0.04
    """Standard deviation, on the log scale, of the error of the formula on a machine without
    runs."""
    prior_models: float = 6.0
    """Weight of `misfit` as a number of models. Each model that ran on the machine has weight 1."""
    variance_factor: float = 2.25
    """Ratio of the variance of a coefficient on a new machine to the variance among the machines of
    the fit."""

    def misfit_after(self, error: Array, variance: Array) -> float:
        """Returns the standard deviation, on the log scale, of the error of the formula on a
        machine with runs. `error` and `variance` have one element per model, as
        `Fit.left_out_error` and `Fit.left_out_variance`.
        """
        own = np.maximum(error**2 - self.variance_factor * variance, 0.0).sum()
        return float(
            np.sqrt((self.prior_models * self.misfit**2 + own) / (self.prior_models + len(error)))
        )

    def half_width(
        self, variance: Array, misfit: float, num_untried: Array, num_runs: int
    ) -> Array:
        """Returns half the width of each 90 % interval, in ln seconds. The distribution is
        Student's t, with thinner tails for more runs.
        """
        misfit_variance = misfit**2
        if num_runs:
            # The coefficients rest on runs that have an error of the formula, too.
            misfit_variance = (1 + 1 / num_runs) * misfit**2
        untried_variance = num_untried * UNTRIED**2
        deviation = np.sqrt(self.variance_factor * variance + misfit_variance + untried_variance)
        return student_quantile(self.prior_models + num_runs) * deviation


SCALES = Scales()
"""Scales of all prediction intervals of the kit."""


def student_quantile(freedom: float) -> float:
    """Returns the quantile of Student's t above which 5 % lie, within 0.2 % from 4 degrees of
    freedom on.

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
    """Returns (ln seconds per step, variance of ln seconds) of each layout. `values` are logarithms
    of the coefficients, and `covariance` is their covariance.
    """
    centre, slopes = log_time_and_slopes(layouts, hardware, np.clip(values, LOW, HIGH))
    return centre, np.einsum("ij,jk,ik->i", slopes, covariance, slopes)


def prediction_errors(
    rows: Rows, found: Fit, runs: Rows | None, other_stack: float = 0.0
) -> tuple[Array, Array]:
    """Returns (relative error of each prediction, whether the measurement lies in its 90 %
    interval).

    `runs` are the fitted runs of the machine, or None. `other_stack` is the standard deviation, on
    the log scale, of the time factor between their software stack and that of `rows`.
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
    count = sum(untried_counts(rows.layouts, rows.hardware, measured).values(), np.zeros(len(rows)))
    misfit = SCALES.misfit_after(found.left_out_error, found.left_out_variance)
    misfit = float(np.hypot(misfit, other_stack))
    return np.expm1(off), np.abs(off) <= SCALES.half_width(variance, misfit, count, num_runs)


def balances(hardware: Hardware) -> dict[str, Array]:
    """Returns the bandwidths of one device (memory, node links, network) in bytes/s per FLOP/s of
    its bf16 products, by the names of BALANCES.
    """
    rate = np.asarray(hardware.attention_flops_per_s)
    network = np.asarray(hardware.network_bytes_per_s) / hardware.node_devices
    moved = (hardware.memory_bytes_per_s, hardware.node_bytes_per_s, network)
    return {name: np.asarray(each) / rate for name, each in zip(BALANCES, moved, strict=True)}


def rare_traits(layouts: Layouts, hardware: Hardware) -> dict[str, Array]:
    """Returns, by name, the traits that at most one code base of the fit has. Arrays have one
    element per layout: the number of untried traits that the trait counts for, or 0 if the layout
    does not have it.

    The fit cannot separate the effect of such a trait from the effect of the code base.
    """
    x = layouts
    found = {
        "number format below bf16": hardware.is_narrow,
        "ZeRO 3 (FSDP2)": x.zero_stage >= 3,
        "compiled blocks": OTHER_CODE_BASE * x.compiled,
        "context parallelism": x.context_parallel > 1,
        "fewer micro-batches than stages": x.num_microbatches < x.pipeline_parallel,
        "asynchronous tensor parallelism": x.tensor_overlap & (x.tensor_parallel > 1),
    }
    return {name: np.broadcast_to(each, x.shape) for name, each in found.items()}


def untried_counts(
    layouts: Layouts,
    hardware: Hardware,
    measured: "MeasuredRange | None",
    known: dict[str, tuple] = BALANCES,
) -> dict[str, Array]:
    """Returns, by name, traits that neither the fit nor the machine's runs have. Arrays have one
    element per layout: the number of untried traits that the trait counts for, or 0.

    `measured` is the range of the machine's runs, or None. `known` has the (lowest, highest)
    balance of the machines in the fit. It is used only without runs, since runs of a machine show
    the effect of its balance.
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
    """Returns the features of layouts, by name, that must lie in the measured range for a
    prediction to be reliable.
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
    """Lowest and highest value of each feature among measured runs, and the rare traits of the
    runs.
    """

    bounds: dict[str, tuple[float, float]]
    """(lowest, highest) value of each of `layout_features`."""
    traits: frozenset[str]
    """Names of the `rare_traits` that at least one run had."""

    @classmethod
    def of(cls, layouts: Layouts, hardware: Hardware) -> Self:
        """Returns the range of the features of `layouts`, and their rare traits on `hardware`."""
        bounds = {}
        for name, values in layout_features(layouts).items():
            bounds[name] = (float(np.min(values)), float(np.max(values)))
        tried = [name for name, count in rare_traits(layouts, hardware).items() if count.any()]
        return cls(bounds=bounds, traits=frozenset(tried))

    def warnings(self, layouts: Layouts) -> tuple[str, ...]:
        """Returns one sentence that names each feature in which some layout lies outside the
        measured range by more than a factor of `MARGIN`. Returns an empty tuple if there is none.
        """
        outside = []
        for name, column in layout_features(layouts).items():
            low, high = self.bounds[name]
            values = np.broadcast_to(column, layouts.shape)
            is_outside = (values < low / MARGIN) | (values > high * MARGIN)
            if is_outside.any():
                outside.append(f"{name} {values[is_outside][0]:,.6g} ({low:,.6g} to {high:,.6g})")
        if not outside:
            return ()
        return (f"{', '.join(outside)}: an extrapolation from the measured range.",)
