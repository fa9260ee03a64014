"""Results in files, and the tables of a document that are made from them."""

import re
from pathlib import Path

import pytest

from kit.errors import ConfigError
from kit.show.results import row
from tests.bench.headlines import HEADLINES, headline_note
from tests.bench.results import Results, write_results
from tests.bench.tables import table, write_tables
from tests.support.environments import ROOT


def _write(folder: Path) -> None:
    rows = [
        row("speed", 1.27, "x", at_least=1.0, note="a | b"),
        row("cost", 0.0196, "fraction", at_most=0.01),
        row("n", 7446),
    ]
    write_results(
        "speed", rows, command="python -m tests.bench speed", load_before=0.4, directory=folder
    )


def test_tables_replace_text_between_markers(tmp_path: Path) -> None:
    _write(tmp_path / "results")
    document = tmp_path / "README.md"
    document.write_text(
        "before\n<!-- bench:speed -->\nold\n<!-- /bench:speed -->\nafter\n"
        "<!-- bench:none -->\nkept\n<!-- /bench:none -->\n"
    )
    assert write_tables(document, directory=tmp_path / "results") == (["speed"], ["none"])
    text = document.read_text()
    assert "| speed | 1.27x | ≥ 1x | yes | a \\| b |" in text and "**no**" in text
    assert (
        "old" not in text and text.startswith("before\n") and "after\n" in text and "kept" in text
    )
    write_tables(document, directory=tmp_path / "results")
    assert document.read_text() == text, "a second time changes nothing"


def test_cell_is_one_line_without_markup() -> None:
    note = table(
        Results(
            name="a",
            command="",
            machine="",
            date="",
            load_before=0,
            rows=(row("x", 1, note="a\n<b> | c"),),
        )
    )
    assert "| x | 1 |  |  | a &lt;b> \\| c |" in note.splitlines()


def test_missing_marker_is_refused_before_writing(tmp_path: Path) -> None:
    _write(tmp_path / "results")
    document = tmp_path / "README.md"
    document.write_text("<!-- bench:speed -->\nno end\n")
    with pytest.raises(ConfigError, match="marker '<!-- bench:speed -->' has no partner"):
        write_tables(document, directory=tmp_path / "results")
    assert document.read_text() == "<!-- bench:speed -->\nno end\n"


def test_results_round_trip(tmp_path: Path) -> None:
    _write(tmp_path)
    results = Results.read(tmp_path / "speed.json")
    assert [item.ok for item in results.rows] == [True, False, None]


def test_benchmark_headlines_are_rows_and_name_misses():
    lead, _, tables = (ROOT / "docs/benchmarks.md").read_text().partition("\n## ")
    rows = [line for line in lead.splitlines() if re.search(r" \| [\d,.]+ .* \|$", line)]
    assert len(rows) >= 8 and [row for row in rows if row not in tables] == []
    missed = re.findall(r"^\| ([^|]+) \| .*\*\*no\*\*", tables, re.MULTILINE)
    assert [name for name in missed if f"- {name}: " not in lead] == []
    assert lead.count("\n- ") - lead.count("\n- [") == len(missed), "only what is missed is said so"


def test_rows_on_first_page_equal_benchmark_rows() -> None:
    tables = (ROOT / "docs/benchmarks.md").read_text()
    first_page = (ROOT / "README.md").read_text()
    for name, title in HEADLINES.values():
        (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", tables, re.MULTILINE)
        *cells, note = line.split(" | ")
        expected = " | ".join((title, *cells, headline_note(note)))
        assert f"| {expected} |\n" in first_page
