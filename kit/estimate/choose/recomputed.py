"""Layouts that recompute some blocks of each pipeline device, as few as fit in memory."""

import dataclasses
from collections.abc import Callable

import numpy as np

from kit.estimate.theory.layouts import RECOMPUTE, Array, Layouts

NONE = RECOMPUTE.index("none")
FULL = RECOMPUTE.index("full")
MOST = 200
"""How many of the fastest layouts that recompute all blocks are tried with fewer."""
PARTS = 16
"""How finely the blocks of a device are counted for that."""


def with_some_recomputed(
    layouts: Layouts,
    time_s: Array,
    used_bytes: Array,
    evaluate: Callable[[Layouts], tuple[Array, Array]],
    most_bytes: float,
    equal_stages: bool,
) -> tuple[Layouts, Array, Array]:
    """Returns layouts, seconds and bytes with more rows: of the fastest that recompute all blocks,
    and do not fit with none recomputed, those that recompute as few as fit.

    Each block that is not recomputed saves its forward pass and keeps its activations, so among
    those that fit the one with the fewest is the fastest. Megatron-Core counts the blocks of a
    stage (`equal_stages`), so a device's stages recompute as many each.
    """
    rows = np.flatnonzero((layouts.recompute == FULL) & (used_bytes <= most_bytes))
    rows = rows[np.argsort(time_s[rows], kind="stable")][:MOST]
    some, origin = _with_fewer(layouts.select(rows), equal_stages)
    some_s, some_bytes = evaluate(some)
    fits = np.flatnonzero(some_bytes <= most_bytes)
    fewest = fits[np.unique(origin[fits], return_index=True)[1]]
    fewest = fewest[some.recompute_layers[fewest] > 0]
    return (
        layouts.followed_by(some.select(fewest)),
        np.concatenate((time_s, some_s[fewest])),
        np.concatenate((used_bytes, some_bytes[fewest])),
    )


def _with_fewer(layouts: Layouts, equal_stages: bool) -> tuple[Layouts, Array]:
    """Returns layouts that recompute from none to 15 sixteenths of each device's blocks, rounded
    up, and the index of the one that each comes from; fewer first.
    """
    step = np.broadcast_to(layouts.virtual_stages if equal_stages else 1.0, layouts.shape)[:, None]
    blocks = np.broadcast_to(layouts.most_layers, layouts.shape)[:, None]
    counts = np.ceil(blocks / step * np.arange(PARTS) / PARTS) * step
    is_new = (np.diff(counts, prepend=-1) > 0) & (counts < blocks)
    origin = np.nonzero(is_new)[0]
    counts = counts[is_new]
    recompute = np.where(counts > 0, FULL, NONE).astype(np.int8)
    fewer = dataclasses.replace(
        layouts.select(origin), recompute=recompute, recompute_layers=counts
    )
    return fewer, origin
