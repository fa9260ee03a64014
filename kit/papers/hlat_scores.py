"""HLAT, section V: scores of checkpoints against tokens (Figures 3 and 4) with the published end
points, and its tables of quality as printed, with your own scores above them.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kit.evaluate.benchmarks import SUITES
from kit.evaluate.hlat import compare, published_table
from kit.evaluate.report import EvalReport
from kit.monitor.scores import ScoreCurve, eval_curve, eval_reports
from kit.papers.facts import Fact
from kit.papers.hlat_model import FACTS
from kit.papers.layers import Drawn, Layer, Runs, by_scale, opened, own_points, scale_of
from kit.papers.panels import HOLLOW, finish, pairs, panel, paper_table
from kit.run import Run
from kit.show.style import Rows, new_figure
from kit.show.theme import GREY, INK

COLUMNS = {
    (task.task, task.num_fewshot): (task.column or "").split("_pass")[0] for task in SUITES["hlat"]
}
"""Of the paper's tables, by the task and the shots that count in them."""
PANELS = {
    "mmlu": "MMLU",
    "commonsense": "common sense",
    "world_knowledge": "world knowledge",
    "reading": "BoolQ",
    "math": "GSM8K",
    "code": "HumanEval",
}
"""Of both figures, (a) to (f)."""
DEMO = "measured, demo scale"
SHORT = {
    "sequence_length": "tokens",
    "commonsense": "CR",
    "world_knowledge": "WK",
    "reading": "RC",
    "math": "Math",
    "mmlu": "MMLU",
    "code_pass_1": "p@1",
    "code_pass_10": "p@10",
    "average": "avg",
    "crows_pairs_english": "CrowS en",
    "crows_pairs_french": "CrowS fr",
    "truthfulqa_mc1": "mc1",
    "truthfulqa_mc2": "mc2",
}
"""Headings of the paper."""
SWAPPED = {"commonsense": "reading", "reading": "commonsense"}
"""Headings of Table IV, against Table II."""


def scores_figure(
    runs: Runs = (), *, model: str, words: Sequence[str], paper_panels: bool = False
) -> Drawn:
    """Returns Figure 3 (7B) or 4 (70B) as far as it was read: the end points, and the curves of
    your runs; and the table.

    `words` are what the paper says of its curves: one for the caption, the others for the notes.
    `paper_panels` draws all panels of the paper, also those that have no curve of your runs.
    """
    panels = {name: end_points(model, name) for name in PANELS}
    for run in by_scale(runs)["cluster"]:
        for curve in eval_curve(run):
            name = COLUMNS.get((curve.oldest_score.task, curve.oldest_score.num_fewshot))
            if name in PANELS:
                panels[name].append(_curve_layer(run, curve))
    curves = {
        name: layers
        for name, layers in panels.items()
        if paper_panels or any(layer.joined for layer in layers)
    }
    mosaic = pairs(len(curves), under_one=True)
    lines = mosaic.count(";")
    with new_figure(mosaic, height=3.6 + 2 * lines, height_ratios=[1.5, *[1] * lines]) as (
        figure,
        places,
    ):
        _draw_end_points(places[0], panels)
        for axis, (name, layers) in zip(places[1:], curves.items(), strict=True):
            _draw_as_published(axis, name, model, layers)
            if len(layers) > 1:
                axis.legend(loc="best")
        return finish(
            figure,
            panels,
            f"Scores of the {model}, %: its last checkpoints"
            + (", and those of runs by tokens." if curves else "."),
            words[0],
            "The points of the paper's curves could not be read.",
            notes=[
                "The last checkpoints are from the paper's tables, the axes as in its panels.",
                "Your runs are scored by the same harness; bars are 95 % intervals.",
                *words[1:],
            ],
        )


def end_points(model: str, panel: str) -> list[Layer]:
    """Returns published scores at the last checkpoints, %, against billions of tokens; of pass@1
    and 10 for code.
    """
    columns = {"code_pass_1": "pass@1", "code_pass_10": "pass@10"}
    two = published_table("II")
    four = published_table("IV")
    [row] = [row for row in two.rows if row["model"] == "HLAT" and row["size"] == model]
    layers = []
    for column, label in (columns if panel == "code" else {panel: "published"}).items():
        source = two.source
        values = {1800: row[column]}
        # Table II has the mean of both checkpoints; Table IV has each.
        if model == "70B" and column != "code_pass_10":
            swapped = SWAPPED.get(column, column)
            values = dict(zip((1740, 1800), (each[swapped] for each in four.rows), strict=False))
            source = four.source
        points = [
            Fact(series=column, x=str(x), value=str(y), known="read", source=source, unit="%")
            for x, y in values.items()
        ]
        layers.append(Layer.published(points, label=label))
    return layers


def _curve_layer(run: Run, curve: ScoreCurve) -> Layer:
    """Returns the scores of a run's checkpoints, %, with their 95 % intervals."""
    layer = own_points(
        [run],
        curve["tokens"] / 1e9,
        curve["score"],
        low=np.where(np.isnan(curve["low"]), curve["score"], curve["low"]),
        high=np.where(np.isnan(curve["high"]), curve["score"], curve["high"]),
        label=f"{run.name}: {curve.name}",
        joined=True,
    ).times(100.0)
    if curve["partial"].any():
        layer = dataclasses.replace(layer, source=f"{layer.source}; a part of the items")
    return layer


def _draw_end_points(axis: Any, panels: dict[str, list[Layer]]) -> None:
    """Draws what is published of all panels, a line each: the scores of the last checkpoints,
    joined, with their numbers.
    """
    published = {
        PANELS[name] + (f" {layer.label.removeprefix('pass')}" if name == "code" else ""): layer
        for name in PANELS
        for layer in panels[name]
        if layer.kind == "published"
    }
    for place, layer in enumerate(published.values()):
        axis.plot(layer.y, [place] * len(layer.y), color=GREY, linewidth=4, alpha=0.5)
        told = " → ".join(f"{y:g}" for y in layer.y)
        before = max(layer.y) > 70  # there is no room behind it
        at, offset, side = (min, -10, "right") if before else (max, 10, "left")
        style = {"textcoords": "offset points", "va": "center", "ha": side, "color": INK}
        axis.annotate(told, (at(layer.y), place), xytext=(offset, 0), **style)
    for marker, tokens in (("|", 1740), ("o", 1800)):
        points = [
            (y, place)
            for place, layer in enumerate(published.values())
            for y in layer.y[layer.x == tokens]
        ]
        if points:
            label = f"at {tokens:,} billion tokens"
            axis.plot(*zip(*points, strict=True), label=label, **HOLLOW | {"marker": marker})
    axis.set_yticks(range(len(published)), [*published])
    axis.set(xlim=(0, 100), ylim=(len(published) - 0.5, -0.5), title="published, %")
    axis.grid(visible=True, axis="both")
    axis.figure.legend(loc="outside upper left", ncols=2)


def _draw_as_published(axis: Any, name: str, model: str, layers: list[Layer]) -> None:
    """Draws a panel with the axes of the paper's: it shows at least its ticks, and all points."""
    title = f"({'abcdef'[list(PANELS).index(name)]}) {PANELS[name]}, %"
    panel(axis, layers, title=title, xlabel="tokens, billions", xlim=(0, 1900))
    low, high = (FACTS.value(f"score_axis_{end}_{model}", name) for end in ("low", "high"))
    margin, (bottom, top) = 0.08 * (high - low), axis.get_ylim()
    axis.set_ylim(min(low - margin, bottom), max(high + margin, top))
    if model == "70B":
        begin = FACTS.value("mix_stage", "from")
        axis.axvline(begin, color=GREY, linewidth=0.8, linestyle=":")


# Tables -------------------------------------------------------------------------------------------


def sequence_length_figure(runs: Runs = ()) -> Drawn:
    """Returns Table I, the models compared and their sequence lengths, with those of your runs;
    and its rows.
    """
    own = []
    for run in opened(runs):
        count = run.spec.num_params
        length = str(run.spec.sequence_length)
        size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.2g}M"
        own.append({"made": _made(run), "model": run.name, "size": size, "sequence_length": length})
    return _table("I", own, [run["model"] for run in own])


def compared_figure(runs: Runs = (), *, table: str, headings: Sequence[str] = ()) -> Drawn:
    """Returns Table II, quality, or V, bias and truthfulness, with the scores of the newest
    checkpoint of your runs above; and its rows.

    A column needs all of its data sets in the paper's shots, whole. `headings` say what its name
    stands for.
    """
    found = reports(runs)
    columns = published_table(table).columns
    own = []
    for report, made, _ in found:
        cells = compare(report, table).own[0]
        name = cells["model"].split(",")[0] if made == DEMO else cells["model"]
        own.append({"made": made, **cells, "model": name})
    notes = [*headings]
    left = ""
    if own:
        notes.append("Own rows: 95 % intervals in brackets.")
    if missing := sum(not any(row[column] for column in columns) for row in own):
        notes.append("Partial scores, other shots and a part of a column's data sets do not count.")
        left = f"Reports without a complete column: {missing} of {len(own)}."
    return _table(table, own, [title for *_, title in found], left, notes=notes)


def averaging_figure(runs: Runs = ()) -> Drawn:
    """Returns Table IV, two checkpoints of the 70B and their mean, and its rows."""
    return _table("IV", [], [], "The mean of both checkpoints has the best average.")


def reports(runs: Runs) -> list[tuple[EvalReport, str, str]]:
    """Returns the newest report of each scored run, and those given as files, with how each was
    made and its name.
    """
    found = []
    for run in runs:
        if not isinstance(run, Run) and Path(run).is_file():
            found.append((EvalReport.read(Path(run)), "measured", Path(run).name))
            continue
        for each in opened([run]):
            if scored := eval_reports(each):
                found.append((scored[-1], _made(each), each.name))
    return found


def _made(run: Run) -> str:
    return DEMO if scale_of(run) == "demo" else "measured"


def _table(
    name: str,
    own: list[dict[str, str]],
    runs: list[str],
    text: str = "",
    *,
    notes: Sequence[str] = (),
) -> Drawn:
    """Returns a table of the paper, own rows first, its oddities in the notes; and its rows."""
    known = published_table(name)
    rows: Rows = [*own, *({"made": "published", **row} for row in known.texts())]
    told = {
        "published": known.source,
        "measured": "reports given to the figure",
        DEMO: "this machine, demo scale",
    }
    layers = [
        Layer(kind=made.split(",")[0], label="table", source=told[made])  # type: ignore[arg-type]
        for made in dict.fromkeys(["published", *(row["made"] for row in own)])
    ]
    drawn = paper_table(
        [{SHORT.get(key, key): value for key, value in row.items()} for row in rows],
        layers,
        f"{known.title}, as printed.",
        *([text] if text else []),
        notes=[*notes, *known.notes],
        runs=runs,
    )
    return drawn, [{"layer": row["made"].split(",")[0]} | row for row in rows]
