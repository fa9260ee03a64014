"""Columns: metrics.jsonl as NumPy columns that grow with the file.

The same rule as `kit.run.metrics.Metrics`: a newer attempt's steps replace what an older one did
after its first. Only new bytes are read each time.
"""

import json
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

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
"""`skipped_steps` counts on from an attempt's start, `nan_steps` are those of a log's line, among
its skipped ones. `consumed_tokens` is another trainer's own count at the end of a step. The last
five, of rank 0, say where its step's time went: waiting for the batch; three phases of the native
engine; and of these, on a CPU, what it neither computed nor waited for a core, but for other ranks.
"""
NAMES = (*COLUMNS, *OPTIONAL_COLUMNS)
FAST_FROM_BYTES, FAST_BLOCK_BYTES = 2**18, 2**20
"""A few steps are parsed before a faster parser is even imported."""


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
        return self._rows

    def __getitem__(self, name: str) -> np.ndarray:
        return self._data[NAMES.index(name), : self._rows]

    def poll(self, limit_bytes: int = CHUNK_BYTES) -> bool:
        """Reads what was added since the last time, at most `limit_bytes`; returns whether there
        is more to read.
        """
        text = self.new_lines(limit_bytes)
        if not text:
            return False
        rows, skipped = parse_lines(text)
        self.skipped_lines += skipped
        self._append(rows)
        return self.unread_bytes > 0

    def read_all(self) -> "Columns":
        """Reads everything that is there, and returns itself."""
        while self.poll():
            pass
        return self

    def restart(self) -> None:
        """Forgets what was read."""
        super().restart()
        self._data, self._rows, self.skipped_lines = np.empty((len(NAMES), 1024)), 0, 0
        self.first_steps: dict[int, int] = {}
        self.revision += 1

    def _append(self, rows: np.ndarray) -> None:
        """Adds parsed rows, [names, n], in the order of the file."""
        if not rows.shape[1]:
            return
        first_steps(rows, self.first_steps)
        start = int(np.searchsorted(self["step"], rows[0].min()))
        self.revision += start < self._rows
        rows = supersede(np.hstack([self._data[:, start : self._rows], rows]), self.first_steps)
        needed = start + rows.shape[1]
        if needed > self._data.shape[1]:
            larger = np.empty((len(NAMES), max(needed, 2 * self._data.shape[1])))
            larger[:, :start] = self._data[:, :start]
            self._data = larger
        self._data[:, start:needed] = rows
        self._rows = needed


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
    return (
        counted
        + np.append(first, more)[np.searchsorted(told, np.arange(len(tokens)), side="right")]
    )


def first_steps(rows: np.ndarray, known: dict[int, int]) -> dict[int, int]:
    """Takes the first step of each attempt of some rows, [names, n], into those that are known,
    and returns these.
    """
    for attempt in np.unique(rows[1]):
        first = int(rows[0, rows[1] == attempt].min())
        known[int(attempt)] = min(first, known.get(int(attempt), first))
    return known


def supersede(rows: np.ndarray, first_steps: dict[int, int]) -> np.ndarray:
    """Returns rows, [names, n], by step, each step once: without an attempt's steps from the first
    of a newer one on.

    Of the names step and attempt are the first two. The rows are in the order of the file: the
    later of two equals counts.
    """
    attempts = sorted(first_steps)
    firsts = [float(first_steps[attempt]) for attempt in attempts]
    # Of all newer attempts.
    bounds = np.append(np.minimum.accumulate(firsts[::-1])[::-1][1:], np.inf)
    rows = rows[:, rows[0] < bounds[np.searchsorted(attempts, rows[1])]]
    order = np.argsort(rows[0], kind="stable")
    steps = rows[0, order]
    is_last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
    return rows[:, order[is_last]]


def parse_lines(text: bytes) -> tuple[np.ndarray, int]:
    """Returns the values of whole lines, [names, n], and how many lines were torn or foreign."""
    rows = None
    if len(text) >= FAST_FROM_BYTES:
        rows = _parse_fast(text)
        if rows is None and b": NaN" in text:  # which is not JSON, and costs nothing
            rows = _parse_fast(text.replace(b": NaN", b": null"))
    return _parse_slowly(text) if rows is None else rows  # a lost line costs its own chunk only


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
    rows = np.stack(
        [np.concatenate([_floats(chunk) for chunk in table.column(name).chunks]) for name in NAMES]
    )
    ours = (np.abs(rows[:2]) < 2.0**53).all(axis=0)  # NaN is not
    rows[:2] = np.trunc(rows[:2])
    return (rows, 0) if ours.all() else (rows[:, ours], int(np.sum(~ours)))


def _floats(array: Any) -> np.ndarray:
    """Returns an Arrow array of float64, NaN for null.

    Its own `to_numpy` would import pandas, which takes a second.
    """
    valid, values = array.buffers()
    part = slice(array.offset, array.offset + len(array))
    result = np.frombuffer(values, np.float64)[part]
    if array.null_count:
        known = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[part]
        result = np.where(known, result, np.nan)
    return result


def _parse_slowly(text: bytes) -> tuple[np.ndarray, int]:
    parsed = [parse_row(line) for line in text.splitlines()]
    rows = [[number(row.get(name)) for name in NAMES] for row in parsed if row is not None]
    return np.array(rows, dtype=float).reshape(-1, len(NAMES)).T, len(parsed) - len(rows)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns the row in a line of `metrics.jsonl`, with whole numbers as step and attempt; None
    if it is not one.
    """
    try:
        row = json.loads(line)
        step, attempt = int(row["step"]), int(row["attempt"])
        for value in filter(is_number, row.values()):
            float(value)  # raises OverflowError where it has hundreds of digits
        return (
            {**row, "step": step, "attempt": attempt}
            if max(abs(step), abs(attempt)) < 2**53
            else None
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a recorded value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> float:
    """Returns a value of a row, as `parse_row` gives it, as a float; NaN if it is none."""
    return float(value) if is_number(value) else float("nan")
