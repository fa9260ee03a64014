"""The layers of a reproduced figure, on one axis: what a paper published, what the kit models, what
was measured.

A figure of `kit.papers` is a function of run directories that returns `Drawn`: it makes its layers
and has `picture` of `panels.py` draw them, or `facts_table` where the paper prints a table. Each
row has a key `layer`. What does not depend on a number (titles, axes, words) stands in
`data/figures.toml`.

    def loss_figure(runs: Runs = ()) -> Drawn:
        layers = [
            Layer.published(FACTS["final_loss"], label="paper"),  # hollow grey markers
            Layer.modelled("model", x, y, low, high, error="6 % on ..."),  # line with its interval
            *measured(runs, x=tokens, y=final_loss),  # filled markers, demo scale marked
        ]
        return picture(layers, [{"title": "loss"}], "What is drawn.", "What holds.", height=3)

Then name it in `data/figures.toml`. Rules that the code here enforces: a remembered number is
never drawn as published, a modelled line says how wrong the model is, and demo-scale points never
share a panel with a paper's.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from cluster.files import write_atomic
from cluster.record import ConfigError
from kit.errors import kit_command
from kit.monitor.runs import find_runs
from kit.papers.facts import Fact
from kit.run import Run
from kit.show.style import Rows

Runs = Sequence[Run | str | Path]
"""Runs, run directories, or folders of them."""
Drawn = tuple[Any, Rows]
"""A figure, or what a paper prints as a table, and its rows."""
WARM_UP = 2
"""Steps at the start of an attempt whose times are left out."""
LOAD = "load.json"
"""Beside demo-scale runs: how busy the machine was before the first of them."""
YOURS = "your runs"
TOKEN_UNITS = {
    "tokens, billions": 1e9,
    "tokens, millions": 1e6,
    "tokens, thousands": 1e3,
    "tokens": 1,
}
QUIET_LOAD = 1.5
"""Processes at work besides; with more, measured times mean little."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """Points of one kind: published (hollow, grey), modelled (a line with its interval) or
    measured (filled).
    """

    kind: Literal["published", "modelled", "measured"]
    label: str
    x: Any = ()
    y: Any = ()
    low: Any = math.nan
    """End of the interval of y; NaN where there is none. So `high`. All become arrays as long as
    x."""
    high: Any = math.nan
    source: str
    """Where it comes from; for a modelled layer how wrong the model is, and on what."""
    scale: Literal["paper", "cluster", "demo"] = "paper"
    names: tuple[str, ...] = ()
    """Of the points, where x is only a place on the axis."""
    level: bool = False
    """Said of all places: a line across the panel."""
    joined: bool = False
    """Measured points are joined by a line."""
    runs: tuple[str, ...] = ()
    """Names of the run directories that measured points come from, one a point or one for all."""

    def __post_init__(self) -> None:
        x = np.atleast_1d(np.asarray(self.x, float))
        for name in ("x", "y", "low", "high"):
            column = np.broadcast_to(np.asarray(getattr(self, name), float), x.shape)
            object.__setattr__(self, name, column)

    @classmethod
    def published(
        cls, facts: Sequence[Fact], *, label: str, scale: float = 1.0, level: bool = False
    ) -> Self:
        """Returns published points; facts whose x are no numbers lie at 0, 1, 2, ... with their x
        as names.

        `scale` multiplies the values; a `level` is said of all places.

        Raises:
            ConfigError: one of them is only remembered.
        """
        how = sorted({fact.known for fact in facts} - {"read"})
        if "remembered" in how:
            raise ConfigError(
                f"{facts[0].series}: remembered, not read. It cannot be drawn as published."
            )
        source = "; ".join(dict.fromkeys(fact.source for fact in facts))
        try:
            x = [float(fact.x) for fact in facts]
            names = ()
        except ValueError:
            x = range(len(facts))
            names = tuple(fact.x for fact in facts)
        return cls(
            kind="published",
            label=label,
            x=x,
            y=[scale * fact.number for fact in facts],
            source=f"{source} ({', '.join(how)})" if how else source,
            names=names,
            level=level,
        )

    @classmethod
    def modelled(cls, label: str, *points: Any, error: str, names: Iterable[str] = ()) -> Self:
        """Returns a modelled line; without points it names the model among the sources of a table.

        `points` are x and y, and both ends of a 90 % interval of y where there is one; `error` says
        how wrong the model is, and on which measurements.

        Raises:
            ConfigError: no error is stated.
        """
        if not error:
            raise ConfigError(
                f"layer {label!r}: error '' is not allowed. Say how wrong the model is on what was"
                " measured."
            )
        columns = dict(zip(("x", "y", "low", "high"), points, strict=False))
        return cls(kind="modelled", label=label, source=error, names=tuple(names), **columns)

    def times(self, factor: Any) -> Self:
        """Returns the same points in another unit."""
        return dataclasses.replace(
            self, y=factor * self.y, low=factor * self.low, high=factor * self.high
        )

    def rows(self) -> Rows:
        """Returns one row per point: layer, series, scale, x, y, low, high, source, and the run
        of a measured one.
        """
        runs = self.runs * (len(self.x) // len(self.runs)) if self.runs else ()
        return [
            {
                "layer": self.kind,
                "series": self.label,
                "scale": self.scale,
                "x": self.names[i] if self.names else float(self.x[i]),
                "y": float(self.y[i]),
                "low": float(self.low[i]),
                "high": float(self.high[i]),
                "source": self.source,
                **({"run": runs[i]} if runs else {}),
            }
            for i in range(len(self.x))
        ]


def table(layers: Iterable[Layer], **columns: Any) -> Rows:
    """Returns the rows of all layers; `columns` are put before each, such as `panel="(a)"`."""
    return [columns | row for layer in layers for row in layer.rows()]


# Runs of your own, and of this machine ------------------------------------------------------------


def opened(runs: Runs) -> list[Run]:
    """Returns run directories as runs: the kit's own, and logs of other trainers that `kit import`
    made into one.

    Raises:
        RunError: there is no run in a folder.
        ConfigError: a log itself is given.
    """
    found = []
    for run in runs:
        if isinstance(run, Run):
            found.append(run)
        elif Path(run).is_file():
            words = ("import", run, "--format", "megatron", "--site", "SITE", "--out", "RUN")
            raise ConfigError(
                f"{run} is a file. Make a run directory of a log first: `{kit_command(*words)}`."
            )
        else:
            found += [Run.open(each) for each in find_runs(Path(run)) or [run]]
    return found


def note_load(directory: str | Path) -> None:
    """Writes into a folder of runs to come how busy the machine is, once."""
    file = Path(directory) / LOAD
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"load": os.getloadavg()[0]}) + "\n")


def was_quiet(directory: str | Path) -> bool:
    """Returns whether the machine had little else to do when the runs in a folder began; True
    where nobody noted it.
    """
    file = Path(directory) / LOAD
    return not file.exists() or json.loads(file.read_text())["load"] < QUIET_LOAD


def demo_source(directories: Iterable[str | Path]) -> str:
    """Returns the source of what was measured in these folders on this machine, and whether it
    was busy then.
    """
    quiet = all(map(was_quiet, directories))
    return "this machine, demo scale" + ("" if quiet else ", while other programs were at work")


def kept(file: Path, make: Callable[[], Any]) -> Any:
    """Returns what a study of this machine has left in a JSON file, after making it where there
    is none yet.
    """
    if not file.exists():
        note_load(file.parent)
        write_atomic(file, json.dumps(make()) + "\n")
    return json.loads(file.read_text())


def folders_with(runs: Runs, name: str) -> list[Path]:
    """Returns those of `runs` that are folders in which a study has left a file of this name."""
    return [
        Path(run) for run in runs if isinstance(run, str | Path) and (Path(run) / name).exists()
    ]


def scale_of(run: Run) -> Literal["cluster", "demo"]:
    """Returns `demo` for processes that share one machine's cores, `cluster` for everything
    else.
    """
    return "demo" if run.site.scheduler == "local" else "cluster"


def by_scale(runs: Runs) -> dict[str, list[Run]]:
    """Returns the runs of this machine (`demo`), then those of clusters."""
    found = opened(runs)
    return {
        scale: [run for run in found if scale_of(run) == scale] for scale in ("demo", "cluster")
    }


def measured(
    runs: Runs,
    *,
    x: Callable[[Run], float],
    y: Callable[[Run], np.ndarray],
    label: str = YOURS,
    line: bool = False,
) -> list[Layer]:
    """Returns measured points, a layer for demo scale and one for clusters, those that there are.

    A point is the median of `y` over the steps after the first `WARM_UP`; its interval spans the
    middle half of them. Runs with too few steps, or for which x or y is NaN, are left out. Without
    a label, a single run is called by its name; `line` joins the points of one layer.
    """
    layers = []
    for group in by_scale(runs).values():
        points = []
        for run in group:
            values = np.asarray(y(run), dtype=float)[WARM_UP:]
            values = values[np.isfinite(values)]
            if values.size and math.isfinite(x(run)):
                points.append((x(run), *np.quantile(values, (0.5, 0.25, 0.75)), run.name))
        if points:
            places, middle, low, high, names = zip(*sorted(points), strict=True)
            layers.append(
                own_points(
                    group,
                    places,
                    middle,
                    low=low,
                    high=high,
                    joined=line,
                    runs=names,
                    label=names[0] if label == YOURS and len(names) == 1 else label,
                )
            )
    return layers


def own_points(own: Sequence[Run], x: Any, y: Any, **fields: Any) -> Layer:
    """Returns measured points of runs of one scale, with further fields of `Layer`: by default the
    label is the first run's name, and all points are of that run.
    """
    scale = scale_of(own[0])
    source = "run directories given to the figure"
    if scale == "demo":
        source = demo_source({run.directory.parent for run in own})
    named = {"label": own[0].name, "runs": (own[0].name,), "source": source} | fields
    return Layer(kind="measured", x=x, y=y, scale=scale, **named)


def study_points(folder: Path, label: str, *points: Any, **fields: Any) -> Layer:
    """Returns what a study of this machine has left in a folder, as x and y, and both ends of an
    interval of y where there is one; with further fields of `Layer`.
    """
    own = {"source": demo_source([folder]), "scale": "demo", "runs": (folder.name,)} | fields
    columns = dict(zip(("x", "y", "low", "high"), points, strict=False))
    return Layer(kind="measured", label=label, **own, **columns)


def on_clusters(
    runs: Runs, *, x: Callable[[Run], float], y: Callable[[Run], np.ndarray]
) -> list[Layer]:
    """Returns the points of `measured` that may share a panel with a paper's: those of clusters."""
    return [layer for layer in measured(runs, x=x, y=y) if layer.scale == "cluster"]


def curves(runs: Runs, column: str) -> tuple[dict[str, list[Layer]], dict[str, str]]:
    """Returns one column of the metrics of each run that has a step against its tokens, by scale;
    and what an axis of these tokens is called, in a unit that suits the longest run.
    """
    found = {}
    labels = {}
    for scale, group in by_scale(runs).items():
        steps = {run: run.metrics() for run in group}
        longest = max((each.total_tokens[-1] for each in steps.values() if len(each)), default=0)
        unit = next((unit for unit in TOKEN_UNITS if longest >= TOKEN_UNITS[unit]), "tokens")
        layers = [
            own_points([run], each.total_tokens / TOKEN_UNITS[unit], each[column], joined=True)
            for run, each in steps.items()
            if len(each)
        ]
        if layers:
            found[scale], labels[scale] = layers, unit
    return found, labels
