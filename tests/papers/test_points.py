"""A paper's own points, digitised by the reader, in the figures of both papers."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kit.commands.app import app
from kit.errors import ConfigError
from kit.papers import FIGURES, HLAT
from kit.papers.points import DIGITISED, read_points, series_of

WEAK = FIGURES["frontier-weak-scaling"]
FRAMES = tuple(
    name
    for name in HLAT
    if name in ("hlat-scores-70b", "hlat-loss", "hlat-learning-rate", "hlat-cost")
)


def written(folder: Path, *lines: str) -> Path:
    file = folder / "points.csv"
    file.write_text("\n".join(["# as read", "series,x,y,source", *lines]) + "\n")
    return file


def test_points_are_drawn_hollow_named_in_the_legend_and_kept_in_the_table(tmp_path: Path) -> None:
    figure: Any
    figure, rows = WEAK.draw(
        points=written(tmp_path, '175B,1024,99.5,"Figure 12, page 9"', "175B,128,140,Figure 12")
    )
    [axis] = figure.axes
    [line] = [line for line in axis.get_lines() if DIGITISED in str(line.get_label())]
    assert line.get_markerfacecolor() == "white" and list(line.get_xdata()) == [128, 1024]
    assert any(DIGITISED in text.get_text() for text in axis.get_legend().get_texts())
    assert axis.get_ylim()[1] >= 140, "the panel reaches to it"
    own = [row for row in rows if row["layer"] == "digitised"]
    assert [(row["x"], row["y"]) for row in own] == [(128, 140), (1024, 99.5)] and "page 9" in own[
        0
    ]["source"]
    assert any("Digitised by the reader (175B: Figure 12" in note for note in figure.notes)


@pytest.mark.parametrize("name", ["frontier-throughput", "frontier-sensitivity", *FRAMES])
def test_the_example_of_a_template_can_be_drawn_and_the_template_unfilled_cannot(
    name: str, tmp_path: Path
) -> None:
    template = FIGURES[name].points_template(name)
    [example] = [
        line.removeprefix("# such as: ")
        for line in template.splitlines()
        if line.startswith("# such as")
    ]
    _, rows = FIGURES[name].draw(points=written(tmp_path, example))
    assert sum(row.get("layer") == "digitised" for row in rows) == 1
    (tmp_path / "empty.csv").write_text(template)
    with pytest.raises(ConfigError, match=r"line \d+, source '' is not allowed"):
        FIGURES[name].draw(points=tmp_path / "empty.csv")


def test_panels_that_only_points_fill_are_drawn_with_them(tmp_path: Path) -> None:
    figure: Any
    figure, _ = FIGURES["hlat-scores-7b"].draw()
    assert len(figure.axes) == 1
    figure, _ = FIGURES["hlat-scores-7b"].draw(
        points=written(tmp_path, '"(a) MMLU, %",250,26,Figure 3 (a)')
    )
    assert len(figure.axes) == 7


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            "175B,128,89 %,f",
            "line 3, y: '89 %' is not allowed. Give a number alone, in the unit of: Weak scaling",
        ),
        ("175B,1024,0.89,f", "looks like a fraction"),
        ("175B,0,89,f", "x: '0' is not allowed"),
        ("175B,1e9,89,f", "x: 1e9 is far from what is drawn"),
        ("175B,nan,89,f", "x: 'nan' is not allowed"),
        ("175C,64,89,f", "series '175C' is unknown. Did you mean '175B'"),
        ("175B,64,89,", "source '' is not allowed"),
        ("175B,64", "line 3, source '' is not allowed"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    known = series_of(WEAK.draw()[0])
    with pytest.raises(ConfigError) as raised:
        read_points(written(tmp_path, line), known)
    assert complaint in str(raised.value)


def test_names_at_an_axis_are_the_places_on_it(tmp_path: Path) -> None:
    _, rows = FIGURES["frontier-throughput"].draw(points=written(tmp_path, "HFU,1T,32,f"))
    assert rows[-1]["x"] == 2.0
    with pytest.raises(ConfigError, match="x: '2' is not allowed. Allowed: 22B, 175B, 1T"):
        FIGURES["frontier-throughput"].draw(points=written(tmp_path, "HFU,2,32,f"))


def test_files_and_figures_without_points_are_refused(tmp_path: Path) -> None:
    known = series_of(WEAK.draw()[0])
    other = tmp_path / "other.csv"
    for text, complaint in (
        ("series;x;y\n", "Expected: series,x,y,source"),
        ("series,x,y,source\n", "no points"),
    ):
        other.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            read_points(other, known)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_points(tmp_path / "none.csv", known)
    with pytest.raises(ConfigError, match="Table II is drawn as a table"):
        FIGURES["hlat-quality"].draw(points=other)


def test_commands_print_a_template_and_draw_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["figure", "hlat-data-mix", "--points-template"])
    assert "series,x,y,source\nTable III: billion tokens,,,\n" in told.output
    file = written(tmp_path, "Table III: billion tokens,90,0,Table III")
    assert (
        CliRunner().invoke(app, ["figure", "hlat-data-mix", "--points", str(file)]).exit_code == 0
    )
    assert "digitised" in (tmp_path / "hlat-data-mix.csv").read_text()
    assert CliRunner().invoke(app, ["figure", "runs/none", "--points", str(file)]).exit_code != 0
