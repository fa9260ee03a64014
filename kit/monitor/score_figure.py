"""Scores against training tokens, with their 95 % intervals."""

from typing import Any

import numpy as np

from kit.errors import RunError, kit_command
from kit.evaluate.report import ANSWER_BITS
from kit.monitor.scores import ScoreCurve, eval_curve
from kit.run import Run
from kit.show.style import new_figure
from kit.show.theme import HUES, SLATE

COLOURS = (*HUES, SLATE)
MARKERS = ("o", "s", "^", "D", "v")


def eval_figure(run: Run) -> tuple[Any, list[dict[str, Any]]]:
    """Returns a matplotlib figure of the scores of a run's checkpoints, and the table that it
    shows.

    Accuracies, bits per byte of right answers and those of texts have a panel each. A bar is the 95
    % interval; a hollow marker is a score of a part of the items; a dotted line is guessing. The
    table has a row for each point: task, metric, step, tokens, score, stderr (the harness's), low,
    high, partial.

    Raises:
        RunError: no checkpoint of the run has been scored.
    """
    curves = eval_curve(run)
    if not curves:
        raise RunError(
            f"{run.directory} has no scores yet. Make some: `{kit_command('eval', run.directory)}`."
        )
    accuracies = _accuracies(curves)
    others = [curve for curve in curves if curve not in accuracies]
    answers = eval_curve(run, ANSWER_BITS)
    panels = [group for group in (accuracies, answers, others) if group]
    with new_figure(len(panels), height=3.0 * len(panels), squeeze=False) as (figure, axes):
        for axis, group in zip(axes[:, 0], panels, strict=True):
            draw_scores(axis, group)
    return figure, [row for curve in (*curves, *answers) for row in curve.rows()]


def draw_scores(axis: Any, curves: list[ScoreCurve]) -> None:
    """Draws curves of one kind of metric: per cent for accuracies, else the metric's own unit."""
    from matplotlib.ticker import EngFormatter

    accuracy = all(curve in _accuracies(curves) for curve in curves)
    scale = 100 if accuracy else 1
    for i, curve in enumerate(curves):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        x, y = curve.tokens, scale * curve.score
        label = curve.name if curve.metric == ANSWER_BITS else f"{curve.name} ({curve.metric})"
        errors = scale * np.nan_to_num(
            np.stack((curve.score - curve.low, curve.high - curve.score))
        )
        axis.errorbar(x, y, errors, color=colour, linewidth=1.2, capsize=2, label=label)
        for partial, face in ((False, colour), (True, "white")):
            here = curve.partial == partial
            axis.plot(x[here], y[here], marker, color=colour, markerfacecolor=face, markersize=5)
        if accuracy and np.isfinite(curve.chance):
            axis.axhline(100 * curve.chance, color=colour, linewidth=0.8, linestyle=":")
    hollow = "\nhollow: a part of the items" if any(curve.partial.any() for curve in curves) else ""
    names = ", ".join(
        dict.fromkeys(f"{curve.name}, {curve.metric.replace('_', ' ')}" for curve in curves)
    )
    of_answers = all(curve.metric == ANSWER_BITS for curve in curves)
    title = "Score, %; bars: 95 % interval; dotted: guessing" if accuracy else names
    axis.set_title(
        f"{'Bits per byte of the right answer: less is better' if of_answers else title}{hollow}"
    )
    axis.set_xlabel("training tokens")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if accuracy or of_answers:
        axis.legend(frameon=True)


def _accuracies(curves: list[ScoreCurve]) -> list[ScoreCurve]:
    return [
        curve
        for curve in curves
        if not curve.metric.startswith(("answer", "bits", "byte", "likelihood", "word"))
    ]
