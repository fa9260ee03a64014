"""Logged steps of another trainer as rows of `metrics.jsonl`."""

from fractions import Fraction
from typing import Any

from kit.foreign.logs import CLOCK_WINDOW_S, LoggedStep


class StepRecorder:
    """Turns logged steps into rows of `metrics.jsonl`: attempts, samples, times."""

    def __init__(self, *, batch: int, sequence_length: int, engine_share: Fraction, interval: int) -> None:
        self.batch, self.sequence_length = batch, sequence_length
        self.engine_share, self.interval = engine_share, interval
        self.attempt, self.starts = 1, 0
        self.seen: dict[int, int] = {}  # hash of what was said of each step of the attempt
        self.newest = 0
        self.clocks: list[tuple[int, float]] = []
        self.last_row: dict[str, Any] = {}
        self.skipped_steps = 0

    def rows(self, logged: LoggedStep) -> list[dict[str, Any]]:
        """Returns the rows that a logged step adds: one for each step since the last line, if not every step has one.

        A step that comes again belongs to a new attempt; the same line printed twice, or a validation loss, does not.
        """
        if logged.loss is None and logged.validation_loss is not None:
            belongs = 0 <= self.last_row.get("step", 0) - logged.step < self.interval and self.last_row
            return (
                [{**self.last_row, "step": logged.step, "validation_loss": logged.validation_loss}] if belongs else []
            )
        old, said = self.seen.get(logged.step), logged.said()
        if old == said and logged.starts == self.starts:
            return []
        if self.seen and (old is not None or logged.starts > self.starts):
            self.attempt, self.newest, self.seen, self.clocks = self.attempt + 1, 0, {}, []
            self.skipped_steps = 0
        self.starts, self.seen[logged.step] = logged.starts, said
        self.last_row = self._row(logged)
        late = logged.step < self.newest  # lines in disorder: those before it have taken their steps
        missing = range(max(self.newest + 1, logged.step - self.interval + 1), 0 if late else logged.step)
        self.newest = max(self.newest, logged.step)
        mean = {name: value for name, value in self.last_row.items() if name != "validation_loss"}
        seconds, end = mean["step_time_s"] or 0.0, logged.time
        times = {step: None if end is None else end - (logged.step - step) * seconds for step in missing}
        return [*({**mean, "step": step, "time": times[step]} for step in missing), self.last_row]

    def _row(self, logged: LoggedStep) -> dict[str, Any]:
        samples = (logged.samples or self.batch) * self.engine_share
        row = {
            "step": logged.step,
            "attempt": self.attempt,
            "time": logged.time,
            "step_time_s": logged.step_time_s or self._from_clock(logged),
            "tokens": round(samples * (logged.sequence_length or self.sequence_length)),
            "loss": logged.loss,
            "grad_norm": logged.grad_norm,
            "learning_rate": logged.learning_rate,
            "memory_bytes": logged.memory_bytes,
        }
        self.skipped_steps += logged.skipped_steps or 0
        other = {
            "validation_loss": logged.validation_loss,
            "loss_scale": logged.loss_scale,
            "skipped_steps": None if logged.skipped_steps is None else self.skipped_steps,
            "nan_steps": logged.nan_steps,
        }
        return row | {name: value for name, value in other.items() if value is not None}

    def _from_clock(self, logged: LoggedStep) -> float | None:
        """Returns seconds per step since the last line that is CLOCK_WINDOW_S old; None for an attempt's first line."""
        if logged.clock_s is None:
            return None
        before = [(step, clock) for step, clock in self.clocks if step < logged.step]
        old = [(step, clock) for step, clock in before if logged.clock_s - clock >= CLOCK_WINDOW_S]
        self.clocks = [*(old[-1:] or before[:1]), *before[len(old) :], (logged.step, logged.clock_s)]
        if not before:
            return None
        step, clock = old[-1] if old else before[0]
        seconds = logged.clock_s - clock
        return seconds / (logged.step - step) if seconds > 0 else None
