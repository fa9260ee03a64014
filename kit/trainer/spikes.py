"""Rules by which a loss is a spike and the start of a run is bad. The reaction to bad steps, the
alerts and the figures use these rules.

The log of another training code may have one line for many steps. Its rows of metrics then repeat
one loss many times, which counts as one loss (`lines`).

A loss is a spike if it is above the median of the 40 finite losses before it by two limits: by more
than 12 times their median absolute deviation (8 standard deviations of Gaussian noise), and by more
than 1.2 %. Median and median absolute deviation are reliable as long as fewer than half of the 40
losses are spikes, unlike mean and variance.

The window of 40 losses is short because the loss falls during training. Over 300 steps, this
decrease dominates the deviation. In simulated training (a power law with 2 % noise), a window of
300 steps found no spike of 15 standard deviations before step 1,000. A window of 40 steps found two
thirds of the spikes at step 350, and all of them from step 1,000 on. Both windows give similar
numbers of false alarms: none in 200,000 steps of Gaussian noise. With the heavy tails of Student's
t (5 degrees of freedom), 40 steps give 18 and 300 steps give 12 false alarms in 100,000 steps.

Before there are 40 losses, only a bad start is reported (`bad_start`). There is no automatic
reaction to a bad start, since no update of such a run is useful. Imports no torch.
"""

from collections.abc import Sequence

import numpy as np

MADS = 12.0
"""Smallest distance of a spike from the median of the losses before it, in median absolute
deviations."""
FLOOR = 1e-3
"""Smallest value of the median absolute deviation, as a fraction of the median. Without it, an
almost constant loss would be called a spike for a change of its last digits."""
WINDOW = 40
"""Number of finite losses before a loss with which it is compared."""
START_LINES, SETTLED = 10, 30
"""START_LINES is the number of consecutive losses that must all be too high for a bad start.
SETTLED is the number of steps after which an untrained model should predict no worse than random
guessing."""


def stands_out(loss: float, before: Sequence[float]) -> bool:
    """Returns whether a loss is a spike, compared with the last WINDOW finite losses in `before`.
    Returns False if `before` has fewer finite losses.
    """
    return bool(spikes(np.array([*before, loss]), start=len(before)))


def spikes(losses: np.ndarray, start: int = 0) -> list[tuple[int, float]]:
    """Returns (index of the loss, median of the WINDOW losses before it) for every loss spike from
    index `start` on. Losses that are not finite are ignored.
    """
    since = start
    while since and len(lines(losses[since:start])) < WINDOW:
        # The search goes back twice as far in each pass, plus WINDOW.
        since = max(0, 2 * since - start - WINDOW)
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
    """Returns the indices of the losses that are finite and differ from the finite loss before
    them. If a log has one line for many steps, each line of the log gives one index.
    """
    rows = np.flatnonzero(np.isfinite(losses))
    return rows[np.diff(losses[rows], prepend=np.nan) != 0]


def bad_start(losses: np.ndarray, guess: float) -> int | None:
    """Returns the index of the last of START_LINES consecutive losses that are too high, among the
    first WINDOW different losses (`lines`). Returns None if there is no bad start.

    `guess` is ln(vocabulary size), the loss of random guessing. A loss is too high if it exceeds
    the larger of the first loss and `guess` by 10 %. If the model was trained before, its first
    loss is low, and a loss 50 % above the first loss is too high. From step SETTLED on, a loss
    above 1.5 times `guess` is always too high. Before, initial weights may give such a loss (60.7
    in LUMI's 175B run), but 20 steps bring it below this limit (10.8).
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
    ordered = np.sort(lines, axis=1)  # On short rows this is ten times as fast as numpy.median.
    return (ordered[:, WINDOW // 2 - 1] + ordered[:, WINDOW // 2]) / 2
