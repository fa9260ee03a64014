"""A table from rows, with its caption and notes: HTML in a notebook, aligned text elsewhere."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kit.show.terminal import Table as TextTable


def notes_html(notes: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """Returns notes as HTML to open below a figure or a table, and above them warnings that are
    always seen.
    """
    seen = "".join(f"<div>⚠ {html.escape(text)}</div>" for text in warnings)
    if not notes:
        return seen
    items = "".join(f"<li>{html.escape(text)}</li>" for text in notes)
    return f"{seen}<details><summary>Sources and notes</summary><ul>{items}</ul></details>"


NUMBER = re.compile(r"[+-]?\d")
"""How the cells of a column of numbers begin, unless they are empty."""
WORD = re.compile(r"[^\W\d_]{2,}")
MOST_WORDS = 2
"""Words in a cell of a column of numbers: "41 GiB of 64" has two. A cell with more is text."""


class Table(TextTable):
    """Rows shown as a table in a notebook, and as aligned text elsewhere.

    Whole numbers get thousands separators. `runs` are the reader's own runs in it, and `left_out`
    says what was given and is not.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        caption: str = "",
        notes: Sequence[str] = (),
        runs: Iterable[str] = (),
    ) -> None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = ([_show(row.get(name)) for name in names] for row in rows)
        super().__init__(*names, rows=cells, title=caption)
        self.rows, self.caption, self.notes = rows, caption, tuple(notes)
        self.runs = frozenset(runs)
        self.left_out: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        rows = [[cell.plain for cell in cells] for cells in self.cells]
        sides = [
            "right" if all(_is_number(cell) for cell in column) else "left"
            for column in zip(*rows, strict=True)
        ]
        body = "".join(f"<tr>{_html_cells('td', cells, sides)}</tr>" for cells in rows)
        caption = f"<caption style='text-align:left'>{html.escape(self.title)}</caption>"
        head = f"<thead><tr>{_html_cells('th', self.columns, sides)}</tr></thead>"
        table = f"<table>{caption if self.title else ''}{head}<tbody>{body}</tbody></table>"
        return table + notes_html(self.notes, self.left_out)


def _is_number(cell: str) -> bool:
    """Returns whether a cell is empty, or a number with few words."""
    return not cell or bool(NUMBER.match(cell)) and len(WORD.findall(cell)) <= MOST_WORDS


def _html_cells(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    pairs = zip(cells, sides, strict=True)
    return "".join(
        f"<{tag} style='text-align:{side}'>{html.escape(cell)}</{tag}>" for cell, side in pairs
    )


def _show(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
