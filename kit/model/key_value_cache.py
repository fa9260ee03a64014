"""Keys and values that attention has already computed, so that generation runs each token once.

Shape letters as in `kit.model`: B batch, T new tokens, S positions seen, K key/value heads, D head
size.
"""

from typing import Any

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of every block, for a batch of sequences of up to `length` tokens.

    Slot s of a row holds what its token at position s left. A token that comes later for the same
    position replaces it, and nobody looks beyond its own position; so rows of different length need
    no care when padded on the right.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._blocks: dict[Any, tuple[Tensor, Tensor]] = {}

    def update(
        self, block: Any, k_BKTD: Tensor, v_BKTD: Tensor, positions_BT: Tensor, seen: int
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens' keys and values at their positions; returns those of positions
        0 to `seen`.
        """
        if block not in self._blocks:
            batch, heads, _, size = k_BKTD.shape
            # Zeros, not empty: what is masked is multiplied by zero, which would leave a NaN a NaN.
            shape = (batch, self.length, heads, size)
            self._blocks[block] = (k_BKTD.new_zeros(shape), v_BKTD.new_zeros(shape))
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        for stored_BSKD, new_BKTD in zip(self._blocks[block], (k_BKTD, v_BKTD), strict=True):
            stored_BSKD[rows_B1, positions_BT] = new_BKTD.transpose(1, 2)
        keys, values = self._blocks[block]
        return keys[:, :seen].transpose(1, 2), values[:, :seen].transpose(1, 2)

    def take(self, rows_B: Tensor) -> None:
        """Keeps these rows, in this order; a row that is named twice is copied."""
        for block, (
            keys,
            values,
        ) in self._blocks.items():  # in place: never two whole caches at once
            self._blocks[block] = (keys[rows_B], values[rows_B])
