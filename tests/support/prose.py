"""What the prose of a notebook says in numbers, and what its code and its outputs show."""

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
"""Of a Markdown cell: code, formulas, tables, headings, links, exercises."""
DIGITS = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
SMALLEST = 13
"""Of whole numbers in digits those that are looked for: a smaller one stands on every page."""


def markdown(notebook: Path) -> list[str]:
    """Returns the texts of a notebook as its page has them."""
    cells = nbformat.read(notebook, as_version=4).cells
    told = (
        as_on_the_page(notebook.stem, cell.source) for cell in cells if cell.cell_type == "markdown"
    )
    return ["\n".join(line.rstrip() for line in text.splitlines()).strip() for text in told]


def prose(notebook: Path) -> str:
    """Returns the sentences of a notebook."""
    told = "\n\n".join(NO_PROSE.sub(" ", text) for text in markdown(notebook))
    return " ".join(told.replace("*", "").split())


def evidence(notebook: Path) -> str:
    """Returns the code of a notebook, and the outputs on its page in the gallery."""
    cells = nbformat.read(notebook, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    page = (GALLERY / f"{notebook.stem}.md").read_text(encoding="utf-8")
    for text in markdown(notebook):
        page = page.replace(text, "")
    return f"{code}\n{page}"


def unseen(text: str, seen: str) -> list[str]:
    """Returns the numbers in digits that nothing seen is, or rounds to."""
    values = [float(number.replace(",", "")) for number in DIGITS.findall(seen)]
    missing = []
    for number in DIGITS.findall(text):
        value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
        is_small = value < SMALLEST and not digits
        if not is_small and not any(round(other, digits) == value for other in values):
            missing.append(number)
    return missing
