"""The end of a rank's log, and the lines in it that hold a word; a log of any size costs the
same.
"""

from pathlib import Path

from kit.run import Run
from kit.run.columns import parse_row
from kit.run.tail import last_lines

TAIL_BYTES, SEARCH_BYTES = 32 * 2**10, 16 * 2**20
MAX_LINES = 200


def tail(file: Path) -> str:
    """Returns the last lines of a log, at most MAX_LINES; empty where there is none."""
    return "\n".join(_lines(file, TAIL_BYTES)[-MAX_LINES:])


def search(file: Path, text: str) -> str:
    """Returns the newest lines that hold `text` in any case, at most MAX_LINES, from the last 16
    MiB.
    """
    wanted = text.casefold()
    return "\n".join(
        [line for line in _lines(file, SEARCH_BYTES) if wanted in line.casefold()][-MAX_LINES:]
    )


def _lines(file: Path, limit_bytes: int) -> list[str]:
    # Progress bars return to the start of the line; only what they showed last is of interest.
    return [
        line.decode(errors="replace").rsplit("\r", 1)[-1]
        for line in last_lines(file, limit_bytes, follows=True)
    ]


def hook_words(run: Run) -> str:
    """Returns the last numbers of a run's hook, in a line; "" without a hook."""
    if run.recipe.hook is None:
        return ""
    rows = map(parse_row, reversed(last_lines(run.directory / "metrics.jsonl", TAIL_BYTES)))
    row = next(filter(None, rows), {})
    numbers = {
        name[5:]: value
        for name, value in row.items()
        if name.startswith("hook/") and name != "hook/seconds"
    }
    return "hook: " + (
        ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()) or "nothing"
    )
