"""EvalReport: the scores of one checkpoint, and everything needed to judge them. No torch, no lm-eval."""

import dataclasses
import html
from pathlib import Path
from typing import Self

from cluster.record import Record, field_doc
from kit.evaluate.resolver import DataSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric(Record):
    """One number of a task."""

    name: str = field_doc("as the harness calls it")
    value: float = field_doc("a fraction for accuracies, bits for bits_per_byte")
    stderr: float | None = field_doc("standard error; None where the harness has no formula", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScore(Record):
    """The scores of one task."""

    task: str = field_doc("name in the harness")
    metrics: tuple[Metric, ...] = field_doc("in the order of the task's definition")
    num_items: int = field_doc("items scored")
    total_items: int = field_doc("items of the whole split")
    seed: int | None = field_doc("of the random subset; None when all items were scored", default=None)
    num_truncated: int = field_doc("prompts cut on the left to the model's sequence length", default=0)
    num_fewshot: int = field_doc("solved examples in the prompt")
    chance: float | None = field_doc("accuracy of guessing; None where there is nothing to guess", default=None)
    task_version: str = field_doc("of the task's definition")
    harness_version: str = field_doc("of lm-eval")
    data: tuple[DataSource, ...] = field_doc("files that the items came from")
    seconds: float = field_doc("time to score")

    @property
    def partial(self) -> bool:
        """True for a random subset: a progress signal, not a result."""
        return self.num_items < self.total_items

    @property
    def coverage(self) -> str:
        """`partial: 200 of 1,838 items`, or `1,838 items`; then how many prompts were cut, if any."""
        whole = f"{self.total_items:,} items"
        text = f"partial: {self.num_items:,} of {whole}" if self.partial else whole
        return f"{text}; {self.num_truncated:,} prompts cut" if self.num_truncated else text

    def metric(self, name: str) -> Metric:
        """Returns one metric.

        Raises:
            KeyError: the task does not have it.
        """
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(f"{self.task} has no metric {name!r}; it has {', '.join(m.name for m in self.metrics)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalReport(Record):
    """The scores of one model, or of one checkpoint of a run."""

    name: str = field_doc("model or run")
    step: int | None = field_doc("optimizer step of the checkpoint", default=None)
    checkpoint: str | None = field_doc("its folder in the run directory", default=None)
    tokens_seen: int | None = field_doc("training tokens up to the checkpoint", default=None)
    tokenizer_sha256: str = field_doc("hash of the tokenizer's file")
    scores: tuple[TaskScore, ...] = field_doc("one for each task", default=())

    def __getitem__(self, task: str) -> TaskScore:
        """Returns the scores of one task.

        Raises:
            KeyError: the report does not have it.
        """
        for score in self.scores:
            if score.task == task:
                return score
        raise KeyError(f"The report has no task {task!r}; it has {', '.join(score.task for score in self.scores)}.")

    def merged(self, other: Self) -> Self:
        """Returns this report with the scores of `other`, which win where task and shots are the same.

        A partial score never takes the place of a complete one.
        """
        scores = {(score.task, score.num_fewshot): score for score in self.scores}
        for score in other.scores:
            old = scores.get((score.task, score.num_fewshot))
            if old is None or old.partial or not score.partial:
                scores[score.task, score.num_fewshot] = score
        return dataclasses.replace(other, scores=tuple(scores.values()))

    def write_merged(self, file: Path) -> None:
        """Writes the report; scores of other tasks that `file` already holds are kept.

        Raises:
            ConfigError: `file` exists and is not a report.
        """
        (type(self).read(file).merged(self) if file.exists() else self).write(file)

    def rows(self) -> list[dict[str, str]]:
        """Returns the report as a table of text, one row for each metric."""
        return [_row(score, metric) for score in self.scores for metric in score.metrics]

    @property
    def title(self) -> str:
        """Model, step and training tokens."""
        parts = [self.name]
        if self.step is not None:
            parts.append(f"step {self.step:,}")
        if self.tokens_seen is not None:
            parts.append(f"{self.tokens_seen:,} training tokens")
        return ", ".join(parts)

    def to_text(self) -> str:
        """Returns the report as a table for a terminal."""
        rows = self.rows()
        if not rows:
            return f"{self.title}\n(no scores)"
        table = [list(rows[0]), *[list(row.values()) for row in rows]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        rows = self.rows()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else ()))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows
        )
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(score: TaskScore, metric: Metric) -> dict[str, str]:
    accuracy = score.chance is not None and metric.name.startswith("acc")
    return {
        "task": score.task,
        "metric": metric.name,
        "value": f"{metric.value:.4f}" + ("" if metric.stderr is None else f" ± {metric.stderr:.4f}"),
        "chance": f"{score.chance:.3f}" if accuracy else "",
        "coverage": score.coverage,
        "shots": str(score.num_fewshot),
        "version": f"task {score.task_version}, lm-eval {score.harness_version}",
        "data": ", ".join(f"{data.origin}:{data.path} {(data.sha256 or '')[:8]}".strip() for data in score.data),
        "seconds": f"{score.seconds:.1f}",
    }
