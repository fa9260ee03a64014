"""Adds points that the user has digitised from a figure in the paper's PDF. The points are drawn as
hollow markers in the kit's figure.
"""

import csv
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.record import ConfigError, suggestion
from kit.papers.layers import FigureLayer, Rows, table
from kit.show.theme import GREY

COLUMNS = ("series", "x", "y", "source")
DIGITISED = "digitised by the reader"
MAX_DISTANCE = 1.0
"""Largest allowed distance of a point from the visible range of an axis, as a multiple of the
length of this range. A point farther away is refused, since it is probably in another unit."""
TEMPLATE = """\
# {name}: fill in points as you read them, any number of lines a series; delete the series you have not.
{units}
# source: where you read it, such as "Figure 12 of version 2, page 9, by WebPlotDigitizer"
series,x,y,source
{series}
"""  # noqa: E501
NUMBER = r"\$.*|[\d.,e+−-]*"
"""Pattern of a tick label that is a number. Any other label names a category, such as a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One labelled curve or set of points in a figure. The user can add digitised points to it."""

    panel: Any
    """Matplotlib axes of the panel that shows the series."""
    label: str
    """Label of the series in the legend. For a panel without series, the title of the panel."""
    colour: str = GREY
    is_only: bool = True
    """Whether this is the only series in the panel."""


def series_of(figure: Any) -> dict[str, Series]:
    """Returns the series of a figure to which points can be added. Keys are the names by which a
    file of points refers to them.

    In a figure with one panel, the name of a series is its label in the legend. In a figure with
    several panels, the name is `TITLE: LABEL`, where TITLE is the title of the panel. If a panel
    has at most one series, the name is only the title.
    """
    found = {}
    for panel in figure.axes:
        title = panel.get_title(loc="left")
        artists, labels = panel.get_legend_handles_labels()
        is_only = len(labels) == 1
        for artist, label in zip(artists, labels, strict=True):
            name = label
            if len(figure.axes) > 1 and is_only:
                name = title
            elif len(figure.axes) > 1:
                name = f"{title}: {label}"
            found[name] = Series(
                panel=panel, label=label, colour=_colour_of(artist), is_only=is_only
            )
        if title and not labels:
            found[title] = Series(panel=panel, label=title)
    return found


def points_template(name: str, figure: Any) -> str:
    """Returns the text of an empty file of points, which the user fills in. The text has the names
    of the columns, the units of the axes, and one line per series.
    """
    units = {}
    lines = []
    for series_name, series in series_of(figure).items():
        panel = series.panel
        units[f"# x: {_unit(panel.xaxis)}; y: {_unit(panel.yaxis)}"] = None
        cell = f'"{series_name}"' if "," in series_name else series_name
        lines.append(f"{cell},,,")
    return TEMPLATE.format(name=name, units="\n".join(units), series="\n".join(lines))


def read_points(file: Path, known: Mapping[str, Series]) -> dict[str, FigureLayer]:
    """Returns a dict from series name to a figure layer with the points of this series in the file.

    `known` maps each allowed series name to its series.

    Raises:
        ConfigError: The file, one of its columns, a series name or a number cannot be used. The
            message names the cause.
    """
    points: dict[str, list[tuple[float, float, str]]] = {}
    for row in _read_rows(file):
        name, x, y, source = (row[column].strip() for column in COLUMNS)
        where = f"--points {file}, {name},{x},{y}"
        if name not in known:
            raise ConfigError(f"{where}: series {name!r} is unknown. {suggestion(name, known)}")
        if not source:
            raise ConfigError(f"{where}: no source. Say where it was read: figure, page, by what.")
        panel = known[name].panel
        x_place = _place(panel.xaxis, x, where)
        y_place = _place(panel.yaxis, y, where)
        points.setdefault(name, []).append((x_place, y_place, source))
    if not points:
        raise ConfigError(f"--points {file}: no points. Fill in lines below the columns.")
    layers = {}
    for name, found in points.items():
        x, y, sources = zip(*sorted(found), strict=True)
        source = "; ".join(dict.fromkeys(sources))
        layers[name] = FigureLayer(kind="published", label=name, x=x, y=y, source=source)
    return layers


def add_points(figure: Any, rows: Rows, file: Path) -> Rows:
    """Draws the points of a file into a figure. Returns `rows` followed by the table rows of these
    points.

    The points are also named in the legends and in the notes of the figure.
    """
    known = series_of(figure)
    layers = read_points(file, known)
    for name, layer in layers.items():
        series = known[name]
        panel = series.panel
        label = DIGITISED
        if not series.is_only:
            label = f"{series.label},\n{DIGITISED}"
        [line] = panel.plot(
            layer.x,
            layer.y,
            "X",
            color=series.colour,
            markerfacecolor="white",
            markersize=7,
            markeredgewidth=1.3,
            zorder=6,
            label=label,
            clip_on=False,
        )
        # Both axes are extended if a point lies outside the visible range.
        panel.xaxis.set_view_interval(layer.x.min(), layer.x.max())
        panel.yaxis.set_view_interval(layer.y.min(), layer.y.max())
        shown = [line] if panel.get_legend() is None else None
        panel.legend(handles=shown, loc="best", fontsize="small")
    sources = "; ".join(f"{name}: {layer.source}" for name, layer in layers.items())
    figure.notes = (*figure.notes, f"{DIGITISED.capitalize()} ({sources}).")
    return [*rows, *(row | {"layer": "digitised"} for row in table(layers.values()))]


def _read_rows(file: Path) -> list[dict[str, str]]:
    """Returns the lines of a file of points as dicts from column name to cell.

    Raises:
        ConfigError: The file is not text, is not CSV, or has other columns than COLUMNS.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--points {file}: cannot be read as text: {error}.") from error
    reader = csv.DictReader((line for line in lines if line.strip() and line[0] != "#"), restval="")
    if sorted(reader.fieldnames or ()) != sorted(COLUMNS):
        raise ConfigError(
            f"--points {file}: columns {reader.fieldnames} are not allowed. Expected:"
            f" {','.join(COLUMNS)}."
        )
    try:
        return list(reader)
    except csv.Error as error:
        raise ConfigError(f"--points {file}: cannot be read as CSV: {error}.") from error


def _place(axis: Any, text: str, where: str) -> float:
    """Returns the coordinate on an axis for the text of a cell, which is a number or the name of a
    category.

    Raises:
        ConfigError: The text is neither a number nor a category of the axis. Or the number is
            probably in another unit: it is far outside the visible range, or it is a fraction and
            the axis is in per cent.
    """
    names = _names(axis)
    unit = _unit(axis)
    where = f"{where}: {axis.axis_name}"
    is_log = axis.get_scale() == "log"
    takes_names = bool(names) and not is_log
    value = names.get(text, math.nan)
    if not takes_names and text not in names:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
    if not math.isfinite(value) or (is_log and value <= 0):
        allowed = f"Give a number alone, in the unit of: {unit}."
        if takes_names:
            allowed = f"Allowed: {', '.join(names)}."
        raise ConfigError(f"{where}: {text!r} is not allowed. {allowed}")
    advice = f"Give a number in the unit of: {unit}."
    first, last = sorted(axis.get_view_interval())
    scale = math.log if is_log else float
    max_distance = MAX_DISTANCE * (scale(last) - scale(first))
    if not scale(first) - max_distance <= scale(value) <= scale(last) + max_distance:
        drawn = f"{first:.3g} to {last:.3g}"
        raise ConfigError(f"{where}: {text} is far from what is drawn ({drawn}). {advice}")
    if axis.axis_name == "y" and "%" in unit and 0 < value <= 1 < last / 10:
        raise ConfigError(
            f"{where}: {text} is probably a fraction, but this axis is in per cent, up to"
            f" {last:.3g}. Write {100 * value:g} for {value:g}. {advice}"
        )
    return value


def _unit(axis: Any) -> str:
    """Returns a text that says what an axis shows and in which unit. The text is the label of the
    axis. If the axis has no label, the text is the title of the panel (y axis only) or the list of
    category names.
    """
    label = axis.get_label_text()
    if label:
        return label
    if axis.axis_name == "y":
        return axis.axes.get_title(loc="left")
    return ", ".join(_names(axis)) or "as at its ticks"


def _names(axis: Any) -> dict[str, float]:
    """Returns the coordinate of each category on an axis, such as a model, by its name. Returns {}
    if the tick labels are numbers.
    """
    places = axis.get_ticklocs()
    texts = axis.get_major_formatter().format_ticks(places)
    return {
        " ".join(text.split()): float(place)
        for place, text in zip(places, texts, strict=True)
        if not re.fullmatch(NUMBER, text)
    }


def _colour_of(artist: Any) -> str:
    """Returns the colour of a line, or of points with error bars. For other drawn objects, returns
    grey.
    """
    line = artist[0] if isinstance(artist, tuple) else artist
    if not hasattr(line, "get_color"):
        return GREY
    colour = line.get_color()
    return colour if isinstance(colour, str) else GREY
