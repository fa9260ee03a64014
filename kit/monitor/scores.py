"""Scores of a run's checkpoints as curves, read from its `eval/step_*.json`.

No torch, no lm-eval.
"""

import dataclasses
from typing import Any

import numpy as np

from kit.errors import ConfigError
from kit.evaluate.report import ANSWER_BITS, EvalReport, Metric, TaskScore
from kit.run import Run


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
    for file in sorted((run.directory / "eval").glob("step_*.json")):
        try:
            reports.append(EvalReport.read(file))
        except (
            ConfigError,
            OSError,
            UnicodeDecodeError,
        ):  # of another writer, or deleted meanwhile
            continue
    return sorted(
        (report for report in reports if report.step is not None),
        key=lambda report: report.step or 0,
    )


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
    first, metrics = points[0][1], [metric for *_, metric in points]

    def column(values: list[Any]) -> np.ndarray:
        return np.array([np.nan if value is None else value for value in values], dtype=float)

    return ScoreCurve(
        task=first.task,
        num_fewshot=first.num_fewshot,
        metric=metrics[0].name,
        step=np.array([report.step for report, *_ in points]),
        tokens=column([report.tokens_seen for report, *_ in points]),
        score=column([metric.value for metric in metrics]),
        stderr=column([metric.stderr for metric in metrics]),
        low=column([metric.low for metric in metrics]),
        high=column([metric.high for metric in metrics]),
        partial=np.array([score.partial for _, score, _ in points]),
        chance=(
            float("nan") if first.chance is None or metrics[0].name == ANSWER_BITS else first.chance
        ),
        temperature=first.temperature,
        precision=first.precision,
    )


def last_scores(run: Run) -> dict[str, dict[str, Any]]:
    """Returns the newest score of each task, a row as of `ScoreCurve.rows` with None for what is
    not known.
    """
    last = {curve.name: curve.rows()[-1] for curve in eval_curve(run)}
    return {
        name: {key: None if value != value else value for key, value in row.items()}
        for name, row in last.items()
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
            values: dict[str, float] = {}
            for score in report.scores:
                values |= self._new(report, score)
            if values:
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
