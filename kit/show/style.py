"""New figures in the kit's style, and their files."""

import contextlib
import csv
import io
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cluster.files import replacement, write_atomic
from kit.errors import ConfigError
from kit.show.terminal import plain
from kit.show.theme import TEXT, WIDTH

STYLE = str(files("kit.show") / "kit.mplstyle")
"""Path of the kit's matplotlib style file."""
PICTURES = (".png", ".svg", ".pdf")
"""Endings of files to which a figure can be written."""
FORMULA_STARTS = tuple("=+-@\t\r")
"""First characters with which a spreadsheet takes a CSV cell for a formula."""
Rows = list[dict[str, Any]]
"""Table of a figure: one dictionary per row, by column."""


@contextlib.contextmanager
def new_figure(
    rows: int | str = 1, columns: int = 1, *, height: float, **layout: Any
) -> Iterator[tuple[Any, Any]]:
    """Yields (figure, axes) of a new figure. Everything that is drawn in the block has the kit's
    style.

    Args:
        rows: number of rows of panels, or a mosaic such as "ab;cc", which has two panels above a
            wide panel. `axes` of a mosaic is the list of its panels.
        columns: number of columns of panels. With more than two, a panel is too narrow for
            readable text.
        height: height of the figure in inches. The width is always WIDTH.
        layout: options of matplotlib's `subplots`, such as `sharex` or `width_ratios`.
    """
    from kit.show.themed_figure import ThemedFigure, drawing_settings

    with drawing_settings(STYLE):
        figure = ThemedFigure(figsize=(WIDTH, height))
        if isinstance(rows, str):
            yield figure, list(figure.subplot_mosaic(rows, **layout).values())
        else:
            yield figure, figure.subplots(rows, columns, **layout)


def legend_under_title(axis: Any, columns: int = 2) -> None:
    """Draws the legend of a panel between the title and the panel, where it covers no data."""
    names = axis.get_legend_handles_labels()[1]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0.2}
    axis.legend(ncols=columns, **place)
    axis.set_title(axis.get_title(loc="left"), pad=8 + 1.5 * TEXT * math.ceil(len(names) / columns))


def short(name: str, room: int = 30) -> str:
    """Returns a name for a legend, with at most `room` characters. A longer name loses its middle,
    since long names usually differ at their ends.

    A space is put before an underscore at the beginning, since matplotlib leaves names with a first
    underscore out of legends.
    """
    if name.startswith("_"):
        name = f" {name}"
    if len(name) <= room:
        return name
    return f"{name[: room // 2 - 1]}…{name[-(room // 2) :]}"


def check_picture(file: Path) -> Path:
    """Returns `file` after checking that a picture can be written to it. Creates missing folders.
    It is called before a figure is drawn, so that an error comes early.

    Raises:
        ConfigError: The ending is not one of PICTURES, the path is a folder, or one of its parents
            is a file.
    """
    if file.suffix.lower() not in PICTURES:
        raise ConfigError(
            f"{file}: {file.suffix or 'no ending'} is not a format of pictures."
            f" Allowed: {', '.join(PICTURES)}."
        )
    parent = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not parent.is_dir():
        raise ConfigError(
            f"{file}: cannot be written. Give the name of a file, in a folder or a new one."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def save_figure(figure: Any, rows: Rows, paths: Sequence[Path]) -> None:
    """Writes a figure to the paths that end in .svg, .png or .pdf, and its table to the paths that
    end in .csv.

    Missing folders are created. Each file is replaced by an atomic rename. A symbolic link is
    replaced too, so its target keeps its content. Equal figures give equal bytes: the files have no
    date, and the names inside an SVG are derived from its content.
    """
    from kit.show.themed_figure import drawing_settings

    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            _write_table(rows, path)
            continue
        date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        # Matplotlib reads the settings for text and names when it saves, not when it draws.
        with drawing_settings(STYLE), replacement(path) as stream:
            figure.savefig(stream, format=path.suffix[1:].lower(), metadata=date)


def plain_cell(text: str) -> str:
    """Returns a text that is safe in a CSV cell, since the folder of a run may have any name.

    Control characters are replaced. A text that a spreadsheet would execute as a formula gets an
    apostrophe before it.
    """
    shown = plain(text)
    if text[:1] in FORMULA_STARTS:
        return f"'{shown}"
    return shown


def _write_table(rows: Rows, path: Path) -> None:
    """Writes rows to a CSV file. Rows may have different keys. A missing value or NaN is an empty
    cell.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([plain_cell(name) for name in columns])
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    write_atomic(path, text.getvalue())


def _cell(value: Any) -> Any:
    """Returns the content of a CSV cell. A float has six significant digits, since further digits
    differ between machines.
    """
    if isinstance(value, str):
        return plain_cell(value)
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    return f"{value:.6g}"
