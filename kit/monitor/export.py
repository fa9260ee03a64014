"""Export: the steps of a run as a CSV or Parquet table, with the facts that its derived columns
rest on.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from cluster.files import replacement
from cluster.record import ConfigError, suggestion
from kit.errors import RunError
from kit.run import Run
from kit.run.columns import COLUMNS, is_number, parse_rows, that_count
from kit.run.tail import Tail
from kit.show.style import plain_cell

FORMATS = ("csv", "parquet")
COUNT = "consumed_tokens"
"""Of what not every run records, the first column."""


def export_table(run: Run) -> Any:
    """Returns the steps of a run as a pyarrow table; speeds and utilisations are derived, the rest
    as recorded.

    Columns: those of `metrics.jsonl`, tokens_per_s, mfu and hfu (fractions) where the run has them,
    and total_tokens up to a step. Each step is there once, in order, as the newest attempt left it.
    A value that was not recorded, and only that, is null: NaN and infinity stay what they are.
    """
    import pyarrow

    tail = Tail(run.directory / "metrics.jsonl")
    recorded = [row for text in iter(tail.new_lines, b"") for row in parse_rows(text)[0]]
    steps, attempts = ([row[name] for row in recorded] for name in ("step", "attempt"))
    kept = [recorded[place] for place in that_count(steps, attempts)]
    metrics = run.metrics(kept)
    told = {name for row in kept for name in row}
    names = [*COLUMNS, *sorted(told - {*COLUMNS}, key=lambda name: (name != COUNT, name))]
    columns = {name: _column([row.get(name) for row in kept]) for name in names}
    for name, column in (metrics.speeds() | {"total_tokens": metrics.total_tokens}).items():
        columns[name] = pyarrow.array(column)
    facts = {
        "run": run.name,
        "model": run.spec.name,
        "model_flops_per_token": run.spec.flops_per_token(),
        "site": run.site.name,
        "why_no_mfu": metrics.why_no_mfu,
        "peak_flops_per_s_per_device": run.site.peak_flops_per_s(run.plan.precision),
        "devices_by_attempt": {
            str(attempt): plan.num_devices for attempt, plan in metrics.plans.items()
        },
    }
    return pyarrow.table(columns).replace_schema_metadata({"kit": json.dumps(facts)})


def export(run: Run, file: Path, *, format: str, overwrite: bool = False) -> int:
    """Writes `export_table` to `file` as `csv` or `parquet`, by atomic rename, and returns its
    number of rows.

    Raises:
        ConfigError: no such format.
        RunError: the file is there and `overwrite` is False, or its folder is not.
    """
    if format not in FORMATS:
        raise ConfigError(f"format: {format!r} is unknown. {suggestion(format, FORMATS)}")
    if file.is_dir() or not file.parent.is_dir():
        raise RunError(f"{file} cannot be written: give a file in a folder that exists.")
    if file.exists() and not overwrite:
        raise RunError(f"{file} exists. Give another --out, or --overwrite.")
    from pyarrow import csv, parquet

    table = export_table(run)
    with replacement(file) as stream:
        if format == "csv":
            # Texts are JSON, in quotes. Only the names of columns come from the run unquoted.
            names = [plain_cell(name) for name in table.column_names]
            csv.write_csv(table.rename_columns(names), stream)
        else:
            parquet.write_table(table, stream, compression="zstd")
    return table.num_rows


def _column(values: list[Any]) -> Any:
    """Returns recorded values as an Arrow array: of numbers where all are numbers, else of JSON
    texts.
    """
    import pyarrow

    known = [value for value in values if value is not None]
    with contextlib.suppress(OverflowError, pyarrow.ArrowInvalid):  # a number beyond 64 bits
        if all(isinstance(value, int) and is_number(value) for value in known):
            return pyarrow.array(values, pyarrow.int64())
        if all(map(is_number, known)):
            floats = [None if value is None else float(value) for value in values]
            return pyarrow.array(floats, pyarrow.float64())
    texts = [None if value is None else json.dumps(value) for value in values]
    return pyarrow.array(texts, pyarrow.string())
