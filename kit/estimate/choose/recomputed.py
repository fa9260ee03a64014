"""Layouts that recompute only some blocks of each pipeline device. For each layout, the smallest
number of recomputed blocks is found with which the layout fits in memory.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from kit.estimate.theory.layouts import RECOMPUTE, Array, Layouts

NONE = RECOMPUTE.index("none")
FULL = RECOMPUTE.index("full")
MAX_LAYOUTS = 200
"""Largest number of layouts for which partial recomputation is tried: the fastest layouts that
recompute all blocks and fit in memory."""
NUM_FRACTIONS = 16
"""Number of partial recomputations that are tried per layout: 0/16 to 15/16 of the blocks of a
device are recomputed."""


def with_some_recomputed(
    layouts: Layouts,
    time_s: Array,
    used_bytes: Array,
    evaluate: Callable[[Layouts], tuple[Array, Array]],
    max_used_bytes: float,
    equal_stages: bool,
) -> tuple[Layouts, Array, Array]:
    """Returns (layouts, step times in seconds, used bytes). The result has the given layouts first,
    then the added layouts, which recompute only some blocks.

    Partial recomputation is tried for the fastest feasible layouts that recompute all blocks, at
    most `MAX_LAYOUTS` layouts. Of each layout, a copy is added that recomputes the smallest number
    of blocks with which it fits in `max_used_bytes`. No copy is added of a layout that fits without
    recomputation.

    A block that is not recomputed saves the time of one forward pass and keeps its activations in
    memory. The copy with the fewest recomputed blocks is therefore the fastest. With
    `equal_stages`, all stages of a device recompute an equal number of blocks, as Megatron-Core
    does: its option sets the number of blocks per stage.
    """
    rows = np.flatnonzero((layouts.recompute == FULL) & (used_bytes <= max_used_bytes))
    rows = rows[np.argsort(time_s[rows], kind="stable")][:MAX_LAYOUTS]
    some, origin = _with_fewer(layouts.select(rows), equal_stages)
    some_s, some_bytes = evaluate(some)
    fits = np.flatnonzero(some_bytes <= max_used_bytes)
    # `origin` is ascending, so the first element of each run of equal values has the fewest blocks.
    fewest = fits[np.diff(origin[fits], prepend=-1) > 0]
    fewest = fewest[some.recompute_layers[fewest] > 0]
    return (
        layouts.followed_by(some.select(fewest)),
        np.concatenate((time_s, some_s[fewest])),
        np.concatenate((used_bytes, some_bytes[fewest])),
    )


def _with_fewer(layouts: Layouts, equal_stages: bool) -> tuple[Layouts, Array]:
    """Returns (fewer, origin). `fewer` has copies of the layouts that recompute 0/16 to 15/16 of
    the blocks of each device, rounded up. `origin` has the index in `layouts` of the layout from
    which each copy was made.

    The copies of one layout are in ascending order of recomputed blocks.
    """
    step = np.broadcast_to(layouts.virtual_stages if equal_stages else 1.0, layouts.shape)[:, None]
    blocks = np.broadcast_to(layouts.max_layers_per_device, layouts.shape)[:, None]
    counts = np.ceil(blocks / step * np.arange(NUM_FRACTIONS) / NUM_FRACTIONS) * step
    is_new = (np.diff(counts, prepend=-1) > 0) & (counts < blocks)
    origin = np.nonzero(is_new)[0]
    counts = counts[is_new]
    recompute = np.where(counts > 0, FULL, NONE).astype(np.int8)
    fewer = dataclasses.replace(
        layouts.select(origin), recompute=recompute, recompute_layers=counts
    )
    return fewer, origin
