"""Rows, their files, and the tables of a document."""

from pathlib import Path

import pytest

from kit.errors import ConfigError
from kit.show.results import format_value, row
from tests.benchmarks.results import Results, write_results
from tests.benchmarks.tables import table, write_tables


def _write(folder: Path) -> None:
    rows = [
        row("speed", 1.27, "x", at_least=1.0, note="a | b"),
        row("cost", 0.0196, "fraction", at_most=0.01),
        row("n", 7446),
    ]
    write_results(
        "speed", rows, command="python -m tests.benchmarks speed", load_before=0.4, directory=folder
    )


def test_row_is_judged_by_its_limit() -> None:
    assert row("a", 2, at_least=1).ok and not row("a", 0.5, at_least=1).ok
    assert row("a", 1, at_most=1).ok and not row("a", 2, at_most=1).ok
    assert row("a", 1).ok is None and row("a", 1).target == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0196, "fraction", "1.96 %"),
        (7446.2, "tokens/s", "7,446 tokens/s"),
        (1.266, "x", "1.27x"),
        (0.3, "s", "0.300 s"),
    ],
)
def test_value_is_printed_to_three_digits(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_table_replaces_what_stands_between_its_markers(tmp_path: Path) -> None:
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


def test_cell_stays_on_one_line_and_is_no_markup() -> None:
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


def test_lost_marker_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    _write(tmp_path / "results")
    document = tmp_path / "README.md"
    document.write_text("<!-- bench:speed -->\nno end\n")
    with pytest.raises(ConfigError, match="has no <!-- /bench:speed -->"):
        write_tables(document, directory=tmp_path / "results")
    assert document.read_text() == "<!-- bench:speed -->\nno end\n"


def test_results_round_trip(tmp_path: Path) -> None:
    _write(tmp_path)
    results = Results.read(tmp_path / "speed.json")
    assert [item.ok for item in results.rows] == [True, False, None]
