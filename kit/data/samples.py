"""Samples: which tokens the n-th training sequence holds, as a pure function of n.

The sources of a mix take turns by a table of 2^16 places, which changes with the phase of the run;
the sequences of each source are counted through all phases. So resuming needs no state but the
number of sequences consumed.
"""

from collections.abc import Sequence

import numpy as np

from kit.data.windows import Windows
from kit.errors import DataError

PERIOD = 1 << 16


class Samples:
    """Endless training sequences of one source or a mix."""

    def __init__(
        self,
        sources: Sequence[Windows],
        sequence_length: int,
        phases: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """Prepares the turns, 1 MB a phase. Raises DataError for a weight above 0 that is too small
        for one.

        Args:
            sources: what is read.
            sequence_length: of a sample, less one.
            phases: first sample and weights of the sources; the first begins at 0. Default: all
                sources alike.
        """
        self.sequence_length, self._sources = sequence_length, sources
        self._turns = Turns(phases or [(0, [1.0] * len(sources))])

    def batch(self, first_sample: int, count: int) -> np.ndarray:
        """Returns samples `first_sample` .. `first_sample + count - 1`: int64 [count,
        sequence_length + 1].
        """
        if first_sample < 0 or count < 0:
            raise DataError(
                f"samples {first_sample} + {count}: not allowed. Give numbers of 0 or more."
            )
        batch = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        turns, numbers = self._turns.of(np.arange(first_sample, first_sample + count))
        for i, source in enumerate(self._sources):
            rows = np.flatnonzero(turns == i)
            source.fill(numbers[rows], batch, rows.tolist())
        return batch

    def epochs(self, count: int) -> list[float]:
        """Returns how often the first `count` samples read each source."""
        drawn = self._turns.before(count).tolist()
        return [
            number / source.epoch_sequences
            for number, source in zip(drawn, self._sources, strict=True)
        ]


class Turns:
    """Which source each sample of a run is of, through its phases (first sample and weights of
    the sources).
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Prepares the turns. Raises as `Samples`."""
        self._phases: list[_Phase] = []
        before = np.zeros(len(phases[0][1]), np.int64)
        for first, weights in phases:
            if self._phases:
                before = self._phases[-1].drawn(first)
            self._phases.append(_Phase(first, weights, before))

    def of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sample, and which of its sequences that is."""
        turns, numbers = np.empty_like(samples), np.empty_like(samples)
        for phase in self._phases:  # a later one takes over what is its own
            of = samples >= phase.first
            turns[of], numbers[of] = phase.turns(samples[of])
        return turns, numbers

    def before(self, sample: int) -> np.ndarray:
        """Returns how many turns each source has had before a sample: int64 [sources]."""
        return next(phase for phase in reversed(self._phases) if phase.first <= sample).drawn(
            sample
        )


class _Phase:
    """Whose turn it is from sample `first` on, after each source has had `before` turns: int64
    [sources].

    The i-th of a source's c turns in a period is due at (i + 1/2) / c of it, and all are taken in
    the order in which they are due. So at any time each of k sources has had c / PERIOD of all
    turns to within (k + 1) / 2 of them; c is its weight rounded, which runs that have begun may
    rely on.
    """

    def __init__(self, first: int, weights: Sequence[float], before: np.ndarray) -> None:
        self.first, self._before = first, before
        shares = PERIOD * np.asarray(weights) / np.sum(weights)
        if small := [
            weight for weight, share in zip(weights, shares, strict=True) if 0 < share < 1
        ]:
            what = f"weight {small[0]:g}: less than 1/{PERIOD:,} of the mix"
            raise DataError(f"{what}. Leave the source out (0), or give it more.")
        counts = shares.astype(np.int64)
        counts[np.argsort(counts - shares, kind="stable")[: PERIOD - counts.sum()]] += (
            1  # what was rounded down most
        )
        nth = [np.arange(count) for count in counts.tolist()]
        order = np.argsort(np.concatenate([(n + 0.5) / n.size for n in nth]), kind="stable")
        self._counts, self._nth = counts, np.concatenate(nth)[order]
        self._source = np.repeat(np.arange(counts.size), counts)[order]

    def drawn(self, sample: int) -> np.ndarray:
        """Returns how many turns each source has had before a sample of the phase: int64
        [sources].
        """
        periods, place = divmod(sample - self.first, PERIOD)
        return (
            self._before
            + periods * self._counts
            + np.bincount(self._source[:place], minlength=self._counts.size)
        )

    def turns(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each sample, and which of its sequences that is."""
        periods, places = np.divmod(samples - self.first, PERIOD)
        source = self._source[places]
        return source, self._before[source] + periods * self._counts[source] + self._nth[places]
