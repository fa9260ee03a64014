"""A loss that rises and does not come back, at once or step by step.

Blocks of 50 steps, or the lines of a log that has fewer, have a level: their median loss. The loss
has risen if the levels of 400 steps, and of eight blocks or lines, are all above the lowest so far
by more than the noise, and are not half the way back. Higher levels take fewer lines, two at least:
their number times their height counts. The noise is what second differences of levels 100 steps
apart are made of, which neither a steady fall nor a rise is.

A learning rate that rises again, after which a loss rises for a while, and new data begin the
comparison anew. What it finds, how late, and on which healthy runs it was tried is in
`docs/decisions/024-spikes-and-rises-of-the-loss.md`. No torch.
"""

import statistics
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from kit.trainer.spikes import lines

BLOCK, BLOCKS = 50, 8
STEPS = BLOCK * BLOCKS
LAG = 2
"""Blocks between the levels of a second difference; lines for more steps than a block are
compared with the next."""
NOISES, LEAST_RISE = 7.0, 0.015
"""Above the lowest level: standard deviations of a level, and share of it. What less of it gives is
in `docs/decisions/024-spikes-and-rises-of-the-loss.md`."""
LONGEST_LINE = 10_000
RATE_RISE = 1.01


class Rise(NamedTuple):
    """What is told of a rise: rows of metrics, and the levels there."""

    row: int
    level: float
    low_row: int
    low: float


class Rises:
    """Follows the loss of one run and tells of each rise once, until the loss has been back."""

    def __init__(self) -> None:
        self._row, self._before = 0, np.empty(0)
        self._highest_rate = self._rate = 0.0
        self._begin()

    def _begin(self) -> None:
        self._low, self._low_row, self._back_row, self._told = float("inf"), 0, 0, False
        self._levels: deque[tuple[int, float]] = deque(maxlen=2 * LAG + 1)
        self._bends: deque[float] = deque(maxlen=100)
        self._above: deque[float] = deque(maxlen=BLOCKS)

    def look(
        self, losses: np.ndarray, rates: np.ndarray, new_data: Collection[int] = ()
    ) -> list[Rise]:
        """Returns the rises that are seen in the rows since the last look; at rows of `new_data`
        a mix begins.
        """
        start, before, found = self._row, self._before, []
        self._row = max(start, len(losses) - (len(losses) - start) % BLOCK)
        known = np.append(before, losses[start : self._row])
        self._before = known[np.isfinite(known)][-1:]
        told = lines(known)[len(before) :] + start - len(before)
        for first in range(start, self._row, BLOCK):
            end = first + BLOCK
            rows = told[slice(*np.searchsorted(told, (first, end)))]
            if len(rows):
                level = statistics.median(losses[rows].tolist())  # NumPy's takes ten times as long
                found += self._take(level, end_of_line(losses, int(rows[-1])))
            if self._warms_again(float(rates[end - 1])) or any(
                first <= row < end for row in new_data
            ):
                self._begin()
        return found

    def _take(self, level: float, row: int) -> list[Rise]:
        """Takes a level, whose last line ends at a row, into account."""
        self._levels.append((row, level))
        bar = LEAST_RISE * abs(self._low)
        if level > self._low + bar:
            noise = (
                float(np.median(self._bends)) / (0.6745 * 6**0.5)
                if len(self._bends) >= 3
                else float("inf")
            )
            bar = max(bar, NOISES * noise)
        if not level > self._low + bar:
            self._note_bend()
            self._back_row, self._told = row, False
            self._above.clear()
            if level < self._low:
                self._low, self._low_row = level, row
            return []
        self._above.append(level)
        height, count = min(self._above) - self._low, len(self._above)
        lasts = count > 1 and count * height >= BLOCKS * bar and row - self._back_row >= STEPS
        if self._told or not lasts or level < (self._low + max(self._above)) / 2:
            return []
        self._told = True
        return [Rise(row, level, self._low_row, self._low)]

    def _note_bend(self) -> None:
        rows, levels = zip(*self._levels, strict=True)
        lag = LAG if rows[-1] - rows[0] < 2 * BLOCK * len(rows) else 1
        if len(levels) > 2 * lag:
            self._bends.append(abs(levels[-1] - 2 * levels[-1 - lag] + levels[-1 - 2 * lag]))

    def _warms_again(self, rate: float) -> bool:
        """Returns whether a learning rate that had begun to fall rises; one that is not known
        (NaN) does not.
        """
        warms = RATE_RISE * self._rate < min(rate, self._highest_rate)
        self._rate = rate if warms or rate >= self._highest_rate else min(self._rate, rate)
        self._highest_rate = max(self._highest_rate, rate)
        return warms


def end_of_line(losses: np.ndarray, row: int) -> int:
    """Returns the last row of the line that begins at a row, as far as it is recorded."""
    others = np.flatnonzero(losses[row : row + LONGEST_LINE] != losses[row])
    return row + int(others[0] if len(others) else len(losses[row : row + LONGEST_LINE])) - 1
