"""Scores of a run's checkpoints as curves, read from its `eval/step_*.json`, and their figure:
scores against training tokens, with their 95 % intervals. No torch, no lm-eval.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from kit.errors import ConfigError, RunError, kit_command
from kit.evaluate.report import ANSWER_BITS, EvalReport, Metric, TaskScore
from kit.run import Run
from kit.show.style import new_figure
from kit.show.theme import HUES, SLATE

COLOURS = (*HUES, SLATE)
MARKERS = ("o", "s", "^", "D", "v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCurve:
    """One metric of one task over the checkpoints of a run, oldest first.

    All arrays have one entry a checkpoint.
    """

    task: str
    num_fewshot: int
    metric: str
    step: np.ndarray  # optimizer steps
    tokens: np.ndarray  # training tokens; NaN where the report does not know
    score: np.ndarray  # fraction, or bits for bits_per_byte
    stderr: np.ndarray  # the harness's standard error; NaN where it has no formula
    low: np.ndarray  # lower end of the 95 % interval; NaN where there is none
    high: np.ndarray  # its upper end
    partial: np.ndarray  # bool: a part of the items was scored
    chance: float  # accuracy of guessing; NaN where there is nothing to guess
    temperature: float = 0.0  # of sampled texts
    precision: str = "fp32"  # of the weights

    @property
    def name(self) -> str:
        """Task, shots, temperature and precision, for a legend."""
        name = self.task + (f", {self.num_fewshot} shots" if self.num_fewshot else "")
        name += f", temperature {self.temperature:g}" if self.temperature else ""
        return name + (f", {self.precision}" if self.precision != "fp32" else "")

    @property
    def is_accuracy(self) -> bool:
        """Whether its scores are shares of items, and not bits or probabilities."""
        return not self.metric.startswith(("answer", "bits", "byte", "likelihood", "word"))

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each checkpoint; NaN is what is not known."""
        numbers = {
            name: getattr(self, name) for name in ("tokens", "score", "stderr", "low", "high")
        }
        return [
            {"task": self.name, "metric": self.metric, "step": int(step)}
            | {name: float(values[i]) for name, values in numbers.items()}
            | {"partial": bool(self.partial[i])}
            for i, step in enumerate(self.step)
        ]


def eval_reports(run: Run) -> list[EvalReport]:
    """Returns the reports of a run's checkpoints, oldest first; a file that is no report is left
    out.
    """
    reports = []
    for file in (run.directory / "eval").glob("step_*.json"):
        # One may be of another writer, or deleted meanwhile.
        with contextlib.suppress(ConfigError, OSError, UnicodeDecodeError):
            reports.append(EvalReport.read(file))
    known = [report for report in reports if report.step is not None]
    return sorted(known, key=lambda report: report.step or 0)


def eval_curve(run: Run, metric: str | None = None) -> list[ScoreCurve]:
    """Returns a curve for each task, number of shots and precision that was scored at any
    checkpoint of the run.

    It is that of the metric that stands for the task, or that of `metric`, of tasks that have it.
    """
    points: dict[tuple, list[tuple[EvalReport, TaskScore, Metric]]] = {}
    for report in eval_reports(run):
        for score in report.scores:
            shown = (
                [m for m in score.metrics if m.name == metric]
                if metric
                else score.metrics and [score.headline]
            )
            points.setdefault((score.key, score.precision), []).extend(
                (report, score, found) for found in shown
            )
    return [_curve(found) for found in points.values() if found]


def _curve(points: list[tuple[EvalReport, TaskScore, Metric]]) -> ScoreCurve:
    first, name = points[0][1], points[0][2].name

    def column(values: Iterable[float | None]) -> np.ndarray:
        return np.array(list(values), dtype=float)  # None is NaN

    return ScoreCurve(
        task=first.task,
        num_fewshot=first.num_fewshot,
        metric=name,
        step=np.array([report.step for report, *_ in points]),
        tokens=column(report.tokens_seen for report, *_ in points),
        score=column(metric.value for *_, metric in points),
        stderr=column(metric.stderr for *_, metric in points),
        low=column(metric.low for *_, metric in points),
        high=column(metric.high for *_, metric in points),
        partial=np.array([score.partial for _, score, _ in points]),
        chance=np.nan if first.chance is None or name == ANSWER_BITS else first.chance,
        temperature=first.temperature,
        precision=first.precision,
    )


def last_scores(run: Run) -> dict[str, dict[str, Any]]:
    """Returns the newest score of each task, a row as of `ScoreCurve.rows` with None for what is
    not known.
    """
    return {
        curve.name: {key: value if value == value else None for key, value in last.items()}
        for curve in eval_curve(run)
        for last in curve.rows()[-1:]
    }


class ScoreFollower:
    """Reads the scores that are added to a run's `eval/*.json`, each once, and again where it
    has changed.
    """

    def __init__(self, run: Run, seen: dict[str, float] | None = None) -> None:
        self.run, self.seen = run, dict(seen or {})

    def read(self) -> list[tuple[int, int, dict[str, float]]]:
        """Returns (attempt, step, values) of what is new; a value is named `eval/TASK/METRIC`,
        `_stderr` its error.
        """
        found = []
        for report in eval_reports(self.run):
            new = [self._new(report, score).items() for score in report.scores]
            if values := dict(itertools.chain.from_iterable(new)):
                found.append((report.attempt or 1, report.step or 0, values))
        return found

    def _new(self, report: EvalReport, score: TaskScore) -> dict[str, float]:
        shots = f"_{score.num_fewshot}_shots" if score.num_fewshot else ""
        shots += f"_temperature_{score.temperature:g}" if score.temperature else ""
        shots += f"_{score.precision}" if score.precision != "fp32" else ""
        values = {}
        for metric in score.metrics:
            name = f"eval/{score.task}{shots}/{metric.name.replace(',', '_')}"
            key = f"{report.step} {name}"
            if self.seen.get(key) != metric.value:
                self.seen[key] = metric.value
                values[name] = metric.value
                values |= {} if metric.stderr is None else {f"{name}_stderr": metric.stderr}
        return values


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
    answers = eval_curve(run, ANSWER_BITS)
    accuracies = [curve for curve in curves if curve.is_accuracy]
    others = [curve for curve in curves if not curve.is_accuracy]
    panels = [group for group in (accuracies, answers, others) if group]
    with new_figure(len(panels), height=3.0 * len(panels), squeeze=False) as (figure, axes):
        for axis, group in zip(axes[:, 0], panels, strict=True):
            draw_scores(axis, group)
    return figure, [row for curve in (*curves, *answers) for row in curve.rows()]


def draw_scores(axis: Any, curves: list[ScoreCurve]) -> None:
    """Draws curves of one kind of metric: per cent for accuracies, else the metric's own unit."""
    from matplotlib.ticker import EngFormatter

    accuracy = all(curve.is_accuracy for curve in curves)
    of_answers = all(curve.metric == ANSWER_BITS for curve in curves)
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
    if accuracy:
        title = "Score, %; bars: 95 % interval; dotted: guessing"
    elif of_answers:
        title = "Bits per byte of the right answer: less is better"
    else:
        names = [f"{curve.name}, {curve.metric.replace('_', ' ')}" for curve in curves]
        title = ", ".join(dict.fromkeys(names))
    hollow = "\nhollow: a part of the items" if any(curve.partial.any() for curve in curves) else ""
    axis.set(title=title + hollow, xlabel="training tokens")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if accuracy or of_answers:
        axis.legend(frameon=True)
