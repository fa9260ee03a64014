"""Rules by which a loss is a spike and the start of a run is bad. The reaction to bad steps, the
alerts and the figures use these rules.

The log of another training code may have one line for many steps. Its rows of metrics then repeat
one loss many times, which counts as one loss (`changed_loss_indices`).

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

Before there are 40 losses, only a bad start is reported (`find_bad_start`). There is no automatic
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
"""Number of preceding finite losses with which a loss is compared."""
START_LINES, SETTLED = 10, 30
"""START_LINES is the number of consecutive losses that must all be too high for a bad start.
SETTLED is the number of steps after which an untrained model should predict no worse than random
guessing."""


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Returns whether a loss is a spike, compared with the last WINDOW finite losses in `before`.
    Returns False if `before` has fewer finite losses.
    """
    return bool(find_spikes(np.array([*before, loss]), start=len(before)))


def find_spikes(losses: np.ndarray, start: int = 0) -> list[tuple[int, float]]:
    """Returns (index of the loss, median of the WINDOW losses before it) for every loss spike from
    index `start` on. Losses that are not finite are ignored.
    """
    since = start
    while since and len(changed_loss_indices(losses[since:start])) < WINDOW:
        # The search goes back twice as far in each pass, plus WINDOW.
        since = max(0, 2 * since - start - WINDOW)
    rows = since + changed_loss_indices(losses[since:])
    first = max(WINDOW, int(np.searchsorted(rows, start)))
    if first >= len(rows):
        return []
    before = np.lib.stride_tricks.sliding_window_view(losses[rows[first - WINDOW : -1]], WINDOW)
    medians = _medians(before)
    deviations = _medians(np.abs(before - medians[:, None]))
    bars = medians + MADS * np.maximum(deviations, FLOOR * np.abs(medians))
    high = np.flatnonzero(losses[rows[first:]] > bars)
    return [(int(rows[first + i]), float(medians[i])) for i in high]


def changed_loss_indices(losses: np.ndarray) -> np.ndarray:
    """Returns the indices of the losses that are finite and differ from the finite loss before
    them. A log with one line for many steps repeats the loss of its line. Only the first of the
    repeated losses is kept.
    """
    rows = np.flatnonzero(np.isfinite(losses))
    return rows[np.diff(losses[rows], prepend=np.nan) != 0]


def find_bad_start(losses: np.ndarray, guess: float) -> int | None:
    """Returns the index of the loss that completes a bad start, or None if there is no bad start.

    A bad start is a sequence of START_LINES consecutive losses that are too high. Only the first
    WINDOW losses are examined. Losses that repeat the loss before them are not counted
    (`changed_loss_indices`).

    A loss is too high in each of these cases. `guess` is ln(vocabulary size), the loss of random
    guessing.

    - The loss exceeds the larger of the first loss and `guess` by 10 %.
    - The model was trained before, so that its first loss is low, and the loss exceeds the first
      loss by 50 %.
    - The loss is above 1.5 times `guess` at step SETTLED or later. Before step SETTLED, initial
      weights may give such a loss. LUMI's 175B run had a loss of 60.7 at step 1, and 10.8, below
      the limit, at step 20.
    """
    for steps_a_line in (10, 10_000):
        rows = changed_loss_indices(losses[: WINDOW * steps_a_line])[:WINDOW]
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
