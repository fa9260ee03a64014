"""Converts the steps of a log to rows of `metrics.jsonl`. Computes times and tokens, and adds a row
for each step between two lines of the log.
"""

import collections
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

from kit.interop.logs.logs import Step, is_training

CLOCK_WINDOW_S = 20.0
"""Shortest time in seconds over which a speed is measured. The clock of a progress bar has whole
seconds, so a time of 20 s is wrong by at most 5 %."""
ALWAYS = ("loss", "grad_norm", "learning_rate", "memory_bytes")
"""Names of values that every row of metrics.jsonl has. A value is None if the line of the log lacks
it."""
OPTIONAL = ("validation_loss", "loss_scale", "skipped_steps", "nan_steps")
"""Names of values that a row of metrics.jsonl has only if the line of the log states them."""

Row = dict[str, Any]


class StepRecorder:
    """Converts steps to rows of `metrics.jsonl`.

    Args:
        batch: Sequences per step according to the log.
        length: Tokens per sequence.
        share: Fraction of the sequences in the log that the trainer's engine really ran.
        own: Sequences to add to the consumed samples of a line, if they leave out the line's own
            step. Otherwise 0.
        interval: Number of optimizer steps per line of the log.

    Attributes:
        last_row: Row of metrics.jsonl for the last line about training.
    """

    def __init__(
        self, *, batch: int, length: int, share: Fraction | int, own: int, interval: int
    ) -> None:
        self.batch = batch
        self.length = length
        self.share = share
        self.own = own
        self.interval = interval
        self.last_row = Row()
        self._begin_attempt(1)

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        self._newest = 0
        self._skipped_steps = 0
        self._clocks = collections.deque[tuple[float, float]]()
        """(Step, clock in seconds) of the lines of the last CLOCK_WINDOW_S seconds, and of the
        newest line before them."""

    def rows(self, step: Step) -> Iterator[Row]:
        """Yields the rows of metrics.jsonl that a line of the log adds: one for each step since the
        previous line.
        """
        if not is_training(step):
            yield from self._validation_rows(step)
            return
        if step["attempt"] > self._attempt:
            self._begin_attempt(int(step["attempt"]))
        row = self._row(step)
        self.last_row = row
        yield from self._rows_before(row)
        tokens = self._consumed_tokens(step)
        if tokens:
            row["consumed_tokens"] = tokens
        yield row

    def _validation_rows(self, step: Step) -> Iterator[Row]:
        """Yields the last row a second time with the validation loss added, if the last line of the
        log covers the step at which this loss was measured.
        """
        last = self.last_row
        if not last:
            return
        earlier = last["step"] - int(step["step"])
        if 0 <= earlier < self.interval:
            row = last | step
            if earlier:
                row.pop("consumed_tokens", None)
            yield row

    def _row(self, step: Step) -> Row:
        samples = (step.get("samples") or self.batch) * self.share
        row = {
            "step": step["step"],
            "attempt": self._attempt,
            "time": step.get("time"),
            "step_time_s": step.get("step_time_s") or self._seconds_by_clock(step),
            "tokens": round(samples * (step.get("sequence_length") or self.length)),
        }
        for name in ALWAYS:
            row[name] = step.get(name)
        for name in OPTIONAL:
            if name in step:
                row[name] = step[name]
        # A line prints the skipped steps since the previous line. A row has those since the start
        # of the attempt.
        if "skipped_steps" in step:
            self._skipped_steps += step["skipped_steps"]
            row["skipped_steps"] = self._skipped_steps
        return row

    def _rows_before(self, row: Row) -> Iterator[Row]:
        """Yields a row for each step between the previous line and this line, with the values of
        this line. Updates the newest step.

        If the line comes after a line of a later step, no rows are added, since that line has added
        them.
        """
        last = row["step"]
        first = max(self._newest + 1, last - self.interval + 1)
        is_late = last < self._newest
        self._newest = max(self._newest, last)
        if is_late:
            return
        seconds = row["step_time_s"] or 0.0
        values = {name: value for name, value in row.items() if name != "validation_loss"}
        for step in range(first, last):
            time = None
            if row["time"] is not None:
                time = row["time"] - (last - step) * seconds
            yield values | {"step": step, "time": time}

    def _consumed_tokens(self, step: Step) -> int | None:
        """Returns the tokens that were consumed up to a step, or None if the log does not state
        them. Consumed samples are converted to tokens only if the sequences of the step have the
        length of the run's other sequences.
        """
        tokens = step.get("consumed_tokens")
        has_length = step.get("sequence_length", self.length) == self.length
        if not tokens and has_length and step.get("consumed_samples"):
            tokens = (step["consumed_samples"] + self.own) * self.length
        return round(tokens * self.share) if tokens else None

    def _seconds_by_clock(self, step: Step) -> float | None:
        """Returns seconds per step since the newest line that is at least CLOCK_WINDOW_S older, or
        else since the oldest line of the attempt. Returns None for the first line of an attempt.
        """
        if "clock_s" not in step:
            return None
        number = step["step"]
        clock = step["clock_s"]
        clocks = self._clocks
        while clocks and (clocks[-1][0] >= number or clocks[-1][1] > clock):
            clocks.pop()  # The lines are out of order, or the clock was set.
        while len(clocks) > 1 and clock - clocks[1][1] >= CLOCK_WINDOW_S:
            clocks.popleft()
        first, since = clocks[0] if clocks else (number, clock)
        clocks.append((number, clock))
        return (clock - since) / (number - first) if clock > since else None


def fill_in(rows: list[Row], end: float) -> None:
    """Sets the missing times of rows. A missing step time is replaced by the step time of the next
    row. For example, the first row of an attempt has no step time.

    Missing times are counted back from the first known time, or counted on from an earlier row. If
    no time is known, they are counted back from `end`, the Unix time of the log's last change, when
    its last line was written. Times never decrease from row to row.
    """
    last = len(rows) - 1
    stamped = next((i for i, row in enumerate(rows) if row["time"] is not None), last)
    rows[stamped]["time"] = rows[stamped]["time"] or end
    for i in range(last - 1, -1, -1):
        row = rows[i]
        after = rows[i + 1]
        if row["step_time_s"] is None and row["attempt"] == after["attempt"]:
            row["step_time_s"] = after["step_time_s"]
        if i < stamped:
            row["time"] = after["time"] - (after["step_time_s"] or 0.0)
    for before, row in pairwise(rows):
        if row["time"] is None:
            row["time"] = before["time"] + (row["step_time_s"] or 0.0)
        else:
            row["time"] = max(row["time"], before["time"])
