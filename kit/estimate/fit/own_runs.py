"""A user's own runs for the planner: read from run directories and CSV files, and kept in a site
file.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cluster.record import ConfigError, counted
from cluster.site import OwnRun, Site
from kit.estimate.fit import published
from kit.estimate.fit.measured_rows import AnyRun, hardware_of, median_step_times
from kit.estimate.fit.stored import stored_results
from kit.estimate.theory.layouts import Array


def read_own_runs(paths: Iterable[str | Path], site: Site) -> list[AnyRun]:
    """Returns the runs of run directories and of CSV files with the columns of the published runs.

    Raises:
        ConfigError: A path is neither a run directory nor a CSV file, a CSV file has no measured
            run, or a run has another device than the site.
    """
    runs: list[AnyRun] = []
    for path in map(Path, paths):
        if (path / "spec.json").exists():
            runs.append(path)
            continue
        if path.suffix != ".csv":
            raise ConfigError(
                f"--runs {path}: neither a run directory nor a .csv file. Give the directory of a"
                " run, or a CSV with the columns of kit/estimate/fit/data/README.md."
            )
        measured = [run for run in published.load(path) if run.step_time_s]
        if not measured:
            raise ConfigError(f"--runs {path}: no row has a step time. Give one that has.")
        for run in measured:
            ran_on = run.site()
            if ran_on is not None and ran_on.device.name != site.device.name:
                raise ConfigError(
                    f"--runs {path}: {run.spec.name} ran on {run.device}, and {site.name} has"
                    f" {site.device.name!r}. Give runs on this device."
                )
        runs += measured
    return runs


def kept_runs(runs: Iterable[str | Path]) -> list[OwnRun]:
    """Returns the step times of run directories in the form in which a site file keeps them: one
    record per attempt.

    Raises:
        ConfigError: A run has no step time yet.
    """
    from kit.run import Run

    kept = []
    for directory in runs:
        run = Run.open(directory)
        plans = run.plans()
        for attempt, seconds in median_step_times(run).items():
            kept.append(
                OwnRun(
                    source=f"{run.directory}, attempt {attempt}",
                    step_time_s=seconds,
                    spec=json.dumps(run.spec.to_dict()),
                    plan=json.dumps(plans[attempt].to_dict()),
                )
            )
    return kept


def site_text(site: Site, name: str, kept: list[OwnRun]) -> str:
    """Returns the text of a site file in TOML with own runs. The file of a packaged site names it
    as its base, and has no other numbers. `name` is the name of the new site.
    """
    values: dict[str, Any] = {"name": name}
    if site.name in Site.names():
        values["base"] = site.name
    else:
        values = site.to_dict() | values
    values["own_runs"] = [run.to_dict() for run in (*site.own_runs, *kept)]
    return "\n".join(_toml(values, ())) + "\n"


def _toml(values: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """Returns the lines of a TOML table. `path` are the names of the tables that contain it."""
    lines = []
    tables = []
    for key, value in values.items():
        here = (*path, json.dumps(key))
        is_tables = isinstance(value, list | tuple) and value and isinstance(value[0], dict)
        if isinstance(value, dict):
            tables += ["", f"[{'.'.join(here)}]", *_toml(value, here)]
        elif is_tables:
            for element in value:
                tables += ["", f"[[{'.'.join(here)}]]", *_toml(element, here)]
        elif value is not None:
            lines.append(f"{here[-1]} = {json.dumps(value)}")
    return [*lines, *tables]


def extrapolation_error(from_devices: float, to_devices: float) -> str | None:
    """Returns a sentence with the error of predictions for many devices after a fit to runs on few
    devices of the same packaged cluster. Returns None if `to_devices` is less than FAR_SCALE times
    `from_devices`.
    """
    ratio = to_devices / from_devices
    if ratio < FAR_SCALE:
        return None
    stored = stored_results()
    found = stored["extrapolations"] if stored else extrapolations()
    ratios, errors = np.array(found["ratios"]), np.array(found["errors"])
    is_far = ratios >= min(ratio, 16 * FAR_SCALE)
    off = np.abs(errors[is_far])
    return (
        f"your runs have at most {counted(int(from_devices), 'device')}: a {ratio:,.0f}-fold"
        f" extrapolation. On {len(off)} packaged runs with at least"
        f" {ratios[is_far].min():,.0f} times the devices of the fitted runs of their cluster, the"
        f" mean error was {off.mean():.0%}, 90 % within {np.quantile(off, 0.9):.0%}."
    )


FAR_SCALE = 4
"""Smallest ratio of planned devices to the devices of the largest own run that counts as an
extrapolation."""
MOST_FITTED = 5
"""Number of small runs of a cluster to which the planner is fitted for `extrapolations`."""


def extrapolations() -> dict[str, list[float]]:
    """Returns the errors of predictions for large runs of the packaged clusters after a fit to
    small runs of the same cluster and software. Keys: `ratios` (devices of the predicted run over
    the largest fitted run), and `errors` (predicted over measured, minus 1).

    For each cluster and each number of devices, the fit has at most MOST_FITTED runs with at most
    this number. The prior is the average of all machines.
    """
    from kit.estimate.fit.calibrate import calibrate

    clusters: dict[str, list] = {}
    for run in published.load():
        if run.step_time_s and run.status in ("read", "mixed") and run.site() is not None:
            clusters.setdefault(run.stack, []).append(run)
    ratios: list[float] = []
    errors: list[float] = []
    for runs in clusters.values():
        sizes = sorted({run.num_devices for run in runs})
        for most in sizes:
            large = [run for run in runs if run.num_devices >= FAR_SCALE * most]
            small = [run for run in runs if run.num_devices <= most]
            if not large:
                continue
            small = small[:: -(-len(small) // MOST_FITTED)]
            found = calibrate(small, runs[0].site())
            fitted_devices = max(run.num_devices for run in small)
            for run in large:
                predicted: Array = found.predict(run.layouts(), hardware_of(run)).total_s
                ratios.append(run.num_devices / fitted_devices)
                errors.append(float(predicted[0]) / run.step_time_s - 1)
    return {
        "ratios": [round(ratio, 3) for ratio in ratios],
        "errors": [round(error, 4) for error in errors],
    }
