"""A console for text of unknown origin: names, reasons and log lines are shown, and never obeyed by the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\r\t"}
"""Of ASCII: to their pictures, so that an escape sequence is seen and does nothing."""
OTHERS = (0x7F, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
"""Further controls, those that turn the direction of writing, and halves of pairs, which no terminal takes."""
TABLE = CONTROLS | dict.fromkeys(OTHERS, 0xFFFD)


def plain(text: str) -> str:
    """Returns a text whose control characters, other than line ends and tabs, are replaced by visible ones."""
    return text.translate(TABLE)


class PlainConsole(Console):
    """A console that colours nothing by itself, and prints no control characters but its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """Yields the pieces of something printed, their text made plain."""
        for text, style, control in super().render(*args, **options):
            yield Segment(text if control else plain(text), style, control)
