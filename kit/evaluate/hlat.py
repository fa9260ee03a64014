"""Published tables of HLAT, published scores of SmolLM2, and tables that compare own scores with
them.

Imports neither torch nor lm-eval.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from cluster.record import Record, field_doc
from kit.errors import ConfigError, check_known
from kit.evaluate.benchmarks import BENCHMARKS, SUITES, read_data_file
from kit.evaluate.report import EvalReport, Metric, Shown

MEASURED_HERE = (
    "Brackets after a score that was measured here: the 95 % interval, computed from Wilson's"
    " interval of each data set. A published ± is the paper's standard error.",
    "Scores measured here use the settings of LLaMA's published scores (arXiv 2302.13971)."
    " Programs are sampled at temperature 0.1 for pass@1 and 0.8 for pass@10, with top-p 0.95. A"
    " GSM8K answer is accepted only in the form of the solved examples (strict-match). HLAT states"
    " neither setting.",
)
"""Notes on the rows that are measured here: their intervals, and the published scores whose
settings they use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedTable(Shown, Record):
    """One table of scores, with the numbers as its publication prints them."""

    title: str = field_doc("title of the table")
    source: str = field_doc("publication and number of the table")
    columns: tuple[str, ...] = field_doc("names of the columns with numbers, in order")
    notes: tuple[str, ...] = field_doc("notes on oddities of the printed table")
    rows: tuple[dict[str, Any], ...] = field_doc(
        "rows of the table; each has the keys model and size, the names of columns with a number,"
        " and `stderr`: standard errors by column"
    )

    def texts(self) -> list[dict[str, str]]:
        """Returns the rows of the table as text, by column. Cells that are empty in the paper are
        empty.
        """
        return [
            {
                "model": row["model"],
                "size": row["size"],
                **{name: _printed(row, name) for name in self.columns},
            }
            for row in self.rows
        ]

    def table(self) -> tuple[str, Sequence[dict[str, str]], Sequence[str]]:
        """Returns (title, rows, notes) of the published table."""
        return f"{self.title} ({self.source})", self.texts(), self.notes


def _printed(row: dict[str, Any], column: str) -> str:
    if column not in row:
        return ""
    error = row.get("stderr", {}).get(column)
    number = f"{row[column]:g}"
    return number if error is None else f"{number} ± {error:g}"


_DATA = read_data_file("hlat_tables.toml") | read_data_file("smollm2_tables.toml")
TABLES = {name: PublishedTable.from_dict(table, name) for name, table in _DATA.items()}
"""Dict from the name of a published table (I, II, IV, V or SmolLM2) to the table."""


def published_table(name: str) -> PublishedTable:
    """Returns a table of the HLAT paper (I, II, IV or V), or `SmolLM2`: scores of that model that
    others measured.

    Raises:
        ConfigError: The table is unknown.
    """
    check_known("table", name, TABLES)
    return TABLES[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Shown):
    """Table with own scores in per cent, followed by the rows of a published table."""

    published: PublishedTable
    own: tuple[dict[str, str], ...]
    notes: tuple[str, ...]

    def texts(self) -> list[dict[str, str]]:
        """Returns the rows as text, own rows first. The column `made` says which rows are measured
        here.
        """
        published = [{"made": "published", **row} for row in self.published.texts()]
        return [{"made": "measured here", **row} for row in self.own] + published

    def table(self) -> tuple[str, Sequence[dict[str, str]], Sequence[str]]:
        """Returns (title, rows, notes) of the comparison of own scores with the paper's table."""
        title = f"{self.published.title}, %: measured here, and {self.published.source}"
        return title, self.texts(), (*self.notes, *self.published.notes)


def compare(reports: EvalReport | Sequence[EvalReport], table: str = "II") -> Comparison:
    """Returns a table with the scores of reports, followed by the rows of a table of the HLAT
    paper.

    A cell is the mean over the data sets of its column. Every data set must be scored completely,
    with the paper's number of shots. Otherwise the cell stays empty and a note says what is
    missing, because a score of a part of the items is not a result.

    The 95 % interval of a column is that of a mean of independent scores. It is computed from the
    distances between each score and the ends of its interval, so it is valid at 0 and 100, too.
    Source: Zou and Donner, "Construction of confidence limits about effect measures", Statistics in
    Medicine 27, 2008. No average over columns is computed, because the paper does not state its
    rule.

    Raises:
        ConfigError: The table is not II or V.
    """
    if table not in ("II", "V"):
        raise ConfigError(f"table: {table!r} cannot be compared with. Allowed: 'II', 'V'.")
    known = published_table(table)
    notes = []
    own = []
    if isinstance(reports, EvalReport):
        reports = [reports]
    for report in reports:
        cells = {}
        for column in known.columns:
            if column == "average":
                cells[column] = ""
                continue
            cells[column], missing = _cell(report, column)
            notes += [f"{report.name}, column {column}: {reason}" for reason in missing]
        own.append({"model": report.title, "size": "", **cells})
    return Comparison(published=known, own=tuple(own), notes=(*notes, *MEASURED_HERE))


def _cell(report: EvalReport, column: str) -> tuple[str, list[str]]:
    """Returns (own score of a column as text, reasons for missing scores). The text is empty if
    scores are missing.
    """
    found: dict[tuple, Metric] = {}
    missing: dict[tuple, list[str]] = {}
    for request in SUITES["hlat"]:
        if request.column != column:
            continue
        known = BENCHMARKS[request.task]
        # Tasks on equal data are alternatives. The first task with a score counts.
        data = (known.repository, known.configs)
        scores = [score for score in report.scores if score.key == request.key]
        if scores and not scores[0].partial:
            metric = scores[0].metric(request.metric or "")
            found.setdefault(
                data, Metric.of(metric.name, metric.value, metric.stderr, scores[0].num_items)
            )
            continue
        shots = f" with {request.num_fewshot} shots" if request.num_fewshot else ""
        coverage = scores[0].coverage if scores else "not scored"
        missing.setdefault(data, []).append(f"{request.task}{shots} ({coverage})")
    lacking = []
    for data, reasons in missing.items():
        if data not in found:
            lacking += reasons
    if lacking or not found:
        return "", lacking
    return _mean(list(found.values())), []


def _mean(metrics: list[Metric]) -> str:
    """Returns the mean of scores and its 95 % interval as text, in per cent."""
    mean = sum(metric.value for metric in metrics) / len(metrics)
    down = math.hypot(*(metric.value - (metric.low or 0) for metric in metrics)) / len(metrics)
    up = math.hypot(*((metric.high or 0) - metric.value for metric in metrics)) / len(metrics)
    return f"{100 * mean:.1f} ({100 * max(0.0, mean - down):.1f}–{100 * (mean + up):.1f})"
