"""Figures of a report: scores beside reference models and chance, and the confidence interval of an
accuracy.
"""

from typing import Any

import numpy as np

from kit.evaluate.report import ANSWER_BITS, EvalReport, wilson
from kit.show.style import Rows, legend_under_title, new_figure
from kit.show.theme import BLUE, GREEN, GREY, VERMILION


def score_figure(report: EvalReport, bits_per_byte: dict[str, float]) -> tuple[Any, Rows]:
    """Returns (figure, table rows) of a report.

    The left panel shows the bits per byte of the validation text, beside the values of reference
    models, which the argument `bits_per_byte` gives. The right panel shows accuracies beside
    chance. The label of an accuracy includes the bits per byte of the right answers, if the report
    has them.

    The report has the task `heldout` and any number of multiple-choice tasks.
    """
    ours = report["heldout"].metric("bits_per_byte").value
    choices = [score for score in report.scores if score.chance is not None]
    labels = []
    rows = [{"task": "heldout", "bits per byte": ours, **bits_per_byte}]
    ratios = [0.34 * (len(bits_per_byte) + 1), 0.5 * max(1, len(choices))]
    with new_figure(2, height=sum(ratios) + 1.4, height_ratios=ratios) as (figure, (left, right)):
        bars = {**bits_per_byte, "this model": ours}
        drawn = left.barh(
            list(bars), list(bars.values()), color=[GREY] * len(bits_per_byte) + [BLUE], height=0.55
        )
        left.bar_label(drawn, fmt="%.2f", padding=3)
        left.set_xlim(0, 1.2 * max(bars.values()))
        left.set_title("Bits per byte of held-out text: less is better")
        for place, score in enumerate(choices):
            accuracy = next(metric for metric in score.metrics if metric.name.startswith("acc"))
            row = {
                "task": score.task,
                "accuracy": accuracy.value,
                "low": accuracy.low,
                "high": accuracy.high,
            }
            label = score.task
            for metric in score.metrics:
                if metric.name == ANSWER_BITS:
                    row[ANSWER_BITS] = metric.value
                    label = f"{score.task}\n{metric.value:.2f} bits per byte"
            rows.append(row)
            labels.append(label)
            down = 0.0 if accuracy.low is None else accuracy.value - accuracy.low
            up = 0.0 if accuracy.high is None else accuracy.high - accuracy.value
            right.errorbar(
                accuracy.value, place, xerr=[[down], [up]], fmt="o", color=GREEN, capsize=3
            )
            right.plot([score.chance] * 2, [place - 0.22, place + 0.22], color=GREY, linewidth=1.5)
            right.text(1, place + 0.32, score.coverage, color=GREY, ha="right")
        right.set_yticks(range(len(choices)), labels)
        right.set(xlim=(0, 1), ylim=(-0.5, len(choices) - 0.4))
        right.set_title(
            "Accuracy with 95 % interval; grey line: chance\n"
            "below the task's name: bits per byte of the right answer"
        )
        for axis in (left, right):
            axis.grid(visible=False)
    return figure, rows


def interval_figure(accuracy: float, chance: float, marks: dict[int, str]) -> tuple[Any, Rows]:
    """Returns (figure, table rows) for the 95 % interval of an accuracy against the number of
    scored items.

    The interval is Wilson's. For a share p of n independent items, the standard error is sqrt(p (1
    - p) / (n - 1)), lm-eval's formula. `marks` maps numbers of items to names. The figure has a
    point with a label at each of them.
    """
    items = np.geomspace(20, 1.2 * max(marks), 200)
    low, high = 100 * np.array([wilson(accuracy, n) for n in items]).T
    rows: Rows = []
    for n, name in sorted(marks.items()):
        ends = wilson(accuracy, n)
        error = round(float(np.sqrt(accuracy * (1 - accuracy) / (n - 1))), 4)
        rows.append(
            {"items": n, "what": name, "standard error": error, "low": ends[0], "high": ends[1]}
        )
    with new_figure(height=3.0) as (figure, axis):
        axis.fill_between(items, low, high, color=BLUE, alpha=0.2, label="95 % interval")
        axis.axhline(100 * accuracy, color=BLUE, label=f"measured: {accuracy:.1%}")
        axis.axhline(100 * chance, color=GREY, linestyle=(0, (4, 3)), label="guessing")
        for row in rows:
            down = 100 * (accuracy - row["low"])
            up = 100 * (row["high"] - accuracy)
            axis.errorbar(
                row["items"], 100 * accuracy, [[down], [up]], color=VERMILION, fmt="o", capsize=4
            )
            axis.annotate(
                f"{row['what']}\n−{down:.1f} +{up:.1f}",
                (row["items"], 100 * accuracy + up),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                color=VERMILION,
            )
        axis.set_xscale("log")
        axis.set(xlabel="items scored", ylim=(100 * accuracy - 28, 100 * accuracy + 28))
        axis.set_title("Score and its 95 % interval, %")
        legend_under_title(axis, columns=3)
    return figure, rows
