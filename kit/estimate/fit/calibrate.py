"""Calibration: coefficients of one machine from any of its runs, an interval, and which runs to
do next. No torch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.record import ConfigError, counted, html_table
from cluster.site import Site
from kit.estimate.fit import fitting, interval, published
from kit.estimate.fit.fitting import Prior, Rows
from kit.estimate.fit.measured_rows import AnyRun, rows_of_any, site_of
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.hardware import NAMES, Coefficients, Hardware
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.step_time import StepTime, step_time

UNIDENTIFIED = 0.9
"""Of the prior's spread: a coefficient whose posterior stays above it was not told by the data."""
RUN_NOISE = 0.07
"""ln-scale of a calibration run's own error when runs are proposed: what the formula gets wrong
(`Scales.misfit`), and the same run measured twice (`fitting.NOISE`)."""
LOCAL_SPREAD = 1.2
"""Factor of the prior's spread on a local site, since the population has no local machines. With
`Scales.variance_factor` and Student's tails, intervals are as wide as with a factor of 2 without
them. They hold all of 19 runs of the notebooks on two quiet cores."""
LOCAL = {
    "gemm_efficiency": (0.6, 0.4),
    "collective_launch_s": (2e-3, 0.65),
    "node_latency_s": (5e-4, 0.65),
    "step_s": (2e-2, 0.95),
}
"""Mean and ln-spread where its mean differs too: processes of one machine that talk through gloo
and Python."""
LOCAL_MISFIT = 0.12
"""ln-scale of what is left over there: processes share cores, caches and whatever else the
machine does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Step times with a 90 % interval, and what makes them doubtful."""

    step_time: StepTime
    low_s: Array
    high_s: Array
    warnings: tuple[str, ...]
    untried: tuple[str, ...]
    """What is outside the experience of fit and runs, and has widened the interval of some
    layout."""

    @property
    def total_s(self) -> Array:
        """Seconds per step, centre of the interval."""
        return self.step_time.total_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What runs told about a machine."""

    coefficients: Coefficients
    covariance: Array
    """Of ln coefficients, [NAMES, NAMES]."""
    unidentified: tuple[str, ...]
    """Coefficients that the runs could not tell: they are the population's."""
    num_runs: int
    num_derived: int = 0
    """Of these, times that follow from a published rate (`PublishedRun.is_derived`)."""
    error: float
    """Mean absolute relative error on the runs themselves; NaN without any."""
    hardware: Hardware
    measured: interval.MeasuredRange | None
    """Of the runs; none without any."""
    misfit: float = interval.SCALES.misfit
    """ln-scale of what the formula gets wrong on this machine."""

    def predict(self, layouts: Layouts, hardware: Hardware | None = None) -> Prediction:
        """Returns step times of layouts with an interval, and warnings for those unlike any
        calibrated run.

        `hardware` is the calibrated machine's unless it is given.
        """
        hardware = hardware or self.hardware
        centre, variance = interval.log_time_and_variance(
            layouts, hardware, self._values, self.covariance
        )
        untried = interval.untried_counts(layouts, hardware, self.measured)
        count = sum(untried.values(), np.zeros(layouts.shape))
        half = interval.SCALES.half_width(variance, self.misfit, count, self.num_runs)
        names = tuple(name for name, each in untried.items() if each.any())
        if self.measured is None:
            warnings = (
                (
                    "no run of this machine was measured: efficiencies are the average of published"
                    " machines."
                ),
            )
        else:
            warnings = self.measured.warnings(layouts)
        if names:
            warnings = (
                *warnings,
                f"{', '.join(names)}: outside the experience of the fit, so the interval is wider.",
            )
        return Prediction(
            step_time=step_time(layouts, hardware, self.coefficients),
            low_s=np.exp(centre - half),
            high_s=np.exp(centre + half),
            warnings=warnings,
            untried=names,
        )

    def draws(self, layouts: Layouts, count: int = 300, *, seed: int = 0) -> Array:
        """Returns step times under draws of the coefficients from their posterior, seconds, [count,
        layouts].

        A ratio of two columns has its interval from these: what both layouts have in common
        cancels. The formula's own misfit is not in them.
        """
        values = np.random.default_rng(seed).multivariate_normal(
            self._values, self.covariance, size=count, method="svd"
        )
        return np.exp(
            fitting.log_time(layouts, self.hardware, np.clip(values, fitting.LOW, fitting.HIGH))
        )

    def propose(
        self, candidates: Layouts, count: int, hardware: Hardware | None = None
    ) -> list[int]:
        """Returns the indices of the `count` candidates whose runs would narrow the predictions of
        all of them most.

        Raises:
            ConfigError: more are asked for than there are candidates.
        """
        return propose(candidates, hardware or self.hardware, self._values, self.covariance, count)

    @property
    def label(self) -> str:
        """Whether times are calibrated, in three words."""
        return (
            f"calibrated on {counted(self.num_runs, 'run')}" if self.num_runs else "not calibrated"
        )

    def __str__(self) -> str:
        if not self.num_runs:
            return f"{self.label}: efficiencies are the average of published machines"
        derived = f", {self.num_derived} of them derived" if self.num_derived else ""
        return f"{self.label}{derived}, {self.error:.1%} mean error on them"

    @property
    def _values(self) -> Array:
        return np.log([getattr(self.coefficients, name) for name in NAMES])

    def _repr_html_(self) -> str:
        deviation = np.sqrt(np.diag(self.covariance))
        rows: list[tuple[str, Any]] = [("times", str(self))]
        for i, name in enumerate(NAMES):
            told = "" if name not in self.unidentified else " (not told by the runs)"
            rows.append(
                (name, f"{getattr(self.coefficients, name):.3g} ± {deviation[i]:.0%}{told}")
            )
        return html_table("Calibration", rows)


def calibrate(
    runs: Sequence[AnyRun], site: Site | None = None, *, hardware: Hardware | None = None
) -> Calibration:
    """Returns the coefficients of the machine that the runs were made on.

    Their prior is the population of published machines, wider for a local site; no runs give the
    population's average. The site is that of the runs unless it is given, and `hardware`, its
    numbers, are the site's.

    Raises:
        ConfigError: a directory holds no finished step, or the site lacks a number that step time
            needs.
    """
    site = site or site_of(runs)
    is_local = site is not None and site.scheduler == "local"
    prior = _local(Prior.default()) if is_local else Prior.default()
    if runs:
        rows = rows_of_any(runs, site, hardware)
        found = fitting.fit(rows, prior)
        hardware = hardware or rows.hardware.select(0)
    elif site is None and hardware is None:
        raise ConfigError(
            "calibrate: neither runs nor a site are given. Give at least one of them."
        )
    else:
        rows = None
        found = fitting.prior_only(prior)
        hardware = hardware or Hardware.of(site)  # type: ignore[arg-type]
    calibration = from_fit(found, prior, rows, hardware)
    derived = sum(isinstance(run, PublishedRun) and run.is_derived for run in runs)
    misfit = max(calibration.misfit, LOCAL_MISFIT) if is_local else calibration.misfit
    return dataclasses.replace(calibration, num_derived=derived, misfit=misfit)


def _local(prior: Prior) -> Prior:
    mean = prior.mean.copy()
    spread = prior.spread * LOCAL_SPREAD
    for i, name in enumerate(NAMES):
        if name in LOCAL:
            mean[i], spread[i] = np.log(LOCAL[name][0]), LOCAL[name][1]
    return Prior(mean=mean, spread=spread)


def left_out_ratios(runs: Sequence[PublishedRun], site: Site) -> Array:
    """Returns predicted over measured step time of each run of a site when the others alone are
    fitted.
    """
    others = [[*runs[:i], *runs[i + 1 :]] for i in range(len(runs))]
    predicted = [
        calibrate(o, site).predict(run.layouts()).total_s.item()
        for o, run in zip(others, runs, strict=True)
    ]
    return np.array(predicted) / published.step_times(runs)


def published_calibration(site: Site) -> Calibration:
    """Returns what published runs tell about a site: the fit of its own, or the population's
    average if it has none.

    A site file laid over a packaged site has that one's runs as its own as long as the device is
    the same: they are fitted with the numbers of the machine that they ran on, and predict with
    those of `site`, and with the doubt of another software stack. Second-hand numbers and rows that
    were put right by hand are left out.

    Raises:
        ConfigError: the site lacks a number that step time needs.
    """
    hardware = Hardware.of(site)
    machine = _packaged(site.base or site.name)
    while machine is not None and machine.device.name == site.device.name:
        if own := published.of_site(machine.name):
            found = calibrate(own, machine)
            misfit = float(np.hypot(found.misfit, interval.OTHER_STACK))
            return dataclasses.replace(found, hardware=hardware, misfit=misfit)
        machine = _packaged(machine.base)
    return calibrate([], site, hardware=hardware)


def _packaged(name: str | None) -> Site | None:
    return Site.load(name) if name in Site.names() else None  # a site.json may come from a stranger


def from_fit(
    found: fitting.Fit, prior: Prior, rows: Rows | None, hardware: Hardware
) -> Calibration:
    """Returns the calibration that a fit amounts to."""
    deviation = np.sqrt(np.diag(found.covariance))
    told = deviation < UNIDENTIFIED * prior.spread
    error = float("nan")
    measured = None
    if rows is not None:
        off = fitting.log_time(rows.layouts, rows.hardware, found.values) - np.log(rows.step_time_s)
        error = float(np.mean(np.abs(np.expm1(off))))
        measured = interval.MeasuredRange.of(rows.layouts, rows.hardware)
    return Calibration(
        coefficients=found.coefficients,
        covariance=found.covariance,
        error=error,
        hardware=hardware,
        measured=measured,
        misfit=interval.SCALES.misfit_after(found.left_out_error, found.left_out_variance),
        unidentified=tuple(name for name, each in zip(NAMES, told, strict=True) if not each),
        num_runs=0 if rows is None else len(rows),
    )


def propose(
    candidates: Layouts, hardware: Hardware, values: Array, covariance: Array, count: int
) -> list[int]:
    """Returns indices of candidates, one after the other that which lowers the summed predictive
    variance most.

    `values` are the ln coefficients believed now, with their covariance.

    Raises:
        ConfigError: more are asked for than there are candidates.
    """
    if not 0 <= count <= len(candidates):
        raise ConfigError(
            f"propose: {count} of {len(candidates)} candidates is not possible. Ask for fewer."
        )
    _, slopes = fitting.log_time_and_slopes(
        candidates, hardware, np.clip(values, fitting.LOW, fitting.HIGH)
    )
    chosen: list[int] = []
    for _ in range(count):
        carried = slopes @ covariance
        gain = ((carried @ slopes.T) ** 2).sum(0) / (
            np.einsum("ij,ij->i", carried, slopes) + RUN_NOISE**2
        )
        gain[chosen] = -1
        best = int(np.argmax(gain))
        chosen.append(best)
        row = carried[best]
        covariance = covariance - np.outer(row, row) / (row @ slopes[best] + RUN_NOISE**2)
    return chosen
