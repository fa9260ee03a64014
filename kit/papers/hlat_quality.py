"""HLAT, section V: its tables of quality as printed, with your own scores above them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.evaluate.hlat import compare, published_table
from kit.evaluate.report import EvalReport
from kit.monitor.scores import eval_reports
from kit.papers.layers import Layer, Runs, opened, scale_of
from kit.papers.panels import paper_table
from kit.run import Run
from kit.show.style import Rows

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


def sequence_length_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns Table I, the models compared and their sequence lengths, with those of your runs;
    and its rows.
    """
    own = [
        {
            "made": _made(run),
            "model": run.name,
            "size": _size(run.spec.num_params),
            "sequence_length": str(run.spec.sequence_length),
        }
        for run in opened(runs)
    ]
    return _table("I", own, [run["model"] for run in own])


def quality_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns Table II, with the scores of the newest checkpoint of your runs above; and its rows.

    A column needs all of its data sets in the paper's shots, whole.
    """
    return _compared(
        "II",
        runs,
        "CR: mean of six tasks of common sense, WK: two of world knowledge, RC: BoolQ, Math: "
        "GSM8K, p@: HumanEval.",
    )


def averaging_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns Table IV, two checkpoints of the 70B and their mean, and its rows."""
    return _table("IV", [], [], "The mean of both checkpoints has the best average.")


def truthfulness_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns Table V, bias and truthfulness, with your own scores above as in `quality_figure`;
    and its rows.
    """
    return _compared("V", runs)


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


def _size(num_params: int) -> str:
    return f"{num_params / 1e9:.3g}B" if num_params >= 1e9 else f"{num_params / 1e6:.2g}M"


def _made(run: Run) -> str:
    return "measured, demo scale" if scale_of(run) == "demo" else "measured"


def _compared(name: str, runs: Runs, *notes: str) -> tuple[Any, Rows]:
    own, missing, found, told = [], 0, reports(runs), list(notes)
    for report, made, _ in found:
        [row] = compare(report, name).own
        own.append({"made": made, **row})
        missing += not any(row[column] for column in published_table(name).columns)
    if own:
        told.append("Own rows: 95 % intervals in brackets.")
    if missing:
        told.append("Partial scores, other shots and a part of a column's data sets do not count.")
    left = f"Reports without a complete column: {missing} of {len(own)}." if missing else ""
    return _table(name, own, [title for *_, title in found], left, notes=told)


def _table(
    name: str,
    own: list[dict[str, str]],
    runs: list[str],
    text: str = "",
    *,
    notes: Sequence[str] = (),
) -> tuple[Any, Rows]:
    """Returns a table of the paper, own rows first, its oddities in the notes; and its rows."""
    known = published_table(name)
    rows: Rows = [*own, *({"made": "published", **row} for row in known.texts())]
    for row in rows:
        if row["made"] == "measured, demo scale":
            row["model"] = row["model"].split(",")[0]
    shown = [{SHORT.get(key, key): value for key, value in row.items()} for row in rows]
    layers = [_layer("published", known.source)]
    layers += [_layer("measured", made) for made in dict.fromkeys(row["made"] for row in own)]
    caption = filter(None, [f"{known.title}, as printed.", text])
    drawn = paper_table(shown, layers, *caption, notes=[*notes, *known.notes], runs=runs)
    return drawn, [{"layer": row["made"].split(",")[0]} | row for row in rows]


def _layer(kind: Any, source: str) -> Layer:
    """Returns a layer of no points: what a table's sources need."""
    told = {
        "measured, demo scale": "this machine, demo scale",
        "measured": "reports given to the figure",
    }
    return Layer(kind=kind, label="table", source=told.get(source, source))
