"""A paper's own points, read off its figure by a reader who has the PDF, drawn hollow into ours."""

import csv
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

from cluster.record import ConfigError, suggestion
from kit.papers.layers import Layer, Rows, table
from kit.show.theme import GREY

COLUMNS = ("series", "x", "y", "source")
DIGITISED = "digitised by the reader"
EXAMPLE = "Figure 12 of version 2, page 9, by WebPlotDigitizer"
BEYOND = 1.0
"""Lengths of an axis that a point may lie outside of what is drawn; further out its unit is
another."""


class Series(NamedTuple):
    """One series of a figure: its panel, its label there, and the artist that draws it.

    A panel without any has one, of its title and no artist.
    """

    panel: Any
    label: str
    artist: Any

    def unit(self, side: str) -> str:
        """Returns what an axis shows, as the panel says it."""
        axis = self.axis(side)
        title = self.panel.get_title(loc="left")
        words = ", ".join(_names(axis)) or "as at its ticks"
        return axis.get_label_text() or (title if side == "y" else words)

    def axis(self, side: str) -> Any:
        """Returns the axis of x or y."""
        return self.panel.xaxis if side == "x" else self.panel.yaxis

    def example(self, side: str) -> str:
        """Returns a place inside the panel, as a file would state it."""
        axis = self.axis(side)
        numbers = [*axis.get_ticklocs(), axis.get_view_interval()[0]]
        places = [*_names(axis)] or [f"{number:g}" for number in numbers]
        return places[len(places) // 2]

    def number(self, side: str, text: str) -> float:
        """Returns where a number or a name lies on one axis.

        Raises:
            ConfigError: it is neither, or so far outside that it must be in another unit.
        """
        axis, unit = self.axis(side), self.unit(side)
        names, log = _names(axis), axis.get_scale() == "log"
        only_names = bool(names) and not log
        allowed = (
            f"Allowed: {', '.join(names)}."
            if only_names
            else f"Give a number alone, in the unit of: {unit}."
        )
        value = names.get(text, math.nan if only_names else _float(text))
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
            names[title] = Series(panel, title, None)
    return names


def template(name: str, figure: Any) -> str:
    """Returns a file to fill in for a figure: its columns, units and series, and an example."""
    found = series_of(figure)
    units = dict.fromkeys(
        f"# x: {series.unit('x')}; y: {series.unit('y')}" for series in found.values()
    )
    first, series = next(iter(found.items()))
    head = [
        (
            f"# {name}: fill in points as you read them, any number of lines a series; delete the"
            " series you have not."
        ),
        *units,
        f"# such as: {_line(first, series.example('x'), series.example('y'), EXAMPLE)}",
    ]
    return "\n".join([*head, _line(*COLUMNS), *(_line(each, "", "", "") for each in found), ""])


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
    filled = [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and line[0] != "#"
    ]
    reader = csv.DictReader((line for _, line in filled), restval="")
    if sorted(reader.fieldnames or ()) != sorted(COLUMNS):
        raise ConfigError(
            f"--points {file}: columns {reader.fieldnames} are not allowed. Expected:"
            f" {','.join(COLUMNS)}."
        )
    points: dict[str, list[tuple[float, float, str]]] = {}
    for (number, _), row in zip(filled[1:], reader, strict=False):
        try:
            point = _point(row, known)
        except ConfigError as error:
            raise ConfigError(f"--points {file}, line {number}, {error}") from error
        points.setdefault(row["series"].strip(), []).append(point)
    if not points:
        raise ConfigError(f"--points {file}: no points. Fill in lines below the columns.")
    return {name: _layer(name, found) for name, found in points.items()}


def _point(row: dict[str, str], known: dict[str, Series]) -> tuple[float, float, str]:
    """Returns x, y and source of a line.

    Raises:
        ConfigError: one of its cells cannot be used.
    """
    name, x, y, source = (row[column].strip() for column in COLUMNS)
    if name not in known:
        raise ConfigError(f"series {name!r} is unknown. {suggestion(name, known)}")
    if not source:
        raise ConfigError("source '' is not allowed. Say where it was read: figure, page, by what.")
    return known[name].number("x", x), known[name].number("y", y), source


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


def _names(axis: Any) -> dict[str, float]:
    """Returns the places of the words at an axis, such as models; none where it has numbers."""
    places = axis.get_ticklocs()
    texts = axis.get_major_formatter().format_ticks(places)
    return {
        " ".join(text.split()): float(place)
        for place, text in zip(places, texts, strict=True)
        if text and text[0] != "$" and math.isnan(_float(text.replace(",", "").replace("−", "-")))
    }


def _float(text: str) -> float:
    """Returns a text as a number, NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _colour(artist: Any) -> str:
    line = artist[0] if isinstance(artist, tuple) else artist
    colour = getattr(line, "get_color", lambda: GREY)()
    return colour if isinstance(colour, str) else GREY


def _line(*cells: str) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="").writerow(cells)
    return stream.getvalue()
