"""Calibration: coefficients of one machine fitted to its runs, predictions with an interval, and
the choice of the next runs. No torch.
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
"""Share of the prior's standard deviation. If the posterior standard deviation of a coefficient is
above this share, the runs did not determine the coefficient."""
RUN_NOISE = 0.07
"""Standard deviation, on the log scale, of the error of one calibration run when runs are proposed.
It combines the error of the formula (`Scales.misfit`) and of a repeated measurement
(`fitting.NOISE`)."""
LOCAL_SPREAD = 1.2
"""Factor of the prior's standard deviation on a local site, since the population has no local
machines. `Scales.variance_factor` and Student's tails widen intervals further. Without these two a
factor of 2 would give the same width. All 19 runs of the notebooks on two quiet cores lie in their
intervals."""
LOCAL = {
    "gemm_efficiency": (0.6, 0.4),
    "collective_launch_s": (2e-3, 0.65),
    "node_latency_s": (5e-4, 0.65),
    "step_s": (2e-2, 0.95),
}
"""(mean, standard deviation of the logarithm) of coefficients whose mean differs on a local site,
since processes of one machine communicate through gloo and Python."""
LOCAL_MISFIT = 0.12
"""Smallest standard deviation, on the log scale, of the error of the formula on a local site.
Processes share cores and caches with each other and with all other work of the machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step times with a 90 % interval, and warnings about their reliability."""

    step_time: StepTime
    """Predicted step times and their terms."""
    low_s: Array
    """Lower end of each 90 % interval, in seconds per step."""
    high_s: Array
    """Upper end of each 90 % interval, in seconds per step."""
    warnings: tuple[str, ...]
    """Sentences about layouts unlike any measured run."""
    untried: tuple[str, ...]
    """Names of traits that neither the fit nor the machine's runs have, for example context
    parallelism. Each has widened the interval of some layout."""

    @property
    def total_s(self) -> Array:
        """Predicted seconds per step, the centre of the interval."""
        return self.step_time.total_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Coefficients of one machine, fitted to its runs, and their uncertainty."""

    coefficients: Coefficients
    covariance: Array
    """Covariance of the logarithms of the coefficients, [NAMES, NAMES]."""
    unidentified: tuple[str, ...]
    """Names of coefficients that the runs did not determine. Their values rest on the population of
    published machines."""
    num_runs: int
    """Number of runs that the coefficients were fitted to."""
    num_derived: int = 0
    """Number of runs, among `num_runs`, whose time follows from a published rate
    (`PublishedRun.is_derived`)."""
    error: float
    """Mean absolute relative error of the fitted step times of the runs. NaN without runs."""
    hardware: Hardware
    """Numbers of the machine, used for predictions by default."""
    measured: interval.MeasuredRange | None
    """Range of the features of the runs. None without runs."""
    misfit: float = interval.SCALES.misfit
    """Standard deviation, on the log scale, of the error of the formula on this machine."""

    def predict(self, layouts: Layouts, hardware: Hardware | None = None) -> Prediction:
        """Returns step times of layouts with a 90 % interval, and warnings for layouts unlike any
        calibrated run.

        If `hardware` is None, it is that of the calibrated machine.
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
        """Returns step times in seconds, [count, layouts], for random draws of the coefficients
        from their posterior.

        The draws give the interval of a ratio of two layouts, since errors that both layouts share
        cancel. They do not include the error of the formula (`misfit`).
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
        all candidates most.

        Raises:
            ConfigError: `count` is larger than the number of candidates.
        """
        return propose(candidates, hardware or self.hardware, self._values, self.covariance, count)

    @property
    def label(self) -> str:
        """Text such as `calibrated on 3 runs`, or `not calibrated`."""
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
    """Returns the coefficients of the machine on which the runs were made.

    Their prior is the population of published machines, with a larger standard deviation for a
    local site. Without runs the coefficients are the average of the population. If `site` is None,
    it is the site of the runs. If `hardware` is None, it has the numbers of the site.

    Raises:
        ConfigError: A directory holds no finished step, the site lacks a number that step time
            needs, or neither runs nor a site are given.
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
    """Returns predicted over measured step time of each run of a site. A run is predicted by a fit
    to all other runs.
    """
    others = [[*runs[:i], *runs[i + 1 :]] for i in range(len(runs))]
    predicted = [
        calibrate(o, site).predict(run.layouts()).total_s.item()
        for o, run in zip(others, runs, strict=True)
    ]
    return np.array(predicted) / published.step_times(runs)


def published_calibration(site: Site) -> Calibration:
    """Returns the calibration of a site from its published runs, or the average of the population
    if it has none.

    A site file with a packaged site as its `base` has the published runs of the packaged site, as
    long as the device is the same. The fit uses the numbers of the packaged site. Predictions use
    the numbers of `site`, and `misfit` includes `interval.OTHER_STACK`, since the software stack
    may differ. Second-hand numbers and rows that were corrected by hand are left out.

    Raises:
        ConfigError: The site lacks a number that step time needs.
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
    # The name may come from a site.json of another user, so no other file is loaded by it.
    return Site.load(name) if name in Site.names() else None


def from_fit(
    found: fitting.Fit, prior: Prior, rows: Rows | None, hardware: Hardware
) -> Calibration:
    """Returns the calibration of a machine with the coefficients of a fit to `rows`. If `rows` is
    None, the fit had no runs.
    """
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
    """Returns the indices of `count` candidates, chosen one after the other. Each choice is the
    candidate whose run lowers the predictive variance, summed over all candidates, most.

    `values` are the present logarithms of the coefficients, with their covariance.

    Raises:
        ConfigError: `count` is larger than the number of candidates.
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
