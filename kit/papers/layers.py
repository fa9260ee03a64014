"""The layers of a reproduced figure, on one axis: what a paper published, what the kit models, what
was measured.

A figure of `kit.papers` is a function of run directories that computes its content:
`FigureContent`, or `TableContent` where the paper prints a table. `panels.py` draws it. Each row of
its table has a key `layer`.

    def loss_content(runs: Runs = ()) -> FigureContent:
        layers = [
            FigureLayer.published(FACTS["final_loss"], label="paper"),  # hollow grey markers
            FigureLayer.modelled("model", x, y, low, high, error="6 % on ..."),  # line, interval
            *measured(runs, x=tokens, y=final_loss),  # filled markers, demo scale marked
        ]
        return FigureContent(panels={"": layers}, values={"last": f"{y[-1]:.2f}"})

`data/figures.toml` has its texts, axes and size, and the name of the function. Its caption takes
`{last}` from `values`.

Rules that the code enforces: a remembered number is never drawn as published, a modelled line says
how wrong the model is, and demo-scale points never share a panel with a paper's.
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
"""Runs, run directories, or folders of them."""
Drawn = tuple[Any, Rows]
"""(figure, or a table if the paper prints one; its rows)."""
WARM_UP = 2
"""Steps at the start of an attempt whose times are left out."""
LOAD = "load.json"
"""File beside demo-scale runs with the load of the machine before the first of them."""
YOURS = "your runs"
TOKEN_UNITS = {
    "tokens, billions": 1e9,
    "tokens, millions": 1e6,
    "tokens, thousands": 1e3,
    "tokens": 1,
}
QUIET_LOAD = 1.5
"""Largest load average at which measured times mean something."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FigureLayer:
    """Points of one kind: published (hollow, grey), modelled (a line with its interval) or
    measured (filled).
    """

    kind: Literal["published", "modelled", "measured"]
    label: str
    x: Any = ()
    y: Any = ()
    low: Any = math.nan
    """Lower end of the interval of y, NaN where there is none. Becomes an array as long as x."""
    high: Any = math.nan
    """Upper end of the interval of y, NaN where there is none. Becomes an array as long as x."""
    source: str
    """Where it comes from; for a modelled layer how wrong the model is, and on what."""
    scale: Literal["paper", "cluster", "demo"] = "paper"
    names: tuple[str, ...] = ()
    """Names of the points, where x is only a place on the axis."""
    level: bool = False
    """Whether the value holds for all places and is drawn as a line across the panel."""
    joined: bool = False
    """Whether a line joins measured points."""
    runs: tuple[str, ...] = ()
    """Names of the run directories that measured points come from, one a point or one for all."""

    def __post_init__(self) -> None:
        x = np.atleast_1d(np.asarray(self.x, float))
        for name in ("x", "y", "low", "high"):
            column = np.broadcast_to(np.asarray(getattr(self, name), float), x.shape)
            object.__setattr__(self, name, column)

    @classmethod
    def published(
        cls, facts: Sequence[PaperFact], *, label: str, scale: float = 1.0, level: bool = False
    ) -> Self:
        """Returns published points; facts whose x are no numbers lie at 0, 1, 2, ... with their x
        as names.

        `scale` multiplies the values; a `level` is said of all places.

        Raises:
            ConfigError: one of them is only remembered.
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
    """Returns the rows of all layers; `columns` are put before each, such as `panel="(a)"`."""
    return [columns | row for layer in layers for row in layer.rows()]


# Runs of your own, and of this machine ------------------------------------------------------------


def open_runs(runs: Runs) -> list[Run]:
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
    source = "this machine, demo scale"
    if not all(map(was_quiet, directories)):
        source += ", while other programs were at work"
    return source


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
    groups: dict[str, list[Run]] = {"demo": [], "cluster": []}
    for run in open_runs(runs):
        groups[scale_of(run)].append(run)
    return groups


def measured(
    runs: Runs,
    *,
    x: Callable[[Run], float],
    y: Callable[[Run], np.ndarray],
    label: str = YOURS,
    line: bool = False,
) -> list[FigureLayer]:
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
    """Returns measured points of runs of one scale, with further fields of `FigureLayer`.

    By default the label is the first run's name, and all points are of that run.
    """
    scale = scale_of(own[0])
    source = "run directories given to the figure"
    if scale == "demo":
        source = demo_source({run.directory.parent for run in own})
    named = {"label": own[0].name, "runs": (own[0].name,), "source": source} | fields
    return FigureLayer(kind="measured", x=x, y=y, scale=scale, **named)


def study_points(folder: Path, label: str, *points: Any, **fields: Any) -> FigureLayer:
    """Returns what a study of this machine has left in a folder, as x and y, and both ends of an
    interval of y where there is one; with further fields of `FigureLayer`.
    """
    own = {"source": demo_source([folder]), "scale": "demo", "runs": (folder.name,)} | fields
    columns = dict(zip(("x", "y", "low", "high"), points, strict=False))
    return FigureLayer(kind="measured", label=label, **own, **columns)


def on_clusters(
    runs: Runs, *, x: Callable[[Run], float], y: Callable[[Run], np.ndarray]
) -> list[FigureLayer]:
    """Returns the points of `measured` that may share a panel with a paper's: those of clusters."""
    return [layer for layer in measured(runs, x=x, y=y) if layer.scale == "cluster"]


def curves(runs: Runs, column: str) -> tuple[dict[str, list[FigureLayer]], dict[str, str]]:
    """Returns one column of the metrics of each run that has a step against its tokens, by scale;
    and what an axis of these tokens is called, in a unit that suits the longest run.
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
