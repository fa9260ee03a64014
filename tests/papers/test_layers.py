"""Layers of a figure (published, modelled or measured data): data that may be drawn as published,
data that may share a panel, and the user's own runs.
"""

from pathlib import Path

import numpy as np
import pytest

from kit.errors import ConfigError, RunError
from kit.papers.appearance import Appearance
from kit.papers.facts import DATA, Facts, Relation
from kit.papers.frontier_demo import run_hfu_percent
from kit.papers.layers import LOAD, FigureLayer, measured_layers, open_runs
from kit.papers.panels import FigureContent, draw_content, draw_layers
from kit.show.style import new_figure
from tests.papers.recorded import cluster_run, demo_study


@pytest.mark.parametrize("name", [file.stem for file in DATA.glob("*.csv")])
def test_every_fact_has_source_and_provenance(name: str) -> None:
    facts = Facts.load(name).facts
    assert len({(fact.series, fact.x) for fact in facts}) == len(facts), "each fact once"
    for fact in facts:
        assert fact.source and fact.known in ("read", "quoted", "derived", "remembered")
        if fact.known == "remembered":
            assert "memory" in fact.source
            with pytest.raises(ConfigError, match="remembered, not read"):
                FigureLayer.published([fact], label="paper")


def test_demo_scale_is_marked_and_drawn_apart(tmp_path: Path) -> None:
    folder = demo_study(tmp_path / "demo", {})
    runs = [folder, cluster_run(tmp_path / "cluster", hfu=0.3)]
    found = measured_layers(runs, x=lambda run: float(run.plan.num_devices), y=run_hfu_percent)
    assert [layer.scale for layer in found] == ["demo", "cluster"]
    assert len(found[0].x) == 6 and found[1].y == pytest.approx([30], rel=0.01)
    assert found[0].source == "this machine, demo scale"
    (folder / LOAD).write_text('{"load": 7.5}')
    busy, _ = measured_layers(runs, x=lambda run: 1.0, y=run_hfu_percent)
    assert busy.source.endswith("while other programs were at work")
    with new_figure(1, 2, height=2) as (_, (left, right)):
        draw_layers(left, found[:1])
        draw_layers(right, found[1:])
        with pytest.raises(ConfigError, match="do not belong in one panel"):
            draw_layers(right, found)
    assert [text.get_text() for text in left.texts] == ["demo scale"] and not right.texts


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_intervals_of_several_lines_stand_side_by_side(scale: str) -> None:
    """Bands of several lines would cover each other. One line has a band."""
    x = [1, 2, 4]
    intervals = [0, 1, 2], [2, 3, 4]
    first = FigureLayer.modelled("first", x, [1, 2, 3], *intervals, error="5 %")
    second = FigureLayer.modelled("second", x, [1, 2, 3], *intervals, error="5 %")
    with new_figure(1, 2, height=2) as (_, (left, right)):
        left.set_xscale(scale)
        draw_layers(left, [first, second])
        draw_layers(right, [first])
    assert len(right.collections) == 1 and list(right.lines[0].get_xdata()) == x
    drawn = [container.lines[0].get_xdata() for container in left.containers]
    assert len(drawn) == 2 and (drawn[0] < x).all() and (x < drawn[1]).all()
    assert drawn[1] - drawn[0] == pytest.approx(0, abs=0.3), "still beside the tick"


def test_caption_and_table_name_every_layer() -> None:
    facts = Facts.load("frontier")
    layers = [
        FigureLayer.published(facts["throughput_percent"], label="paper"),
        FigureLayer.modelled(
            "model", [0, 1, 2], [1, 2, 3], [0, 1, 2], [2, 3, 4], error="5 % on 9 runs"
        ),
    ]
    look = Appearance(
        caption=["What is drawn.", "", "What {verb}."],
        notes=["A fit."],
        panels={"others": {"title": "panel {panel}"}},
        layouts=[{"mosaic": "a", "height": 3}, {"mosaic": "aa;bc", "height": 5}],
    )
    content = FigureContent(panels={"a": layers}, values={"verb": "holds"}, notes=["Of 9 runs."])
    figure, rows = draw_content(look, content)
    [axis] = figure.axes
    assert figure.caption == "What is drawn. What holds."
    assert axis.get_title(loc="left") == "panel a" and figure.get_figheight() == 3
    assert figure.notes == (
        "A fit.",
        "Of 9 runs.",
        "Published (paper): Dash et al., arXiv 2312.12705, abstract.",
        "Modelled (model): 5 % on 9 runs.",
    )
    assert len(axis.lines) == 2 and axis.lines[0].get_markerfacecolor() == "white"
    assert [row["x"] for row in rows] == ["22B", "175B", "1T", 0, 1, 2]
    assert rows[0]["panel"] == "a" and np.isnan(rows[0]["low"]) and rows[3]["high"] == 2


def test_undrawable_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("iteration 1")
    (tmp_path / "empty").mkdir()
    for error, message, action in (
        (ConfigError, "kit import", lambda: open_runs([tmp_path / "train.log"])),
        (RunError, "not a run directory", lambda: open_runs([tmp_path / "empty"])),
        (ConfigError, "'throughput_percent'", lambda: Facts.load("frontier")["throughput_persent"]),
        (
            ConfigError,
            "how wrong",
            lambda: FigureLayer.modelled("model", [1], [1], [1], [1], error=""),
        ),
    ):
        with pytest.raises(error, match=message):
            action()


@pytest.mark.parametrize(
    "low, high, verdict",
    [(0.7, 0.9, "holds"), (0.9, 1.1, "holds within the interval"), (1.05, 1.1, "fails")],
)
def test_relation_verdict_depends_on_interval(low: float, high: float, verdict: str) -> None:
    number = {"layer": "modelled", "value": 1, "low": low, "high": high}
    relation = Relation(claim="x", **number, expected="below 1", within=(-np.inf, 1))
    assert relation.verdict == verdict
