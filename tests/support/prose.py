"""Numbers in the sentences of a notebook, and numbers in its code and outputs."""

import re
from pathlib import Path

import nbformat

from tests.gallery import GALLERY, as_on_the_page

NO_PROSE = re.compile(
    r"<details>.*?</details>|\*\*Exercises\.\*\*.*|```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$"
    r"|\[(?:\d\d|notebook \d\d|arXiv [^\]]*)\]\([^)]*\)|\]\([^)]*\)|^\*\d+ minutes to read[^*]*\*"
    r"|^#[^\n]*$|^\|[^\n]*\|$",
    re.DOTALL | re.MULTILINE,
)
"""Matches the parts of a Markdown cell that are no sentences: code, formulas, tables, headings,
links and exercises.
"""
DIGITS = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
SMALLEST = 13
"""Smallest whole number in digits that is checked. Smaller numbers occur on every page by
chance.
"""


def markdown(notebook: Path) -> list[str]:
    """Returns the Markdown cells of a notebook, in the form that its gallery page has."""
    cells = nbformat.read(notebook, as_version=4).cells
    told = (
        as_on_the_page(notebook.stem, cell.source) for cell in cells if cell.cell_type == "markdown"
    )
    return ["\n".join(line.rstrip() for line in text.splitlines()).strip() for text in told]


def prose(notebook: Path) -> str:
    """Returns the sentences of a notebook's Markdown cells as one text."""
    told = "\n\n".join(NO_PROSE.sub(" ", text) for text in markdown(notebook))
    return " ".join(told.replace("*", "").split())


def evidence(notebook: Path) -> str:
    """Returns the code of a notebook, and the outputs on its gallery page, as one text."""
    cells = nbformat.read(notebook, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    page = (GALLERY / f"{notebook.stem}.md").read_text(encoding="utf-8")
    for text in markdown(notebook):
        page = page.replace(text, "")
    return f"{code}\n{page}"


def unseen(text: str, seen: str) -> list[str]:
    """Returns the numbers in `text` to which no number in `seen` is equal or rounds."""
    values = [float(number.replace(",", "")) for number in DIGITS.findall(seen)]
    missing = []
    for number in DIGITS.findall(text):
        value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
        is_small = value < SMALLEST and not digits
        if not is_small and not any(round(other, digits) == value for other in values):
            missing.append(number)
    return missing
