"""HLAT's tables (and SmolLM2's scores) as published, and our own scores beside them. No torch, no lm-eval."""

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from cluster.record import Record, field_doc, suggestion
from kit.errors import ConfigError
from kit.evaluate.benchmarks import BENCHMARKS, SUITES, TaskRequest
from kit.evaluate.report import EvalReport, TaskScore, html_rows, text_table

PASS_10 = TaskRequest(task="humaneval", shots=0, metric="pass@10,create_test", column="code_pass_10", samples=20)
"""A second number of the same score; the suite asks for each score once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedTable(Record):
    """One table, as printed by its source."""

    title: str = field_doc("what it shows")
    source: str = field_doc("paper and number")
    columns: tuple[str, ...] = field_doc("names of its numbers, in order")
    notes: tuple[str, ...] = field_doc("oddities of the printed table")
    rows: tuple[dict[str, Any], ...] = field_doc("model, size, a number for each column that has one, stderr")

    def texts(self) -> list[dict[str, str]]:
        """Returns the rows as text; an empty cell is empty in the paper."""
        return [
            {"model": row["model"], "size": row["size"], **{name: _printed(row, name) for name in self.columns}}
            for row in self.rows
        ]

    def to_text(self) -> str:
        """Returns the table for a terminal."""
        return "\n".join([f"{self.title} ({self.source})", text_table(self.texts()), *self.notes])

    def _repr_html_(self) -> str:
        return html_rows(f"{self.title} ({self.source})", self.texts(), self.notes)


def _printed(row: dict[str, Any], column: str) -> str:
    if column not in row:
        return ""
    error = row.get("stderr", {}).get(column)
    return f"{row[column]:g}" + ("" if error is None else f" ± {error:g}")


TABLES = {
    name: PublishedTable.from_dict(table, name)
    for file in ("hlat_tables.toml", "smollm2_tables.toml")
    for name, table in tomllib.loads((files("kit.evaluate") / "data" / file).read_text()).items()
}


def published_table(name: str) -> PublishedTable:
    """Returns a table of the paper, I, II, IV or V; or `SmolLM2`, what others measured of that model.

    Raises:
        ConfigError: there is no such table here.
    """
    if name not in TABLES:
        raise ConfigError(f"table: {name!r} is unknown. {suggestion(name, TABLES)}")
    return TABLES[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Own scores, in per cent, above the published rows of a table."""

    table: PublishedTable
    own: tuple[dict[str, str], ...]
    notes: tuple[str, ...]

    def texts(self) -> list[dict[str, str]]:
        """Returns the rows as text, the own ones first; `made` says which are measured here."""
        published = [{"made": "published", **row} for row in self.table.texts()]
        return [{"made": "measured here", **row} for row in self.own] + published

    def to_text(self) -> str:
        """Returns the comparison for a terminal."""
        return "\n".join([self._title, text_table(self.texts()), *self.notes, *self.table.notes])

    def _repr_html_(self) -> str:
        return html_rows(self._title, self.texts(), (*self.notes, *self.table.notes))

    @property
    def _title(self) -> str:
        return f"{self.table.title}, %: measured here, and {self.table.source}"


def compare(reports: EvalReport | Sequence[EvalReport], table: str = "II") -> Comparison:
    """Returns own scores beside a table of the paper.

    A column is the mean over its data sets, all of them scored whole, in the paper's shots; its error is that of the
    mean of independent scores. A column that is not complete stays empty, and a note says what is missing: a part of
    the items is no result. No average over columns is made, since the paper does not state its rule.

    Raises:
        ConfigError: the table is not II or V.
    """
    if table not in ("II", "V"):
        raise ConfigError(f"table: {table!r} cannot be compared with. Allowed: 'II', 'V'.")
    known, notes, own = published_table(table), [], []
    for report in [reports] if isinstance(reports, EvalReport) else reports:
        cells = {}
        for column in known.columns:
            cells[column], missing = _cell(report, column) if column != "average" else ("", [])
            notes += [f"{report.name}, {column}: {reason}" for reason in missing]
        own.append({"model": report.title, "size": "", **cells})
    return Comparison(table=known, own=tuple(own), notes=tuple(notes))


def _cell(report: EvalReport, column: str) -> tuple[str, list[str]]:
    """Returns a column's own score as text, and what is missing for it."""
    found: dict[tuple, tuple[float, float]] = {}
    missing: dict[tuple, list[str]] = {}
    for request in (*SUITES["hlat"].tasks, PASS_10):
        if request.column != column:
            continue
        known = BENCHMARKS[request.task]
        data = (known.repository, known.configs)  # tasks over the same data are alternatives: the first one counts
        score = _score(report, request)
        if score is None or score.partial:
            shots = f" with {request.shots} shots" if request.shots else ""
            missing.setdefault(data, []).append(f"{request.task}{shots}: {score.coverage if score else 'not scored'}")
        else:
            metric = score.metric(request.metric or "")
            found.setdefault(data, (100 * metric.value, 100 * (metric.stderr or 0.0)))
    lacking = [words for data, reasons in missing.items() if data not in found for words in reasons]
    if lacking or not found:
        return "", lacking
    mean = sum(value for value, _ in found.values()) / len(found)
    error = math.sqrt(sum(error**2 for _, error in found.values())) / len(found)
    return f"{mean:.1f} ± {error:.1f}", []


def _score(report: EvalReport, request: TaskRequest) -> TaskScore | None:
    """Returns the score of a request; where it samples programs, only with as many of them."""
    for score in report.scores:
        if (score.task, score.num_fewshot, score.num_samples) == (request.task, request.shots, request.samples):
            return score
    return None
