"""Steps that another trainer's log tells of as rows of `metrics.jsonl`."""

import collections
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from kit.foreign.logs import Step

CLOCK_WINDOW_S = 20.0
"""A progress bar's clock has whole seconds: over 20 of them it is off by 5 % at most."""
ALWAYS = ("loss", "grad_norm", "learning_rate", "memory_bytes")
IF_TOLD = ("validation_loss", "loss_scale", "skipped_steps", "nan_steps")


class StepRecorder:
    """Turns steps into rows of `metrics.jsonl`: samples, times, tokens.

    `batch` are a step's sequences according to the log, `length` their tokens, `share` what the
    engine really ran of them, `own` those that its line does not count as consumed, and `interval`
    the steps that one line stands for.
    """

    def __init__(
        self, *, batch: int, length: int, share: Fraction | int, own: int, interval: int
    ) -> None:
        self.batch, self.length, self.own, self.interval = batch, length, own, interval
        self.share, self.last_row = share, dict[str, Any]()
        self.attempt, self.newest, self.skipped_steps = 1, 0, 0
        self.clocks = collections.deque[tuple[float, float]]()

    def rows(self, step: Step) -> Iterator[dict[str, Any]]:
        """Yields the rows that a step adds: one for each since the last line that has none."""
        number, last = int(step["step"]), self.last_row
        if "attempt" not in step:  # a held-out loss, of a step of the last line or of none
            if last and 0 <= (earlier := last["step"] - number) < self.interval:
                untold = "consumed_tokens" if earlier else ""
                yield {name: last[name] for name in last if name != untold} | step
            return
        if step["attempt"] > self.attempt:
            self.attempt, self.newest, self.skipped_steps = int(step["attempt"]), 0, 0
            self.clocks.clear()
        row = self.last_row = self._row(step)
        late = number < self.newest  # lines in disorder: those before it have taken their steps
        first = max(self.newest + 1, number - self.interval + 1)
        seconds, end = row["step_time_s"] or 0.0, row["time"]
        mean = {name: row[name] for name in row if name != "validation_loss"}
        self.newest = max(self.newest, number)
        for other in range(first, 0 if late else number):
            when = None if end is None else end - (number - other) * seconds
            yield mean | {"step": other, "time": when}
        samples = step.get("sequence_length", self.length) == self.length and step.get(
            "consumed_samples"
        )
        if tokens := step.get("consumed_tokens") or (
            samples and (samples + self.own) * self.length
        ):
            row["consumed_tokens"] = round(tokens * self.share)
        yield row

    def _row(self, step: Step) -> dict[str, Any]:
        samples = (step.get("samples") or self.batch) * self.share
        self.skipped_steps += step.get("skipped_steps", 0)
        told = step | ({"skipped_steps": self.skipped_steps} if "skipped_steps" in step else {})
        return {
            "step": step["step"],
            "attempt": self.attempt,
            "time": step.get("time"),
            "step_time_s": step.get("step_time_s") or self._from_clock(step),
            "tokens": round(samples * (step.get("sequence_length") or self.length)),
            **{name: step.get(name) for name in ALWAYS},
            **{name: told[name] for name in IF_TOLD if name in told},
        }

    def _from_clock(self, step: Step) -> float | None:
        """Returns seconds per step since the last line that is CLOCK_WINDOW_S old.

        None for an attempt's first line.
        """
        if "clock_s" not in step:
            return None
        number, clock, clocks = step["step"], step["clock_s"], self.clocks
        while clocks and (clocks[-1][0] >= number or clocks[-1][1] > clock):
            clocks.pop()  # lines in disorder, or the clock was set
        while len(clocks) > 1 and clock - clocks[1][1] >= CLOCK_WINDOW_S:
            clocks.popleft()
        first, since = clocks[0] if clocks else (number, clock)
        clocks.append((number, clock))
        return (clock - since) / (number - first) if clock > since else None
