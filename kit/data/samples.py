"""Samples: which tokens the n-th training sequence holds, as a pure function of n.

Every epoch is a stream: all documents, in an order drawn from (seed, epoch), end to end. The streams of all epochs
form one endless stream, cut into windows of `sequence_length` + 1 tokens, `sequence_length` apart (the last token of a
window is the first of the next: a window gives that many inputs and targets). The windows that begin in an epoch are
read in another order drawn from (seed, epoch). So each epoch trains on every token exactly once, nothing is dropped at
its end, and resuming needs no state but the number of sequences consumed.

Source: the construction of `GPTDataset` in megatron-core (documents shuffled, windows across documents, windows
shuffled), made endless.
"""

import dataclasses
import functools

import numpy as np

from kit.data.token_file import TokenFile
from kit.errors import DataError

LARGEST_SEED = 2**32 - 1
TOKENS_PER_COPY = 1 << 18
"""Tokens copied at a time, so that they are still in the cache when they are made int64."""


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The documents of one epoch in their order, then as many of the next as its last window can reach."""

    bounds: np.ndarray
    """Position in the stream of each document's begin, and of the end: int64 [documents + 1]."""
    shifts: np.ndarray
    """Position in the file minus position in the stream, of each document: int64 [documents]."""


class Samples:
    """Endless shuffled training sequences. Memory: about 32 bytes per document for each of two epochs."""

    def __init__(self, token_file: TokenFile, sequence_length: int, seed: int) -> None:
        """Prepares sampling; orders are drawn when an epoch is first read.

        Raises:
            DataError: the file has fewer than `sequence_length` + 1 tokens, or the seed is not in 0 .. 2^32 - 1.
        """
        _check_length(token_file, sequence_length)
        if not 0 <= seed <= LARGEST_SEED:
            raise DataError(f"seed: {seed} is not allowed. Give 0 to {LARGEST_SEED}.")
        self.sequence_length = sequence_length
        self.seed = seed
        self._tokens = np.asarray(token_file.tokens)
        self._starts = token_file.document_starts
        self._stream = functools.lru_cache(maxsize=2)(self._draw_stream)
        self._windows = functools.lru_cache(maxsize=2)(self._draw_windows)

    def batch(self, first_sample: int, count: int) -> np.ndarray:
        """Returns samples `first_sample` .. `first_sample + count - 1`: int64 [count, sequence_length + 1]."""
        if first_sample < 0 or count < 0:
            raise DataError(f"samples {first_sample} + {count}: not allowed. Give numbers of 0 or more.")
        batch = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        row = 0
        while row < count:
            epoch, begin, end = self._epoch_of(first_sample + row)
            rows = min(count - row, end - first_sample - row)
            index = np.arange(first_sample + row, first_sample + row + rows)
            windows = begin + self._windows(epoch)[index - begin]
            positions = windows * self.sequence_length - epoch * self._tokens.size
            self._read(self._stream(epoch), positions, batch[row : row + rows])
            row += rows
        return batch

    def _epoch_of(self, sample: int) -> tuple[int, int, int]:
        """Returns the epoch of a sample, its first sample, and the first sample of the next epoch."""
        epoch = sample * self.sequence_length // self._tokens.size
        return epoch, self._first_sample(epoch), self._first_sample(epoch + 1)

    def _first_sample(self, epoch: int) -> int:
        return -(-epoch * self._tokens.size // self.sequence_length)  # rounded up, exact for any size

    def _order(self, epoch: int, purpose: int, count: int) -> np.ndarray:
        # RandomState, because NumPy promises its draws never change: a run resumed after an upgrade reads on in order.
        return np.random.RandomState([self.seed, epoch, purpose]).permutation(count)

    def _draw_windows(self, epoch: int) -> np.ndarray:
        """Returns the order of the windows that begin in an epoch, counted from its first."""
        return self._order(epoch, 1, self._first_sample(epoch + 1) - self._first_sample(epoch))

    def _draw_stream(self, epoch: int) -> _Stream:
        lengths = np.diff(self._starts)
        order, following = (self._order(e, 0, lengths.size) for e in (epoch, epoch + 1))
        reach = int(np.searchsorted(np.cumsum(lengths[following]), self.sequence_length + 1)) + 1
        order = np.concatenate((order, following[:reach]))
        bounds = np.concatenate(([0], np.cumsum(lengths[order])))
        return _Stream(bounds, self._starts[order] - bounds[:-1])

    def _read(self, stream: _Stream, positions: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` [rows, sequence_length + 1] with the tokens from each position of the stream onwards."""
        rows = max(1, TOKENS_PER_COPY // out.shape[1])
        for i in range(0, len(positions), rows):
            begins, ends = _pieces(stream, positions[i : i + rows], out.shape[1])
            pieces = [self._tokens[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
            out[i : i + rows] = np.concatenate(pieces).reshape(-1, out.shape[1])


def _pieces(stream: _Stream, positions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where in the file the pieces begin and end that make up the windows at `positions`, one after the other.

    Each window of `length` tokens is a few pieces of documents; within one, file and stream differ by a constant shift.
    """
    first = np.searchsorted(stream.bounds, positions, side="right") - 1
    last = np.searchsorted(stream.bounds, positions + (length - 1), side="right") - 1
    pieces = last - first + 1
    document = np.repeat(first - (np.cumsum(pieces) - pieces), pieces) + np.arange(pieces.sum())
    window, shift = np.repeat(positions, pieces), stream.shifts[document]
    begins = np.maximum(stream.bounds[document], window)
    ends = np.minimum(stream.bounds[document + 1], window + length)
    return begins + shift, ends + shift


def _check_length(token_file: TokenFile, sequence_length: int) -> None:
    if sequence_length < 1:
        raise DataError(f"sequence_length: {sequence_length} is not allowed. Give a number above 0.")
    if token_file.num_tokens <= sequence_length:
        raise DataError(
            f"sequence_length: {sequence_length:,} needs at least {sequence_length + 1:,} tokens, but "
            f"{token_file.prefix.name}.bin holds {token_file.num_tokens:,}. "
            f"Give at most {token_file.num_tokens - 1:,}, or build the dataset from more text."
        )
