"""Packs token sequences into rows so that what several of them begin with is computed once.

The answers to one question share the question, the questions of one task their solved examples. A
row holds prefix trees in preorder: each node is a token, its position the depth, and it may look at
its ancestors only. In preorder the descendants of node j are the nodes from j up to an end_j, so
node i may look at j where j <= i < end_j: that is all the attention mask needs.

Shape letters: B rows, T nodes of a row.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kit.model import Past

Sequence = tuple[int, ...]

SHORTEST_ROW = 256
"""Tokens up to which a row is filled whatever the sequences, so that short ones make few rows.
Attention in such a row costs little beside matrix products: 4 T h FLOPs a token and block against
24 h^2, with h in the hundreds or more."""
SEQUENCES_PER_ROW = 3
"""A row of long sequences may be so many times as long as the last of them: room for what they
do not share."""


class Row:
    """Prefix trees, side by side."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of the nodes, in preorder
        self.positions: list[int] = []  # depth of each node in its tree
        self.ends: list[int] = []  # where the descendants of each node end
        self.places: dict[
            Sequence, list[int]
        ] = {}  # for each sequence, the nodes of its last tokens
        self._path: list[int] = []  # nodes of the sequence added last, from its root

    def shared(self, sequence: Sequence) -> int:
        """Returns how many first tokens the sequence has in common with the one added last."""
        count = 0
        for node, token in zip(self._path, sequence, strict=False):
            if self.tokens[node] != token:
                break
            count += 1
        return count

    def add(self, sequence: Sequence, shared: int, num_places: int) -> None:
        """Adds a sequence, the first `shared` tokens of which the one added last begins with
        too.
        """
        self._close(shared)
        first = len(self.tokens)
        self._path += range(first, first + len(sequence) - shared)
        self.tokens += sequence[shared:]
        self.positions += range(shared, len(sequence))
        self.ends += [0] * (len(sequence) - shared)
        self.places[sequence] = self._path[-num_places:]

    def finish(self) -> None:
        """Must be called after the last sequence."""
        self._close(0)

    def _close(self, shared: int) -> None:
        for node in self._path[shared:]:
            self.ends[node] = len(self.tokens)
        del self._path[shared:]


def pack(num_places: dict[Sequence, int], longest: int) -> list[Row]:
    """Returns rows with all sequences, each of at most `longest` tokens unless a single sequence is
    longer.

    `num_places` says for each sequence how many of its last tokens are asked for.
    """
    rows: list[Row] = []
    for sequence in sorted(num_places):
        shared = rows[-1].shared(sequence) if rows else 0
        limit = min(longest, max(SHORTEST_ROW, SEQUENCES_PER_ROW * len(sequence)))
        if not rows or len(rows[-1].tokens) + len(sequence) - shared > limit:
            rows.append(Row())
            shared = 0
        rows[-1].add(sequence, shared, num_places[sequence])
    for row in rows:
        row.finish()
    return rows


def batches(rows: Iterable[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Yields the rows by falling length, as many at a time as `batch_tokens` holds when padded
    to the longest.
    """
    left = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    while left:
        count = max(1, batch_tokens // len(left[0].tokens))
        yield left[:count]
        left = left[count:]


def tensors(rows: list[Row], device: torch.device) -> tuple[Tensor, Past | None]:
    """Returns tokens_BT, padded on the right, and what each may look at: None for all before it,
    as ever.
    """
    length = max(len(row.tokens) for row in rows)

    def padded(values: list[list[int]], fill: int) -> Tensor:
        return torch.tensor(
            [[*row, *[fill] * (length - len(row))] for row in values], device=device
        )

    tokens_BT = padded([row.tokens for row in rows], 0)
    if all(row.ends == [len(row.ends)] * len(row.ends) for row in rows):
        return tokens_BT, None
    nodes_T = torch.arange(length, device=device)
    # Padding looks at padding: a token that may look at nothing would be a NaN.
    ends_BT = padded([row.ends for row in rows], length)
    mask_BTT = (nodes_T <= nodes_T[:, None]) & (nodes_T[:, None] < ends_BT[:, None])
    return tokens_BT, Past(
        positions_BT=padded([row.positions for row in rows], 0), mask_BTS=mask_BTT
    )
