"""What a stranger may send: pickles that run a program, words that a shell, a browser or a terminal would obey."""

import os
from pathlib import Path

SCRIPT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>'\"`${7*7}"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b]8;;http://evil\x1b\\click\u202e"
MARKUP = "[link=http://evil]click[/link][bold red]x[/]"


class Payload:
    """Unpickled by an ordinary reader, it makes the file `canary`."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


class Reduced:
    """Is pickled as whatever it is told."""

    def __init__(self, parts: tuple) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple:
        return self.parts
