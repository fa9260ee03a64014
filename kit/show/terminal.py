"""A console for text of unknown origin, and the table of the command line, which never shortens a
name or a number.

Control characters in names, reasons and log lines are made visible, so that the terminal does not
execute them. Text for a file or a pipe is not wrapped.
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
"""Visible symbol for each ASCII control character, by code, so that an escape sequence is shown and
has no effect. Carriage returns are included: text after one would overwrite the beginning of its
line."""
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
"""Codes of further control characters, line separators and characters that change the writing
direction. Halves of surrogate pairs are included, since a terminal cannot show them."""
VISIBLE = CONTROLS | dict.fromkeys(OTHERS, 0xFFFD)
"""Code of the visible replacement, by code of each character that `plain` replaces."""


def plain(text: str) -> str:
    """Returns a text with visible symbols in place of its control characters. Newlines and tabs
    are kept.
    """
    return text.translate(VISIBLE)


STYLE_CODE = re.compile(r"(\x1b\[[\d;]*m)")
"""Pattern of the escape sequence of a colour or a style."""


class PlainStream:
    """Standard output or standard error of a command. All text passes through `plain`, whichever
    library writes it. On a terminal, carriage returns and styles are kept, for progress bars and
    coloured errors.

    PlainConsole writes to the attribute `unfiltered`, the original stream, since its texts have
    passed through `plain` already.
    """

    def __init__(self, stream: Any) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        if not self.unfiltered.isatty():
            return self.unfiltered.write(plain(text))
        # Every second part is an escape sequence of a style, which is kept.
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
            # After a closed pipe, Typer has set another stream, which must stay.
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


GAP = "  "
"""Space between two cells of a stacked row."""
UNLIMITED = 100_000
"""Width of a line in a file or a pipe, in characters, so that no line is wrapped."""
PICTURE = 80
"""Width of a curve in a file or a pipe, in characters."""
APART_S = 30.0
"""Seconds between two views that `keep_drawing` writes to a file or a pipe."""
HUGE = 1e6
"""Absolute value from which on a number with fixed decimals is written with an exponent."""


def number(value: float | None, form: str) -> str:
    """Returns a number in the format `form`. None is a dash.

    If `form` has fixed decimals, numbers from HUGE on are written with an exponent.
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if form in (".2f", ".3f", ".4f") and abs(value) >= HUGE:
        form = ".3e"
    return f"{value:{form}}"


def clock(when: float, form: str = "%H:%M:%S") -> str:
    """Returns a unix time as local time of this machine. Returns "?" if it is not a valid time."""
    try:
        return time.strftime(form, time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "?"


def as_text(*parts: RenderableType) -> str:
    """Returns the text that the terminal would show, without colours. Lines are wrapped to the
    width of the terminal. Without a terminal they are not wrapped.
    """
    console = PlainConsole(color_system=None, force_jupyter=False)
    with console.capture() as shown:
        for part in parts:
            if isinstance(part, str):
                part = Text(part)
            console.print(part)
    return shown.get().removesuffix("\n")


class PlainConsole(Console):
    """A rich console without highlighting and markup. It makes control characters in the printed
    text visible. It prints no control characters except those of its own styles and cursor.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = UNLIMITED

    @property
    def file(self) -> Any:
        """Stream to which the console writes. In place of a PlainStream, which would remove the
        styles, it is the original stream.
        """
        stream = Console.file.fget(self)  # pyright: ignore[reportOptionalCall]
        return getattr(stream, "unfiltered", stream)

    @file.setter
    def file(self, stream: Any) -> None:
        Console.file.fset(self, stream)  # pyright: ignore[reportOptionalCall]

    @property
    def picture_width(self) -> int:
        """Width that a curve may have, in characters."""
        return PICTURE if self.width == UNLIMITED else self.width

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Yields the segments of a printed object. Their text has passed through `plain`."""
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
    """Draws a view repeatedly in the same place of the terminal, until `over` returns True or the
    user presses Ctrl-C.

    A file or a pipe cannot be overwritten. It gets the first view, a view every APART_S seconds,
    and the last view.

    Args:
        view: function that returns the present view.
        console: console to which the view is printed.
        every_s: seconds between two views.
        over: function that returns whether the view that was drawn last is the final view.
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
    """Rows under named columns. No cell is shortened.

    The table is as wide as its cells. In a narrower terminal, texts are wrapped between words. If
    single words are too wide, each row is printed as a few lines of `name value`.

    Args:
        columns: names of the columns. A name may be empty.
        rows: cells of each row, as strings or styled texts. Brackets are no markup.
        right: names of the columns that are aligned right and never wrapped.
        title: line above the table.
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
        """Adds a row, with one cell for each column."""
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
        """Yields the lines of each row as pairs of `name value`. A line has as many pairs as fit
        into `width` characters.
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
