"""HLAT, section V: scores of checkpoints against tokens (Figures 3 and 4), with the published
end points.
"""

import dataclasses
from typing import Any

import numpy as np

from kit.evaluate.benchmarks import SUITES
from kit.evaluate.hlat import published_table
from kit.monitor.scores import ScoreCurve, eval_curve
from kit.papers.hlat_model import facts
from kit.papers.layers import Fact, Layer, Runs, opened, scale_of, source_of
from kit.papers.panels import draw, finish, pairs
from kit.run import Run
from kit.show.style import Rows, new_figure
from kit.show.theme import GREY

PANELS = {
    "mmlu": "MMLU",
    "commonsense": "common sense",
    "world_knowledge": "world knowledge",
    "reading": "BoolQ",
    "math": "GSM8K",
    "code": "HumanEval",
}
"""Of both figures, (a) to (f)."""
IN_WORDS = {
    "7B": "In words: common sense saturates, math stays flat until about 1 trillion.",
    "70B": "In words: math, code and MMLU jump after 1.4 trillion (dotted; Table III).",
}
SWAPPED = {"commonsense": "reading", "reading": "commonsense"}
"""Headings of Table IV, against Table II."""


def scores_7b_figure(runs: Runs = (), *, paper_panels: bool = False) -> tuple[Any, Rows]:
    """Returns Figure 3 as far as it was read: end points of the 7B, and the curves of your runs;
    and the table.

    `paper_panels` draws all panels of the paper, also those that have no curve of your runs.
    """
    return _figure("7B", runs, paper_panels)


def scores_70b_figure(runs: Runs = (), *, paper_panels: bool = False) -> tuple[Any, Rows]:
    """Returns Figure 4 in the same way for the 70B, whose last two checkpoints are known; and
    the table.
    """
    return _figure("70B", runs, paper_panels)


def end_points(model: str, panel: str) -> list[Layer]:
    """Returns published scores at the last checkpoints, %, against billions of tokens; of pass@1
    and 10 for code.
    """
    columns = {"code": {"code_pass_1": "pass@1", "code_pass_10": "pass@10"}}.get(
        panel, {panel: "published"}
    )
    layers = []
    for column, label in columns.items():
        table_two = published_table("II")
        [row] = [row for row in table_two.rows if row["model"] == "HLAT" and row["size"] == model]
        points = [_point(column, 1800, row[column], table_two.source)]
        if (
            model == "70B" and column != "code_pass_10"
        ):  # Table II has the mean of both; Table IV has each
            table_four = published_table("IV")
            points = [
                _point(column, tokens, row[SWAPPED.get(column, column)], table_four.source)
                for tokens, row in zip((1740, 1800), table_four.rows, strict=False)
            ]
        layers.append(Layer.published(points, label=label))
    return layers


def score_layers(run: Run, unit: float) -> dict[str, list[Layer]]:
    """Returns the scores of a run's checkpoints with their 95 % intervals, by panel; other tasks by
    their name.

    `unit` is how many tokens count as 1 on the axis.
    """
    columns = {
        (task.task, task.shots): (task.column or "").split("_pass")[0]
        for task in SUITES["hlat"].tasks
    }
    found: dict[str, list[Layer]] = {}
    for curve in eval_curve(run):
        layer = _curve_layer(run, curve, unit)
        panel = columns.get((curve.task, curve.num_fewshot), "")
        if scale_of(run) == "demo" or panel not in PANELS:
            panel = f"{curve.name}, {curve.metric.replace('_', ' ')}"
        found.setdefault(panel, []).append(layer)
    return found


def _curve_layer(run: Run, curve: ScoreCurve, unit: float) -> Layer:
    low, high = (np.where(np.isnan(end), curve.score, end) for end in (curve.low, curve.high))
    source = source_of([run]) + ("; a part of the items" if curve.partial.any() else "")
    points = Layer(
        kind="measured",
        label=f"{run.name}: {curve.name}",
        x=curve.tokens / unit,
        y=curve.score,
        low=low,
        high=high,
        source=source,
        scale=scale_of(run),
        joined=True,
        runs=(run.name,),
    )
    return points.times(1.0 if curve.metric == "bits_per_byte" else 100.0)


def _point(column: str, tokens: float, value: float, source: str) -> Fact:
    return Fact(
        series=column, x=str(tokens), value=str(value), known="read", source=source, unit="%"
    )


def _figure(model: str, runs: Runs, paper_panels: bool) -> tuple[Any, Rows]:
    panels = {name: end_points(model, name) for name in PANELS}
    chances: dict[str, float] = {}
    demo: dict[str, list[Layer]] = {}
    for run in opened(runs):
        is_demo = scale_of(run) == "demo"
        for name, layers in score_layers(run, 1e6 if is_demo else 1e9).items():
            (demo if is_demo else panels).setdefault(name, []).extend(layers)
        chances |= {
            f"{curve.name}, {curve.metric.replace('_', ' ')}": 100 * curve.chance
            for curve in eval_curve(run)
        }
    curves = {
        name: layers
        for name, layers in (panels | demo).items()
        if (paper_panels and name in PANELS) or any(layer.joined for layer in layers)
    }
    mosaic = pairs(len(curves), under_one=True)
    lines = mosaic.count(";")
    with new_figure(mosaic, height=3.6 + 2 * lines, height_ratios=[1.5, *[1] * lines]) as (
        figure,
        places,
    ):
        _draw_end_points(places[0], panels)
        for axis, (name, layers) in zip(places[1:], curves.items(), strict=True):
            shown = (
                layers
                if name in PANELS
                else [dataclasses.replace(layer, label=layer.runs[0]) for layer in layers]
            )
            draw(axis, shown)
            _label(axis, name, model)
            if np.isfinite(chances.get(name, np.nan)):
                axis.axhline(chances[name], color=GREY, linewidth=1, linestyle=":")
            if len(layers) > 1:
                axis.legend(loc="best")
        return finish(
            figure,
            panels | {f"here: {name}": layers for name, layers in demo.items()},
            f"Scores of the {model}: its last checkpoints"
            + (", and those of runs by tokens." if curves else "."),
            IN_WORDS[model],
            "The points of the paper's curves could not be read.",
            notes=_notes(model, bool(demo)),
        )


def _draw_end_points(axis: Any, panels: dict[str, list[Layer]]) -> None:
    """Draws what is published of all panels, a line each: the scores of the last checkpoints."""
    published = [
        (name, layer)
        for name, layers in panels.items()
        for layer in layers
        if layer.kind == "published"
    ]
    names = [
        PANELS[name] + (f" {layer.label.removeprefix('pass')}" if name == "code" else "")
        for name, layer in published
    ]
    for marker, tokens in zip(
        "os", sorted({x for _, layer in published for x in layer.x}, reverse=True), strict=False
    ):
        points = [
            (y, place)
            for place, (_, layer) in enumerate(published)
            for x, y in zip(layer.x, layer.y, strict=True)
            if x == tokens
        ]
        axis.plot(
            *zip(*points, strict=True),
            marker,
            color=GREY,
            markerfacecolor="white",
            markersize=8,
            markeredgewidth=1.5,
            label=f"at {tokens:,.0f} billion tokens",
        )
    axis.set_yticks(range(len(names)), names)
    axis.set(xlim=(0, 100), title="published, %")
    axis.invert_yaxis()
    axis.grid(visible=True, axis="both")
    axis.figure.legend(loc="outside upper left", ncols=2)


def _label(axis: Any, name: str, model: str) -> None:
    if name in PANELS:
        axis.set(xlim=(0, 1900), title=f"({'abcdef'[list(PANELS).index(name)]}) {PANELS[name]}, %")
        low, high = (facts().value(f"score_axis_{end}_{model}", name) for end in ("low", "high"))
        margin = 0.08 * (high - low)
        bottom, top = (
            axis.get_ylim()
        )  # of the points; the paper's panel shows at least its own ticks
        axis.set_ylim(min(low - margin, bottom), max(high + margin, top))
        if model == "70B":
            axis.axvline(
                facts().value("mix_stage", "from"), color=GREY, linewidth=0.8, linestyle=":"
            )
        axis.set_xlabel("tokens, billions")
    else:
        axis.set(title=f"here: {name}", xlabel="tokens, millions")


def _notes(model: str, has_demo: bool) -> list[str]:
    notes = ["The last checkpoints are from the paper's tables, the axes as in its panels."]
    if model == "7B":
        notes.append(
            "In words, too: world knowledge grows almost with tokens, at any number of shots."
        )
    if has_demo:
        notes.append(
            "Runs of this machine are scored by the same harness; bars are 95 % intervals, dotted"
            " is guessing. Bits per byte: less is better."
        )
    return notes
