"""A paper's own points, read off its figure by a reader who has the PDF, drawn hollow into ours."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.record import ConfigError, suggestion
from kit.papers.layers import Layer, table
from kit.show.style import Rows
from kit.show.theme import GREY

COLUMNS = ("series", "x", "y", "source")
DIGITISED = "digitised by the reader"
EXAMPLE = "Figure 12 of version 2, page 9, by WebPlotDigitizer"
BEYOND = 1.0
"""Lengths of an axis that a point may lie outside of what is drawn; further out its unit is
another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One series of a figure: its panel, its label there ("" for all of a panel) and the artist
    that draws it.
    """

    axis: Any
    label: str
    artist: Any

    @property
    def units(self) -> dict[str, str]:
        """What both axes show, as the panel says it, of x and y."""
        title = self.axis.get_title(loc="left") or self.axis.get_title()
        return {
            "x": self.axis.get_xlabel() or ", ".join(_names(self.axis.xaxis)) or "as at its ticks",
            "y": self.axis.get_ylabel() or title,
        }

    def middle(self) -> tuple[str, str]:
        """Returns a point inside the panel, as a file would state it."""
        return self._middle("x"), self._middle("y")

    def number(self, side: str, text: str) -> float:
        """Returns where a number or a name lies on one axis.

        Raises:
            ConfigError: it is neither, or so far outside that it must be in another unit.
        """
        axis, names = self._axis(side), _names(self._axis(side))
        unit, log = self.units[side], axis.get_scale() == "log"
        if text in names:
            return names[text]
        allowed = (
            f"Allowed: {', '.join(names)}."
            if names
            else f"Give a number alone, in the unit of: {unit}."
        )
        try:
            value = float(text) if log or not names else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (log and value <= 0):
            raise ConfigError(f"{side}: {text!r} is not allowed. {allowed}")
        ends = sorted(axis.get_view_interval())
        low, high, place = (math.log(v) if log else v for v in (*ends, value))
        if not low - BEYOND * (high - low) <= place <= high + BEYOND * (high - low):
            raise ConfigError(
                f"{side}: {text} is far from what is drawn ({ends[0]:.3g} to {ends[1]:.3g})."
                f" {allowed}"
            )
        if side == "y" and "%" in unit and 0 < value <= 1 < ends[1] / 10:
            raise ConfigError(f"y: {text} of an axis in per cent looks like a fraction. {allowed}")
        return value

    def _axis(self, side: str) -> Any:
        return self.axis.xaxis if side == "x" else self.axis.yaxis

    def _middle(self, side: str) -> str:
        axis = self._axis(side)
        ticks = [tick for tick in axis.get_ticklocs() if tick > 0]
        return next(iter(_names(axis)), f"{ticks[len(ticks) // 2]:g}" if ticks else "1")


def series_of(figure: Any) -> dict[str, Series]:
    """Returns the series of a figure that points can be added to, by the name that a file gives
    them.

    That is the label in the legend; where two panels have it, the title of the panel before it;
    where a panel has one label that others have too, or none, its title.
    """
    found = list(_labelled(figure))
    labels = [series.label for series in found]
    panels = [series.axis for series in found]
    names = {}
    for series in found:
        title = series.axis.get_title(loc="left") or series.axis.get_title()
        alone = panels.count(series.axis) == 1
        name = series.label if labels.count(series.label) == 1 and series.label else title
        names[name if name != title or alone else f"{title}: {series.label}"] = series
    return names


def template(name: str, figure: Any) -> str:
    """Returns a file to fill in for a figure: its columns, units and series, and an example."""
    found = series_of(figure)
    units = dict.fromkeys(
        f"# x: {series.units['x']}; y: {series.units['y']}" for series in found.values()
    )
    first = next(iter(found))
    head = [
        (
            f"# {name}: fill in points as you read them, any number of lines a series; delete the"
            " series you have not."
        ),
        *units,
        f"# such as: {_line(first, *found[first].middle(), EXAMPLE)}",
    ]
    return "\n".join([*head, _line(*COLUMNS), *(_line(series, "", "", "") for series in found), ""])


def read_points(file: Path, known: dict[str, Series]) -> dict[str, Layer]:
    """Returns the points of a file by series.

    Raises:
        ConfigError: the file, a column, a series or a number in it cannot be used; the message says
            which.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--points {file}: cannot be read as text: {error}.") from error
    kept = [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and line[0] != "#"
    ]
    reader = csv.reader(line for _, line in kept)
    columns = next(reader, [])
    if sorted(columns) != sorted(COLUMNS):
        raise ConfigError(
            f"--points {file}: columns {columns} are not allowed. Expected: {','.join(COLUMNS)}."
        )
    points: dict[str, list[tuple[float, float, str]]] = {}
    for (number, _), cells in zip(kept[1:], reader, strict=False):
        place = f"--points {file}, line {number}"
        if len(cells) != len(columns):
            raise ConfigError(
                f"{place}: {len(cells)} cells, expected {len(columns)}. Quote text that has a"
                " comma."
            )
        row = {column: cell.strip() for column, cell in zip(columns, cells, strict=True)}
        if row["series"] not in known:
            raise ConfigError(
                f"{place}: series {row['series']!r} is unknown. {suggestion(row['series'], known)}"
            )
        if not row["source"]:
            raise ConfigError(
                f"{place}: source '' is not allowed. Say where it was read: figure, page, by what."
            )
        try:
            x, y = (known[row["series"]].number(side, row[side]) for side in "xy")
        except ConfigError as error:
            raise ConfigError(f"{place}, {error}") from error
        points.setdefault(row["series"], []).append((x, y, row["source"]))
    if not points:
        raise ConfigError(f"--points {file}: no points. Fill in lines below the columns.")
    return {name: _layer(name, found) for name, found in points.items()}


def add_points(figure: Any, rows: Rows, file: Path) -> Rows:
    """Draws the points of a file into a figure, names them in its legends and notes, and returns
    rows with theirs.
    """
    known = series_of(figure)
    layers = read_points(file, known)
    for name, layer in layers.items():
        series = known[name]
        alone = sum(other.axis is series.axis for other in known.values()) == 1
        label = DIGITISED if alone else f"{series.label},\n{DIGITISED}"
        limits = {side: series._axis(side).get_view_interval() for side in "xy"}
        series.axis.plot(
            layer.x,
            layer.y,
            "X",
            color=_colour(series.artist),
            markerfacecolor="white",
            markersize=7,
            markeredgewidth=1.3,
            zorder=6,
            label=label,
            clip_on=False,
        )
        for side, values in (("x", layer.x), ("y", layer.y)):
            _widen(series._axis(side), limits[side], values)
        own = series.axis.get_lines()[-1:] if series.axis.get_legend() is None else None
        series.axis.legend(handles=own, loc="best", fontsize="small")
    said = "; ".join(f"{name}: {layer.source}" for name, layer in layers.items())
    figure.notes = (*figure.notes, f"{DIGITISED.capitalize()} ({said}).")
    return [*rows, *(row | {"layer": "digitised"} for row in table(layers.values()))]


def _labelled(figure: Any) -> Iterator[Series]:
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        for artist, label in zip(handles, labels, strict=True):
            yield Series(axis=axis, label=label, artist=artist)
        if not labels and (axis.get_title(loc="left") or axis.get_title()):
            yield Series(axis=axis, label="", artist=None)


def _layer(name: str, points: list[tuple[float, float, str]]) -> Layer:
    x, y, sources = zip(*sorted(points), strict=True)
    return Layer(kind="published", label=name, x=x, y=y, source="; ".join(dict.fromkeys(sources)))


def _names(axis: Any) -> dict[str, float]:
    """Returns the places of the words at an axis, such as models; none where it has numbers."""
    places: dict[str, float] = {}
    for place, tick in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False):
        text = " ".join(tick.get_text().split())
        try:
            float(text.replace(",", "").replace("−", "-") or "0")
        except ValueError:
            places[text] = float(place)
    return {} if any("mathdefault" in text for text in places) else places


def _colour(artist: Any) -> str:
    line = artist[0] if isinstance(artist, tuple) else artist
    colour = getattr(line, "get_color", lambda: GREY)()
    return colour if isinstance(colour, str) else GREY


def _widen(axis: Any, limits: Any, values: Any) -> None:
    """Makes an axis reach to some values; it keeps its ends, and their order, where they lie
    inside.
    """
    low, high = min(limits), max(limits)
    least, most = min(low, float(values.min())), max(high, float(values.max()))
    axis.axes.set(
        **{f"{axis.axis_name}lim": (least, most) if limits[0] <= limits[1] else (most, least)}
    )


def _line(*cells: str) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="").writerow(cells)
    return stream.getvalue()
