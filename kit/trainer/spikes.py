"""Rules for loss spikes and bad starts. The reaction to bad steps, the alerts and the figures use
them.

The log of another trainer may have one line for many steps. The rows of these steps repeat one
loss, which counts once (`lines`).

A loss is a spike if it is above the median of the 40 finite losses before it by more than 12 times
their median absolute deviation (8 standard deviations of Gaussian noise), and by more than 1.2 %.
Unlike mean and variance, median and deviation stay useful while up to half of the 40 losses are
spikes.

The window is short because the loss falls. Over 300 steps, the decrease of the loss dominates the
deviation. In simulated training (a power law with 2 % noise), a window of 300 steps found no spike
of 15 standard deviations before step 1,000. A window of 40 steps found two in three at step 350 and
all from step 1,000 on. Both windows give similar numbers of false alarms: none in 200,000 steps of
Gaussian noise. With the heavy tails of Student's t (5 degrees of freedom), 40 steps give 18 and 300
steps give 12 false alarms in 100,000 steps.

Before there are 40 losses, only a bad start is reported (`bad_start`). No reaction to a bad start
exists, since no update of such a run is worth keeping. Imports no torch.
"""

from collections.abc import Sequence

import numpy as np

MADS = 12.0
"""Distance of a spike from the median, in median absolute deviations."""
FLOOR = 1e-3
"""Smallest deviation, as a share of the median, so that a loss that is almost constant is not
judged by its last digits."""
WINDOW = 40
"""Number of finite losses with which a loss is compared."""
START_LINES, SETTLED = 10, 30
"""START_LINES is the number of losses in a row that make a bad start if all are too high. SETTLED
is the number of steps after which an untrained model should guess no worse than at random."""


def stands_out(loss: float, before: Sequence[float]) -> bool:
    """Returns whether a loss is a spike, compared with the last WINDOW finite losses before it.
    Returns False if there are fewer losses.
    """
    return bool(spikes(np.array([*before, loss]), start=len(before)))


def spikes(losses: np.ndarray, start: int = 0) -> list[tuple[int, float]]:
    """Returns (row, median of the window before the row) for every loss spike from row `start` on.
    Non-finite losses are ignored.
    """
    since = start
    while since and len(lines(losses[since:start])) < WINDOW:
        since = max(0, 2 * since - start - WINDOW)  # twice as far back, plus WINDOW
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
    """Returns the rows whose loss is finite and differs from the previous finite loss. If a log has
    one line for many steps, each line gives one row.
    """
    rows = np.flatnonzero(np.isfinite(losses))
    return rows[np.diff(losses[rows], prepend=np.nan) != 0]


def bad_start(losses: np.ndarray, guess: float) -> int | None:
    """Returns the row at which START_LINES losses in a row were too high, among the first WINDOW
    losses (`lines`). Returns None if there is no bad start.

    `guess` is ln(vocabulary), the loss of guessing at random. A loss is too high if it exceeds the
    larger of the first loss and `guess` by 10 %. For a model that was trained before, a loss 50 %
    above the first loss is too high. From row SETTLED on, a loss above 1.5 times `guess` is always
    too high. Initial weights may give a higher loss (60.7 in LUMI's 175B run), but 20 steps bring
    the loss below this limit (10.8).
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
    ordered = np.sort(lines, axis=1)  # Ten times as fast as numpy.median on short rows.
    return (ordered[:, WINDOW // 2 - 1] + ordered[:, WINDOW // 2]) / 2
