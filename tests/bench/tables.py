"""Tables of measured results in a Markdown document.

The document has the markers `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`, each on its own line.
The text between the two markers is replaced by the table of results NAME, so that no measured
number is typed by hand.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cluster.files import write_atomic
from cluster.record import ConfigError
from kit.show.results import format_value
from tests.bench.results import RESULTS, Results

BETWEEN_MARKERS = re.compile(
    r"^<!-- bench:(\w+) -->$(?:(?!<!-- /?bench:).)*^<!-- /bench:\1 -->$", flags=re.M | re.S
)


def write_tables(
    document: Path, *, directory: Path = RESULTS, texts: Mapping[str, str | None] | None = None
) -> tuple[list[str], list[str]]:
    """Replaces the tables of `document`. Returns (names of the written tables, names of the tables
    that stay because they have no results).

    Args:
        document: File with the markers. It is written only if all markers and results are valid.
        directory: Folder of the results.
        texts: Maps a name to the text that is put between its markers instead of a table. None
            keeps the present text.

    Raises:
        ConfigError: The document is missing, a marker has no partner, or a results file is damaged.
    """
    if not document.is_file():
        raise ConfigError(
            f"{document}: no such file; expected a document with <!-- bench:NAME --> markers."
        )
    text = document.read_text()
    # Without this check, the text between a single marker and the next pair would be replaced too.
    if lost := re.search(r"^<!-- /?bench:\w+ -->$", re.sub(BETWEEN_MARKERS, "", text), flags=re.M):
        raise ConfigError(
            f"{document}: marker {lost[0]!r} has no partner. Each table stands between <!--"
            " bench:NAME --> and <!-- /bench:NAME -->, each on a line of its own, not nested."
        )
    written, kept, found = [], [], dict(texts or {})

    def replaced(match: re.Match) -> str:
        name, file = match[1], directory / f"{match[1]}.json"
        if name not in found and file.exists():
            found[name] = table(Results.read(file))
        if found.get(name) is None:
            kept.append(name)
            return match[0]
        written.append(name)
        return f"<!-- bench:{name} -->\n{found[name]}\n<!-- /bench:{name} -->"

    changed = re.sub(BETWEEN_MARKERS, replaced, text)
    if changed != text:
        write_atomic(document, changed)
    return written, kept


def table(results: Results) -> str:
    """Returns the result rows as a Markdown table, then one line with machine, date, load and
    command.
    """
    lines = ["| | measured | target | met | |", "|---|--:|--:|:-:|---|"]
    for item in results.rows:
        met = {True: "yes", False: "**no**", None: ""}[item.ok]
        cells = (item.name, format_value(item.value, item.unit), item.target, met, item.note)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += [
        "",
        (
            f"{results.machine}; {results.date} UTC, load average before the start"
            f" {results.load_before:.1f};"
            f" `{results.command}`"
        ),
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Returns `text` as a cell of a Markdown table. Newlines are removed and markup is escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
