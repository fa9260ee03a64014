"""The few things that only notebooks need: the scale check, a fresh run directory, a table from rows."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.record import ConfigError, suggestion
from kit.data.dataset import DESCRIPTION, Dataset

SCALES = ("demo", "cluster")
NOT_YET = (
    "SCALE: 'cluster' is not in this version: the sizes in the notebooks are for this machine. The same calls run on a "
    'cluster: write a site file with a line base = "frontier" and your account, then kit.launch(..., '
    "site='mine.toml') as in 03_launch_jobs, with a model and a plan from 02_choose_parallelism. Here set "
    "SCALE = 'demo'."
)


def check_scale(scale: str) -> str:
    """Returns one line that says what numbers at this scale are worth, to be shown at the top of a notebook.

    Raises:
        ConfigError: the scale is unknown, or this version cannot run it.
    """
    if scale not in SCALES:
        raise ConfigError(f"SCALE: {scale!r} is unknown. {suggestion(str(scale), SCALES)}")
    if scale == "cluster":
        raise ConfigError(NOT_YET)
    return "Demo scale: real processes and real training on this machine's CPU cores. Only the sizes are small."


def demo_dataset(directory: str | Path) -> Dataset:
    """Returns the dataset in a folder; where there is none, it is built first, from the text of this installation.

    What is there is kept although that text changes with every package that is installed: the demo wants any text, and
    `dataset.json` says which it was.

    Raises:
        DataError: the folder holds something else, or a damaged dataset.
    """
    if (Path(directory) / DESCRIPTION).exists():
        return Dataset.open(directory)
    from kit.data import build_dataset

    return build_dataset(directory, progress=False)


def new_run_directory(parent: str | Path, name: str) -> Path:
    """Makes and returns a new NAME-001, NAME-002, ... in `parent`; two callers never get the same."""
    parent = Path(parent)
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(found.name[len(name) + 1 :]) for found in parent.glob(f"{name}-[0-9][0-9][0-9]")]
    number = max(taken, default=0)
    while True:
        number += 1
        directory = parent / f"{name}-{number:03d}"
        try:
            directory.mkdir()
            return directory
        except FileExistsError:
            continue


class Table:
    """Rows shown as a table in a notebook, and as aligned text elsewhere. Whole numbers get thousands separators."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], caption: str = "") -> None:
        self.rows, self.caption = rows, caption
        self.columns = list(rows[0]) if rows else []
        self.cells = [[_show(row[column]) for column in self.columns] for row in rows]

    def _repr_html_(self) -> str:
        numbers = [any(isinstance(row[column], int | float) for row in self.rows) for column in self.columns]
        sides = ["right" if number else "left" for number in numbers]
        body = "".join(f"<tr>{_html_cells('td', cells, sides)}</tr>" for cells in self.cells)
        caption = f"<caption>{html.escape(self.caption)}</caption>"
        head = _html_cells("th", self.columns, sides)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        lines = [self.columns, *self.cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.caption, *text]).strip()


def _html_cells(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    pairs = zip(cells, sides, strict=True)
    return "".join(f"<{tag} style='text-align:{side}'>{html.escape(cell)}</{tag}>" for cell, side in pairs)


def _show(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
