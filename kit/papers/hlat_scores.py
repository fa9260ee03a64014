"""HLAT, section V: benchmark scores of checkpoints against training tokens (Figures 3 and 4), and
tables of model quality.

The figures show the published scores of the last checkpoints. The tables are as printed in the
paper, with the scores of the user's runs above the published rows.
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
from kit.papers.facts import PaperFact
from kit.papers.hlat_model import FACTS
from kit.papers.layers import FigureLayer, Runs, by_scale, open_runs, own_points, scale_of
from kit.papers.panels import HOLLOW, FigureContent, TableContent, draw_layers
from kit.run import Run
from kit.show.results import parameters_text
from kit.show.style import Rows
from kit.show.theme import GREY, INK

COLUMNS = {
    (task.task, task.num_fewshot): (task.column or "").split("_pass")[0] for task in SUITES["hlat"]
}
"""Maps (name of a task, number of shots in the paper) to the column of the paper's tables with the
score of this task."""
PANELS = {
    "mmlu": "MMLU",
    "commonsense": "common sense",
    "world_knowledge": "world knowledge",
    "reading": "BoolQ",
    "math": "GSM8K",
    "code": "HumanEval",
}
"""Maps a column of the paper's tables to the title of the panel that shows its scores. The panels
are (a) to (f) of Figures 3 and 4."""
DEMO = "measured, demo scale"
"""Text in the column `made` (origin of the scores) of a table row that comes from a run of this
machine."""
END_POINTS = "end points"
"""Name of the panel at the top of the figure, which shows the published scores of the last
checkpoints."""
MARKER_OFFSET = 0.2
"""Vertical distance of the markers of two checkpoints from the middle of their line, in line
heights."""
SHORT = {
    "sequence_length": "sequence length",
    "commonsense": "common sense (CR)",
    "world_knowledge": "world knowledge (WK)",
    "reading": "reading (RC)",
    "math": "Math",
    "mmlu": "MMLU",
    "code_pass_1": "pass@1",
    "code_pass_10": "pass@10",
    "crows_pairs_english": "CrowS-Pairs, English",
    "crows_pairs_french": "CrowS-Pairs, French",
    "truthfulqa_mc1": "TruthfulQA mc1",
    "truthfulqa_mc2": "TruthfulQA mc2",
}
"""Maps the kit's name of a table column to its heading. Brackets have the heading as printed in the
paper's tables."""
SWAPPED = {"commonsense": "reading", "reading": "commonsense"}
"""Columns whose printed headings in Table IV are swapped, compared with Table II. Maps each of them
to the other."""


def scores_content(runs: Runs = (), *, model: str, paper_panels: bool = False) -> FigureContent:
    """Returns Figure 3 (7B) or Figure 4 (70B), without the paper's curves.

    The numbers of the paper's curves could not be read off its figures. So only the published
    scores of the last checkpoints and the curves of the user's runs are drawn. If `paper_panels` is
    true, panels without a curve of the user's runs are drawn too.
    """
    panels = {name: end_points(model, name) for name in PANELS}
    has_curve = set()
    for run in by_scale(runs)["cluster"]:
        for curve in eval_curve(run):
            score = curve.oldest_score
            name = COLUMNS.get((score.task, score.num_fewshot))
            if name in PANELS:
                panels[name].append(_curve_layer(run, curve))
                has_curve.add(name)
    drawn = [name for name in PANELS if paper_panels or name in has_curve]
    and_curves = ", and those of runs by tokens" if drawn else ""

    def draw_panel(axis: Any, name: str) -> None:
        if name == END_POINTS:
            _draw_end_points(axis, panels)
        else:
            _draw_as_published(axis, name, model, panels[name])

    return FigureContent(
        panels=panels,
        values={"and_curves": and_curves},
        axes=[END_POINTS, *drawn],
        layout=_layout_below_end_points(len(drawn)),
        draw_panel=draw_panel,
    )


def _layout_below_end_points(num_panels: int) -> dict[str, Any]:
    """Returns keyword arguments of `new_figure` for a wide panel above `num_panels` smaller panels,
    two per line.
    """
    lines = ["aa"]
    letters = "bcdefg"[:num_panels]
    for i in range(0, num_panels, 2):
        lines.append(letters[i : i + 2].ljust(2, letters[i]))
    return {
        "mosaic": ";".join(lines),
        "height": 1.6 + 2 * len(lines),
        "height_ratios": [1.5] + [1] * (len(lines) - 1),
    }


def end_points(model: str, panel: str) -> list[FigureLayer]:
    """Returns figure layers (sets of points) with the published scores of the last checkpoints in
    %, against billions of training tokens.

    `panel` is a key of PANELS. For the panel `code` there are two layers, with the metrics pass@1
    and pass@10. For each other panel there is one layer.
    """
    labels = {panel: "published"}
    if panel == "code":
        labels = {"code_pass_1": "pass@1", "code_pass_10": "pass@10"}
    quality = published_table("II")
    averaging = published_table("IV")
    [row] = [row for row in quality.rows if row["model"] == "HLAT" and row["size"] == model]
    layers = []
    for column, label in labels.items():
        source = quality.source
        values = {1800: row[column]}
        # For 70B, Table II has only the score of the average of the last two checkpoints. The
        # scores of the two checkpoints are in Table IV, which has no pass@10.
        if model == "70B" and column != "code_pass_10":
            source = averaging.source
            heading = SWAPPED.get(column, column)
            checkpoints = [checkpoint[heading] for checkpoint in averaging.rows]
            values = dict(zip((1740, 1800), checkpoints, strict=False))
        points = [
            PaperFact(series=column, x=str(x), value=str(y), known="read", source=source, unit="%")
            for x, y in values.items()
        ]
        layers.append(FigureLayer.published(points, label=label))
    return layers


def _curve_layer(run: Run, curve: ScoreCurve) -> FigureLayer:
    """Returns one score curve of a run as a figure layer: scores of the run's checkpoints in %,
    with 95 % intervals, against billions of training tokens.
    """
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


def _draw_end_points(axis: Any, panels: dict[str, list[FigureLayer]]) -> None:
    """Draws one line for each panel of the paper's figure. The line joins the published scores of
    the last checkpoints. The scores are also written as numbers beside the line.

    Many scores differ by less than the width of a marker. So the marker of the earlier checkpoint
    is above the marker of the later one.
    """
    published = {}
    for name, title in PANELS.items():
        for layer in panels[name]:
            if layer.kind == "published":
                label = title
                if name == "code":
                    label += f" {layer.label.removeprefix('pass')}"
                published[label] = layer
    for place, layer in enumerate(published.values()):
        heights = [place + _marker_offset(layer, x) for x in layer.x]
        axis.plot(layer.y, heights, color=GREY, linewidth=1.2)
        text = " → ".join(f"{y:g}" for y in layer.y)
        style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "color": INK}
        # Scores above 70 are too near the right border for a text beside them, so the text is on
        # the left.
        if max(layer.y) > 70:
            axis.annotate(text, (min(layer.y), place), xytext=(-10, 0), ha="right", **style)
        else:
            axis.annotate(text, (max(layer.y), place), xytext=(10, 0), ha="left", **style)
    for marker, tokens in (("s", 1740), ("o", 1800)):
        points = []
        for place, layer in enumerate(published.values()):
            height = place + _marker_offset(layer, tokens)
            points += [(y, height) for y in layer.y[layer.x == tokens]]
        if points:
            label = f"at {tokens:,} billion tokens"
            style = HOLLOW | {"marker": marker, "markersize": 6}
            axis.plot(*zip(*points, strict=True), label=label, **style)
    axis.set_yticks(range(len(published)), [*published])
    axis.set_ylim(len(published) - 0.5, -0.5)
    axis.grid(visible=True, axis="both")
    axis.figure.legend(loc="outside upper left", ncols=2)


def _marker_offset(layer: FigureLayer, tokens: float) -> float:
    """Returns the distance of a marker from the middle of its line, in line heights. A positive
    distance is below the middle. `tokens` is the checkpoint of the marker, in billions of tokens.
    """
    if len(layer.x) == 1:
        return 0.0
    return MARKER_OFFSET if tokens == max(layer.x) else -MARKER_OFFSET


def _draw_as_published(axis: Any, name: str, model: str, layers: list[FigureLayer]) -> None:
    """Draws one panel with the axes of the paper's figure. The y axis is extended if points lie
    outside the paper's range.
    """
    draw_layers(axis, layers)
    letter = "abcdef"[[*PANELS].index(name)]
    axis.set_title(f"({letter}) {PANELS[name]}, %")
    low, high = (FACTS.value(f"score_axis_{end}_{model}", name) for end in ("low", "high"))
    margin = 0.08 * (high - low)
    bottom, top = axis.get_ylim()
    axis.set_ylim(min(low - margin, bottom), max(high + margin, top))
    if model == "70B":
        begin = FACTS.value("mix_stage", "from")
        axis.axvline(begin, color=GREY, linewidth=0.8, linestyle=":")
    if len(layers) > 1:
        axis.legend(loc="best")


# Tables -------------------------------------------------------------------------------------------


def sequence_length_content(runs: Runs = ()) -> TableContent:
    """Returns Table I: the compared models and their sequence lengths, with rows for the user's
    runs.
    """
    own = []
    for run in open_runs(runs):
        size = parameters_text(run.spec.num_params)
        length = str(run.spec.sequence_length)
        own.append({"made": _made(run), "model": run.name, "size": size, "sequence_length": length})
    return _printed_table("I", own, [run["model"] for run in own])


def compared_content(runs: Runs = (), *, table: str) -> TableContent:
    """Returns Table II (quality) or Table V (bias and truthfulness), with the scores of the user's
    runs above the published rows.

    Each run is shown with the scores of its newest checkpoint. A cell is filled only if all data
    sets of its column were scored, with all items and the paper's number of shots.
    """
    found = reports(runs)
    columns = published_table(table).columns
    own = []
    num_partial = 0
    for report, made, _ in found:
        cells = compare(report, table).own[0]
        num_partial += not any(cells[column] for column in columns)
        name = cells["model"]
        if made == DEMO:
            name = name.split(",")[0]
        own.append({"made": made, **cells, "model": name})
    notes = []
    incomplete = ""
    if own:
        notes.append("Rows of your own have 95 % intervals in brackets.")
    if num_partial:
        notes.append(
            "A cell stays empty if only a part of the items or data sets was scored, or with"
            " another number of shots."
        )
        incomplete = f"Reports without a complete column: {num_partial} of {len(own)}."
    content = _printed_table(table, own, [name for _, _, name in found], notes)
    return dataclasses.replace(content, values={**content.values, "incomplete": incomplete})


def averaging_content(runs: Runs = ()) -> TableContent:
    """Returns Table IV: the scores of the last two checkpoints of HLAT 70B, and of the average of
    these checkpoints.
    """
    return _printed_table("IV", [], [])


def reports(runs: Runs) -> list[tuple[EvalReport, str, str]]:
    """Returns (score report, origin, name) for each report file and each scored run in `runs`. Of a
    run, the newest score report is returned. The elements of `runs` are paths of report files, runs
    and folders with runs.

    The name is the name of the file or of the run. The origin is DEMO for a run of a local site,
    and `measured` for all other runs and for report files.
    """
    found = []
    for run in runs:
        if not isinstance(run, Run) and Path(run).is_file():
            found.append((EvalReport.read(Path(run)), "measured", Path(run).name))
            continue
        for each in open_runs([run]):
            if scored := eval_reports(each):
                found.append((scored[-1], _made(each), each.name))
    return found


def _made(run: Run) -> str:
    return DEMO if scale_of(run) == "demo" else "measured"


def _printed_table(
    name: str, own: list[dict[str, str]], runs: list[str], notes: Sequence[str] = ()
) -> TableContent:
    """Returns a table of the paper with the rows of the user's runs first. The notes name errors
    and oddities of the printed table.
    """
    known = published_table(name)
    rows: Rows = [*own, *({"made": "published", **row} for row in known.texts())]
    sources = {
        "published": known.source,
        "measured": "reports given to the figure",
        DEMO: "this machine, demo scale",
    }
    layers = []
    for made in dict.fromkeys(["published", *(row["made"] for row in own)]):
        kind: Any = _kind_of(made)
        layers.append(FigureLayer(kind=kind, label="table", source=sources[made]))
    return TableContent(
        cells=[{SHORT.get(key, key): value for key, value in row.items()} for row in rows],
        rows=[{"layer": _kind_of(row["made"])} | row for row in rows],
        layers=layers,
        runs=runs,
        values={"title": known.title},
        notes=[*notes, *known.notes],
    )


def _kind_of(made: str) -> str:
    """Returns the kind of numbers that a table row has, `published` or `measured`. `made` is the
    text in the row's column `made`, which says where the scores come from.
    """
    return made.split(",")[0]
