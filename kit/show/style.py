"""The look of every figure: its size, its colours on a light and on a dark page, and how it becomes a file."""

import contextlib
import csv
import html
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from kit.errors import ConfigError

WIDTH, PIXELS_PER_INCH = 6.25, 96
"""Inches, of every figure: 600 pixels of a page. Shown in 548 pixels, which is what JupyterLab's side bar leaves of a
window of 1,000, its smallest text is still as high as the page's own, 14 pixels."""
TEXT = 11.5
"""Points, of all text (as in `kit.mplstyle`): 14 pixels at 548."""
BLUE, VERMILION, GREEN, PURPLE, OLIVE = "#0072B2", "#B34D00", "#007A5A", "#9A4A78", "#8A7A00"
"""The Okabe-Ito hues, darkened until lines have a contrast of 4 on white. Written out where they are used, since a
cycle's C0, C1 are looked up when the figure is saved, outside its style."""
INK, GREY, SLATE, GRID, GROUND = "#222222", "#666666", "#555555", "#E6E6E6", "#FFFFFF"
MUTED = "color:var(--jp-ui-font-color2,gray)"
"""Of less important words on a page: its theme's own."""
HUES = (BLUE, VERMILION, GREEN, PURPLE)
CHOICES = ("#1F83C6", "#C66A14")
"""Ends of a scale whose colours are all seen on light and on dark pages."""
DARK = {
    light.lower(): dark
    for light, dark in {
        BLUE: "#56B4E9", VERMILION: "#FF9A52", GREEN: "#2BCB9A", PURPLE: "#E08FC0", OLIVE: "#D9C64A",
        INK: "#E4E4E4", "#444444": "#C8C8C8", SLATE: "#B4B4B4", GREY: "#A6A6A6", GRID: "#333333", GROUND: "#111111",
        "#56A0D3": "#3C7FAE", "#A9CBE6": "#27506E", "#5E7F99": "#7F9DB5", "#B8C4CC": "#47525A",
        "#D27A3C": "#D67F3E", "#E39A63": "#A66230", "#F0C39C": "#754722", "#CC97B6": "#9A5F85",
        "#6DBFA4": "#1F8A69", "#BFBFBF": "#5C5C5C", "#ECECEC": "#2A2A2A",
    }.items()
}  # fmt: skip
"""Each colour of a figure on a dark page; what is paler on white is nearer to the dark ground."""
STYLE = str(files("kit.show") / "kit.mplstyle")
Rows = list[dict[str, Any]]
"""The table of a figure."""


@contextlib.contextmanager
def new_figure(rows: int | str = 1, columns: int = 1, *, height: float, **layout: Any) -> Iterator[tuple[Any, Any]]:
    """Gives (figure, axes) of a new figure; what is drawn in the block has the kit's style.

    Args:
        rows: of panels, or a mosaic such as "ab;cc": two panels above a wide one, `axes` being the list of all three.
        columns: of panels; more than two leave little room for text that can be read.
        height: of the figure in inches; its width is always the same.
        layout: of matplotlib's `subplots`, such as `sharex` or `width_ratios`.
    """
    from matplotlib import style

    from kit.show.themed_figure import ThemedFigure

    with style.context(STYLE):
        figure = ThemedFigure(figsize=(WIDTH, height))
        if isinstance(rows, str):
            yield figure, list(figure.subplot_mosaic(rows, **layout).values())
        else:
            yield figure, figure.subplots(rows, columns, **layout)


def short(name: str, room: int = 30) -> str:
    """Returns a name as a legend takes it: without the middle of a long one, since the ends of names tell them apart.

    An underscore at its beginning, which would hide it from the legend, gets a space before it.
    """
    name = f" {name}" if name.startswith("_") else name
    return name if len(name) <= room else f"{name[: room // 2 - 1]}…{name[-(room // 2) :]}"


def notes_html(notes: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """Returns notes as HTML to open below a figure or a table, and above them warnings that are always seen."""
    seen = "".join(f"<div>⚠ {html.escape(text)}</div>" for text in warnings)
    if not notes:
        return seen
    items = "".join(f"<li>{html.escape(text)}</li>" for text in notes)
    return f"{seen}<details><summary>Sources and notes</summary><ul>{items}</ul></details>"


PICTURES = (".png", ".svg", ".pdf")


def check_picture(file: Path) -> Path:
    """Returns the name of a picture that can be written, so that this is known before it is drawn.

    Raises:
        ConfigError: its ending is none of PICTURES, it is a folder, or a file stands in its way.
    """
    if file.suffix.lower() not in PICTURES:
        named = file.suffix or "no ending"
        raise ConfigError(f"{file}: {named} is no format of a picture. Allowed: {', '.join(PICTURES)}.")
    if file.is_dir() or not next(folder for folder in file.absolute().parents if folder.exists()).is_dir():
        raise ConfigError(f"{file}: cannot be written. Give the name of a file, in a folder or a new one.")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def save_figure(figure: Any, rows: Rows, paths: Sequence[Path], *, dpi: int = 300) -> None:
    """Writes a figure to files, by their ending (.svg, .png, .pdf), and its table to those that end in .csv.

    The same figure gives the same bytes: no date, and names inside an SVG follow from what is drawn.

    Args:
        figure: of matplotlib.
        rows: its table.
        paths: their folders are made; what is there is replaced.
        dpi: of what has pixels.
    """
    from matplotlib import style

    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            _write_table(rows, path)
            continue
        date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        with style.context(STYLE):  # how text and names are written is looked up here, not when it is drawn
            figure.savefig(path, dpi=dpi, metadata=date)


def _write_table(rows: Rows, path: Path) -> None:
    """Writes rows whose keys may differ; what is not known, NaN or absent, is an empty cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)


def _cell(value: Any) -> Any:
    if isinstance(value, float):  # six digits: the last ones differ between machines
        return "" if math.isnan(value) else f"{value:.6g}"
    return value
