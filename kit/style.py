"""The look of every figure, its colours, and how a figure and its table become files."""

import contextlib
import csv
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from kit.errors import ConfigError

BLUE, VERMILION, GREEN, PURPLE, GREY = "#0072B2", "#B34D00", "#007A5A", "#9A4A78", "#666666"
"""The Okabe-Ito hues, darkened until lines have a contrast of 5 on white. Written out where they are used, since a
cycle's C0, C1 are looked up when the figure is saved, outside its style."""
HUES = (BLUE, VERMILION, GREEN, PURPLE)
STYLE = str(files("kit") / "kit.mplstyle")
Rows = list[dict[str, Any]]
"""The table of a figure."""


@contextlib.contextmanager
def figure_style() -> Iterator[Any]:
    """Gives `matplotlib.pyplot` in the kit's style, and closes what was drawn: a cell shows it once, as its value."""
    from matplotlib import pyplot as plt

    before = set(plt.get_fignums())
    with plt.style.context(STYLE):
        try:
            yield plt
        finally:
            for number in set(plt.get_fignums()) - before:
                plt.close(number)


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
    from matplotlib import pyplot as plt

    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            _write_table(rows, path)
            continue
        date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
        with plt.style.context(STYLE):  # how text and names are written is looked up here, not when it is drawn
            figure.savefig(path, bbox_inches="tight", dpi=dpi, metadata=date)


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
