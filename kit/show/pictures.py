"""Figures that explain an idea, for notebooks. Each returns a matplotlib figure and, where it shows data, its table."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kit.evaluate.report import EvalReport, wilson
from kit.show.style import BLUE, GREEN, GREY, VERMILION, Rows, new_figure
from kit.spec import FlopBasis, ModelSpec


def tensor_split_picture() -> Any:
    """Returns a drawing of a column-split matrix followed by a row-split one, over two devices."""
    subscripts = "₁₂"
    with new_figure(height=1.7) as (figure, axis):
        for device, colour in enumerate((BLUE, VERMILION)):
            down = 1 - device
            _box(axis, 3.1 + 1.1 * device, 0, 1.1, 2, colour, f"A{subscripts[device]}")
            _box(axis, 6.6 + 1.1 * device, 0.3, 1.1, 1.4, colour, f"Y{subscripts[device]}")
            _box(axis, 10.1, down, 2, 1, colour, f"B{subscripts[device]}")
            _box(axis, 13.3 + 3 * device, 0.3, 2, 1.4, colour, f"Z{subscripts[device]}")
        _box(axis, 0, 0.3, 2, 1.4, GREY, "X")
        for x, text in ((2.55, "·"), (6.0, "="), (9.45, "·"), (12.7, "="), (15.8, "+")):
            axis.text(x, 1, text, ha="center", va="center", fontsize=13)
        notes = ((1, "input,\non both"), (4.2, "by columns:\nnothing sent"), (7.7, "activation,\nelementwise"),
                 (11.1, "by rows"), (15.8, "partial sums:\none all-reduce"))  # fmt: skip
        for x, text in notes:
            axis.text(x, -0.25, text, ha="center", va="top", color=GREY)
        axis.set(xlim=(-0.2, 18.5), ylim=(-1.6, 2.9), aspect="equal")
        axis.set_axis_off()
        axis.text(0, 2.3, "device 1", color=BLUE, weight="bold")
        axis.text(3.1, 2.3, "device 2", color=VERMILION, weight="bold")
    return figure


def flop_basis_figure(specs: Sequence[ModelSpec]) -> tuple[Any, Rows]:
    """Returns a figure of each model's FLOPs per token in every basis, relative to the kit's, and its table."""
    others = [basis for basis in FlopBasis if basis is not FlopBasis.MODEL]
    rows = [
        {"spec": spec.name, "model": float(spec.flops_per_token())}
        | {basis.value: spec.flops_per_token(basis) / spec.flops_per_token() for basis in others}
        for spec in specs
    ]
    with new_figure(height=0.28 * len(rows) + 1.4) as (figure, axis):
        for basis, marker in zip(others, "osD^", strict=True):
            ratios = [row[basis.value] for row in rows]
            axis.plot(ratios, range(len(rows)), marker, label=basis.value.replace("_", " "), markersize=6)
        axis.axvline(1, color=GREY, linewidth=1, zorder=1)
        axis.set_yticks(range(len(rows)), [row["spec"] for row in rows])
        axis.invert_yaxis()
        axis.set_title("FLOPs per token relative to the kit's own count (line at 1)")
        figure.legend(ncols=4, loc="outside lower left")
    return figure, rows


def stage_weights_figure(weights: dict[int, tuple[int, int]]) -> tuple[Any, Rows]:
    """Returns a figure of the weights that one rank of each pipeline stage holds, and its table.

    Args:
        weights: of each stage, the numbers held in blocks and in all; the rest is embedding, final norm and output.
    """
    rows = [
        {"stage": stage, "blocks": blocks, "embedding and output": whole - blocks}
        for stage, (blocks, whole) in weights.items()
    ]
    with new_figure(height=2.8) as (figure, axis):
        stages, blocks = [row["stage"] for row in rows], [row["blocks"] / 1e9 for row in rows]
        axis.bar(stages, blocks, color=BLUE, width=0.8, label="blocks")
        extra = [row["embedding and output"] / 1e9 for row in rows]
        axis.bar(stages, extra, bottom=blocks, color=VERMILION, width=0.8, label="embedding, final norm, output")
        axis.set_title("Weights held by one rank of each pipeline stage, billions")
        axis.set_xlabel("pipeline stage")
        axis.set_ylim(top=1.3 * max(row["blocks"] + row["embedding and output"] for row in rows) / 1e9)
        axis.legend(ncols=2, loc="upper center")
    return figure, rows


def score_figure(report: EvalReport, bits_per_byte: dict[str, float]) -> tuple[Any, Rows]:
    """Returns a figure of a report: bits per byte beside reference models, accuracies beside chance; and its table.

    Args:
        report: with the task `heldout` and any number of multiple-choice tasks.
        bits_per_byte: of reference models on the same text, by name.
    """
    ours = report["heldout"].metric("bits_per_byte").value
    choices = [score for score in report.scores if score.chance is not None]
    rows = [{"task": "heldout", "bits per byte": ours, **bits_per_byte}]
    ratios = [0.34 * (len(bits_per_byte) + 1), 0.5 * max(1, len(choices))]
    with new_figure(2, height=sum(ratios) + 1.2, height_ratios=ratios) as (figure, (left, right)):
        bars = {**bits_per_byte, "this model": ours}
        drawn = left.barh(list(bars), list(bars.values()), color=[GREY] * len(bits_per_byte) + [BLUE], height=0.55)
        left.bar_label(drawn, fmt="%.2f", padding=3)
        left.set_xlim(0, 1.2 * max(bars.values()))
        left.set_title("Bits per byte of held-out text: less is better")
        for place, score in enumerate(choices):
            accuracy = score.metric("acc")
            rows.append({"task": score.task, "accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high})
            low, high = (accuracy.value if end is None else end for end in (accuracy.low, accuracy.high))
            spread = [[accuracy.value - low], [high - accuracy.value]]
            right.errorbar(accuracy.value, place, xerr=spread, fmt="o", color=GREEN, capsize=3)
            right.plot([score.chance] * 2, [place - 0.22, place + 0.22], color=GREY, linewidth=1.5)
            right.text(1, place + 0.32, score.coverage, color=GREY, ha="right")
        right.set_yticks(range(len(choices)), [score.task for score in choices])
        right.set(xlim=(0, 1), ylim=(-0.5, len(choices) - 0.4))
        right.set_title("Accuracy with 95 % interval; grey: chance")
        for axis in (left, right):
            axis.grid(visible=False)
    return figure, rows


def interval_figure(accuracy: float, chance: float, marks: dict[int, str]) -> tuple[Any, Rows]:
    """Returns a figure of the 95 % interval of an accuracy against the number of items it was measured on; its table.

    The interval is Wilson's; the standard error of a share p of n independent items is sqrt(p (1 - p) / (n - 1)), the
    harness's formula.

    Args:
        accuracy: the share of right answers.
        chance: that of guessing, drawn as a line.
        marks: numbers of items to mark, with their names.
    """
    items = np.geomspace(20, 1.2 * max(marks), 200)
    low, high = 100 * np.array([wilson(accuracy, n) for n in items]).T
    rows: Rows = []
    for n, name in sorted(marks.items()):
        ends = wilson(accuracy, n)
        error = round(float(np.sqrt(accuracy * (1 - accuracy) / (n - 1))), 4)
        rows.append({"items": n, "what": name, "standard error": error, "low": ends[0], "high": ends[1]})
    with new_figure(height=3.0) as (figure, axis):
        axis.fill_between(items, low, high, color=BLUE, alpha=0.2, label="95 % interval")
        axis.axhline(100 * accuracy, color=BLUE, label=f"measured: {accuracy:.1%}")
        axis.axhline(100 * chance, color=GREY, linestyle=(0, (4, 3)), label="guessing")
        for row in rows:
            down, up = 100 * (accuracy - row["low"]), 100 * (row["high"] - accuracy)
            axis.errorbar(row["items"], 100 * accuracy, [[down], [up]], color=VERMILION, fmt="o", capsize=4)
            axis.annotate(f"{row['what']}\n−{down:.1f} +{up:.1f}", (row["items"], 100 * accuracy + up), xytext=(0, 3),
                          textcoords="offset points", ha="center", color=VERMILION)  # fmt: skip
        axis.set_xscale("log")
        axis.set(xlabel="items scored", ylim=(100 * accuracy - 28, 100 * accuracy + 28))
        axis.set_title("What the score is known to, %")
        axis.legend(loc="lower right", frameon=True)
    return figure, rows


def _box(axis: Any, x: float, y: float, width: float, height: float, colour: str, text: str) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, alpha=0.22, edgecolor="none"))
    axis.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=colour, linewidth=1.2))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=13)
