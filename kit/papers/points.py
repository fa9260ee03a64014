"""A paper's own points, read off its figure by a reader who has the PDF, drawn hollow into ours."""

import csv
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from cluster.record import ConfigError, suggestion
from kit.papers.layers import Layer, Rows, table
from kit.show.theme import GREY

COLUMNS = ("series", "x", "y", "source")
DIGITISED = "digitised by the reader"
BEYOND = 1.0
"""Lengths of an axis that a point may lie outside of what is drawn; further out its unit is
another."""
TEMPLATE = """\
# {name}: fill in points as you read them, any number of lines a series; delete the series you have not.
{units}
# source: where you read it, such as "Figure 12 of version 2, page 9, by WebPlotDigitizer"
series,x,y,source
{series}
"""  # noqa: E501
NUMBER = r"\$.*|[\d.,e+−-]*"
"""Of a tick; any other text there names a place, such as a model."""


class Series(NamedTuple):
    """One series of a figure: its panel, its label there, and the artist that draws it; an empty
    panel has one of its title.
    """

    panel: Any
    label: str
    artist: Any = None


def series_of(figure: Any) -> dict[str, Series]:
    """Returns the series of a figure that points can be added to, by the name that a file gives
    them.

    That is the label in the legend; where there are several panels, after the title of its own, and
    the title alone where the panel has one series or none.
    """
    names = {}
    for panel in figure.axes:
        title, (artists, labels) = panel.get_title(loc="left"), panel.get_legend_handles_labels()
        for artist, label in zip(artists, labels, strict=True):
            in_panel = title if len(labels) == 1 else f"{title}: {label}"
            names[in_panel if figure.axes[1:] else label] = Series(panel, label, artist)
        if title and not labels:
            names[title] = Series(panel, title)
    return names


def template(name: str, figure: Any) -> str:
    """Returns a file to fill in for a figure: its columns, units and series."""
    found = series_of(figure)
    panels = [series.panel for series in found.values()]
    units = [f"# x: {_unit(panel.xaxis)}; y: {_unit(panel.yaxis)}" for panel in panels]
    lines = [f'"{each}",,,' if "," in each else f"{each},,," for each in found]
    return TEMPLATE.format(
        name=name, units="\n".join(dict.fromkeys(units)), series="\n".join(lines)
    )


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
    reader = csv.DictReader((line for line in lines if line.strip() and line[0] != "#"), restval="")
    if sorted(reader.fieldnames or ()) != sorted(COLUMNS):
        raise ConfigError(
            f"--points {file}: columns {reader.fieldnames} are not allowed. Expected:"
            f" {','.join(COLUMNS)}."
        )
    points: dict[str, list[tuple[float, float, str]]] = {}
    try:
        rows = list(reader)
    except csv.Error as error:
        raise ConfigError(f"--points {file}: cannot be read as CSV: {error}.") from error
    for row in rows:
        name, x, y, source = (row[column].strip() for column in COLUMNS)
        where = f"--points {file}, {name},{x},{y}"
        if name not in known:
            raise ConfigError(f"{where}: series {name!r} is unknown. {suggestion(name, known)}")
        if not source:
            raise ConfigError(f"{where}: no source. Say where it was read: figure, page, by what.")
        panel = known[name].panel
        place = (_place(panel.xaxis, x, where), _place(panel.yaxis, y, where))
        points.setdefault(name, []).append((*place, source))
    if not points:
        raise ConfigError(f"--points {file}: no points. Fill in lines below the columns.")
    return {name: _layer(name, found) for name, found in points.items()}


def _place(axis: Any, text: str, where: str) -> float:
    """Returns where a number or a name lies on an axis; raises ConfigError where it is neither."""
    names = _names(axis)
    log = axis.get_scale() == "log"
    by_name = names and not log
    try:
        value = names[text] if by_name or text in names else float(text)
    except (KeyError, ValueError):
        value = math.nan
    if not math.isfinite(value) or (log and value <= 0):
        number = f"Give a number alone, in the unit of: {_unit(axis)}."
        allowed = f"Allowed: {', '.join(names)}." if by_name else number
        raise ConfigError(f"{where}: {axis.axis_name}: {text!r} is not allowed. {allowed}")
    _check_unit(axis, value, f"{where}: {axis.axis_name}: {text}")
    return value


def _check_unit(axis: Any, value: float, what: str) -> None:
    """Raises ConfigError where a number must be in another unit than its axis: it is far from what
    is drawn, or a fraction of a per cent.
    """
    first, last = sorted(axis.get_view_interval())
    scale = math.log if axis.get_scale() == "log" else float
    low = scale(first)
    high = scale(last)
    place = scale(value)
    advice = f"Give a number in the unit of: {_unit(axis)}."
    if not low - BEYOND * (high - low) <= place <= high + BEYOND * (high - low):
        raise ConfigError(f"{what} is far from what is drawn ({first:.3g} to {last:.3g}). {advice}")
    if axis.axis_name == "y" and "%" in _unit(axis) and 0 < value <= 1 < last / 10:
        raise ConfigError(f"{what} of an axis in per cent looks like a fraction. {advice}")


def add_points(figure: Any, rows: Rows, file: Path) -> Rows:
    """Draws the points of a file into a figure, names them in its legends and notes, and returns
    rows with theirs.
    """
    known = series_of(figure)
    layers = read_points(file, known)
    for name, layer in layers.items():
        panel, label, artist = known[name]
        alone = sum(other.panel is panel for other in known.values()) == 1
        [line] = panel.plot(
            layer.x,
            layer.y,
            "X",
            color=_colour(artist),
            markerfacecolor="white",
            markersize=7,
            markeredgewidth=1.3,
            zorder=6,
            label=DIGITISED if alone else f"{label},\n{DIGITISED}",
            clip_on=False,
        )
        panel.xaxis.set_view_interval(layer.x.min(), layer.x.max())  # reaches to them, at least
        panel.yaxis.set_view_interval(layer.y.min(), layer.y.max())
        shown = [line] if panel.get_legend() is None else None
        panel.legend(handles=shown, loc="best", fontsize="small")
    said = "; ".join(f"{name}: {layer.source}" for name, layer in layers.items())
    figure.notes = (*figure.notes, f"{DIGITISED.capitalize()} ({said}).")
    return [*rows, *(row | {"layer": "digitised"} for row in table(layers.values()))]


def _layer(name: str, points: list[tuple[float, float, str]]) -> Layer:
    x, y, sources = zip(*sorted(points), strict=True)
    return Layer(kind="published", label=name, x=x, y=y, source="; ".join(dict.fromkeys(sources)))


def _unit(axis: Any) -> str:
    """Returns what an axis shows, as its panel says it."""
    title = axis.axes.get_title(loc="left")
    names = ", ".join(_names(axis))
    return axis.get_label_text() or (title if axis.axis_name == "y" else names or "as at its ticks")


def _names(axis: Any) -> dict[str, float]:
    """Returns the places of the words at an axis, such as models; none where it has numbers."""
    places = axis.get_ticklocs()
    texts = axis.get_major_formatter().format_ticks(places)
    return {
        " ".join(text.split()): float(place)
        for place, text in zip(places, texts, strict=True)
        if not re.fullmatch(NUMBER, text)
    }


def _colour(artist: Any) -> str:
    line = artist[0] if isinstance(artist, tuple) else artist
    colour = getattr(line, "get_color", lambda: GREY)()
    return colour if isinstance(colour, str) else GREY
