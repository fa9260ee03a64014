"""A paper's own points, digitised by the reader, in the figures of both papers."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kit.commands.app import app
from kit.errors import ConfigError
from kit.papers import FIGURES
from kit.papers.points import DIGITISED, read_points, series_of

WEAK = FIGURES["frontier-weak-scaling"]
FRAMES = ("hlat-scores-70b", "hlat-loss", "hlat-learning-rate", "hlat-cost")


def written(folder: Path, *lines: str) -> Path:
    file = folder / "points.csv"
    file.write_text("\n".join(["# as read", "series,x,y,source", *lines]) + "\n")
    return file


def test_points_are_drawn_hollow_named_in_the_legend_and_kept_in_the_table(tmp_path: Path) -> None:
    lines = '175B,1024,99.5,"Figure 12, page 9"', "175B,128,140,Figure 12"
    figure, rows = WEAK.draw(points=written(tmp_path, *lines))
    [axis] = figure.axes
    [line] = [line for line in axis.get_lines() if DIGITISED in str(line.get_label())]
    assert line.get_markerfacecolor() == "white" and list(line.get_xdata()) == [128, 1024]
    assert any(DIGITISED in text.get_text() for text in axis.get_legend().get_texts())
    assert axis.get_ylim()[1] >= 140, "the panel reaches to it"
    own = [row for row in rows if row["layer"] == "digitised"]
    assert [(row["x"], row["y"]) for row in own] == [(128, 140), (1024, 99.5)]
    assert "page 9" in own[0]["source"]
    assert any("Digitised by the reader (175B: Figure 12" in note for note in figure.notes)


@pytest.mark.parametrize("name", ["frontier-throughput", "frontier-sensitivity", *FRAMES])
def test_the_example_of_a_template_can_be_drawn_and_the_template_unfilled_cannot(
    name: str, tmp_path: Path
) -> None:
    template = FIGURES[name].points_template(name)
    begin = "# such as: "
    [example] = [line for line in template.splitlines() if line.startswith(begin)]
    example = example.removeprefix(begin)
    _, rows = FIGURES[name].draw(points=written(tmp_path, example))
    assert sum(row.get("layer") == "digitised" for row in rows) == 1
    (tmp_path / "empty.csv").write_text(template)
    with pytest.raises(ConfigError, match=r"line \d+, source '' is not allowed"):
        FIGURES[name].draw(points=tmp_path / "empty.csv")


def test_panels_that_only_points_fill_are_drawn_with_them(tmp_path: Path) -> None:
    figure, _ = FIGURES["hlat-scores-7b"].draw()
    assert len(figure.axes) == 1
    points = written(tmp_path, '"(a) MMLU, %",250,26,Figure 3 (a)')
    figure, _ = FIGURES["hlat-scores-7b"].draw(points=points)
    assert len(figure.axes) == 7


HEAD = "series,x,y,source\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEAD + "175B,128,89 %,f", "line 2, y: '89 %' is not allowed. Give a number alone, in the"),
        (HEAD + "175B,128,89 %,f", "in the unit of: Weak scaling"),
        (HEAD + "175B,1024,0.89,f", "looks like a fraction"),
        (HEAD + "175B,0,89,f", "x: '0' is not allowed"),
        (HEAD + "175B,1e9,89,f", "x: 1e9 is far from what is drawn"),
        (HEAD + "175B,nan,89,f", "x: 'nan' is not allowed"),
        (HEAD + "175C,64,89,f", "series '175C' is unknown. Did you mean '175B'"),
        (HEAD + "175B,64,89,", "source '' is not allowed"),
        ("# as read\n" + HEAD + "175B,64", "line 3, source '' is not allowed"),
        (HEAD, "no points"),
        ("series;x;y", "Expected: series,x,y,source"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(text: str | None, complaint: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "points.csv").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read_points(tmp_path / "points.csv", series_of(WEAK.draw()[0]))


def test_a_figure_that_is_a_table_takes_no_points(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Table II is drawn as a table"):
        FIGURES["hlat-quality"].draw(points=tmp_path / "points.csv")


def test_names_at_an_axis_are_the_places_on_it(tmp_path: Path) -> None:
    _, rows = FIGURES["frontier-throughput"].draw(points=written(tmp_path, "HFU,1T,32,f"))
    assert rows[-1]["x"] == 2.0
    with pytest.raises(ConfigError, match="x: '2' is not allowed. Allowed: 22B, 175B, 1T"):
        FIGURES["frontier-throughput"].draw(points=written(tmp_path, "HFU,2,32,f"))


def test_commands_print_a_template_and_draw_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def figure(*words: str) -> Any:
        return CliRunner().invoke(app, ["figure", *words])

    told = figure("hlat-data-mix", "--points-template")
    assert "series,x,y,source\nTable III: billion tokens,,,\n" in told.output
    file = str(written(tmp_path, "Table III: billion tokens,90,0,Table III"))
    assert figure("hlat-data-mix", "--points", file).exit_code == 0
    assert "digitised" in (tmp_path / "hlat-data-mix.csv").read_text()
    assert figure("runs/none", "--points", file).exit_code != 0
