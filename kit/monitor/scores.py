"""Benchmark scores of a run's checkpoints, read from `eval/step_*.json`, as curves. Also makes the
figure of scores over training tokens with 95 % intervals. The module imports neither torch nor
lm-eval.
"""

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np

from kit.errors import ConfigError, RunError, kit_command
from kit.evaluate.report import ANSWER_BITS, EvalReport, Metric, TaskScore
from kit.run import Run
from kit.run.columns import LONGEST_NAME
from kit.show.style import legend_under_title, new_figure
from kit.show.theme import HUES, SLATE

CURVE_COLOURS = (*HUES, SLATE)
MOST_SERIES = 200
"""Largest number of scores that the dashboard offers as charts."""
MARKERS = ("o", "s", "^", "D", "v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCurve:
    """Curve of one metric of one task over the checkpoints of a run, oldest checkpoint first.
    `curve["score"]` is the column `score` of `rows` as an array.
    """

    oldest_score: TaskScore
    """Score of the oldest checkpoint. Task and settings are read from it, since they are equal for
    all checkpoints of a curve."""
    metric: str
    """Name of the metric in the score reports, such as `acc`."""
    rows: list[dict[str, Any]]
    """One row per checkpoint, as a dict with the following keys. An unknown number is NaN.

    - `task`, `metric`, `step`, and `tokens`: number of training tokens up to the checkpoint.
    - `score`: value of the metric: a fraction, or bits for bits_per_byte.
    - `stderr`: standard error, as the harness reports it.
    - `low`, `high`: ends of the 95 % interval of the score.
    - `partial`: whether only a part of the task's items was scored."""

    def __getitem__(self, column: str) -> np.ndarray:
        return np.array([row[column] for row in self.rows])

    @property
    def name(self) -> str:
        """Name of the curve for a legend: the task, followed by the settings that differ from the
        default.
        """
        return score_name(self.oldest_score)

    @property
    def chance(self) -> float:
        """Accuracy of random guessing, as a fraction. NaN for a metric or a task without such an
        accuracy.
        """
        chance = self.oldest_score.chance
        if self.metric == ANSWER_BITS or chance is None:
            return np.nan
        return chance

    @property
    def is_accuracy(self) -> bool:
        """Whether the scores are accuracies, which are fractions of the items, and not bits or
        probabilities.
        """
        bits = self.metric.startswith(("answer", "bits", "byte", "likelihood", "word"))
        return not bits and "perplexity" not in self.metric


def eval_reports(run: Run) -> list[EvalReport]:
    """Returns the score reports of a run's checkpoints, sorted by training step. Files that are no
    valid reports are left out.
    """
    reports = []
    for file in (run.directory / "eval").glob("step_*.json"):
        # The file may have been written by another program, or deleted meanwhile.
        with contextlib.suppress(ConfigError, OSError, UnicodeDecodeError):
            reports.append(EvalReport.read(file))
    known = [report for report in reports if report.step is not None]
    return sorted(known, key=lambda report: report.step or 0)


def scoring_seconds(run: Run) -> float:
    """Returns the number of seconds for which all checkpoints of a run were scored, in total."""
    return sum(report.seconds for report in eval_reports(run))


def eval_curve(run: Run, metric: str | None = None) -> list[ScoreCurve]:
    """Returns one curve for each combination of task, settings and precision that was scored at any
    checkpoint of the run.

    By default, a curve shows the headline metric (the main one) of its task. If `metric` is given,
    all curves show this metric, and tasks without this metric are left out.
    """
    curves: dict[tuple, ScoreCurve] = {}
    for report in eval_reports(run):
        for score in report.scores:
            wanted = metric or score.headline.name
            for candidate in score.metrics:
                if candidate.name != wanted:
                    continue
                key = score.key, score.precision
                new = ScoreCurve(oldest_score=score, metric=wanted, rows=[])
                curves.setdefault(key, new).rows.append(_row(report, score, candidate))
    return list(curves.values())


def _row(report: EvalReport, score: TaskScore, metric: Metric) -> dict[str, Any]:
    """Returns the row of a `ScoreCurve` for one metric of one task in a score report."""
    numbers = {
        "tokens": report.tokens_seen,
        "score": metric.value,
        "stderr": metric.stderr,
        "low": metric.low,
        "high": metric.high,
    }
    row: dict[str, Any] = {
        "task": score_name(score),
        "metric": metric.name,
        "step": report.step,
        "partial": score.partial,
    }
    for name, value in numbers.items():
        row[name] = np.nan if value is None else float(value)
    return row


def score_name(score: TaskScore) -> str:
    """Returns the name of a score: the task, followed by the settings that differ from the default.
    Settings are shots, temperature, chat template, options of generation and precision.
    """
    words = [score.task]
    if score.num_fewshot:
        words.append(f"{score.num_fewshot} shots")
    if score.temperature:
        words.append(f"temperature {score.temperature:g}")
    if score.apply_chat_template:
        words.append("chat template")
    if score.gen_kwargs:
        words.append(str(score.gen_kwargs))
    if score.precision != "fp32":
        words.append(score.precision)
    return ", ".join(words)


def last_scores(run: Run) -> dict[str, dict[str, Any]]:
    """Returns the newest score of each curve of a run, by the name of the curve. A score is the
    last row of its `ScoreCurve`, in which an unknown number is None.
    """
    scores = {}
    for curve in eval_curve(run):
        newest = dict(curve.rows[-1])
        for key, value in newest.items():
            if value != value:  # Only NaN differs from itself.
                newest[key] = None
        scores[curve.name] = newest
    return scores


class ScoreFollower:
    """Reads new scores from a run's `eval/step_*.json`. Each score is returned once, and again if
    it has changed.

    Attributes:
        seen: value of each score when it was last returned, by `STEP NAME`.
    """

    def __init__(self, run: Run, seen: dict[str, float] | None = None) -> None:
        self.run = run
        self.seen = dict(seen or {})

    def read(self) -> list[tuple[int, int, dict[str, float]]]:
        """Returns (attempt, step, values) for each report with new scores. `values` maps names to
        numbers. A score is named `eval/TASK/METRIC`, and its standard error
        `eval/TASK/METRIC_stderr`.
        """
        new = []
        for report in eval_reports(self.run):
            values: dict[str, float] = {}
            for score in report.scores:
                task = score_name(score).replace(", ", "_").replace(" ", "_")
                for metric in score.metrics:
                    name = f"eval/{task}/{metric.name.replace(',', '_')}"
                    key = f"{report.step} {name}"
                    if self.seen.get(key) == metric.value:
                        continue
                    self.seen[key] = values[name] = metric.value
                    if metric.stderr is not None:
                        values[f"{name}_stderr"] = metric.stderr
            if values:
                new.append((report.attempt or 1, report.step or 0, values))
        return new


def score_series(run: Run) -> dict[str, dict[int, float]]:
    """Returns the scores of a run's checkpoints by training step, for each `eval/TASK/METRIC`. At
    most MOST_SERIES names are read, and only names that a chart can show.
    """
    series: dict[str, dict[int, float]] = {}
    for _, step, values in ScoreFollower(run).read():
        if step not in range(2**53):  # No training step has a larger number.
            continue
        for name, value in values.items():
            is_shown = name.isprintable() and len(name) <= LONGEST_NAME
            if name.endswith("_stderr") or not is_shown or not math.isfinite(value):
                continue
            if name in series or len(series) < MOST_SERIES:
                series.setdefault(name, {})[step] = value
    return series


def eval_figure(run: Run) -> tuple[Any, list[dict[str, Any]]]:
    """Returns (matplotlib figure, table) with the scores of a run's checkpoints. The table has the
    rows of all curves.

    The figure has up to three panels: accuracies, bits per byte of the right answers, and all other
    metrics. The 95 % interval is shaded. A hollow marker means that only a part of the items was
    scored. A dotted line is the accuracy of random guessing.

    Raises:
        RunError: No checkpoint of the run has been scored.
    """
    curves = eval_curve(run)
    if not curves:
        raise RunError(
            f"{run.directory} has no scores yet. Make some: `{kit_command('eval', run.directory)}`."
        )
    answers = eval_curve(run, ANSWER_BITS)
    accuracies = [curve for curve in curves if curve.is_accuracy]
    others = [curve for curve in curves if not curve.is_accuracy]
    panels = [group for group in (accuracies, answers, others) if group]
    heights = [3.0] * len(panels)
    if others:
        heights[-1] = 2.4
    layout = {"height_ratios": heights, "sharex": True, "squeeze": False}
    with new_figure(len(panels), height=sum(heights), **layout) as (figure, axes):
        for axis, group in zip(axes[:, 0], panels, strict=True):
            draw_scores(axis, group)
            axis.label_outer()
    table = []
    for curve in (*curves, *answers):
        table += curve.rows
    return figure, table


def draw_scores(axis: Any, curves: list[ScoreCurve]) -> None:
    """Draws score curves into one panel. Accuracies are drawn in per cent, and other metrics in
    their own unit.
    """
    from matplotlib.ticker import EngFormatter

    accuracy = all(curve.is_accuracy for curve in curves)
    of_answers = all(curve.metric == ANSWER_BITS for curve in curves)
    scale = 100 if accuracy else 1
    for i, curve in enumerate(curves):
        colour = CURVE_COLOURS[i % len(CURVE_COLOURS)]
        marker = MARKERS[i % len(MARKERS)]
        x = curve["tokens"]
        y = scale * curve["score"]
        partial = curve["partial"]
        label = curve.name if curve.metric == ANSWER_BITS else f"{curve.name} ({curve.metric})"
        axis.plot(x, y, color=colour, linewidth=1.2, marker=marker, label=label)
        low = scale * curve["low"]
        high = scale * curve["high"]
        axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.vlines(x, low, high, color=colour, alpha=0.6, linewidth=1)
        for here, face in ((~partial, colour), (partial, "white")):
            axis.plot(x[here], y[here], marker, color=colour, markerfacecolor=face, markersize=5)
        if accuracy and np.isfinite(curve.chance):
            axis.axhline(100 * curve.chance, color=colour, linewidth=0.8, linestyle=":")
    if accuracy:
        title = "Score, %; shaded: 95 % interval; dotted: guessing"
    elif of_answers:
        title = "Bits per byte of the right answer: less is better"
    else:
        names = [f"{curve.name}, {curve.metric.replace('_', ' ')}" for curve in curves]
        title = ", ".join(dict.fromkeys(names))
    if any(curve["partial"].any() for curve in curves):
        title += "\nhollow: a part of the items"
    axis.set(title=title, xlabel="training tokens")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if accuracy or of_answers:
        legend_under_title(axis)
