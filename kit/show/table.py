"""Tables of results with caption and notes. A table is shown as HTML in a notebook, and as aligned
text in a terminal.
"""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Self

from kit.show.terminal import Table as TextTable


def notes_html(notes: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """Returns the HTML of warnings and notes below a figure or a table. Warnings are always
    visible. The notes are in an element that the reader can open.
    """
    seen = "".join(f"<div>⚠ {html.escape(text)}</div>" for text in warnings)
    if not notes:
        return seen
    items = "".join(f"<li>{html.escape(text)}</li>" for text in notes)
    return f"{seen}<details><summary>Sources and notes</summary><ul>{items}</ul></details>"


NUMBER = re.compile(r"[+-]?\d")
"""Pattern of the beginning of a cell that counts as a number. A column of such cells and empty
cells is aligned to the right."""
WORD = re.compile(r"[^\W\d_]{2,}")
MOST_WORDS = 2
"""Largest number of words in a cell that still counts as a number. For example, "41 GiB of 64" has
two words."""
LONG_TEXT = 60
"""Smallest number of characters of a long cell. The column of a long cell is at least LEAST_WIDTH
wide. Otherwise a browser narrows the column to its longest word, and the row becomes dozens of
lines high."""
LEAST_WIDTH = "16em"
"""Least width of a column with long cells, as a CSS length."""
CAPTION = "<div style='width:0'><div style='{}'>{}</div></div>"
"""HTML of a table's caption, with placeholders for the CSS of its width and its text. The caption
may be wider than its table and does not widen the table.

The inner element sets the width. With only `width:0`, each word of the caption would be on a
separate line. The unit `ch` and the value `max-content` are not used, since JupyterLab removes them
from the styles of a notebook that it does not trust."""
LONG_CAPTION = 70
"""Number of characters above which a caption is broken into lines."""


class Table(TextTable):
    """Rows shown as an HTML table in a notebook, and as aligned text in a terminal.

    Integers get thousands separators.

    Attributes:
        notes: sentences about sources and precision, shown below the table.
        runs: names of the user's runs that the table contains.
        left_out: sentences that name what is missing from the table, with the reason.
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

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Iterable[Any]], caption: str = "", notes: Sequence[str] = ()
    ) -> Self:
        """Returns a table from its columns. `columns` maps the name of each column to its cells,
        e.g. a list or an array with one element per row.

        Raises:
            ValueError: The columns differ in length.
        """
        cells = zip(*columns.values(), strict=True)
        return cls([dict(zip(columns, row, strict=True)) for row in cells], caption, notes)

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
    """Returns the CSS of a column with these cells. A column of numbers is aligned to the right. A
    column with a long cell has a least width.
    """
    style = "text-align:left"
    if all(_is_number(cell) for cell in cells):
        style = "text-align:right"
    if max(map(len, cells)) >= LONG_TEXT:
        style = f"min-width:{LEAST_WIDTH};{style}"
    return style


def _is_number(cell: str) -> bool:
    """Returns whether a cell is empty, or begins with a number and has at most MOST_WORDS words."""
    if not cell:
        return True
    return bool(NUMBER.match(cell)) and len(WORD.findall(cell)) <= MOST_WORDS


def _html_cells(tag: str, cells: Sequence[str], styles: Sequence[str]) -> str:
    """Returns the HTML of the cells of one row. `tag` is "th" (heading) or "td" (data). `styles`
    has the CSS of each column.
    """
    pairs = zip(cells, styles, strict=True)
    return "".join(f"<{tag} style='{style}'>{html.escape(cell)}</{tag}>" for cell, style in pairs)


def _show(value: Any) -> str:
    """Returns the text of a cell for a value. None and NaN give an empty cell."""
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, Integral):
        return f"{value:,}"
    if isinstance(value, Real):
        return f"{value:.4g}"
    return str(value)
