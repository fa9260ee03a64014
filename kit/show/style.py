"""A new figure in the style of all, and how it becomes a file."""

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
PICTURES = (".png", ".svg", ".pdf")
FORMULA_STARTS = tuple("=+-@\t\r")
"""First characters of a CSV cell that a spreadsheet executes as a formula."""
Rows = list[dict[str, Any]]
"""The table of a figure."""


@contextlib.contextmanager
def new_figure(
    rows: int | str = 1, columns: int = 1, *, height: float, **layout: Any
) -> Iterator[tuple[Any, Any]]:
    """Gives (figure, axes) of a new figure; what is drawn in the block has the kit's style.

    Args:
        rows: of panels, or a mosaic such as "ab;cc": two panels above a wide one, `axes` being the
            list of all three.
        columns: of panels; more than two leave little room for text that can be read.
        height: of the figure in inches; its width is always the same.
        layout: of matplotlib's `subplots`, such as `sharex` or `width_ratios`.
    """
    from kit.show.themed_figure import ThemedFigure, drawing_settings

    with drawing_settings(STYLE):
        figure = ThemedFigure(figsize=(WIDTH, height))
        if isinstance(rows, str):
            yield figure, list(figure.subplot_mosaic(rows, **layout).values())
        else:
            yield figure, figure.subplots(rows, columns, **layout)


def legend_under_title(axis: Any, columns: int = 2) -> None:
    """Puts the legend of a panel between its title and the panel, where it covers no data."""
    names = axis.get_legend_handles_labels()[1]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0.2}
    axis.legend(ncols=columns, **place)
    axis.set_title(axis.get_title(loc="left"), pad=8 + 1.5 * TEXT * math.ceil(len(names) / columns))


def short(name: str, room: int = 30) -> str:
    """Returns a name as a legend takes it: without the middle of a long one, since the ends of
    names tell them apart.

    An underscore at its beginning, which would hide it from the legend, gets a space before it.
    """
    if name.startswith("_"):
        name = f" {name}"
    if len(name) <= room:
        return name
    return f"{name[: room // 2 - 1]}…{name[-(room // 2) :]}"


def check_picture(file: Path) -> Path:
    """Returns the name of a picture that can be written, so that this is known before it is drawn.

    Raises:
        ConfigError: its ending is none of PICTURES, it is a folder, or a file stands in its way.
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
    """Writes a figure to files, by their ending (.svg, .png, .pdf), and its table to those that end
    in .csv.

    Missing folders are made. Each file is replaced in one step. A symbolic link is replaced too,
    so its target keeps its content. The same figure gives the same bytes: no date, and names inside
    an SVG follow from what is drawn.
    """
    from kit.show.themed_figure import drawing_settings

    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            _write_table(rows, path)
            continue
        date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        # How text and names are written is looked up here, not when it is drawn.
        with drawing_settings(STYLE), replacement(path) as stream:
            figure.savefig(stream, format=path.suffix[1:].lower(), metadata=date)


def plain_cell(text: str) -> str:
    """Returns a text of a CSV cell without control characters, and with an apostrophe before it if
    a spreadsheet would otherwise execute it as a formula. A run's folder may have any name.
    """
    shown = plain(text)
    if text[:1] in FORMULA_STARTS:
        return f"'{shown}"
    return shown


def _write_table(rows: Rows, path: Path) -> None:
    """Writes rows whose keys may differ; what is not known, NaN or absent, is an empty cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([plain_cell(name) for name in columns])
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    write_atomic(path, text.getvalue())


def _cell(value: Any) -> Any:
    """Returns the content of a CSV cell, with six digits for floats: further digits differ between
    machines.
    """
    if isinstance(value, str):
        return plain_cell(value)
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    return f"{value:.6g}"
