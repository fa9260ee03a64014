"""The figures as files, and the list that says where each figure of a paper is."""

import csv
from pathlib import Path

import numpy as np
import pytest

from kit.commands import exchange as commands
from kit.papers import (
    FIGURES,
    FRONTIER,
    FRONTIER_NOT_DRAWN,
    HLAT,
    HLAT_NOT_DRAWN,
    contents,
    save_all,
)
from kit.show.style import new_figure, save_figure

QUICK = {name: FIGURES[name] for name in ("hlat-data-mix", "hlat-loss")}


def test_figures_become_svg_png_and_csv_and_a_rerun_changes_no_byte(tmp_path: Path) -> None:
    told = save_all(QUICK, tmp_path / "first")
    assert told["hlat-data-mix"] == "" and "Give run directories" in told["hlat-loss"], (
        "and goes on without"
    )
    save_all(QUICK, tmp_path / "second")
    names = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert names == ["hlat-data-mix.csv", "hlat-data-mix.png", "hlat-data-mix.svg"]
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (
            tmp_path / "second" / name
        ).read_bytes(), name
    drawing = (tmp_path / "first" / "hlat-data-mix.svg").read_text()
    assert "Open-Web-Math" in drawing and "<dc:date>" not in drawing, "text stays text"
    with (tmp_path / "first" / "hlat-data-mix.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["x"] for row in rows] == ["Web", "Domain (math, science)", "Code"] and rows[0][
        "low"
    ] == ""


def test_table_of_rows_with_other_keys_has_all_columns(tmp_path: Path) -> None:
    with new_figure(height=2) as (figure, _):
        pass
    save_figure(
        figure,
        [{"a": 1, "b": np.float64(1 / 3)}, {"a": "x, y", "c": float("nan")}],
        [tmp_path / "new" / "t.csv"],
    )
    assert (tmp_path / "new" / "t.csv").read_text() == 'a,b,c\n1,0.333333,\n"x, y",,\n'


def test_command_draws_all_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "FIGURES", QUICK)
    commands.figure(out=tmp_path / "talk")
    assert (tmp_path / "talk" / "hlat-data-mix.svg").exists()
    assert "hlat-loss: no steps in" in capsys.readouterr().out, "and says why"


def test_contents_name_each_figure_and_table_of_the_papers() -> None:
    hlat = contents(HLAT, HLAT_NOT_DRAWN)
    places = {row["of the paper"]: row["here"] for row in hlat}
    for number in ("Table I", "Table II", "Table III", "Table IV", "Table V", "Figure 5"):
        assert places[number] in HLAT
    assert (
        places["Figure 3 (a) to (f)"] == "hlat-scores-7b"
        and places["Figure 4 (a) to (f)"] == "hlat-scores-70b"
    )
    assert places["Figures 1 and 2"] == "not drawn"
    frontier = contents(FRONTIER, FRONTIER_NOT_DRAWN)
    assert len(frontier) == len(FRONTIER) + len(FRONTIER_NOT_DRAWN)
    for row in (*hlat, *frontier):
        assert all(row.values()) and (row["here"] in FIGURES or len(row["what"]) > 20), (
            "drawn, or why not"
        )
