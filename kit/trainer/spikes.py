"""What a loss spike is, and what a bad start: the rules of the guard that answers spikes, the
alerts, and the figures.

Another trainer's log may have one line for many steps; all its rows say the same, which counts once
(`lines`).

A loss stands out if it is above the median of the 40 finite losses before it by more than 12 of
their median absolute deviations (8 standard deviations of Gaussian noise), and by more than 1.2 %.
Median and deviation, unlike mean and variance, hold while up to half of those before are spikes
themselves. The window is short because the loss falls: over 300 steps the fall itself makes the
deviation, and in simulated training (a power law with 2 % noise) no spike of 15 standard deviations
was found before step 1,000, where 40 steps find two in three at step 350 and all from 1,000 on.
False alarms do not tell them apart: none in 200,000 steps of Gaussian noise, and with the heavy
tails of Student's t of 5 degrees of freedom 18 and 12 in 100,000.

Before there are 40 losses, only a start that goes wrong is told of (`bad_start`). The guard has no
answer to it: no update of such a run is worth keeping. No torch.
"""

from collections.abc import Sequence

import numpy as np

MADS = 12.0
FLOOR = 1e-3
"""Of the median: the least deviation, so that a loss that is almost constant is not judged by
its last digits."""
WINDOW = 40
START_LINES, SETTLED = 10, 30
"""Losses in a row that make a bad start; steps after which an untrained model should guess no
worse than at random."""


def stands_out(loss: float, before: Sequence[float]) -> bool:
    """Returns whether a loss is a spike beside the last `WINDOW` finite losses before it; False
    beside fewer.
    """
    return bool(spikes(np.array([*before, loss]), start=len(before)))


def spikes(losses: np.ndarray, start: int = 0) -> list[tuple[int, float]]:
    """Returns (row, median before) of the losses from row `start` on that stand out; infinite
    ones are none.
    """
    since = start
    while since and len(lines(losses[since:start])) < WINDOW:
        since = max(0, 2 * since - start - WINDOW)  # twice as far back, and a little
    rows = since + lines(losses[since:])
    first = max(WINDOW, int(np.searchsorted(rows, start)))
    if first >= len(rows):
        return []
    before = np.lib.stride_tricks.sliding_window_view(losses[rows[first - WINDOW : -1]], WINDOW)
    medians = _medians(before)
    deviations = _medians(np.abs(before - medians[:, None]))
    bars = medians + MADS * np.maximum(deviations, FLOOR * np.abs(medians))
    high = np.flatnonzero(losses[rows[first:]] > bars)
    return [(int(rows[first + i]), float(medians[i])) for i in high]


def lines(losses: np.ndarray) -> np.ndarray:
    """Returns the rows whose loss is finite and says something new, which those of one line of a
    log say once.
    """
    rows = np.flatnonzero(np.isfinite(losses))
    return rows[np.diff(losses[rows], prepend=np.nan) != 0]


def bad_start(losses: np.ndarray, guess: float) -> int | None:
    """Returns the first row at which ten of the first 40 losses in a row were too high; None where
    none was.

    Too high is 10 % above the larger of the first loss and `guess`, the ln(vocabulary) of guessing
    at random, and for a model that was trained before, half as high again as its first. From step
    30 on it is at the latest 1.5 times `guess`: weights may begin worse than that (60.7 of LUMI's
    175B), but 20 steps take them there (10.8).
    """
    for steps_a_line in (10, 10_000):
        rows = lines(losses[: WINDOW * steps_a_line])[:WINDOW]
        if len(rows) == WINDOW:
            break
    if len(rows) < START_LINES:
        return None
    first = losses[rows[0]]
    bar = max(1.1 * first, min(1.5 * first, 1.1 * guess))
    above = losses[rows] > np.where(rows < SETTLED, bar, min(bar, 1.5 * guess))
    found = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(above, START_LINES).all(axis=1))
    return int(rows[found[0] + START_LINES - 1]) if len(found) else None


def _medians(lines: np.ndarray) -> np.ndarray:
    ordered = np.sort(lines, axis=1)  # ten times as fast as numpy.median for lines this short
    return (ordered[:, WINDOW // 2 - 1] + ordered[:, WINDOW // 2]) / 2
