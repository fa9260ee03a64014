"""A table from rows, with its caption and notes: HTML in a notebook, aligned text elsewhere."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kit.show.terminal import Table as TextTable
from kit.show.terminal import as_text


def notes_html(notes: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """Returns notes as HTML to open below a figure or a table, and above them warnings that are
    always seen.
    """
    seen = "".join(f"<div>⚠ {html.escape(text)}</div>" for text in warnings)
    if not notes:
        return seen
    items = "".join(f"<li>{html.escape(text)}</li>" for text in notes)
    return f"{seen}<details><summary>Sources and notes</summary><ul>{items}</ul></details>"


NUMERIC = ("", *"0123456789+-")
"""How the cells of a column of numbers begin."""


class Table:
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
        self.rows, self.caption, self.notes = rows, caption, tuple(notes)
        self.columns = list(dict.fromkeys(name for row in rows for name in row))
        self.cells = [[_show(row.get(column)) for column in self.columns] for row in rows]
        self.runs = frozenset(runs)
        self.left_out: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        sides = [
            "right" if all(cell[:1] in NUMERIC for cell in column) else "left"
            for column in zip(*self.cells, strict=True)
        ]
        body = "".join(f"<tr>{_html_cells('td', cells, sides)}</tr>" for cells in self.cells)
        caption = f"<caption style='text-align:left'>{html.escape(self.caption)}</caption>"
        head = f"<thead><tr>{_html_cells('th', self.columns, sides)}</tr></thead>"
        table = f"<table>{caption if self.caption else ''}{head}<tbody>{body}</tbody></table>"
        return table + notes_html(self.notes, self.left_out)

    def __repr__(self) -> str:
        return as_text(TextTable(*self.columns, rows=self.cells, title=self.caption))


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
