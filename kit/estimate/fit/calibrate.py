"""Calibration of the planner on one machine. The planner's coefficients (efficiencies and
latencies) are fitted to runs of the machine. A calibrated planner predicts step times with an
interval, and proposes the runs that would reduce the uncertainty most. This module does not import
torch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from cluster.record import ConfigError, counted, html_table
from cluster.site import Site
from kit.estimate.fit import fitting, interval, published
from kit.estimate.fit.fitting import Prior, Rows
from kit.estimate.fit.measured_rows import AnyRun, hardware_of, rows_of_any, site_of
from kit.estimate.fit.published import PublishedRun
from kit.estimate.fit.stored import stored_results
from kit.estimate.theory.hardware import NAMES, Coefficients, Hardware
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.step_time import StepTime, step_time

UNIDENTIFIED = 0.9
"""Highest ratio of posterior to prior standard deviation at which a coefficient counts as
determined by the runs. Above this ratio, the runs narrowed the prior too little."""
RUN_NOISE = 0.07
"""Assumed standard deviation, on the log scale, of the error of a future calibration run. The value
is used to choose the most useful runs. It combines the error of the formula (`Scales.misfit`) and
of a repeated measurement (`fitting.NOISE`)."""
LOCAL_SPREAD = 1.2
"""Factor by which the prior's standard deviations are larger on a local site. The published
machines, from which the prior was computed, include no local machine.

`Scales.variance_factor` and the tails of Student's t distribution widen the intervals further.
Without these two corrections, a value of 2 would give equally wide intervals. The measured times of
all 19 notebook runs on two otherwise idle cores lie in the predicted intervals."""
LOCAL = {
    "gemm_efficiency": (0.6, 0.4),
    "collective_launch_s": (2e-3, 0.65),
    "node_latency_s": (5e-4, 0.65),
    "step_s": (2e-2, 0.95),
}
"""Maps coefficients to (mean, standard deviation of the logarithm) of their prior on a local site.
These priors differ from those of clusters, since the processes of a local run communicate through
gloo and Python."""
LOCAL_MISFIT = 0.12
"""Smallest standard deviation, on the log scale, of the error of the step time formula on a local
site. The value is large, since processes share cores and caches with all other work of the
machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step times with a 90 % interval, and warnings about their reliability."""

    step_time: StepTime
    """Predicted seconds per step of each layout, divided into computation, communication and other
    terms."""
    low_s: Array
    """Lower end of each 90 % interval, in seconds per step."""
    high_s: Array
    """Upper end of each 90 % interval, in seconds per step."""
    warnings: tuple[str, ...]
    """Sentences that warn about layouts with sizes or features that no measured run had."""
    unmeasured_features: tuple[str, ...]
    """Names of features, for example context parallelism, that occur in none of the runs in the
    fit. Each of these features made the interval of at least one layout wider."""

    @property
    def total_s(self) -> Array:
        """Predicted seconds per step of each layout. They are the centres of the 90 % intervals."""
        return self.step_time.total_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Coefficients of the step time formula (efficiencies and latencies), fitted to the runs of one
    machine, and their uncertainty.
    """

    coefficients: Coefficients
    covariance: Array
    """Covariance matrix of the logarithms of the coefficients, with rows and columns in the order
    of NAMES."""
    prior: Prior
    """Distribution of the logarithms of the coefficients before the runs were fitted."""
    unidentified: tuple[str, ...]
    """Names of coefficients that the runs did not determine. Their values come from other published
    machines."""
    num_runs: int
    """Number of runs to which the coefficients were fitted."""
    num_derived: int = 0
    """Number of runs among `num_runs` whose step time was computed from published rates and was not
    itself published (`PublishedRun.is_derived`)."""
    error: float
    """Mean absolute relative error of the fitted step times of the runs. If there are no runs, the
    value is NaN."""
    hardware: Hardware
    """Peak rates, bandwidths and sizes of the machine. Predictions use these numbers unless other
    hardware is given."""
    measured: interval.MeasuredRange | None
    """Ranges of model sizes, degrees and batches of the runs. Predictions for layouts outside these
    ranges have warnings. If there are no runs, the value is None."""
    machine: str = ""
    """Name of the packaged site whose published runs were fitted, if it is not the site itself.
    Otherwise the text is empty."""
    misfit: float = interval.SCALES.misfit
    """Standard deviation, on the log scale, of the error of the step time formula on this machine.
    The uncertainty of the coefficients is not included."""

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields except the hardware and `machine` as plain values for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["hardware"]
        del values["machine"]
        values["coefficients"] = self.coefficients.to_dict()
        values["covariance"] = self.covariance.tolist()
        values["prior"] = {
            "mean": self.prior.mean.tolist(),
            "spread": self.prior.spread.tolist(),
        }
        if self.measured is not None:
            bounds = {name: list(ends) for name, ends in self.measured.bounds.items()}
            values["measured"] = {"bounds": bounds, "traits": sorted(self.measured.traits)}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], hardware: Hardware) -> Self:
        """Returns the calibration that `to_dict` has converted to plain values."""
        measured = values["measured"]
        if measured is not None:
            measured = interval.MeasuredRange(
                bounds={name: (low, high) for name, (low, high) in measured["bounds"].items()},
                traits=frozenset(measured["traits"]),
            )
        converted = {
            "coefficients": Coefficients.from_dict(values["coefficients"]),
            "covariance": np.array(values["covariance"]),
            "prior": Prior(
                mean=np.array(values["prior"]["mean"]), spread=np.array(values["prior"]["spread"])
            ),
            "unidentified": tuple(values["unidentified"]),
            "measured": measured,
        }
        return cls(hardware=hardware, **{**values, **converted})

    def predict(self, layouts: Layouts, hardware: Hardware | None = None) -> Prediction:
        """Returns the predicted step time of each layout with a 90 % interval, and warnings about
        sizes and features that no calibration run had.

        If `hardware` is None, the hardware of the calibrated machine is used.
        """
        hardware = hardware or self.hardware
        centre, variance = interval.log_time_and_variance(
            layouts, hardware, self._values, self.covariance
        )
        untried = interval.unmeasured_feature_counts(layouts, hardware, self.measured)
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
                f"{', '.join(names)}: not in any run of the fit, so the interval is wider.",
            )
        return Prediction(
            step_time=step_time(layouts, hardware, self.coefficients),
            low_s=np.exp(centre - half),
            high_s=np.exp(centre + half),
            warnings=warnings,
            unmeasured_features=names,
        )

    def draws(self, layouts: Layouts, count: int = 300, *, seed: int = 0) -> Array:
        """Returns step times in seconds, [count, layouts]. Each row is computed with coefficients
        drawn at random from their posterior.

        The draws give the interval of the ratio between the step times of two layouts. An error of
        a coefficient that changes the step times of these two layouts by equal factors cancels in
        the ratio. The draws do not include the error of the formula (`misfit`).
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
        """Returns the indices of the `count` candidates that are most useful as calibration runs.
        Measured step times of these candidates would most reduce the uncertainty of the predictions
        for all candidates.

        Raises:
            ConfigError: `count` is larger than the number of candidates.
        """
        return propose(candidates, hardware or self.hardware, self._values, self.covariance, count)

    @property
    def label(self) -> str:
        """Text with the number of fitted runs, e.g. `calibrated on 3 runs`, and with the machine of
        the runs if it is another site. Without runs it is `not calibrated`.
        """
        if not self.num_runs:
            return "not calibrated"
        of = f" of {self.machine}" if self.machine else ""
        return f"calibrated on {counted(self.num_runs, 'run')}{of}"

    def __str__(self) -> str:
        if not self.num_runs:
            return f"{self.label}: efficiencies are the average of published machines"
        derived = f", {self.num_derived} of them derived" if self.num_derived else ""
        return f"{self.label}{derived}, mean error of the fit {self.error:.1%}"

    @property
    def _values(self) -> Array:
        return np.log([getattr(self.coefficients, name) for name in NAMES])

    def _repr_html_(self) -> str:
        deviation = np.sqrt(np.diag(self.covariance))
        rows: list[tuple[str, Any]] = [("times", str(self))]
        for i, name in enumerate(NAMES):
            told = "" if name not in self.unidentified else " (not determined by the runs)"
            rows.append(
                (name, f"{getattr(self.coefficients, name):.3g} ± {deviation[i]:.0%}{told}")
            )
        return html_table("Calibration", rows)


def calibrate(
    runs: Sequence[AnyRun], site: Site | None = None, *, hardware: Hardware | None = None
) -> Calibration:
    """Returns the coefficients of the step time formula, fitted to runs of one machine.

    The prior of the coefficients comes from published machines. For a local site the standard
    deviations of this prior are larger. Without runs the coefficients are the average of published
    machines. If `site` is None, the site of the runs is used. If `hardware` is None, the numbers of
    the site are used.

    Raises:
        ConfigError: No attempt of a run directory has more steps than the two of the warm-up, the
            site lacks a number that step time needs, or neither runs nor a site are given.
    """
    site = site or site_of(runs)
    is_local = site is not None and site.scheduler == "local"
    prior = _local(Prior.default()) if is_local else Prior.default()
    if runs:
        rows = rows_of_any(runs, site, hardware)
        found = fitting.fit(rows, prior)
        hardware = hardware or _wide_hardware(runs[0], rows, site)
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


def _wide_hardware(first: AnyRun, rows: Rows, site: Site | None) -> Hardware:
    """Returns the hardware of the first run. If this run used a format narrower than bf16, returns
    that of its site in bf16, so that predictions do not depend on the order of the runs.
    """
    hardware = rows.hardware.select(0)
    if site is None and isinstance(first, PublishedRun):
        site = first.site()
    return Hardware.of(site) if site is not None and hardware.is_narrow.any() else hardware


def _local(prior: Prior) -> Prior:
    mean = prior.mean.copy()
    spread = prior.spread * LOCAL_SPREAD
    for i, name in enumerate(NAMES):
        if name in LOCAL:
            mean[i], spread[i] = np.log(LOCAL[name][0]), LOCAL[name][1]
    return Prior(mean=mean, spread=spread)


def left_out_ratios(runs: Sequence[PublishedRun], site: Site) -> Array:
    """Returns the ratio of predicted to measured step time of each run of a site. Each run is
    predicted with coefficients that are fitted to all other runs.
    """
    others = [[*runs[:i], *runs[i + 1 :]] for i in range(len(runs))]
    predicted = [
        calibrate(o, site).predict(run.layouts(), hardware_of(run, site)).total_s.item()
        for o, run in zip(others, runs, strict=True)
    ]
    return np.array(predicted) / published.measured_step_seconds(runs)


def published_calibration(site: Site) -> Calibration:
    """Returns the coefficients of the step time formula, fitted to the published runs of a site. If
    the site has no published runs, those of a packaged site with the same device are fitted: its
    `base` if this has runs, otherwise the site with the most runs. If there is no such site, the
    coefficients are the average of the published machines.

    The fit uses the peak rates and bandwidths of the packaged site. Predictions use those of
    `site`. `misfit` includes `interval.OTHER_STACK`, since the software stack may differ. Runs
    whose numbers are second-hand or were corrected by hand are left out.

    Raises:
        ConfigError: The site lacks a number that step time needs.
    """
    hardware = Hardware.of(site)
    machine = _packaged(site.base or site.name)
    found = None
    while found is None and machine is not None and machine.device.name == site.device.name:
        found = fitted_machine(machine)
        name = machine.name
        machine = _packaged(machine.base)
    if found is None:
        name, found = _same_device_machine(site.device.name)
    if found is None:
        return calibrate([], site, hardware=hardware)
    misfit = float(np.hypot(found.misfit, interval.OTHER_STACK))
    other = name if name != site.name else ""
    return dataclasses.replace(found, hardware=hardware, misfit=misfit, machine=other)


def _same_device_machine(device: str) -> tuple[str, Calibration | None]:
    """Returns (name, calibration) of the packaged site with this device that has the most published
    runs. The calibration is None if no packaged site with this device has published runs.
    """
    best_name = ""
    best = None
    for name in Site.names():
        machine = Site.load(name)
        found = fitted_machine(machine) if machine.device.name == device else None
        if found is not None and (best is None or found.num_runs > best.num_runs):
            best_name = name
            best = found
    return best_name, best


def own_calibration(runs: Sequence[AnyRun], site: Site) -> Calibration:
    """Returns the coefficients of the step time formula for a user's own software on a site, fitted
    to `runs` and to the runs that the site file keeps (`Site.own_runs`).

    The mean of the prior comes from the published runs of the machine. Without own runs, the result
    is `published_calibration(site)`.

    Raises:
        ConfigError: A run has no step time yet or ran on another device, or the site lacks a number
            that step time needs.
    """
    runs = [*site.own_runs, *runs]
    if site.scheduler == "local":
        return calibrate(runs, site)
    known = published_calibration(site)
    if not runs:
        return known
    prior = Prior(mean=known._values, spread=Prior.default().spread)
    rows = rows_of_any(runs, site, None)
    return from_fit(fitting.fit(rows, prior), prior, rows, Hardware.of(site))


def fitted_machine(machine: Site) -> Calibration | None:
    """Returns the calibration of a packaged site on its published runs, or None if it has none. The
    result is read from the stored results if these are up to date.
    """
    stored = stored_results()
    if stored is None:
        own = published.of_site(machine.name)
        return calibrate(own, machine) if own else None
    values = stored["calibrations"].get(machine.name)
    return values and Calibration.from_dict(values, Hardware.of(machine))


def _packaged(name: str | None) -> Site | None:
    # The name may come from a site.json of another user. Only site files of the kit are loaded, so
    # that this name cannot make the kit read any other file.
    return Site.load(name) if name in Site.names() else None


def from_fit(
    found: fitting.Fit, prior: Prior, rows: Rows | None, hardware: Hardware
) -> Calibration:
    """Returns the calibration of a machine. `found` has the coefficients, which were fitted to the
    measured runs `rows`. If `rows` is None, no run was fitted.
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
        prior=prior,
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
    """Returns the indices of `count` candidates that are most useful as calibration runs.

    They are chosen one after the other. Each choice is the candidate whose measurement would most
    reduce the sum of the variances of all candidates' predictions. `values` are the current
    logarithms of the coefficients, and `covariance` is their covariance matrix.

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
        # Many candidates are equally useful. The first of them is taken, so that rounding errors do
        # not decide.
        best = int(np.flatnonzero(gain >= gain.max() * (1 - 1e-6))[0])
        chosen.append(best)
        row = carried[best]
        covariance = covariance - np.outer(row, row) / (row @ slopes[best] + RUN_NOISE**2)
    return chosen
