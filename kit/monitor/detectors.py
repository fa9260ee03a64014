"""Detectors: the statistics behind the alert rules. Their inputs are arrays. They need no torch.

`RiseDetector` finds a loss that rises and stays high. `slowest_rank` tests whether a rank is slower
than the other ranks. `rows_not_finite` and `first_rows` find the first row of each stretch of bad
rows.
"""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from kit.run.columns import Columns
from kit.trainer.spikes import lines

LEVEL_STEPS = 50
"""Number of steps whose median loss is one level of `RiseDetector`."""
RISE_LEVELS = 8
"""Number of levels above the lowest level that suffice for a rise of any height."""
RISE_STEPS = LEVEL_STEPS * RISE_LEVELS
"""Number of steps for which a loss must have been above its lowest level."""
LAG = 2
"""Distance between the levels of a second difference, as a number of levels. If a line of the
log stands for more steps than a level, the distance is 1."""
NOISES = 7.0
"""Least height of a rise, in standard deviations of a level. Results with smaller values are in
`docs/decisions/024-spikes-and-rises-of-the-loss.md`."""
LEAST_RISE = 0.015
"""Least height of a rise, as a fraction of the lowest level. Results with smaller values are in
`docs/decisions/024-spikes-and-rises-of-the-loss.md`."""
LONGEST_LINE = 10_000
"""Largest number of steps for which one line of a log may stand."""
RATE_RISE = 1.01
"""Factor by which a learning rate that had begun to fall must rise to count as a second warm-up."""

SLOW = 1.15
"""Step time of a rank divided by the step time of the other ranks. A rank gets an alert only if
this ratio is above the value with high probability."""
TEST_MEDIANS = 12
"""Number of medians over neighbouring samples that the t-test of a rank compares."""
MIN_SAMPLES = 2 * TEST_MEDIANS
"""Least number of samples for the t-test."""


class Rise(NamedTuple):
    """A loss that has risen, with the levels before and after the rise."""

    row: int
    """Row at which the rise was found."""
    level: float
    """Median loss of the block that ends at `row`, in nats per token."""
    low_row: int
    """Last row of the lowest level."""
    low: float
    """Lowest level before the rise, in nats per token."""


class RiseDetector:
    """Finds rises in the loss of one run. It reports a rise once, until the loss has come back.

    The median loss of each block of LEVEL_STEPS steps is a level. If a line of the log stands for
    more steps, each line is a level. The bar is the lowest level so far plus the least
    height of a rise, which LEAST_RISE and NOISES define. The loss has risen if all levels of the
    last RISE_STEPS steps are above the bar, and if these are RISE_LEVELS levels. Fewer levels, at
    least two, suffice if their number times their height is as large. A loss that has come half the
    way back is no rise. The noise is estimated from second differences of levels 100 steps apart.
    These are about zero for a steady fall or rise.

    The comparison starts anew where another mix of data begins. It also starts anew where the
    learning rate rises again, since the loss then rises for a while.
    `docs/decisions/024-spikes-and-rises-of-the-loss.md` lists the rises that are found, the delay,
    and the healthy runs on which the detector was tested.
    """

    def __init__(self) -> None:
        self._row = 0
        """Number of rows that were examined."""
        self._before = np.empty(0)
        """Last finite loss before `_row`, if there is one."""
        self._highest_rate = 0.0
        self._rate = 0.0
        self._comparison = LevelComparison()

    def find(
        self, losses: np.ndarray, rates: np.ndarray, new_data: Collection[int] = ()
    ) -> list[Rise]:
        """Returns the rises in the rows since the last call.

        Args:
            losses: all losses so far. The losses of the last call must be the beginning.
            rates: learning rate of each row, NaN where it is unknown.
            new_data: rows at which another mix of data begins.
        """
        start = self._row
        before = self._before
        found: list[Rise] = []
        self._row = max(start, len(losses) - (len(losses) - start) % LEVEL_STEPS)
        known = np.append(before, losses[start : self._row])
        self._before = known[np.isfinite(known)][-1:]
        line_rows = lines(known)[len(before) :] + start - len(before)
        for first in range(start, self._row, LEVEL_STEPS):
            end = first + LEVEL_STEPS
            rows = line_rows[slice(*np.searchsorted(line_rows, (first, end)))]
            if len(rows):
                # The median of NumPy takes ten times as long for so few values.
                level = statistics.median(losses[rows].tolist())
                rise = self._comparison.add_level(level, end_of_line(losses, int(rows[-1])))
                if rise is not None:
                    found.append(rise)
            warms_again = self._warms_again(float(rates[end - 1]))
            if warms_again or any(first <= row < end for row in new_data):
                self._comparison = LevelComparison()
        return found

    def _warms_again(self, rate: float) -> bool:
        """Returns whether the learning rate `rate` rises again after it had begun to fall. Returns
        False if the rate is unknown (NaN).
        """
        warms = RATE_RISE * self._rate < min(rate, self._highest_rate)
        if warms or rate >= self._highest_rate:
            self._rate = rate
        else:
            self._rate = min(self._rate, rate)
        self._highest_rate = max(self._highest_rate, rate)
        return warms


class LevelComparison:
    """The lowest level and the newest levels of `RiseDetector` since its comparison began."""

    def __init__(self) -> None:
        self._low = float("inf")
        self._low_row = 0
        self._back_row = 0
        """Last row at which the level was not above the bar."""
        self._is_reported = False
        self._levels: deque[tuple[int, float]] = deque(maxlen=2 * LAG + 1)
        self._bends: deque[float] = deque(maxlen=100)
        """Absolute values of the newest second differences of the levels."""
        self._above: deque[float] = deque(maxlen=RISE_LEVELS)
        """Levels above the bar since `_back_row`."""

    def add_level(self, level: float, row: int) -> Rise | None:
        """Adds a level whose last line ends at `row`. Returns the rise that this level completes,
        or None.
        """
        self._levels.append((row, level))
        bar = LEAST_RISE * abs(self._low)
        if level > self._low + bar:
            bar = max(bar, NOISES * self._noise())
        if not level > self._low + bar:
            self._add_bend()
            self._back_row = row
            self._is_reported = False
            self._above.clear()
            if level < self._low:
                self._low = level
                self._low_row = row
            return None
        self._above.append(level)
        height = min(self._above) - self._low
        count = len(self._above)
        is_high = count > 1 and count * height >= RISE_LEVELS * bar
        is_long = row - self._back_row >= RISE_STEPS
        comes_back = level < (self._low + max(self._above)) / 2
        if self._is_reported or not is_high or not is_long or comes_back:
            return None
        self._is_reported = True
        return Rise(row, level, self._low_row, self._low)

    def _noise(self) -> float:
        """Returns the standard deviation of a level, in nats per token. Returns infinity while too
        few levels are known.
        """
        if len(self._bends) < 3:
            return float("inf")
        return float(np.median(self._bends)) / (0.6745 * 6**0.5)

    def _add_bend(self) -> None:
        """Computes the second difference of the newest levels and stores its absolute value."""
        rows, levels = zip(*self._levels, strict=True)
        is_dense = rows[-1] - rows[0] < 2 * LEVEL_STEPS * len(rows)
        lag = LAG if is_dense else 1
        if len(levels) > 2 * lag:
            self._bends.append(abs(levels[-1] - 2 * levels[-1 - lag] + levels[-1 - 2 * lag]))


def end_of_line(losses: np.ndarray, row: int) -> int:
    """Returns the last recorded row of the log line that begins at `row`. All rows of a line have
    one loss. At most LONGEST_LINE rows are searched.
    """
    ahead = losses[row : row + LONGEST_LINE]
    others = np.flatnonzero(ahead != losses[row])
    num_rows = int(others[0]) if len(others) else len(ahead)
    return row + num_rows - 1


def rows_not_finite(columns: Columns, name: str, start: int, end: int) -> np.ndarray:
    """Returns the rows from `start` to `end` at which a stretch of non-finite losses or gradient
    norms begins. `name` is "loss" or "grad_norm".

    A gradient norm that has never been finite counts as not logged. Only rows with a duration are
    examined. A non-finite value is no fault in a step that fp16 skips to find its loss scale. The
    gradient of such a step has overflowed. Megatron prints no loss for a line whose steps were all
    skipped.
    """
    since = max(0, start - 1)
    bad = ~np.isfinite(columns[name][since:end]) & np.isfinite(columns["step_time_s"][since:end])
    if name == "grad_norm":
        known = np.isfinite(columns[name][:end])
        first_logged = int(known.argmax()) if known.any() else end
        bad[: max(0, first_logged - since)] = False
    counts = np.nan_to_num(columns["skipped_steps"][since:end])
    # The row before `start` was examined already, so it does not count as skipped in this call.
    count_before = 0 if start == 0 else np.inf
    skipped = np.diff(counts, prepend=count_before) > 0
    if name == "loss":
        skipped &= columns["nan_steps"][since:end] == 0
    rows = first_rows(bad, start)
    return rows[~skipped[rows - since]]


def first_rows(bad: np.ndarray, start: int) -> np.ndarray:
    """Returns the rows from `start` on at which a stretch of bad rows begins. `bad` begins with the
    row before `start`, if there is one.
    """
    rows = max(0, start - 1) + np.flatnonzero(bad & ~np.append(False, bad[:-1]))
    return rows[rows >= start]


def slowest_rank(relative: np.ndarray) -> tuple[int, float, float] | None:
    """Returns (slowest rank, its step time divided by that of the other ranks, p-value). Returns
    None if a block has no sample of the slowest rank.

    The p-value is the probability that noise alone makes any rank look at least as slow, if no rank
    is slower than SLOW times the other ranks.

    Neighbouring samples are correlated on a busy machine. So they are grouped into TEST_MEDIANS
    blocks. The medians of the blocks are compared by a one-sided t-test of their logarithms against
    ln SLOW. The probability is multiplied by the number of ranks, since the slowest of all ranks is
    tested (Bonferroni).

    Args:
        relative: step time divided by the median of all ranks, [rank, sample]. The number of
            samples is a multiple of TEST_MEDIANS.
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # A rank may have no sample.
        means = np.nanmean(relative, axis=1)
        if not np.isfinite(means).any():
            return None
        rank = int(np.nanargmax(means))
        ratios = relative[rank].astype(float)
        if len(relative) == 2:  # The median of two ranks is their mean, which includes the rank.
            ratios = ratios / (2 - ratios)
        medians = np.nanmedian(np.log(ratios).reshape(TEST_MEDIANS, -1), axis=1)
    if not np.isfinite(medians).all():
        return None
    mean = float(np.mean(medians))
    error = float(np.std(medians, ddof=1)) / math.sqrt(TEST_MEDIANS)
    excess = mean - math.log(SLOW)
    t = excess / error if error else math.copysign(math.inf, excess)
    by_chance = _t_tail(t)
    return rank, math.exp(mean), min(1.0, len(relative) * by_chance)


def _t_tail(t: float) -> float:
    """Returns the probability that Student's t with TEST_MEDIANS - 1 degrees of freedom is above t.
    The formula needs an odd number of degrees of freedom.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, equation 26.7.3.
    """
    freedom = TEST_MEDIANS - 1
    angle = math.atan(t / math.sqrt(freedom))
    term = series = math.cos(angle)
    for k in range(2, freedom - 1, 2):
        term *= k / (k + 1) * math.cos(angle) ** 2
        series += term
    return 0.5 - (angle + math.sin(angle) * series) / math.pi
