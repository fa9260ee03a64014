"""Settings of a run by name, and the settings in which several runs differ, for the table of runs
and for the dashboard.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.record import shortened
from kit.run import Run
from kit.show.terminal import plain

LONGEST_VALUE = 200
"""Largest number of characters of the value of a setting that the dashboard shows."""
SCHEDULERS = ("slurm", "kubernetes")
"""Parts of a site that the dashboard does not show. They say how a job is started. They may contain
private environment variables, and a page of a run may be given to other people."""


def run_settings(run: Run) -> dict[str, Any]:
    """Returns all settings of a run by dotted name: `site`, and the fields of spec, plan and
    recipe, such as `plan.zero_stage`.
    """
    settings: dict[str, Any] = {"site": run.site.name}
    for part, record in (("spec", run.spec), ("plan", run.plan), ("recipe", run.recipe)):
        for name, value in record.to_dict().items():
            settings[f"{part}.{name}"] = value
    return settings


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the dotted names of the settings in which some runs differ. `settings` has the
    result of `run_settings` for each run. Fields of the model spec are only compared between models
    with the same name.
    """
    differing = []
    for name in settings[0] if settings else ():
        is_shape = name.startswith("spec.") and name != "spec.name"
        values: dict[str, set[str]] = {}
        for of_run in settings:
            model = of_run["spec.name"] if is_shape else ""
            values.setdefault(model, set()).add(repr(of_run[name]))
        if any(len(of_model) > 1 for of_model in values.values()):
            differing.append(name)
    return differing


def settings_table(run: Run, others: Mapping[str, Run]) -> dict[str, Any]:
    """Returns the settings of a run and of the runs with which the dashboard compares it, as plain
    values for JSON.

    `rows` has a list for each setting: its dotted name, its value in `run`, and its value in each
    of `others`, all as text. `differing` has the names of the settings in a legend of the runs, as
    `differing_settings` finds them.
    """
    runs = [run, *others.values()]
    settings = [run_settings(each) for each in runs]
    shown = [of_run | _site_numbers(each) for each, of_run in zip(runs, settings, strict=True)]
    names = list(dict.fromkeys(name for of_run in shown for name in of_run))
    rows = [[name, *(_text(of_run.get(name)) for of_run in shown)] for name in names]
    return {"others": list(others), "rows": rows, "differing": differing_settings(settings)}


def _site_numbers(run: Run) -> dict[str, Any]:
    """Returns the known facts of a run's site by dotted name, without their sources."""
    site = run.site.to_dict()
    return dict(_leaves("site", {key: site[key] for key in site if key not in SCHEDULERS}))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of everything in a dictionary that is neither empty nor None."""
    if not isinstance(value, dict):
        if value not in (None, []):
            yield name, value
    elif {"value", "source"} <= value.keys():
        yield name, value["value"]
    else:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)


def _text(value: Any) -> str:
    """Returns the value of a setting as one short line of text."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}"
    return shortened(plain(" ".join(text.split())), LONGEST_VALUE)
