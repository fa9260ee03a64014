"""Windows: one source of training sequences in an order that is computed, not stored, whatever the
size of the data.

Window i of a token file is its tokens [i T, i T + T + 1): the last token of a window is the first
input of the next, and up to T tokens at the end of a file belong to none. Each epoch reads every
window once, in an order of its own. Documents stand in them as in the file, where `kit data build`
has shuffled them.
"""

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from kit.data.token_file import TokenFile
from kit.errors import DataError

LARGEST_SEED = 2**32 - 1
ROUNDS = 6
"""Four make a Feistel cipher a strong pseudo-random permutation (Luby and Rackoff 1988); two
more cost microseconds."""


class Windows:
    """The windows of some token files, read as one file after another."""

    def __init__(
        self, files: Sequence[TokenFile], sequence_length: int, seed: int, source: int = 0
    ) -> None:
        """Counts the windows; `source` tells sources of one seed apart, so that their orders have
        nothing in common.

        Raises:
            DataError: a file has fewer than `sequence_length` + 1 tokens, or the seed is not in 0
                .. 2^32 - 1.
        """
        if not 0 <= seed <= LARGEST_SEED:
            raise DataError(f"seed: {seed} is not allowed. Give 0 to {LARGEST_SEED}.")
        if sequence_length < 1:
            raise DataError(
                f"sequence_length: {sequence_length} is not allowed. Give a number above 0."
            )
        if short := [file for file in files if file.num_tokens <= sequence_length]:
            raise DataError(
                f"sequence_length: {sequence_length:,} needs at least {sequence_length + 1:,}"
                f" tokens, but {short[0].prefix.name}.bin holds {short[0].num_tokens:,}. Give at"
                f" most {short[0].num_tokens - 1:,}, or build the dataset from more text."
            )
        self._files, self._length, self._key = files, sequence_length, (seed, source)
        self._bounds = np.cumsum([0, *((file.num_tokens - 1) // sequence_length for file in files)])
        self.epoch_sequences = int(self._bounds[-1])

    def fill(self, numbers: np.ndarray, batch: np.ndarray, rows: Sequence[int]) -> None:
        """Writes the sequences of these numbers, counted over all epochs, to rows of a batch [S,
        T + 1].
        """
        epochs, windows = np.divmod(numbers, self.epoch_sequences)
        for epoch in set(epochs.tolist()):
            of = epochs == epoch
            windows[of] = permuted(windows[of], self.epoch_sequences, (*self._key, epoch))
        files = np.searchsorted(self._bounds, windows, side="right") - 1
        positions = (windows - self._bounds[files]) * self._length
        for row, file, position in zip(rows, files.tolist(), positions.tolist(), strict=True):
            batch[row] = self._files[file].read(position, self._length + 1)


def permuted(index: np.ndarray, count: int, key: tuple[int, ...]) -> np.ndarray:
    """Returns where a pseudo-random permutation of 0 .. count - 1, chosen by `key`, takes each
    index: int64.

    A generalised Feistel cipher on a x b numbers, a and b near the root of `count`, walked along
    its cycle until it is below `count` (hardly ever more than once). Its round function is
    splitmix64's finaliser.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), methods 2 and 3;
    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), with the
    constants of Vigna's splitmix64.c.
    """
    sides, keys = _setting(count, key)
    found = _cipher(index.astype(np.uint64), sides, keys)
    while (outside := np.flatnonzero(found >= count)).size:
        found[outside] = _cipher(found[outside], sides, keys)
    return found.astype(np.int64)


@functools.lru_cache
def _setting(count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a and b, and the keys of the rounds."""
    height = math.isqrt(count - 1) + 1
    # From a hash: it will be the same in all versions of NumPy, and a resumed run must read on in
    # its order.
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8 * ROUNDS).digest()
    return np.array([height, -(-count // height)], np.uint64), np.frombuffer(digest, "<u8")


def _cipher(numbers: np.ndarray, sides: np.ndarray, keys: np.ndarray) -> np.ndarray:
    halves = list(np.divmod(numbers, sides[1]))
    for i, key in enumerate(keys):
        mixed = halves[1 - i % 2] + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        halves[i % 2] = (halves[i % 2] + mixed % sides[i % 2]) % sides[i % 2]
    return halves[0] * sides[1] + halves[1]
