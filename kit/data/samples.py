"""Computes the tokens of the n-th training sequence (sample) of a run, as a pure function of n.

The function needs no stored order, whatever the size of the data. A resumed run needs no state
except the number of sequences consumed.

With sequence length T, window i of a token file consists of its tokens [i T, i T + T + 1). The last
token of a window is the first input of the next window. Up to T tokens at the end of a file belong
to no window. Each epoch reads every window of a source once, in an order that differs between
epochs and is computed, not stored. Documents stay in the order of the file, which `kit data build`
has shuffled.

A mix has several sources, and its weights may change between phases of the run. In each phase, a
table of 2^16 turns says from which source each sample is read. The sequences of each source are
counted over all phases.
"""

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from kit.data.token_file import TokenFile
from kit.errors import DataError

PERIOD = 1 << 16
"""Number of training samples after which a phase of the mix repeats the order in which it reads
from its sources."""
LARGEST_SEED = 2**32 - 1
ROUNDS = 6
"""Rounds of the Feistel cipher. Four rounds make it a strong pseudo-random permutation (Luby and
Rackoff 1988). The two additional rounds cost microseconds."""


class SourceSequences:
    """Training sequences of one source. Each sequence is a window of consecutive tokens of a token
    file, and the order of the windows is shuffled in each epoch.
    """

    def __init__(
        self, files: Sequence[TokenFile], sequence_length: int, seed: int, source: int = 0
    ) -> None:
        """Computes the number of windows of each token file.

        Args:
            files: token files of the source.
            sequence_length: tokens of a sample, without its last target.
            seed: seed of the order of the windows.
            source: number of the source in its mix. Sources with equal seeds have independent
                orders.

        Raises:
            DataError: A file has fewer than `sequence_length` + 1 tokens, or the seed is not in 0
                .. 2^32 - 1.
        """
        if not 0 <= seed <= LARGEST_SEED:
            raise DataError(f"seed: {seed} is not allowed. Give 0 to {LARGEST_SEED}.")
        if short := [file for file in files if file.num_tokens <= sequence_length]:
            raise DataError(
                f"sequence_length: {sequence_length:,} needs at least {sequence_length + 1:,}"
                f" tokens, but {short[0].prefix.name}.bin holds {short[0].num_tokens:,}. Give at"
                f" most {short[0].num_tokens - 1:,}, or build the dataset from more text."
            )
        self._files = files
        self._length = sequence_length
        self._key = (seed, source)
        self._bounds = np.cumsum([0, *((file.num_tokens - 1) // sequence_length for file in files)])
        self.epoch_sequences = int(self._bounds[-1])

    def read_rows(self, numbers: np.ndarray, batch: np.ndarray, rows: Sequence[int]) -> None:
        """Reads sequences from the token files into the given rows of `batch` [samples,
        sequence_length + 1].

        `numbers` has the number of each sequence, counted over all epochs of the source.
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
    """Returns the image of each index under a pseudo-random permutation of 0 .. count - 1.

    The result is int64, as long as `index`. `key` selects the permutation. It is a generalised
    Feistel cipher on a x b numbers, where a and b are near the square root of `count`. The cipher
    is repeated until the result is below `count`, hardly ever more than once. Its round function is
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
    """Returns (side lengths, round keys) of the Feistel cipher that permutes 0 .. `count` - 1:
    uint64 [2] and uint64 [ROUNDS]. The product of the two sides is at least `count`.
    """
    height = math.isqrt(count - 1) + 1
    # The keys come from a hash function, whose results do not depend on the version of NumPy. A
    # resumed run must continue in the order of its first start.
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


class Samples:
    """Endless training sequences of one source or of a mix."""

    def __init__(
        self,
        sources: Sequence[SourceSequences],
        sequence_length: int,
        phases: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """Prepares the order in which samples are read from the sources. It takes 1 MB of memory
        per phase.

        Args:
            sources: windows of each source.
            sequence_length: tokens of a sample, without its last target.
            phases: (first sample, weights of the sources) of each phase. The first phase begins at
                sample 0. Default: all sources have equal weights.

        Raises:
            DataError: A weight above 0 is too small for one turn per period.
        """
        self.sequence_length = sequence_length
        self._sources = sources
        self._turns = SourceOrder(phases or [(0, [1.0] * len(sources))])

    def batch(self, first_sample: int, count: int) -> np.ndarray:
        """Returns the samples `first_sample` .. `first_sample + count - 1`: int64 [count,
        sequence_length + 1].
        """
        if first_sample < 0 or count < 0:
            raise DataError(
                f"samples {first_sample} + {count}: not allowed. Give numbers of 0 or more."
            )
        batch = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        turns, numbers = self._turns.locate_samples(np.arange(first_sample, first_sample + count))
        for i, source in enumerate(self._sources):
            rows = np.flatnonzero(turns == i)
            source.read_rows(numbers[rows], batch, rows.tolist())
        return batch

    def epochs(self, count: int) -> list[float]:
        """Returns, for each source, the number of epochs that the first `count` samples read of it.
        The numbers are fractions, such as 0.3.
        """
        drawn = self._turns.count_samples_before(count).tolist()
        return [
            number / source.epoch_sequences
            for number, source in zip(drawn, self._sources, strict=True)
        ]


class SourceOrder:
    """Computes from which source each training sample of a run is read, over all phases of the mix.
    A phase is (first sample, weights of the sources).
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Prepares a table of turns for each phase: the source of each of PERIOD consecutive
        samples.

        Raises:
            DataError: A weight above 0 is too small for one turn per period.
        """
        self._phases = list[_Phase]()
        for first, weights in phases:
            before = self._phases[-1].drawn(first) if self._phases else 0
            self._phases.append(_Phase(first, weights, before))

    def locate_samples(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (number of the source, number of the sequence in that source) of each sample."""
        turns = np.empty_like(samples)
        numbers = np.empty_like(samples)
        for phase in self._phases:  # A later phase overwrites the samples from its first one on.
            of = samples >= phase.first
            turns[of], numbers[of] = phase.turns(samples[of])
        return turns, numbers

    def count_samples_before(self, sample: int) -> np.ndarray:
        """Returns the number of samples that each source provides before sample number `sample`:
        int64 [sources].
        """
        return next(phase for phase in reversed(self._phases) if phase.first <= sample).drawn(
            sample
        )


class _Phase:
    """One phase of a mix: the order in which samples are read from the sources, from sample `first`
    on.

    `before` is the number of samples that each source has provided before `first`: int64 [sources].

    A period has PERIOD samples. A source has c of them, where c is PERIOD times the rounded weight
    of the source. Its i-th sample is due at the fraction (i + 1/2) / c of the period. Samples are
    read in the order in which they are due. So at any time each of k sources has provided c /
    PERIOD of all samples, to within (k + 1) / 2 samples. The rounding must not change, since runs
    that have begun rely on it.
    """

    def __init__(self, first: int, weights: Sequence[float], before: np.ndarray | int) -> None:
        self.first = first
        shares = PERIOD * np.asarray(weights) / np.sum(weights)
        if small := [
            weight for weight, share in zip(weights, shares, strict=True) if 0 < share < 1
        ]:
            what = f"weight {small[0]:g}: less than 1/{PERIOD:,} of the mix"
            raise DataError(f"{what}. Leave the source out (0), or give it more.")
        counts = shares.astype(np.int64)
        # Rounding down leaves some of the PERIOD turns. They go to the sources whose shares were
        # rounded down most.
        counts[np.argsort(counts - shares, kind="stable")[: PERIOD - counts.sum()]] += 1
        nth = [np.arange(count) for count in counts.tolist()]
        order = np.argsort(np.concatenate([(n + 0.5) / n.size for n in nth]), kind="stable")
        self._before = np.zeros_like(counts) + before
        self._counts = counts
        self._nth = np.concatenate(nth)[order]
        self._source = np.repeat(np.arange(counts.size), counts)[order]

    def drawn(self, sample: int) -> np.ndarray:
        """Returns the number of samples that each source provides before sample `sample`, earlier
        phases included: int64 [sources].
        """
        periods, place = divmod(sample - self.first, PERIOD)
        return (
            self._before
            + periods * self._counts
            + np.bincount(self._source[:place], minlength=self._counts.size)
        )

    def turns(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (number of the source, number of the sequence in that source) of each sample."""
        periods, places = np.divmod(samples - self.first, PERIOD)
        source = self._source[places]
        return source, self._before[source] + periods * self._counts[source] + self._nth[places]
