"""Layers of a reproduced figure. A layer is one curve or one set of points: published, modelled or
measured. All layers of a panel are drawn on common axes.

Each figure has a function that computes its content from run directories. The function returns a
`FigureContent`, or a `TableContent` if the paper prints a table. `panels.py` draws the content.
Each row of the figure's table has a key `layer` with the kind of its layer.

    def loss_content(runs: Runs = ()) -> FigureContent:
        layers = [
            FigureLayer.published(FACTS["final_loss"], label="paper"),  # hollow grey markers
            FigureLayer.modelled("model", x, y, low, high, error="6 % on ..."),  # line, interval
            *measured_layers(runs, x=tokens, y=final_loss),  # filled markers, demo scale marked
        ]
        return FigureContent(panels={"": layers}, values={"last": f"{y[-1]:.2f}"})

`data/figures.toml` has the texts, axes and size of the figure, and the name of its function. The
placeholder `{last}` in its caption gets its value from `values`.

The code enforces three rules. A number that was only remembered, and not read in a source, is never
drawn as published. A modelled line states the error of the model. Points at demo scale (small runs
of this machine) never share a panel with points of a paper.
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
from kit.papers.facts import PaperFact
from kit.run import Run
from kit.show.style import Rows

Runs = Sequence[Run | str | Path]
"""Opened runs, run directories, or folders that contain run directories."""
Drawn = tuple[Any, Rows]
"""(drawn figure, rows of its data). If the paper prints a table, the first item is a table instead
of a figure."""
WARM_UP = 2
"""Number of first values that statistics leave out: the first training steps of a run, or the first
measured times of a kernel."""
LOAD = "load.json"
"""Name of the file with the load average that this machine had before the first run of a study. It
is in the folder that contains the runs."""
YOURS = "your runs"
"""Default label, in the legend, of points from the user's runs."""
TOKEN_UNITS = {
    "tokens, billions": 1e9,
    "tokens, millions": 1e6,
    "tokens, thousands": 1e3,
    "tokens": 1,
}
"""Maps the label of a token axis to the number of tokens per unit of this axis. The largest unit
comes first."""
QUIET_LOAD = 1.5
"""Smallest load average (number of running processes) at which a figure says that other programs
ran during the measurements."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FigureLayer:
    """One curve or set of points in a panel of a figure. A published layer is drawn as hollow grey
    markers, a modelled layer as a line with its interval, and a measured layer as filled markers.
    """

    kind: Literal["published", "modelled", "measured"]
    label: str
    x: Any = ()
    y: Any = ()
    low: Any = math.nan
    """Lower ends of the intervals of y, NaN without an interval. A single number is extended to an
    array as long as x."""
    high: Any = math.nan
    """Upper ends of the intervals of y, NaN without an interval. A single number is extended to an
    array as long as x."""
    source: str
    """Text that says where the plotted points come from. For a modelled layer, the text states the
    error of the model, and the measurements by which this error was determined."""
    scale: Literal["paper", "cluster", "demo"] = "paper"
    names: tuple[str, ...] = ()
    """Names of the categories to which the points belong, such as models. If names are given, x has
    only the numbers of the categories."""
    level: bool = False
    """Whether the layer has only one value, which holds for every x. The value is then drawn as a
    horizontal line across the panel."""
    joined: bool = False
    """Whether a line joins the points of a measured layer."""
    runs: tuple[str, ...] = ()
    """Names of the run directories from which the points were measured: one name per point, or one
    name for all points."""

    def __post_init__(self) -> None:
        x = np.atleast_1d(np.asarray(self.x, float))
        for name in ("x", "y", "low", "high"):
            column = np.broadcast_to(np.asarray(getattr(self, name), float), x.shape)
            object.__setattr__(self, name, column)

    @classmethod
    def published(
        cls, facts: Sequence[PaperFact], *, label: str, scale: float = 1.0, level: bool = False
    ) -> Self:
        """Returns a layer of published points.

        If the x of the facts are names, the points are placed at x = 0, 1, 2, ..., and the names
        become the category names.

        Args:
            facts: published numbers of one series.
            label: name in the legend.
            scale: factor by which the values are multiplied, to change their unit.
            level: whether to draw one value as a horizontal line, since it holds for every x.

        Raises:
            ConfigError: A number was only remembered, and not read in a source.
        """
        not_read = sorted({fact.known for fact in facts} - {"read"})
        if "remembered" in not_read:
            raise ConfigError(
                f"{facts[0].series}: remembered, not read. It cannot be drawn as published."
            )
        source = "; ".join(dict.fromkeys(fact.source for fact in facts))
        if not_read:
            source += f" ({', '.join(not_read)})"
        names = ()
        try:
            x = [float(fact.x) for fact in facts]
        except ValueError:
            x = range(len(facts))
            names = tuple(fact.x for fact in facts)
        return cls(
            kind="published",
            label=label,
            x=x,
            y=[scale * fact.number for fact in facts],
            source=source,
            names=names,
            level=level,
        )

    @classmethod
    def modelled(cls, label: str, *points: Any, error: str, names: Iterable[str] = ()) -> Self:
        """Returns a modelled layer (curve or points). A layer without points is not drawn. It only
        adds the model's error to the sources that are listed below a table.

        Args:
            label: name in the legend.
            points: arrays x and y of the points. If y has a 90 % interval, the lower and upper ends
                follow.
            error: sentence with the error of the model, and the measurements by which the error was
                determined.
            names: names of the categories, such as models, if x has only the numbers of categories.

        Raises:
            ConfigError: `error` is empty.
        """
        if not error:
            raise ConfigError(
                f"layer {label!r}: error '' is not allowed. Say how wrong the model is on what was"
                " measured."
            )
        columns = dict(zip(("x", "y", "low", "high"), points, strict=False))
        return cls(kind="modelled", label=label, source=error, names=tuple(names), **columns)

    def times(self, factor: Any) -> Self:
        """Returns a copy of the layer whose y and interval are multiplied by `factor`, to change
        the unit.
        """
        return dataclasses.replace(
            self, y=factor * self.y, low=factor * self.low, high=factor * self.high
        )

    def rows(self) -> Rows:
        """Returns one row per point, with these keys: layer (its kind), series (its label), scale
        (`paper`, `cluster` or `demo`), x, y, low, high and source. Measured points also have the
        key run.
        """
        rows = []
        places = self.names or self.x.tolist()
        for i, place in enumerate(places):
            row = {
                "layer": self.kind,
                "series": self.label,
                "scale": self.scale,
                "x": place,
                "y": float(self.y[i]),
                "low": float(self.low[i]),
                "high": float(self.high[i]),
                "source": self.source,
            }
            if self.runs:
                row["run"] = self.runs[i % len(self.runs)]
            rows.append(row)
        return rows


def table(layers: Iterable[FigureLayer], **columns: Any) -> Rows:
    """Returns the table rows of all layers, one row per point. `columns`, such as `panel="(a)"`,
    are added at the beginning of each row.
    """
    return [columns | row for layer in layers for row in layer.rows()]


# The user's runs, and small experiments run on this machine ---------------------------------------


def open_runs(runs: Runs) -> list[Run]:
    """Returns the opened runs of all given run directories. The logs of other trainers are run
    directories too after `kit import`.

    A folder that is not a run directory is replaced by all runs below it.

    Raises:
        RunError: A folder contains no run.
        ConfigError: A log file is given instead of a run directory.
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


def record_load(directory: str | Path) -> None:
    """Writes the load average of this machine into the file LOAD of a folder, unless the file
    exists.

    It is called before the first run is made in the folder.
    """
    file = Path(directory) / LOAD
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({"load": os.getloadavg()[0]}) + "\n")


def was_idle(directory: str | Path) -> bool:
    """Returns whether this machine was nearly idle (load average below QUIET_LOAD) before the first
    run in a folder.

    Returns True if no load average was recorded in the folder.
    """
    file = Path(directory) / LOAD
    return not file.exists() or json.loads(file.read_text())["load"] < QUIET_LOAD


def demo_source(directories: Iterable[str | Path]) -> str:
    """Returns a phrase for the source of numbers that were measured on this machine and stored in
    these folders.

    The phrase says whether other programs were running during the measurement.
    """
    source = "this machine, demo scale"
    if not all(map(was_idle, directories)):
        source += ", while other programs were at work"
    return source


def read_or_make(file: Path, make: Callable[[], Any]) -> Any:
    """Returns the stored result of a study of this machine, or makes the study if the JSON file is
    missing.

    To make the study, the function first records the load average of the machine. Then it calls
    `make` and writes the result to the file.
    """
    if not file.exists():
        record_load(file.parent)
        write_atomic(file, json.dumps(make()) + "\n")
    return json.loads(file.read_text())


def folders_with(runs: Runs, name: str) -> list[Path]:
    """Returns the folders among `runs` that contain a file with this name, which a study has
    written.
    """
    return [
        Path(run) for run in runs if isinstance(run, str | Path) and (Path(run) / name).exists()
    ]


def scale_of(run: Run) -> Literal["cluster", "demo"]:
    """Returns "demo" for a run of a local site, whose processes share the cores of one machine.
    Returns "cluster" for any other run.
    """
    return "demo" if run.site.scheduler == "local" else "cluster"


def by_scale(runs: Runs) -> dict[str, list[Run]]:
    """Returns the runs as a dict with the keys "demo" (runs of this machine) and "cluster" (runs of
    clusters).
    """
    groups: dict[str, list[Run]] = {"demo": [], "cluster": []}
    for run in open_runs(runs):
        groups[scale_of(run)].append(run)
    return groups


def measured_layers(
    runs: Runs,
    *,
    x: Callable[[Run], float],
    y: Callable[[Run], np.ndarray],
    label: str = YOURS,
    line: bool = False,
) -> list[FigureLayer]:
    """Returns layers of measured points: one layer for runs at demo scale and one for runs of
    clusters. A layer without points is left out.

    Each run gives one point. The y of the point is the median of `y` over the steps after the first
    `WARM_UP` steps, and the interval is the interquartile range. A run is left out if it has at
    most `WARM_UP` steps, or if its x or y is NaN.

    Args:
        runs: runs, run directories, or folders of them.
        x: function that returns the x of a run.
        y: function that returns the y of each step of a run.
        label: name in the legend. By default, a layer with a single run is called by the run's
            name.
        line: whether a line joins the points of a layer.
    """
    layers = []
    for group in by_scale(runs).values():
        points = []
        for run in group:
            values = np.asarray(y(run), dtype=float)[WARM_UP:]
            values = values[np.isfinite(values)]
            if values.size and math.isfinite(x(run)):
                points.append((x(run), *np.quantile(values, (0.5, 0.25, 0.75)), run.name))
        if not points:
            continue
        places, middle, low, high, names = zip(*sorted(points), strict=True)
        layer_label = label
        if label == YOURS and len(names) == 1:
            layer_label = names[0]
        fields: dict[str, Any] = {"label": layer_label, "runs": names, "joined": line}
        layers.append(own_points(group, places, middle, low=low, high=high, **fields))
    return layers


def own_points(own: Sequence[Run], x: Any, y: Any, **fields: Any) -> FigureLayer:
    """Returns one layer of points that were measured in the runs `own`. Either all these runs are
    runs of this machine (demo scale), or all are runs of clusters.

    `fields` are further fields of `FigureLayer`. By default, the label is the name of the first
    run, and all points belong to that run.
    """
    scale = scale_of(own[0])
    source = "run directories given to the figure"
    if scale == "demo":
        source = demo_source({run.directory.parent for run in own})
    named = {"label": own[0].name, "runs": (own[0].name,), "source": source} | fields
    return FigureLayer(kind="measured", x=x, y=y, scale=scale, **named)


def study_points(folder: Path, label: str, *points: Any, **fields: Any) -> FigureLayer:
    """Returns a layer of the points that a study of this machine has stored in a folder.

    Args:
        folder: folder of the study.
        label: name in the legend.
        points: arrays x and y of the points. If y has an interval, the lower and upper ends follow.
        fields: further fields of `FigureLayer`.
    """
    own = {"source": demo_source([folder]), "scale": "demo", "runs": (folder.name,)} | fields
    columns = dict(zip(("x", "y", "low", "high"), points, strict=False))
    return FigureLayer(kind="measured", label=label, **own, **columns)


def measured_on_clusters(
    runs: Runs, *, x: Callable[[Run], float], y: Callable[[Run], np.ndarray]
) -> list[FigureLayer]:
    """Returns figure layers with one measured point for each cluster run among `runs`. Runs of this
    machine (demo scale) are left out, since their points must not share a panel with a paper's
    points.
    """
    return [layer for layer in measured_layers(runs, x=x, y=y) if layer.scale == "cluster"]


def curves(runs: Runs, column: str) -> tuple[dict[str, list[FigureLayer]], dict[str, str]]:
    """Returns (layers, axis labels) that show one column of the runs' metrics against tokens. Both
    are dicts with the keys "demo" (runs of this machine) and "cluster" (runs of clusters).

    Each layer shows the column of one run. Runs without steps are left out. The unit of the token
    axis is chosen to suit the longest run.
    """
    layers_by_scale = {}
    units = {}
    for scale, group in by_scale(runs).items():
        metrics = {run: run.metrics() for run in group}
        known = {run: steps for run, steps in metrics.items() if len(steps)}
        if not known:
            continue
        longest = max(steps.total_tokens[-1] for steps in known.values())
        unit = next((unit for unit in TOKEN_UNITS if longest >= TOKEN_UNITS[unit]), "tokens")
        units[scale] = unit
        layers_by_scale[scale] = [
            own_points([run], steps.total_tokens / TOKEN_UNITS[unit], steps[column], joined=True)
            for run, steps in known.items()
        ]
    return layers_by_scale, units
