"""Detectors: the statistics behind the alert rules. Their inputs are NumPy arrays, so they need no
torch.

`RiseDetector` finds a loss that rises and stays high. `slowest_rank` tests whether one rank is
slower than the other ranks. `find_non_finite_rows` and `first_rows` find the first row of each
stretch of neighbouring bad rows. A row is a training step in metrics.jsonl.
"""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from kit.run.columns import Columns
from kit.trainer.spikes import changed_loss_indices

LEVEL_STEPS = 50
"""Number of training steps in a block. The median loss of a block is one level of
`RiseDetector`."""
RISE_LEVELS = 8
"""Number of levels in a row above the lowest level that suffice for a rise of any height. A higher
rise needs fewer levels."""
RISE_STEPS = LEVEL_STEPS * RISE_LEVELS
"""Number of training steps for which the loss must have stayed above its lowest level to count as a
rise."""
LAG = 2
"""Distance between the three levels of a second difference, as a number of levels. The distance is
1 if one line of the log represents more steps than a level has."""
NOISES = 7.0
"""Least height of a rise above the lowest level, in standard deviations of the noise of a level.
Results with smaller values are in `docs/decisions/024-spikes-and-rises-of-the-loss.md`."""
LEAST_RISE = 0.015
"""Least height of a rise above the lowest level, as a fraction of that level. Results with smaller
values are in `docs/decisions/024-spikes-and-rises-of-the-loss.md`."""
LONGEST_LINE = 10_000
"""Largest number of training steps that one line of another trainer's log may represent."""
RATE_RISE = 1.01
"""Factor by which a learning rate must rise again, after it had begun to fall, to count as a second
warm-up."""

SLOW = 1.15
"""Threshold for the step time of a rank divided by the step time of the other ranks. A rank gets an
alert only if its ratio is above this threshold with high probability."""
TEST_MEDIANS = 12
"""Number of blocks of neighbouring samples. The t-test of a rank uses the median of each block."""
MIN_SAMPLES = 2 * TEST_MEDIANS
"""Least number of samples of step times for the t-test of a rank: two per block."""


class LossRise(NamedTuple):
    """A rise of the loss, with the levels before and after it."""

    row: int
    """Row of the metrics at which the rise was detected."""
    level: float
    """Level after the rise: median loss of the block that ends at `row`, in nats per token."""
    low_row: int
    """Last row of the block with the lowest level before the rise."""
    low: float
    """Lowest level before the rise, in nats per token."""


class RiseDetector:
    """Finds rises in the loss of one run. Each rise is reported once. The next rise can be reported
    after the loss has come back.

    The median loss of each block of LEVEL_STEPS training steps is a level. If one line of a log
    represents more steps than a block, each line gives a level. The bar is the lowest level so far
    plus the least height of a rise, which LEAST_RISE and NOISES define.

    The loss has risen if all levels of the last RISE_STEPS steps are above the bar, and if these
    are at least RISE_LEVELS levels. A higher rise needs fewer levels, at least two: their number
    times their height must be as large as for the smallest rise. A loss that has come half the way
    back is no rise. The noise of the levels is estimated from second differences of levels 100
    steps apart, which are about zero if the loss falls or rises steadily.

    The comparison starts again where another data mix begins, or where the learning rate rises
    again, since the loss then rises for a while.
    `docs/decisions/024-spikes-and-rises-of-the-loss.md` lists the rises that are found, the delay,
    and the healthy runs on which the detector was tested.
    """

    def __init__(self) -> None:
        self._row = 0
        """Number of rows of the metrics that were examined."""
        self._before = np.empty(0)
        """Array with the last finite loss before the row `_row`. Empty if there is none."""
        self._highest_rate = 0.0
        self._rate = 0.0
        self._comparison = LevelComparison()

    def find(
        self, losses: np.ndarray, rates: np.ndarray, new_data: Collection[int] = ()
    ) -> list[LossRise]:
        """Returns the rises of the loss in the rows that were added since the last call.

        Args:
            losses: losses of all rows so far. They must begin with the losses of the last call.
            rates: learning rate at each row, NaN if it is unknown.
            new_data: rows at which another data mix begins.
        """
        start = self._row
        before = self._before
        found: list[LossRise] = []
        self._row = max(start, len(losses) - (len(losses) - start) % LEVEL_STEPS)
        known = np.append(before, losses[start : self._row])
        self._before = known[np.isfinite(known)][-1:]
        line_rows = changed_loss_indices(known)[len(before) :] + start - len(before)
        for first in range(start, self._row, LEVEL_STEPS):
            end = first + LEVEL_STEPS
            rows = line_rows[slice(*np.searchsorted(line_rows, (first, end)))]
            if len(rows):
                # NumPy's median takes ten times as long for so few values.
                level = statistics.median(losses[rows].tolist())
                rise = self._comparison.add_level(level, end_of_line(losses, int(rows[-1])))
                if rise is not None:
                    found.append(rise)
            warms_again = self._warms_again(float(rates[end - 1]))
            if warms_again or any(first <= row < end for row in new_data):
                self._comparison = LevelComparison()
        return found

    def _warms_again(self, rate: float) -> bool:
        """Returns whether the learning rate has begun to rise again after a fall. `rate` is its
        newest value. Returns False if `rate` is NaN (unknown).
        """
        warms = RATE_RISE * self._rate < min(rate, self._highest_rate)
        if warms or rate >= self._highest_rate:
            self._rate = rate
        else:
            self._rate = min(self._rate, rate)
        self._highest_rate = max(self._highest_rate, rate)
        return warms


class LevelComparison:
    """State of one comparison of `RiseDetector`: the lowest level, and the newest levels. A level
    is the median loss of a block of steps.
    """

    def __init__(self) -> None:
        self._low = float("inf")
        self._low_row = 0
        self._back_row = 0
        """Last row of the newest block whose level was not above the bar."""
        self._is_reported = False
        self._levels: deque[tuple[int, float]] = deque(maxlen=2 * LAG + 1)
        self._bends: deque[float] = deque(maxlen=100)
        """Absolute values of the newest second differences between levels, from which the noise is
        estimated."""
        self._above: deque[float] = deque(maxlen=RISE_LEVELS)
        """Newest levels since `_back_row`, all of which are above the bar."""

    def add_level(self, level: float, row: int) -> LossRise | None:
        """Adds a level, the median loss of a block of steps whose last log line ends at `row`.
        Returns the rise that this level completes, or None.
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
        return LossRise(row, level, self._low_row, self._low)

    def _noise(self) -> float:
        """Returns the standard deviation of a level's noise, in nats per token. Returns infinity
        while too few levels are known.
        """
        if len(self._bends) < 3:
            return float("inf")
        return float(np.median(self._bends)) / (0.6745 * 6**0.5)

    def _add_bend(self) -> None:
        """Stores the absolute second difference of the newest levels, if there are enough
        levels.
        """
        rows, levels = zip(*self._levels, strict=True)
        is_dense = rows[-1] - rows[0] < 2 * LEVEL_STEPS * len(rows)
        lag = LAG if is_dense else 1
        if len(levels) > 2 * lag:
            self._bends.append(abs(levels[-1] - 2 * levels[-1 - lag] + levels[-1 - 2 * lag]))


def end_of_line(losses: np.ndarray, row: int) -> int:
    """Returns the last recorded row of the log line that begins at row `row`. A log line of another
    trainer may represent many steps, and their rows repeat one loss. At most LONGEST_LINE rows are
    searched.
    """
    ahead = losses[row : row + LONGEST_LINE]
    others = np.flatnonzero(ahead != losses[row])
    num_rows = int(others[0]) if len(others) else len(ahead)
    return row + num_rows - 1


def find_non_finite_rows(columns: Columns, name: str, start: int, end: int) -> np.ndarray:
    """Returns the first row of each stretch of non-finite losses or gradient norms, among the rows
    from `start` to `end`. `name` is "loss" or "grad_norm".

    Gradient norms before the first finite one count as not logged. Only rows with a step time are
    examined, unless no row has a step time: some logs of other trainers contain no times. Steps
    that fp16 training skips to find its loss scale are no problem, since their gradients are
    expected to overflow. Megatron prints no loss for a log line whose steps were all skipped.
    """
    since = max(0, start - 1)
    bad = ~np.isfinite(columns[name][since:end])
    is_timed = np.isfinite(columns["step_time_s"][:end])
    if is_timed.any():
        bad &= is_timed[since:]
    if name == "grad_norm":
        known = np.isfinite(columns[name][:end])
        first_logged = int(known.argmax()) if known.any() else end
        bad[: max(0, first_logged - since)] = False
    counts = np.nan_to_num(columns["skipped_steps"][since:end])
    # The row before `start` was examined in an earlier call, so it does not count as skipped in
    # this call.
    count_before = 0 if start == 0 else np.inf
    skipped = np.diff(counts, prepend=count_before) > 0
    if name == "loss":
        skipped &= columns["nan_steps"][since:end] == 0
    rows = first_rows(bad, start)
    return rows[~skipped[rows - since]]


def first_rows(bad: np.ndarray, start: int) -> np.ndarray:
    """Returns the first row of each stretch of neighbouring bad rows, from row `start` on. `bad` is
    a mask whose first element is the row before `start`, if there is one.
    """
    rows = max(0, start - 1) + np.flatnonzero(bad & ~np.append(False, bad[:-1]))
    return rows[rows >= start]


def slowest_rank(relative: np.ndarray) -> tuple[int, float, float] | None:
    """Returns (slowest rank, its step time divided by that of the other ranks, p-value). Returns
    None if one of the rank's blocks of samples is empty.

    The p-value is the probability that noise alone makes any rank look at least as slow, if in
    truth no rank is slower than SLOW times the other ranks.

    On a busy machine, neighbouring samples are correlated. So the samples are grouped into
    TEST_MEDIANS blocks. A one-sided t-test compares the logarithms of the blocks' medians with ln
    SLOW. Its probability is multiplied by the number of ranks, since the slowest of all ranks is
    tested (Bonferroni).

    Args:
        relative: step times divided by the median of all ranks, [rank, sample]. NaN for a missing
            sample. The number of samples is a multiple of TEST_MEDIANS.
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about a rank without samples.
        means = np.nanmean(relative, axis=1)
        if not np.isfinite(means).any():
            return None
        rank = int(np.nanargmax(means))
        ratios = relative[rank].astype(float)
        # With two ranks, the median is their mean, which includes the rank itself.
        if len(relative) == 2:
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
    """Returns the probability that a Student's t variable with TEST_MEDIANS - 1 degrees of freedom
    is above `t`. The formula needs an odd number of degrees of freedom.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, equation 26.7.3.
    """
    freedom = TEST_MEDIANS - 1
    angle = math.atan(t / math.sqrt(freedom))
    term = series = math.cos(angle)
    for k in range(2, freedom - 1, 2):
        term *= k / (k + 1) * math.cos(angle) ** 2
        series += term
    return 0.5 - (angle + math.sin(angle) * series) / math.pi
