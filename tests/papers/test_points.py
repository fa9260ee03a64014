"""Points that the user digitised from a paper's figure, drawn in the kit's figures of both
papers.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.errors import ConfigError
from kit.papers import FIGURES
from kit.papers.points import DIGITISED

WEAK, NAMED = "frontier-weak-scaling", "frontier-throughput"
HFU = '"(a) HFU, % of peak: modelled"'
HEAD = "series,x,y,source\n"


def written(folder: Path, *lines: str) -> Path:
    file = folder / "points.csv"
    file.write_text("\n".join(["# as read", HEAD.strip(), *lines]) + "\n")
    return file


def test_digitised_points_are_marked_in_figure_and_table(tmp_path: Path) -> None:
    """Digitised points are hollow and have an entry in the legend. The axis range of the panel
    includes them.
    """
    lines = '175B,1024,99.5,"Figure 12, page 9"', "175B,128,140,Figure 12"
    figure, rows = FIGURES[WEAK].draw(points=written(tmp_path, *lines))
    [axis] = figure.axes
    [line] = [line for line in axis.get_lines() if DIGITISED in str(line.get_label())]
    assert line.get_markerfacecolor() == "white" and list(line.get_xdata()) == [128, 1024]
    assert any(DIGITISED in text.get_text() for text in axis.get_legend().get_texts())
    assert axis.get_ylim()[1] >= 140, "the panel reaches to it"
    own = [row for row in rows if row["layer"] == "digitised"]
    assert [(row["x"], row["y"]) for row in own] == [(128, 140), (1024, 99.5)]
    assert "page 9" in own[0]["source"]
    assert any("Digitised by the reader (175B: Figure 12" in note for note in figure.notes)


@pytest.mark.parametrize(
    ("name", "unit", "point"),
    [
        ("frontier-throughput", "# x: 22B, 175B, 1T; y: (a) HFU, % of peak", "1T,30"),
        ("frontier-sensitivity", "y: 1.4B, authors' space: % of the variance", "5,tensor parallel"),
        ("hlat-scores-70b", "# x: tokens, billions; y: (a) MMLU, %", "50,MMLU"),
        ("hlat-loss", "# x: tokens, billions; y: HLAT: training loss, nats per token", "900,1"),
        ("hlat-learning-rate", "# x: tokens, billions; y: 7B: learning rate", "900,1e-4"),
        ("hlat-cost", "# x: nodes; y: (a) 7B: % of p4d's on 4 nodes", "8,60"),
    ],
)
def test_points_template_is_accepted_once_filled(name, unit, point, tmp_path) -> None:
    """The template file names the units of the axes. A template without points is refused."""
    template = FIGURES[name].points_template(name)
    assert unit in template
    (tmp_path / "empty.csv").write_text(template)
    with pytest.raises(ConfigError, match="no source"):
        FIGURES[name].draw(points=tmp_path / "empty.csv")
    line = template.splitlines()[template.splitlines().index(HEAD.strip()) + 1]
    filled = written(tmp_path, line.replace(",,,", f",{point},Figure 1"))
    figure, rows = FIGURES[name].draw(points=filled)
    assert sum(row.get("layer") == "digitised" for row in rows) == 1
    assert name != "hlat-scores-70b" or len(figure.axes) == 7, "panels that only points fill"


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (WEAK, HEAD + "175B,128,89 %,f", "175B,128,89 %: y: '89 %' is not allowed. Give a number"),
        (WEAK, HEAD + "175B,128,89 %,f", "alone, in the unit of: throughput per GCD, % of one"),
        (WEAK, HEAD + "175B,1024,0.89,f", "y: 0.89 is far from what is drawn (80 to 110)"),
        (
            NAMED,
            HEAD + HFU + ",1T,0.32,f",
            "y: 0.32 is probably a fraction, but this axis is in per cent",
        ),
        (WEAK, HEAD + "175B,1e9,89,f", "x: 1e9 is far from what is drawn"),
        (WEAK, HEAD + "175B,0,89,f", "x: '0' is not allowed"),
        (WEAK, HEAD + "175B,nan,89,f", "x: 'nan' is not allowed"),
        (WEAK, HEAD + "175C,64,89,f", "series '175C' is unknown. Did you mean '175B'"),
        (WEAK, "# as read\n" + HEAD + "175B,64", "175B,64,: no source"),
        (WEAK, HEAD, "no points"),
        (WEAK, "series;x;y", "Expected: series,x,y,source"),
        (WEAK, None, "cannot be read"),
        (NAMED, HEAD + HFU + ",2,32,f", "x: '2' is not allowed. Allowed: 22B, 175B, 1T"),
        ("hlat-quality", HEAD, "Table II is drawn as a table"),
    ],
)
def test_unusable_points_file_is_refused(name, text, complaint, tmp_path) -> None:
    if text is not None:
        (tmp_path / "points.csv").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        FIGURES[name].draw(points=tmp_path / "points.csv")


def test_category_name_becomes_axis_position(tmp_path: Path) -> None:
    _, rows = FIGURES[NAMED].draw(points=written(tmp_path, HFU + ",1T,32,f"))
    assert rows[-1]["x"] == 2.0


def test_commands_print_template_and_draw_points(
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
