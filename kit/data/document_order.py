"""DocumentOrder: the order of datasets built before documents were shuffled in the file; their runs resume in it.

Every epoch is a stream: all documents, in an order drawn from (seed, epoch), end to end. The streams of all epochs form
one endless stream, cut into windows `sequence_length` apart; those that begin in an epoch are read in an order drawn
from (seed, epoch). So each epoch reads every token exactly once.

Source: the construction of `GPTDataset` in megatron-core, made endless.
"""

import functools
from collections.abc import Sequence

import numpy as np

from kit.data.token_file import TokenFile, rebuild_hint
from kit.data.windows import check_windows
from kit.errors import DataError

MOST_DOCUMENTS = 50_000_000
"""Each costs a rank about 40 bytes and 1 to 2 microseconds before the first batch: here 2 GB and a minute."""


class DocumentOrder:
    """A source of training sequences. Memory: about 32 bytes per document for each of two epochs."""

    def __init__(self, token_file: TokenFile, sequence_length: int, seed: int) -> None:
        """Orders are drawn when an epoch is first read. Raises as `Windows`, and DataError for too many documents."""
        check_windows(token_file, sequence_length, seed)
        if token_file.num_documents > MOST_DOCUMENTS:
            raise DataError(
                f"{token_file.prefix}: its order 'documents', of an older `kit data build`, is drawn in the memory of "
                f"each rank: {token_file.num_documents:,} documents are too many, {MOST_DOCUMENTS:,} are allowed. "
                f"{rebuild_hint(token_file.prefix.parent)}; new runs then need no such memory."
            )
        self._tokens, self._starts = np.asarray(token_file.tokens), token_file.document_starts
        self._length, self._seed = sequence_length, seed
        self.epoch_sequences = token_file.num_tokens / sequence_length
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)

    def fill(self, numbers: np.ndarray, batch: np.ndarray, rows: Sequence[int]) -> None:
        """Writes the sequences of these numbers, counted over all epochs, to rows of a batch [S, T + 1]."""
        for number, row in zip(numbers.tolist(), rows, strict=True):
            epoch = number * self._length // self._tokens.size
            bounds, shifts, windows = self._epoch(epoch)
            first = self._first_sample(epoch)
            start = begin = (first + int(windows[number - first])) * self._length - epoch * self._tokens.size
            document = int(np.searchsorted(bounds, start, side="right")) - 1
            while begin < start + self._length + 1:
                stop, shift = min(int(bounds[document + 1]), start + self._length + 1), int(shifts[document])
                batch[row, begin - start : stop - start] = self._tokens[begin + shift : stop + shift]
                begin, document = stop, document + 1

    def _first_sample(self, epoch: int) -> int:
        return -(-epoch * self._tokens.size // self._length)  # rounded up, exact for any size

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns an epoch's stream, with as many documents of the next as its last window can reach, and its windows.

        Where each document begins in the stream, and the end; how much further on it is in the file; the windows that
        begin in the epoch, counted from its first, in their order.
        """

        def order(epoch: int, purpose: int, count: int) -> np.ndarray:
            # RandomState: NumPy promises that its draws never change, so a run resumed after an upgrade reads on.
            return np.random.RandomState([self._seed, epoch, purpose]).permutation(count)

        lengths = np.diff(self._starts)
        documents, following = order(epoch, 0, lengths.size), order(epoch + 1, 0, lengths.size)
        reach = int(np.searchsorted(np.cumsum(lengths[following]), self._length + 1)) + 1
        documents = np.concatenate((documents, following[:reach]))
        bounds = np.concatenate(([0], np.cumsum(lengths[documents])))
        windows = order(epoch, 1, self._first_sample(epoch + 1) - self._first_sample(epoch))
        return bounds, self._starts[documents] - bounds[:-1], windows
