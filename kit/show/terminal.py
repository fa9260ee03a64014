"""Safe printing in a terminal, and the table of the command line, which never shortens a name or a
number.

Names, reasons and log lines may come from other users and may contain control characters. These are
replaced by visible symbols, so that the terminal does not execute them. Lines in a file or a pipe
are not wrapped.
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
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
"""Maps the code point of each ASCII control character, except newline and tab, to the code point of
its visible symbol. An escape sequence is then shown and has no effect. Carriage returns are
included, since text after a carriage return would overwrite the beginning of its line."""
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
"""Code points of further characters that `plain` replaces: control characters, line separators, and
characters that change the writing direction. Halves of surrogate pairs are included, since a
terminal cannot show them."""
VISIBLE = CONTROLS | dict.fromkeys(OTHERS, 0xFFFD)
"""Maps the code point of each character that `plain` replaces to the code point of its visible
symbol."""


def plain(text: str) -> str:
    """Returns a text whose control characters are replaced by visible symbols. Newlines and tabs
    are kept.
    """
    return text.translate(VISIBLE)


STYLE_CODE = re.compile(r"(\x1b\[[\d;]*m)")
"""Pattern of a terminal escape sequence that sets a colour or a style."""


class PlainStream:
    """Wrapper of standard output or standard error. It replaces control characters by visible
    symbols in all text that the process writes, including the text of libraries. On a terminal,
    carriage returns and styles are kept, since progress bars and coloured errors need them.

    The attribute `unfiltered` is the original stream. A PlainConsole writes to the original stream,
    because the console already replaces control characters.
    """

    def __init__(self, stream: Any) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        if not self.unfiltered.isatty():
            return self.unfiltered.write(plain(text))
        # `split` returns text and style sequences in turn. Only the text is changed.
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
    """Context manager that replaces control characters by visible symbols in all output of the
    process. Within the `with` block, standard output and standard error are wrapped in a
    `PlainStream`.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    filters = {name: PlainStream(stream) for name, stream in before.items()}
    for name, stream in filters.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in filters.items():
            # If a closed pipe caused an error, Typer has replaced the stream by a stream that
            # ignores this error. Typer's stream is kept.
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


GAP = "  "
"""Space between two `name value` pairs in a row of a table that is printed on several lines."""
UNLIMITED = 100_000
"""Assumed line width of a file or a pipe, in characters. It is so large that no line is wrapped."""
PICTURE = 80
"""Width, in characters, of a curve that is drawn with text characters and printed to a file or a
pipe."""
APART_S = 30.0
"""Shortest time in seconds between two prints of a live view to a file or a pipe."""
HUGE = 1e6
"""Smallest absolute value of a number that is printed with an exponent, even if the format of the
number has fixed decimals."""


def format_number(value: float | None, form: str) -> str:
    """Returns a number as text in the format `form`. Returns a dash for None.

    If `form` has fixed decimals, a number of at least HUGE is printed with an exponent instead.
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if form in (".2f", ".3f", ".4f") and abs(value) >= HUGE:
        form = ".3e"
    return f"{value:{form}}"


def format_time(when: float, form: str = "%H:%M:%S") -> str:
    """Returns a unix time as text in the local time of this machine. Returns "?" if the time is not
    valid.
    """
    try:
        return time.strftime(form, time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "?"


def as_text(*parts: RenderableType) -> str:
    """Returns the text that the terminal would show for the printable objects `parts`, without
    colours. Lines are wrapped to the width of the terminal. Without a terminal, lines are not
    wrapped.
    """
    console = PlainConsole(color_system=None, force_jupyter=False)
    with console.capture() as shown:
        for part in parts:
            if isinstance(part, str):
                part = Text(part)
            console.print(part)
    return shown.get().removesuffix("\n")


class PlainConsole(Console):
    """A rich console without highlighting and markup. It replaces control characters in the printed
    text by visible symbols. The only control characters that it prints are those for its styles and
    its cursor.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = UNLIMITED

    @property
    def file(self) -> Any:
        """Stream to which the console writes. If standard output is wrapped in a PlainStream, the
        console writes to the original stream, since a PlainStream would damage the console's own
        escape sequences.
        """
        stream = Console.file.fget(self)  # pyright: ignore[reportOptionalCall]
        return getattr(stream, "unfiltered", stream)

    @file.setter
    def file(self, stream: Any) -> None:
        Console.file.fset(self, stream)  # pyright: ignore[reportOptionalCall]

    @property
    def picture_width(self) -> int:
        """Width, in characters, of a curve that is drawn with text characters: the width of the
        terminal, or PICTURE for a file or a pipe.
        """
        return PICTURE if self.width == UNLIMITED else self.width

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Yields the segments of a printed object. Control characters in their text are replaced by
        `plain`.
        """
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

    In a file or a pipe, a new view cannot overwrite the old view. So only the first view, one view
    every APART_S seconds, and the last view are printed.

    Args:
        view: function that returns the view of the present moment. It is called once per drawing.
        console: console to which the view is printed.
        every_s: seconds between two views.
        over: function that is called after each call of `view`. It returns True if that view is the
            last one.
    """
    drawn_over = console.is_terminal or console.is_jupyter
    screen: contextlib.AbstractContextManager = contextlib.nullcontext()
    if drawn_over:
        from rich.live import Live

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
    even single words are too wide, each row is printed on a few lines as `name value` pairs.

    Args:
        columns: names of the columns. A name may be empty.
        rows: cells of each row, as strings or styled texts. Square brackets are printed and not
            taken for markup.
        right: names of the columns that are aligned to the right and never wrapped.
        title: line of text above the table.
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
        """Adds a row to the table. `cells` has one cell for each column."""
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
        """Yields the lines of a table whose rows are printed as `name value` pairs. A line has as
        many pairs as fit into `width` characters.
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
