"""A console for text of unknown origin, and the one table of the command line, which never cuts a
name or a number.

Names, reasons and log lines are shown, and never obeyed by the terminal. What does not go to a
terminal is not wrapped.
"""

import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
"""ASCII control characters, each with its picture, so that an escape sequence is seen and does
nothing. A carriage return is one: what follows it would hide the beginning of the line."""
OTHERS = (
    0x7F,
    *range(0x80, 0xA0),
    0x061C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
"""Further control characters, separators of lines, characters that change the direction of writing,
and halves of surrogate pairs, which no terminal takes."""
VISIBLE = CONTROLS | dict.fromkeys(OTHERS, 0xFFFD)


def plain(text: str) -> str:
    """Returns a text whose control characters, other than newlines and tabs, are replaced by
    visible ones.
    """
    return text.translate(VISIBLE)


STYLE_CODE = re.compile(r"(\x1b\[[\d;]*m)")
"""Escape sequence of a colour or a style."""


class PlainStream:
    """Standard output or standard error of a command. What is written passes through `plain`, by
    whichever library it is written. Carriage returns and styles remain on a terminal, for progress
    bars and coloured errors.

    PlainConsole writes to the stream itself, `unfiltered`, since its texts are plain already.
    """

    def __init__(self, stream: Any) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        if not self.unfiltered.isatty():
            return self.unfiltered.write(plain(text))
        # Every second part is a style.
        parts = STYLE_CODE.split(text)
        kept = {**VISIBLE, ord("\r"): "\r"}
        parts[::2] = [part.translate(kept) for part in parts[::2]]
        return self.unfiltered.write("".join(parts))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def plain_streams() -> Iterator[None]:
    """Filters standard output and standard error within the block. See PlainStream."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    filters = {name: PlainStream(stream) for name, stream in before.items()}
    for name, stream in filters.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in filters.items():
            # Typer replaces the stream after a closed pipe.
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


GAP = "  "
UNLIMITED = 100_000
"""Characters in a line of a file or a pipe."""
PICTURE = 80
"""Characters in the width of a curve that goes to a file or a pipe."""
APART_S = 30.0
"""Seconds between two views of `keep_drawing` in a file or a pipe."""
HUGE = 1e6
"""Smallest number with fixed decimals that is written with an exponent."""


def number(value: float | None, form: str) -> str:
    """Formats a number.

    With a fixed number of decimals, numbers from 1e6 on have an exponent. None is a dash.
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if form in (".2f", ".3f", ".4f") and abs(value) >= HUGE:
        form = ".3e"
    return f"{value:{form}}"


def clock(when: float, form: str = "%H:%M:%S") -> str:
    """Returns a unix time as this machine's clock shows it; a question mark where it is no time."""
    try:
        return time.strftime(form, time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "?"


def as_text(*parts: RenderableType) -> str:
    """Returns what the terminal would show, without colours: lines of its width, or whole where
    there is none.
    """
    console = PlainConsole(color_system=None, force_jupyter=False)
    with console.capture() as shown:
        for part in parts:
            if isinstance(part, str):
                part = Text(part)
            console.print(part)
    return shown.get().removesuffix("\n")


class PlainConsole(Console):
    """A console that colours nothing by itself, knows no markup, and prints no control
    characters but its own.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = UNLIMITED

    @property
    def file(self) -> Any:
        """Stream that is written to. A PlainStream is passed by: it would remove the styles."""
        stream = Console.file.fget(self)  # pyright: ignore[reportOptionalCall]
        return getattr(stream, "unfiltered", stream)

    @file.setter
    def file(self, stream: Any) -> None:
        Console.file.fset(self, stream)  # pyright: ignore[reportOptionalCall]

    @property
    def picture_width(self) -> int:
        """Characters that a curve may take."""
        return PICTURE if self.width == UNLIMITED else self.width

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Yields the pieces of something printed, their text made plain."""
        for segment in super().render(*args, **options):
            if segment.control:
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


def keep_drawing(
    view: Callable[[], RenderableType],
    console: Console,
    *,
    every_s: float,
    over: Callable[[], bool],
) -> None:
    """Draws a view again and again in its place until it is over, or the user presses Ctrl-C.

    A file or a pipe cannot be drawn over: it gets the first view, one in `APART_S` seconds, and the
    last.
    """
    drawn_over = console.is_terminal or console.is_jupyter
    screen: contextlib.AbstractContextManager = contextlib.nullcontext()
    if drawn_over:
        screen = Live(console=console, auto_refresh=False)
    printed = -math.inf
    with contextlib.suppress(KeyboardInterrupt), screen as live:
        while True:
            drawn = view()
            ended = over()
            if live:
                live.update(drawn, refresh=True)
            elif ended or time.monotonic() - printed >= APART_S:
                console.print(drawn)
                printed = time.monotonic()
            if ended:
                return
            time.sleep(every_s)


class Table:
    """Rows under named columns, each cell whole: a table as wide as its cells; in a terminal too
    narrow for that, texts are folded between words, and where words alone are too wide, each row
    becomes a few lines of `name value`.

    Args:
        columns: their names; "" for a column that explains itself.
        rows: cells of each, plain words or styled texts; brackets are no markup.
        right: names of those that are aligned right, and never folded.
        title: a line above.
    """

    def __init__(
        self,
        *columns: str,
        rows: Iterable[Iterable[str | Text]] = (),
        right: Iterable[str] = (),
        title: str = "",
    ) -> None:
        self.columns = columns
        self.right = frozenset(right)
        self.title = title
        self.cells: list[list[Text]] = []
        for cells in rows:
            self.add(*cells)

    def add(self, *cells: str | Text) -> None:
        """Adds a row."""
        self.cells.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __repr__(self) -> str:
        return as_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold")
        table = RichTable(
            box=None,
            pad_edge=False,
            header_style="dim",
            show_header=any(self.columns),
            padding=(0, 1),
        )
        least = len(GAP) * (len(self.columns) - 1)
        for i, name in enumerate(self.columns):
            whole = name in self.right
            parts = []
            for text in (name, *(cells[i].plain for cells in self.cells)):
                parts += text.splitlines() if whole else text.split()
            width = max(map(cell_len, parts), default=0)
            least += width
            table.add_column(
                Text(name),
                justify="right" if whole else "left",
                no_wrap=whole,
                overflow="fold",
                min_width=width,
            )
        for cells in self.cells:
            table.add_row(*cells)
        if least <= options.max_width:
            for line in console.render_lines(table, options, pad=False):
                text = Text.assemble(*((part.text, part.style or "") for part in line))
                text.rstrip()
                yield text
        else:
            yield from self._stacked(options.max_width)

    def _stacked(self, width: int) -> Iterator[Text]:
        """Yields each row as its first cell, then its others after their names, as many in a
        line as fit.
        """
        for cells in self.cells:
            line = Text(overflow="fold")
            for name, cell in zip(self.columns, cells, strict=True):
                prefix = f"{name} " if name else ""
                pair = Text.assemble((prefix, "dim"), cell)
                if line.plain.strip() and line.cell_len + len(GAP) + pair.cell_len > width:
                    yield line
                    line = Text("  ", overflow="fold")
                if not cell.plain:
                    continue
                if line.plain.strip():
                    line.append(GAP)
                line.append_text(pair)
            yield line
