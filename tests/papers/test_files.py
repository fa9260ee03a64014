"""All figures of the papers: the sources of their layers (published, modelled or measured data),
their files, and the list of figures.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from kit.cli import exchange as commands
from kit.errors import ConfigError
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
from kit.show.themed_figure import ThemedFigure
from tests.support.pictures import check_data, check_panels

pytestmark = pytest.mark.slow

QUICK = {name: FIGURES[name] for name in ("hlat-data-mix", "hlat-loss")}
NEEDS_RUNS = {
    "hlat-loss": r"no steps in \[\]",
    "hlat-averaged-weights": r"no averaging\.json in \[\].*demo_averaging",
    "hlat-precision": r"no precision\.json in \[\].*demo_precision",
}
"""Maps a figure to the error message that it gives without runs. The curves of the paper could not
be read, so without runs there is nothing to draw."""


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_sources_of_its_layers(name, frontier_runs, hlat_runs) -> None:
    """The notes below a figure name each layer (published, modelled or measured data) and its
    source. Demo scale is marked, and no interval has a lower end above its upper end.
    """
    if name in NEEDS_RUNS:
        with pytest.raises(ConfigError, match=NEEDS_RUNS[name]):
            FIGURES[name].draw()
    own = frontier_runs if name in FRONTIER else hlat_runs
    for given in (own,) if name in NEEDS_RUNS else ((), own):
        drawn, rows = FIGURES[name].draw(given)
        said, kinds = " ".join(drawn.notes), {row["layer"] for row in rows}
        if name in HLAT:
            assert "published" in kinds or name in NEEDS_RUNS
        elif "memory" not in name:
            assert "modelled" in kinds and "fitted to 12 runs on LUMI" in said
        assert all(f"{kind.capitalize()} (" in said for kind in kinds - {"computed"})
        assert all(row["source"].rstrip(".") in said for row in rows if "source" in row)
        assert not any(row.get("low", 0) > row.get("high", 0) for row in rows)
        if isinstance(drawn, ThemedFigure):
            check_data(drawn)
            texts = [text.get_text() for axis in drawn.axes for text in axis.texts]
            assert any(row.get("scale") == "demo" for row in rows) == ("demo scale" in texts)


def test_panel_check_finds_cut_data_and_misplaced_text(drawn_once) -> None:
    drawn_once.clear()
    figure, _ = FIGURES["frontier-throughput"].draw()
    drawn_once.clear()  # no other test must get the changed figure from the cache
    left, _ = figure.axes
    check_panels(figure)
    left.set_ylim(0, 50)
    with pytest.raises(AssertionError, match=r"\(a\) HFU.*cuts data"):
        check_panels(figure)
    left.set_ylim(0, 60)
    left.legend(loc="upper left")
    with pytest.raises(AssertionError, match="the legend stands on data"):
        check_panels(figure)
    left.get_legend().remove()
    left.text(2.5, 30, "a text that is too long")
    with pytest.raises(AssertionError, match="leaves its panel"):
        check_panels(figure)


def test_saved_figures_are_byte_identical_on_rerun(tmp_path, drawn_once) -> None:
    """The files of a figure are SVG, PNG and CSV. If a figure has no runs to draw, a message is
    printed and the figure is skipped.
    """
    told = save_all(QUICK, tmp_path / "first")
    assert told["hlat-data-mix"] == ""
    assert "Give run directories" in told["hlat-loss"], "and goes on without"
    drawn_once.clear()
    save_all(QUICK, tmp_path / "second")
    names = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert names == ["hlat-data-mix.csv", "hlat-data-mix.png", "hlat-data-mix.svg"]
    for name in names:
        first, second = ((tmp_path / each / name).read_bytes() for each in ("first", "second"))
        assert first == second, name
    drawing = (tmp_path / "first" / "hlat-data-mix.svg").read_text()
    assert "Open-Web-Math" in drawing and "<dc:date>" not in drawing, "text stays text"
    with (tmp_path / "first" / "hlat-data-mix.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["x"] for row in rows] == ["Web", "Domain (math, science)", "Code"]
    assert rows[0]["low"] == ""


def test_csv_has_columns_of_all_rows(tmp_path: Path) -> None:
    with new_figure(height=2) as (figure, _):
        pass
    rows = [{"a": 1, "b": np.float64(1 / 3)}, {"a": "x, y", "c": float("nan")}]
    save_figure(figure, rows, [tmp_path / "new" / "t.csv"])
    assert (tmp_path / "new" / "t.csv").read_text() == 'a,b,c\n1,0.333333,\n"x, y",,\n'


def test_figure_command_draws_all_into_folder(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(commands, "FIGURES", QUICK)
    commands.figure(out=tmp_path / "talk")
    assert (tmp_path / "talk" / "hlat-data-mix.svg").exists()
    assert "hlat-loss: no steps in" in capsys.readouterr().out, "and says why"


def test_contents_list_every_figure_and_table() -> None:
    hlat = contents(HLAT, HLAT_NOT_DRAWN)
    places = {row["of the paper"]: row["here"] for row in hlat}
    for number in ("Table I", "Table II", "Table III", "Table IV", "Table V", "Figure 5"):
        assert places[number] in HLAT
    assert places["Figure 3 (a) to (f)"] == "hlat-scores-7b"
    assert places["Figure 4 (a) to (f)"] == "hlat-scores-70b"
    assert places["Figures 1 and 2"] == "not drawn"
    frontier = contents(FRONTIER, FRONTIER_NOT_DRAWN)
    assert len(frontier) == len(FRONTIER) + len(FRONTIER_NOT_DRAWN)
    for row in (*hlat, *frontier):
        assert all(row.values())
        assert row["here"] in FIGURES or len(row["what"]) > 20, "drawn, or why not"
