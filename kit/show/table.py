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
LONG_TEXT = 60
"""Characters of a cell from which its column gets a least width. Without it, a page narrows the
column to its longest word and the row grows to dozens of lines."""
LEAST_WIDTH = "16em"
CAPTION = "<div style='width:0'><div style='{}'>{}</div></div>"
"""A caption that may be wider than its table and does not widen it.

JupyterLab removes the unit `ch` and the value `max-content` from the styles of a notebook that it
does not trust. With `width:0` alone, each word of the caption would be a line."""
LONG_CAPTION = 70
"""Characters of a caption from which it is broken into lines."""


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
        self.rows = rows
        self.caption = caption
        self.notes = tuple(notes)
        self.runs = frozenset(runs)
        self.left_out: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        rows = [[cell.plain for cell in cells] for cells in self.cells]
        styles = [_column_style(column) for column in zip(*rows, strict=True)]
        caption = ""
        if self.title:
            width = "width:44em" if len(self.title) > LONG_CAPTION else "white-space:nowrap"
            title = CAPTION.format(width, html.escape(self.title))
            caption = f"<caption style='text-align:left'>{title}</caption>"
        head = f"<thead><tr>{_html_cells('th', self.columns, styles)}</tr></thead>"
        body = "".join(f"<tr>{_html_cells('td', cells, styles)}</tr>" for cells in rows)
        table = f"<table>{caption}{head}<tbody>{body}</tbody></table>"
        return table + notes_html(self.notes, self.left_out)


def _column_style(cells: Sequence[str]) -> str:
    """Returns the CSS of a column with these cells: numbers are aligned right, and a column of long
    texts has a least width.
    """
    style = "text-align:left"
    if all(_is_number(cell) for cell in cells):
        style = "text-align:right"
    if max(map(len, cells)) >= LONG_TEXT:
        style = f"min-width:{LEAST_WIDTH};{style}"
    return style


def _is_number(cell: str) -> bool:
    """Returns whether a cell is empty, or a number with few words."""
    if not cell:
        return True
    return bool(NUMBER.match(cell)) and len(WORD.findall(cell)) <= MOST_WORDS


def _html_cells(tag: str, cells: Sequence[str], styles: Sequence[str]) -> str:
    pairs = zip(cells, styles, strict=True)
    return "".join(f"<{tag} style='{style}'>{html.escape(cell)}</{tag}>" for cell, style in pairs)


def _show(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
