"""Creates figures in the kit's style, and writes them to files."""

import contextlib
import csv
import io
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cluster.files import replace_atomically, write_atomic
from kit.errors import ConfigError
from kit.show.terminal import plain
from kit.show.theme import TEXT, WIDTH

STYLE = str(files("kit.show") / "kit.mplstyle")
"""Path of the kit's matplotlib style file."""
PICTURES = (".png", ".svg", ".pdf")
"""File name extensions of the image formats in which a figure can be saved."""
FORMULA_STARTS = tuple("=+-@\t\r")
"""First characters by which a spreadsheet recognises a CSV cell as a formula and executes it."""
Rows = list[dict[str, Any]]
"""Table of the data in a figure: one dictionary per row, from column name to value."""


@contextlib.contextmanager
def new_figure(
    rows: int | str = 1, columns: int = 1, *, height: float, **layout: Any
) -> Iterator[tuple[Any, Any]]:
    """Yields (figure, axes) of a new figure. Everything that is drawn within the `with` block has
    the kit's style.

    Args:
        rows: number of rows of panels, or a mosaic string. The mosaic "ab;cc" has two panels above
            a wide panel. For a mosaic, `axes` is a list of its panels.
        columns: number of columns of panels. With three or more columns, panels are too narrow for
            readable text.
        height: height of the figure in inches. The width is always WIDTH.
        layout: keyword arguments of matplotlib's `subplots` or `subplot_mosaic`, such as `sharex`
            or `width_ratios`.
    """
    from kit.show.themed_figure import ThemedFigure, drawing_settings

    with drawing_settings(STYLE):
        figure = ThemedFigure(figsize=(WIDTH, height))
        if isinstance(rows, str):
            yield figure, list(figure.subplot_mosaic(rows, **layout).values())
        else:
            yield figure, figure.subplots(rows, columns, **layout)


def legend_under_title(axis: Any, columns: int = 2) -> None:
    """Draws the legend of a panel between its title and its axes, where the legend covers
    no data.
    """
    names = axis.get_legend_handles_labels()[1]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0.2}
    axis.legend(ncols=columns, **place)
    axis.set_title(axis.get_title(loc="left"), pad=8 + 1.5 * TEXT * math.ceil(len(names) / columns))


def short(name: str, room: int = 30) -> str:
    """Returns a name for a legend, shortened to at most `room` characters. The middle of a longer
    name is replaced by `…`, since long names usually differ at their ends.

    If the name begins with an underscore, a space is added before it. Matplotlib does not show
    names that begin with an underscore in legends.
    """
    if name.startswith("_"):
        name = f" {name}"
    if len(name) <= room:
        return name
    return f"{name[: room // 2 - 1]}…{name[-(room // 2) :]}"


def check_picture(file: Path) -> Path:
    """Returns `file` if a figure can be saved as this file, and raises an error otherwise. Creates
    missing folders. It is called before a figure is drawn, so that the error comes early.

    Raises:
        ConfigError: The extension is not one of PICTURES, the path is a folder, or one of its
            parents is a file.
    """
    return check_output_file(file, PICTURES, "a format of pictures")


def check_output_file(file: Path, endings: Sequence[str], kind: str) -> Path:
    """Returns `file` if its extension is one of `endings` and the file can be written. Creates
    missing folders. `kind` says in the error what the endings are.

    Raises:
        ConfigError: The extension is another one, the path is a folder, or one of its parents is a
            file.
    """
    if file.suffix.lower() not in endings:
        raise ConfigError(
            f"{file}: {file.suffix or 'no ending'} is not {kind}. Allowed: {', '.join(endings)}."
        )
    parent = next(folder for folder in file.absolute().parents if folder.exists())
    if file.is_dir() or not parent.is_dir():
        reason = "it is a folder" if file.is_dir() else f"{parent} is a file, not a folder"
        raise ConfigError(
            f"{file} cannot be written: {reason}. Give the path of a file. Missing folders are"
            " created."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def save_figure(figure: Any, rows: Rows, paths: Sequence[Path]) -> None:
    """Writes a figure to the paths that end in .svg, .png or .pdf, and its table to the paths that
    end in .csv.

    Creates missing folders. Each file is replaced by an atomic rename. If the path is a symbolic
    link, the link is replaced and its target stays unchanged. Equal figures give equal bytes: the
    files contain no date, and the names inside an SVG are derived from its content.
    """
    from kit.show.themed_figure import drawing_settings

    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            _write_table(rows, path)
            continue
        date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        # Matplotlib reads some settings, for text and for names, only when it saves a figure.
        with drawing_settings(STYLE), replace_atomically(path) as stream:
            figure.savefig(stream, format=path.suffix[1:].lower(), metadata=date)


def plain_cell(text: str) -> str:
    """Returns a text in a form that is safe in a CSV cell. The text may be the name of a run's
    folder, which may contain any characters.

    Control characters are replaced by visible symbols. An apostrophe is put before a text that a
    spreadsheet would execute as a formula.
    """
    shown = plain(text)
    if text[:1] in FORMULA_STARTS:
        return f"'{shown}"
    return shown


def _write_table(rows: Rows, path: Path) -> None:
    """Writes rows to a CSV file. The rows may have different keys. The cell of a missing value or
    NaN is empty.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([plain_cell(name) for name in columns])
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    write_atomic(path, text.getvalue())


def _cell(value: Any) -> Any:
    """Returns the content of a CSV cell for a value. A float is written with six significant
    digits, since further digits differ between machines.
    """
    if isinstance(value, str):
        return plain_cell(value)
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    return f"{value:.6g}"
