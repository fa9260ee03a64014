"""A loss that creeps upward, step by step, with no spike and no NaN that would tell.

The losses are cut into blocks of 25 to 400 steps, and twelve blocks in a row are a window. A loss creeps if, over a
window, the medians of the blocks and their tenths from below both rise along a straight line (slope over its standard
error above `LEAST_T` and half of it), by 0.5 % at least, in each third of the window (which a new mix of data, whose
loss jumps once, does not), to above all of the two windows before (which the way back from easier data is not), while
the learning rate has not risen (after which a loss rises for a while and falls again). The noise is that of the blocks
about their line, so losses may hang together over less than a block. No torch.

What it finds, how late, and on which healthy runs it was tried stands in LOG.md.
"""

from typing import NamedTuple

import numpy as np

SCALES = (25, 50, 100, 200, 400)
"""Steps of a block: a window of 300 steps finds a steep rise, one of 4,800 a slow one in more noise."""
BLOCKS = 12
LEAST_T = 7.0
"""No window of 10 million steps of Gaussian noise passes; healthy runs that rise for a while reach 4.6."""
LEAST_RISE = 0.005
LEAST_THIRD = 0.1
"""Of the whole rise."""
RATE_RISE = 1.01

_X = np.arange(BLOCKS) - (BLOCKS - 1) / 2


class Creep(NamedTuple):
    """The window at the end of which a loss was seen to creep."""

    row: int
    steps: int
    before: float
    now: float


def creeps(losses: np.ndarray, rates: np.ndarray, start: int = 0) -> list[Creep]:
    """Returns where a loss creeps in windows that end at row `start` or later, by row.

    Losses that are not finite are left out, and those that repeat the one before: a log's line for many steps says one
    thing. Learning rates that are not finite are unknown.
    """
    rows = np.flatnonzero(np.isfinite(losses))
    rows = rows[np.diff(losses[rows], prepend=np.nan) != 0]
    found = [_of_scale(losses[rows], rates[rows], int(np.searchsorted(rows, start)), steps) for steps in SCALES]
    return sorted(
        creep._replace(row=int(rows[creep.row]), steps=int(rows[creep.row] - rows[creep.row - creep.steps + 1]) + 1)
        for each in found
        for creep in each
    )


def _of_scale(losses: np.ndarray, rates: np.ndarray, start: int, steps: int) -> list[Creep]:
    first, last = max(start // steps + 1, BLOCKS), len(losses) // steps  # blocks before the end of a window
    if first > last:
        return []
    low = max(0, first - 3 * BLOCKS)
    blocks = np.sort(losses[low * steps : last * steps].reshape(-1, steps), axis=1)
    medians, tenths = (blocks[:, (steps - 1) // 2] + blocks[:, steps // 2]) / 2, blocks[:, steps // 10]
    windows = np.lib.stride_tricks.sliding_window_view(medians, BLOCKS)
    quarters = windows.reshape(len(windows), 4, -1).mean(axis=2)
    rise = quarters[:, -1] - quarters[:, 0]
    is_rise = (rise > LEAST_RISE * np.abs(quarters[:, 0])) & (np.diff(quarters).min(axis=1) > LEAST_THIRD * rise)
    is_rise &= _slope_over_error(windows) > LEAST_T
    is_rise &= _slope_over_error(np.lib.stride_tricks.sliding_window_view(tenths, BLOCKS)) > LEAST_T / 2
    found = []
    for i in np.flatnonzero(is_rise).tolist():
        end, earlier = low + i + BLOCKS, max(0, i - 2 * BLOCKS)
        since = (low + earlier) * steps
        is_higher = quarters[i, -1] > medians[earlier:i].max(initial=-np.inf)
        if end >= first and is_higher and not _rises(rates[since : end * steps : max(1, steps // 2)]):
            found.append(Creep(end * steps - 1, BLOCKS * steps, float(quarters[i, 0]), float(quarters[i, -1])))
    return found


def _slope_over_error(windows: np.ndarray) -> np.ndarray:
    """Returns the slope of each window's line over its standard error; [windows, BLOCKS] to [windows]."""
    centred = windows - windows.mean(axis=1, keepdims=True)
    slope = centred @ _X / (_X @ _X)
    left = ((centred - slope[:, None] * _X) ** 2).sum(axis=1) / (BLOCKS - 2)
    return slope / np.sqrt(np.maximum(left / (_X @ _X), 1e-30))


def _rises(rates: np.ndarray) -> bool:
    known = rates[np.isfinite(rates)]
    return len(known) > 0 and bool((known > RATE_RISE * np.minimum.accumulate(known)).any())
