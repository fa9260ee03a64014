"""How far a prediction may be off: intervals from the posterior of the coefficients, and the
measured range.

What a step takes is ln-normal about the model, with a variance of three parts: what is not known of
the coefficients, what the formula itself gets wrong on this machine (believed beforehand, then told
by its runs, those of each model as if left out), and what no fit has seen. The scales are chosen on
machines and code bases left out (`make validate`).
"""

import dataclasses
from typing import Self

import numpy as np

from kit.estimate.fit.fitting import HIGH, LOW, Fit, Rows, log_time_and_slopes
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layer import layer_params
from kit.estimate.theory.layouts import Array, Layouts

NORMAL = 1.6449
"""Quantile of a normal distribution: 5 % lie above."""
UNTRIED = 0.05
"""ln-scale that each untried thing adds. Left-out machines that had one tell it badly, 0 to 0.1 is
as likely."""
OTHER_CODE_BASE = 16
"""Untried things that compiled blocks count for, since they are a code base of their own: with
other machines and code bases alone published runs of torchtitan are missed by a third, 0.2 to 0.3
in ln; with other runs of their machine 64 A100 by 20 % and 64 MI250X by 2 %. Its own table for
H100 of 500 W and 2.4 TB/s is missed by 18 % where half the products are made again (its `selective
op`)."""
OTHER_STACK = 0.08
"""ln-scale by which a trainer or release differs from those of the published runs of its machine:
the least with which intervals hold 85 % on published stacks, models and formats left out."""
MARGIN = 1.25
"""How far outside the measured values a layout or a device may lie without a warning."""
BALANCES = {
    "memory bytes/s": (0.00415, 0.0128),
    "node link bytes/s": (0.000491, 0.00238),
    "network bytes/s": (2.23e-05, 1e-4),
}
"""Lowest and highest of the machines in the fit, of one device, for each FLOP/s that its matrix
products reach."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """How wide intervals are: the narrowest that hold 90 % on left-out machines (`make
    validate`).
    """

    misfit: float = 0.04
    """Standard deviation, on the log scale, of the error of the formula on a machine without
    runs."""
    prior_models: float = 6.0
    """Weight of `misfit`, in models, against the models that ran on the machine."""
    variance_factor: float = 2.25
    """Ratio of the variance of a coefficient on a new machine to the variance among the machines of
    the fit."""

    def misfit_after(self, error: Array, variance: Array) -> float:
        """Returns the misfit believed after runs: ln error and variance of each model's when they
        are predicted by the rest.
        """
        own = np.maximum(error**2 - self.variance_factor * variance, 0.0).sum()
        return float(
            np.sqrt((self.prior_models * self.misfit**2 + own) / (self.prior_models + len(error)))
        )

    def half_width(
        self, variance: Array, misfit: float, num_untried: Array, num_runs: int
    ) -> Array:
        """Returns half of each 90 % interval, in ln seconds; tails are Student's, thinner with
        every run.
        """
        misfit_variance = misfit**2
        if num_runs:
            # The runs that the fit rests on have a misfit, too.
            misfit_variance = (1 + 1 / num_runs) * misfit**2
        untried_variance = num_untried * UNTRIED**2
        deviation = np.sqrt(self.variance_factor * variance + misfit_variance + untried_variance)
        return student_quantile(self.prior_models + num_runs) * deviation


SCALES = Scales()


def student_quantile(freedom: float) -> float:
    """Returns what 5 % of Student's t lie above, to 0.2 % from 4 degrees of freedom on.

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
    """Returns (ln seconds, its variance) given ln coefficients and their covariance."""
    centre, slopes = log_time_and_slopes(layouts, hardware, np.clip(values, LOW, HIGH))
    return centre, np.einsum("ij,jk,ik->i", slopes, covariance, slopes)


def prediction_errors(
    rows: Rows, found: Fit, runs: Rows | None, other_stack: float = 0.0
) -> tuple[Array, Array]:
    """Returns (relative error of each prediction, whether the measurement lies in its 90 %
    interval).

    `runs` are those of the machine that were fitted, `other_stack` is the ln-scale by which theirs
    differs from that of the rows.
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
    """Returns what one device moves per second for each FLOP/s of its bf16 products, by the
    names of BALANCES.
    """
    rate = np.asarray(hardware.attention_flops_per_s)
    network = np.asarray(hardware.network_bytes_per_s) / hardware.node_devices
    moved = (hardware.memory_bytes_per_s, hardware.node_bytes_per_s, network)
    return {name: np.asarray(each) / rate for name, each in zip(BALANCES, moved, strict=True)}


def rare_traits(layouts: Layouts, hardware: Hardware) -> dict[str, Array]:
    """Returns where a layout has what at most one code base of the fit has, and as how many untried
    things it counts: its effect and the code base's are one.
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
    """Returns by name where layouts lie outside the experience of the fit and of the machine's own
    runs: how many untried things that counts for, else 0.

    `known` are the balances of the machines in the fit; a machine that has runs has told its own.
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
    """Returns what a layout must have in common with measured ones for its prediction to be
    trusted.
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
    """Lowest and highest value of each feature among measured runs, and what they tried."""

    bounds: dict[str, tuple[float, float]]
    traits: frozenset[str]
    """Names of `rare_traits` that some run had."""

    @classmethod
    def of(cls, layouts: Layouts, hardware: Hardware) -> Self:
        """Returns the range of these layouts on that hardware."""
        bounds = {}
        for name, values in layout_features(layouts).items():
            bounds[name] = (float(np.min(values)), float(np.max(values)))
        tried = [name for name, count in rare_traits(layouts, hardware).items() if count.any()]
        return cls(bounds=bounds, traits=frozenset(tried))

    def warnings(self, layouts: Layouts) -> tuple[str, ...]:
        """Returns a sentence that names each feature of which some layout lies outside the measured
        range by `MARGIN`.
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
