"""The end of a rank's log, and the lines in it that hold a word; a log of any size costs the same."""

import os
from pathlib import Path

TAIL_BYTES, SEARCH_BYTES = 32 * 2**10, 16 * 2**20
MAX_LINES = 200


def tail(file: Path) -> str:
    """Returns the last lines of a log, at most MAX_LINES; empty where there is none."""
    return "\n".join(_lines(file, TAIL_BYTES)[-MAX_LINES:])


def search(file: Path, text: str) -> str:
    """Returns the newest lines that hold `text` in any case, at most MAX_LINES, from the last 16 MiB."""
    wanted = text.casefold()
    return "\n".join([line for line in _lines(file, SEARCH_BYTES) if wanted in line.casefold()][-MAX_LINES:])


def _lines(file: Path, limit_bytes: int) -> list[str]:
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            text = stream.read(limit_bytes).decode(errors="replace")
    except OSError:
        return []
    # Progress bars return to the start of the line; only what they showed last is of interest.
    lines = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
    return lines[1:] if size > limit_bytes else lines
