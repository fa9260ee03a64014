"""Columns: metrics.jsonl as NumPy columns that grow with the file: only new bytes are read.

The rule by which a newer attempt's steps replace what older ones did from its first on stands in
`that_count`; everything that reads steps uses it.
"""

import json
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike

from kit.run.tail import CHUNK_BYTES, Tail

COLUMNS = (
    "step",
    "attempt",
    "time",
    "step_time_s",
    "tokens",
    "loss",
    "grad_norm",
    "learning_rate",
    "memory_bytes",
)
OPTIONAL_COLUMNS = (
    "validation_loss",
    "validation_s",
    "loss_scale",
    "skipped_steps",
    "nan_steps",
    "reserved_bytes",
    "allocation_retries",
    "checkpoint_s",
    "consumed_tokens",
    "data_s",
    "forward_backward_s",
    "reduction_s",
    "optimizer_s",
    "waiting_s",
)
"""Columns that a run may lack.

- `validation_s`: seconds of the validation after a step.
- `skipped_steps`: steps without an update since the attempt's start. `nan_steps`: those of them, in
  the line of another trainer's log, whose loss was not a number.
- `consumed_tokens`: another trainer's own count of tokens at the end of a step.
- `data_s`, `forward_backward_s`, `reduction_s`, `optimizer_s`: seconds that rank 0 waited for its
  batch, and that the native engine's three phases took.
- `waiting_s`, on a CPU: seconds of these phases in which rank 0 waited for other ranks.
"""
NAMES: tuple[str, ...] = (*COLUMNS, *OPTIONAL_COLUMNS)
FAST_FROM_BYTES, FAST_BLOCK_BYTES, MOST_ROOM = 2**18, 2**20, 2**22
"""A few steps are parsed before a faster parser is even imported. Room for steps that are unread
ends at MOST_ROOM, 0.7 GB that is not written to yet."""


class Growing:
    """Rows of float64 values, [rows, n], that grow at their end."""

    def __init__(self, rows: int) -> None:
        self._data = np.empty((rows, 1024))
        self.length = 0

    @property
    def values(self) -> np.ndarray:
        return self._data[:, : self.length]

    def extend(self, values: ArrayLike, start: int | None = None, to_come: int = 0) -> None:
        """Adds further values, [rows, n]; in place of those from `start` on, if it is given.

        `to_come` is how many more are expected: with room for them at once, less is copied.
        """
        values = np.asarray(values)
        start = self.length if start is None else start
        needed = start + values.shape[-1]
        if needed > self._data.shape[1]:
            # Room that is not written to yet costs nothing.
            grown = np.empty((len(self._data), needed + max(self._data.shape[1], to_come)))
            grown[:, :start] = self._data[:, :start]
            self._data = grown
        self._data[:, start:needed] = values
        self.length = needed


class Columns(Tail):
    """The steps of a metrics file, each once, by step; `columns["loss"]` is float64, NaN where a
    line has none.

    Attributes:
        revision: changes whenever rows that were there before have changed (a new attempt, a
            replaced file).
        skipped_lines: torn or foreign lines so far.
        first_steps: first step of each attempt.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.revision = 0
        self.restart()

    def __len__(self) -> int:
        return self._columns["step"].length

    def __getitem__(self, name: str) -> np.ndarray:
        column = self._columns[name]
        if not column.length:
            return np.broadcast_to(np.nan, len(self))
        return column.values[0]

    def poll(self, limit_bytes: int = CHUNK_BYTES) -> bool:
        """Reads what was added since the last time, at most `limit_bytes`; returns whether there
        is more to read.
        """
        text = self.new_lines(limit_bytes)
        if not text:
            return False
        rows, skipped = parse_lines(text)
        self.skipped_lines += skipped
        self._append(rows, min(MOST_ROOM, rows.shape[1] * self.unread_bytes // len(text)))
        return self.unread_bytes > 0

    def read_all(self) -> "Columns":
        """Reads everything that is there, and returns itself."""
        while self.poll():
            pass
        return self

    def restart(self) -> None:
        """Forgets what was read."""
        super().restart()
        # One without a value so far stays empty, and takes no memory.
        self._columns = {name: Growing(1) for name in NAMES}
        self.skipped_lines = 0
        self.first_steps: dict[int, int] = {}
        self.revision += 1

    def _append(self, rows: np.ndarray, to_come: int) -> None:
        """Adds parsed rows, [names, n], in the order of the file."""
        start = int(np.searchsorted(self["step"], rows[0].min(initial=np.inf)))
        self.revision += start < len(self)
        rows = np.hstack([[self[name][start:] for name in NAMES], rows])
        rows = rows[:, that_count(rows[0], rows[1], self.first_steps)]
        for column, values in zip(self._columns.values(), rows, strict=True):
            if column.length or not np.isnan(values).all():
                begin = min(start, column.length)
                column.extend([np.append(np.full(start - begin, np.nan), values)], begin, to_come)


def tokens_seen(
    tokens: np.ndarray, consumed: np.ndarray, before: float | None = None
) -> np.ndarray:
    """Returns the tokens seen at the end of each step: what was told there, else counted on from
    the last step told of.

    `tokens` are those of each step, `consumed` what was told (NaN: nothing), `before` what was seen
    before these steps. Without it they are a run's first, and count back from the first step told
    of: a log may begin in the middle.
    """
    counted = (before or 0.0) + np.nancumsum(tokens)
    told = np.flatnonzero(np.isfinite(consumed))
    if not told.size:
        return counted
    more = consumed[told] - counted[told]
    first = more[0] if before is None else 0.0
    corrections = np.append(first, more)
    last_told = np.searchsorted(told, np.arange(len(tokens)), side="right")
    return counted + corrections[last_told]


def that_count(
    steps: ArrayLike, attempts: ArrayLike, first_steps: dict[int, int] | None = None
) -> np.ndarray:
    """Returns the places of the rows that count, by step, each step once: without an attempt's
    steps from the first of a newer one on.

    The rows are in the order of the file: the later of two equals counts. `first_steps` are those
    of the attempts of rows before, and get those of these rows.
    """
    steps = np.asarray(steps, float)
    attempts = np.asarray(attempts, float)
    firsts = {} if first_steps is None else first_steps
    for attempt in np.unique(attempts).tolist():
        first = int(steps[attempts == attempt].min())
        firsts[int(attempt)] = min(first, firsts.get(int(attempt), first))
    numbers = sorted(firsts)
    starts = [float(firsts[number]) for number in numbers]
    # Of all newer attempts.
    bounds = np.append(np.minimum.accumulate(starts[::-1])[::-1][1:], np.inf)
    kept = np.flatnonzero(steps < bounds[np.searchsorted(numbers, attempts)])
    order = kept[np.argsort(steps[kept], kind="stable")]
    is_last = np.append(np.diff(steps[order]) != 0, True)[: len(order)]
    return order[is_last]


def parse_lines(text: bytes) -> tuple[np.ndarray, int]:
    """Returns the values of whole lines, [names, n], and how many lines were torn or foreign."""
    if len(text) >= FAST_FROM_BYTES:
        # NaN is not JSON.
        if found := _parse_fast(text) or _parse_fast(text.replace(b": NaN", b": null")):
            return found
    # A lost line costs its own chunk only.
    rows, skipped = parse_rows(text)
    return values_of(rows), skipped


def _parse_fast(text: bytes) -> tuple[np.ndarray, int] | None:
    """Returns what `parse_lines` does, or None if any line is not one flat JSON object with
    numbers of ours.
    """
    import pyarrow
    import pyarrow.json

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in NAMES])
    try:
        table = pyarrow.json.read_json(
            pyarrow.BufferReader(text),
            read_options=pyarrow.json.ReadOptions(block_size=FAST_BLOCK_BYTES),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            ),
        )
    except pyarrow.ArrowException:
        return None
    if table.num_rows != text.count(b"\n"):
        return None
    # A scalar of Python's NaN would import pandas, which takes a second; so would `to_numpy`.
    (nan,) = pyarrow.Array.from_buffers(
        pyarrow.float64(), 1, [None, pyarrow.py_buffer(np.array([np.nan]))]
    )
    rows = np.stack([_floats(column.fill_null(nan)) for column in table.columns])
    # Step and attempt must be whole numbers that float64 holds. NaN is not below the limit.
    ours = (np.abs(rows[:2]) < 2.0**53).all(axis=0)
    rows[:2] = np.trunc(rows[:2])
    if ours.all():
        return rows, 0
    return rows[:, ours], int(np.sum(~ours))


def _floats(column: Any) -> np.ndarray:
    """Returns the values of an Arrow column of float64 without nulls."""
    parts = []
    for array in column.chunks:
        end = array.offset + len(array)
        parts.append(np.frombuffer(array.buffers()[1], np.float64, end)[array.offset :])
    return np.concatenate(parts)


def parse_rows(text: bytes) -> tuple[list[dict[str, Any]], int]:
    """Returns the rows in whole lines, and how many lines were torn or foreign."""
    found = [parse_row(line) for line in text.splitlines()]
    rows = [row for row in found if row is not None]
    return rows, len(found) - len(rows)


def values_of(rows: list[dict[str, Any]]) -> np.ndarray:
    """Returns the values of rows, [names, n], NaN where a row has none."""
    values = np.empty((len(NAMES), len(rows)))
    for place, row in enumerate(rows):
        values[:, place] = [float_or_nan(row.get(name)) for name in NAMES]
    return values


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns the row in a line of `metrics.jsonl`, with whole numbers as step and attempt; None
    if it is not one.
    """
    try:
        row = json.loads(line)
        step = int(row["step"])
        attempt = int(row["attempt"])
        for value in filter(is_number, row.values()):
            float(value)  # raises OverflowError where it has hundreds of digits
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if max(abs(step), abs(attempt)) >= 2**53:
        return None
    return {**row, "step": step, "attempt": attempt}


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a recorded value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def float_or_nan(value: Any) -> float:
    """Returns a value of a row, as `parse_row` gives it, as a float; NaN if it is none."""
    return float(value) if is_number(value) else float("nan")
