"""Reads metrics.jsonl into NumPy columns, which grow with the file. Only bytes that are new in the
file are read.

A restarted attempt may repeat steps of older attempts. From its first step on, its steps replace
the steps of older attempts. All code that reads steps uses `valid_rows`, which implements this
rule.
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
"""Columns that `Metrics` always has. The value is NaN for a step whose line lacks the column."""
OPTIONAL_COLUMNS = (
    "validation_loss",
    "validation_s",
    "z_loss",
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
    "lowest_device_utilisation",
    "highest_device_temperature_c",
    "device_power_w",
    "largest_device_memory_bytes",
)
"""Columns that a run may lack."""
NAMES: tuple[str, ...] = (*COLUMNS, *OPTIONAL_COLUMNS)
COLUMN_MEANINGS = {
    "step": "number of the optimizer step, counted from 1",
    "attempt": "number of the attempt that trained the step, counted from 1",
    "time": "Unix time of the end of the step, in seconds",
    "step_time_s": "duration of the step, in seconds, without validation and hook",
    "tokens": "number of training tokens of the step, over all replicas",
    "loss": "mean cross-entropy of the step, in nats per token",
    "grad_norm": "norm of all gradients before clipping",
    "learning_rate": "learning rate of the step",
    "memory_bytes": "largest memory so far of the device of rank 0 or, on a CPU, of its process,"
    " in bytes",
    "validation_loss": "mean cross-entropy on the validation set after the step, in nats per token",
    "validation_s": "duration of the validation after the step, in seconds",
    "z_loss": "mean z-loss of the step, which the column `loss` does not contain",
    "loss_scale": "factor by which fp16 training scales the loss of the next step",
    "skipped_steps": "number of steps without an update since the start of the attempt",
    "nan_steps": "number of skipped steps with a NaN loss in one line of another trainer's log",
    "reserved_bytes": "largest memory so far that torch reserved on the GPU of rank 0, in bytes",
    "allocation_retries": "number of times that torch has freed cached GPU memory of rank 0 to"
    " satisfy an allocation",
    "checkpoint_s": "seconds for which training waited for saves since the column was last written",
    "consumed_tokens": "number of tokens at the end of the step, as counted by another trainer",
    "data_s": "seconds for which rank 0 waited for its batch",
    "forward_backward_s": "duration of the forward and backward passes on rank 0, in seconds"
    " (native engine)",
    "reduction_s": "duration of the gradient reduction on rank 0, in seconds (native engine)",
    "optimizer_s": "duration of the optimizer's update on rank 0, in seconds (native engine)",
    "waiting_s": "seconds, within the other phases, for which rank 0 waited for other ranks;"
    " recorded on a CPU only",
    "lowest_device_utilisation": "lowest utilisation of the devices of all ranks, from 0 to 1;"
    " recorded about every 10 s",
    "highest_device_temperature_c": "highest temperature of the devices of all ranks, in degrees"
    " Celsius; recorded about every 10 s",
    "device_power_w": "sum of the powers of the devices of all ranks, in watts; recorded about"
    " every 10 s",
    "largest_device_memory_bytes": "largest memory so far of the device of any rank, in bytes;"
    " recorded about every 10 s",
}
"""Meaning and unit of each column in NAMES. The trainer of the kit does not write `nan_steps` and
`consumed_tokens`, which come from logs of other trainers."""
MOST_NAMES = len(NAMES) + 200
"""Largest number of columns that are read: NAMES and 200 others, such as the numbers of a hook. The
number is limited, since each column takes 8 bytes per step, even if most steps lack the value."""
LONGEST_NAME = 100
"""Largest number of characters in the name of a column that is not in NAMES. Columns with longer
names are not read."""
FAST_FROM_BYTES, FAST_BLOCK_BYTES, MOST_ROOM = 2**18, 2**20, 2**22
"""FAST_FROM_BYTES is the smallest size of a text that pyarrow parses. `json` parses a shorter text
in less time than the import of pyarrow takes. FAST_BLOCK_BYTES is pyarrow's block size in bytes.
MOST_ROOM is the largest number of unread steps for which memory is reserved. They reserve 0.7 GB,
but pages that are not written use no memory."""


class GrowingArray:
    """Array of float64 values, [rows, n], to which values can be appended along the second
    dimension.
    """

    def __init__(self, rows: int) -> None:
        self._data = np.empty((rows, 1024))
        self.length = 0

    @property
    def values(self) -> np.ndarray:
        return self._data[:, : self.length]

    def extend(self, values: ArrayLike, start: int | None = None, to_come: int = 0) -> None:
        """Appends values of shape [rows, n]. If `start` is given, the new values replace all values
        from index `start` on.

        `to_come` is the number of further values that are expected. Memory for them is reserved
        now, so that less must be copied later.
        """
        values = np.asarray(values)
        start = self.length if start is None else start
        needed = start + values.shape[-1]
        if needed > self._data.shape[1]:
            # np.empty only reserves memory. Pages that are never written use no physical memory.
            grown = np.empty((len(self._data), needed + max(self._data.shape[1], to_come)))
            grown[:, :start] = self._data[:, :start]
            self._data = grown
        self._data[:, start:needed] = values
        self.length = needed


class Columns(Tail):
    """The steps of a metrics file in ascending order, each step once. `columns["loss"]` is a
    float64 array, with NaN for steps whose line has no loss.

    Attributes:
        names: names of the columns: NAMES, followed by the other columns of the file that have
            numbers, such as `hook/NAME`. They are in the order of their first occurrence. There are
            at most MOST_NAMES names.
        revision: number that changes whenever rows that were already read have changed. The cause
            is a new attempt that repeats steps, or a replaced file.
        skipped_lines: number of lines so far that are torn or were not written by the kit.
        first_steps: number of the first step of each attempt, by number of the attempt.
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
        """Reads at most `limit_bytes` of the lines that were added since the last call. Returns
        whether more lines can be read at once.
        """
        text = self.new_lines(limit_bytes)
        if not text:
            return False
        self.names, rows, skipped = parse_all_columns(text, self.names)
        self.skipped_lines += skipped
        for name in self.names[len(self._columns) :]:
            self._columns[name] = GrowingArray(1)
        self._append(rows, min(MOST_ROOM, rows.shape[1] * self.unread_bytes // len(text)))
        return self.unread_bytes > 0

    def read_all(self) -> "Columns":
        """Reads all lines that are in the file at present. Returns `self`."""
        while self.poll():
            pass
        return self

    def recorded_names(self) -> list[str]:
        """Returns the names of the columns that have a number in at least one step."""
        return [name for name, column in self._columns.items() if column.length]

    def restart(self) -> None:
        """Removes all steps from memory. The next `poll` reads the file from its beginning."""
        super().restart()
        self.names = NAMES
        # A column without any finite value stays empty, so that it takes no memory.
        self._columns = {name: GrowingArray(1) for name in NAMES}
        self.skipped_lines = 0
        self.first_steps: dict[int, int] = {}
        self.revision += 1

    def _append(self, rows: np.ndarray, to_come: int) -> None:
        """Adds parsed rows, an array [columns of `names`, n], in the order of the file. `to_come`
        is the number of rows that are expected later.
        """
        start = int(np.searchsorted(self["step"], rows[0].min(initial=np.inf)))
        self.revision += start < len(self)
        rows = np.hstack([[self[name][start:] for name in self.names], rows])
        rows = rows[:, valid_rows(rows[0], rows[1], self.first_steps)]
        for column, values in zip(self._columns.values(), rows, strict=True):
            if column.length or not np.isnan(values).all():
                begin = min(start, column.length)
                column.extend([np.append(np.full(start - begin, np.nan), values)], begin, to_come)


def tokens_seen(
    tokens: np.ndarray, consumed: np.ndarray, before: float | None = None
) -> np.ndarray:
    """Returns the cumulative number of tokens at the end of each step.

    Where a cumulative count was recorded, it is used. After a recorded count, the tokens of each
    step are added to it. If `before` is None, the counts before the first recorded count are
    computed backwards from it, since a log may begin in the middle of a run.

    Args:
        tokens: number of tokens of each step.
        consumed: recorded cumulative count at the end of each step. NaN if it was not recorded.
        before: cumulative number of tokens before these steps. None if they are the first steps of
            a run.
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


def valid_rows(
    steps: ArrayLike, attempts: ArrayLike, first_steps: dict[int, int] | None = None
) -> np.ndarray:
    """Returns the indices of the rows that are valid, in ascending order of their steps, each step
    once.

    A row is invalid if a newer attempt has begun at the row's step or at an earlier step. If two
    rows of one attempt have the same step, only the later row is valid.

    Args:
        steps: step of each row, in the order of the file.
        attempts: attempt of each row.
        first_steps: first step of each attempt in earlier rows, by number of the attempt. The first
            steps of attempts in these rows are added to this dict.
    """
    steps = np.asarray(steps, float)
    attempts = np.asarray(attempts, float)
    firsts = {} if first_steps is None else first_steps
    for attempt in np.unique(attempts).tolist():
        first = int(steps[attempts == attempt].min())
        firsts[int(attempt)] = min(first, firsts.get(int(attempt), first))
    numbers = sorted(firsts)
    starts = [float(firsts[number]) for number in numbers]
    # For each attempt, the smallest first step of all newer attempts.
    bounds = np.append(np.minimum.accumulate(starts[::-1])[::-1][1:], np.inf)
    kept = np.flatnonzero(steps < bounds[np.searchsorted(numbers, attempts)])
    order = kept[np.argsort(steps[kept], kind="stable")]
    is_last = np.append(np.diff(steps[order]) != 0, True)[: len(order)]
    return order[is_last]


def parse_lines(text: bytes) -> tuple[np.ndarray, int]:
    """Returns (values of the lines, number of skipped lines). The values are an array of shape
    [columns of NAMES, n]. Other columns are ignored.

    Lines that are torn or were not written by the kit are skipped. `text` must consist of complete
    lines.
    """
    if found := _parse_fast(text, NAMES, all_named=False):
        return found
    # If a line is torn, the slow parser is needed, but only for this chunk of the file.
    rows, skipped = parse_rows(text)
    return values_of(rows), skipped


def parse_all_columns(
    text: bytes, names: tuple[str, ...]
) -> tuple[tuple[str, ...], np.ndarray, int]:
    """Returns (names, values, number of skipped lines) of all columns of the lines that have
    numbers. The returned names are `names`, followed by names that occur here for the first time.
    The values are an array of shape [columns of the returned names, n].

    Lines are skipped as by `parse_lines`. The fast parser cannot find new names. In most runs, the
    first lines of a text contain all names, so these lines are parsed slowly first.
    """
    if found := _parse_fast(text, names, all_named=len(names) < MOST_NAMES):
        return names, *found
    if len(text) >= FAST_FROM_BYTES:
        rows, _ = parse_rows(text[: FAST_FROM_BYTES // 4])
        names = _with_new_names(names, rows)
        if found := _parse_fast(text, names, all_named=len(names) < MOST_NAMES):
            return names, *found
    rows, skipped = parse_rows(text)
    names = _with_new_names(names, rows)
    return names, values_of(rows, names), skipped


def _with_new_names(names: tuple[str, ...], rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns `names`, followed by the names of numbers in the rows that are not in `names`, in the
    order of their first occurrence. There are at most MOST_NAMES names.

    pyarrow refuses some names that are not printable, so these are left out.
    """
    found = dict.fromkeys(names)
    for row in rows:
        for name, value in row.items():
            if name in found or len(found) == MOST_NAMES or not is_number(value):
                continue
            if name.isprintable() and 0 < len(name) <= LONGEST_NAME:
                found[name] = None
    return tuple(found)


def _parse_fast(
    text: bytes, names: tuple[str, ...], *, all_named: bool
) -> tuple[np.ndarray, int] | None:
    """Parses lines with pyarrow, which is fast. Returns (values of the columns `names`, number of
    skipped lines).

    Returns None if the text is short, or if a line is not a flat JSON object with numbers in these
    columns. With `all_named`, returns None also if a line has a column that is not in `names`.
    """
    if len(text) < FAST_FROM_BYTES:
        return None
    # JSON has no NaN, which Python's json writes for a NaN loss. The second call replaces NaN by
    # null.
    return _parse_json(text, names, all_named) or _parse_json(
        text.replace(b": NaN", b": null"), names, all_named
    )


def _parse_json(
    text: bytes, names: tuple[str, ...], all_named: bool
) -> tuple[np.ndarray, int] | None:
    """Returns the result of `_parse_fast` for a text without NaN."""
    import pyarrow
    import pyarrow.json

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
    try:
        table = pyarrow.json.read_json(
            pyarrow.BufferReader(text),
            read_options=pyarrow.json.ReadOptions(block_size=FAST_BLOCK_BYTES),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=schema,
                unexpected_field_behavior="error" if all_named else "ignore",
            ),
        )
    except pyarrow.ArrowException:
        return None
    if table.num_rows != text.count(b"\n"):
        return None
    # The NaN is made from a buffer. To convert a Python NaN to an Arrow scalar, or to call
    # `to_numpy`, would import pandas, which takes a second.
    (nan,) = pyarrow.Array.from_buffers(
        pyarrow.float64(), 1, [None, pyarrow.py_buffer(np.array([np.nan]))]
    )
    rows = np.stack([_floats(column.fill_null(nan)) for column in table.columns])
    # Step and attempt must be integers that float64 can represent exactly. For NaN the comparison
    # is False.
    ours = (np.abs(rows[:2]) < 2.0**53).all(axis=0)
    rows[:2] = np.trunc(rows[:2])
    if ours.all():
        return rows, 0
    return rows[:, ours], int(np.sum(~ours))


def _floats(column: Any) -> np.ndarray:
    """Returns the values of an Arrow column as a NumPy array. The column must be float64 without
    nulls.
    """
    parts = []
    for array in column.chunks:
        end = array.offset + len(array)
        parts.append(np.frombuffer(array.buffers()[1], np.float64, end)[array.offset :])
    return np.concatenate(parts)


def parse_rows(text: bytes) -> tuple[list[dict[str, Any]], int]:
    """Returns (rows of the lines as dicts, number of skipped lines).

    Lines that are torn or were not written by the kit are skipped. `text` must consist of complete
    lines.
    """
    found = [parse_row(line) for line in text.splitlines()]
    rows = [row for row in found if row is not None]
    return rows, len(found) - len(rows)


def values_of(rows: list[dict[str, Any]], names: tuple[str, ...] = NAMES) -> np.ndarray:
    """Returns the values of rows as an array of shape [columns of `names`, n]. A value that a row
    lacks is NaN.
    """
    values = np.empty((len(names), len(rows)))
    for place, row in enumerate(rows):
        values[:, place] = [float_or_nan(row.get(name)) for name in names]
    return values


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Returns a line of metrics.jsonl as a dict, with step and attempt as integers. Returns None if
    the line is torn or was not written by the kit.
    """
    try:
        row = json.loads(line)
        step = int(row["step"])
        attempt = int(row["attempt"])
        for value in filter(is_number, row.values()):
            float(value)  # This raises OverflowError for an integer with hundreds of digits.
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if max(abs(step), abs(attempt)) >= 2**53:
        return None
    return {**row, "step": step, "attempt": attempt}


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a recorded value is a number. A bool does not count as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def float_or_nan(value: Any) -> float:
    """Returns a value of a row that `parse_row` returned as a float. Returns NaN if the value is
    not a number.
    """
    return float(value) if is_number(value) else float("nan")
