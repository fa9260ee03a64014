"""`Samples` and `SourceSequences` compute a sample from its number alone, in an order that is as
random as NumPy's.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.data.samples import PERIOD, Samples, SourceSequences, permuted
from kit.errors import DataError
from tests.data.orders import quality
from tests.data.token_files import numbered


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_each_epoch_is_a_permutation(count, seed, epoch):
    found = permuted(np.arange(count), count, (seed, 0, epoch))
    assert found.dtype == np.int64 and np.array_equal(np.sort(found), np.arange(count))


@settings(deadline=None)
@given(st.integers(1, 2**50), st.data())
def test_position_in_order_does_not_depend_on_batch(count, data):
    places = st.lists(st.integers(0, count - 1), min_size=1, max_size=20, unique=True)
    index = np.array(data.draw(places))
    together = permuted(index, count, (1, 2, 3))
    assert together.min() >= 0 and together.max() < count and np.unique(together).size == index.size
    alone = [permuted(index[i : i + 1], count, (1, 2, 3)).item() for i in range(index.size)]
    assert together.tolist() == alone


def test_order_is_as_random_as_numpys():
    """Statistics of the first tenth of 40 epochs are compared with NumPy's. Their means differ by
    no more than the noise of both.
    """
    count, tries = 20_000, 40
    orders = [permuted(np.arange(2000), count, (1, 0, epoch)) for epoch in range(tries)]
    ours = [quality(order, count) for order in orders]
    orders = [np.random.RandomState(seed).permutation(count) for seed in range(tries)]
    theirs = [quality(order[:2000], count) for order in orders]
    for name in ours[0]:
        mine, other = (np.array([row[name] for row in rows]) for rows in (ours, theirs))
        noise = math.hypot(mine.std(), other.std()) / math.sqrt(tries)
        assert abs(mine.mean() - other.mean()) < 4 * noise, name


def test_seed_source_and_epoch_give_unrelated_orders():
    keys = (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 10, 0)
    orders = [permuted(np.arange(1000), 1000, key) for key in keys]
    for i, first in enumerate(orders):
        assert all(abs(np.corrcoef(first, other)[0, 1]) < 0.15 for other in orders[:i])


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(6, 60), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 99),
    st.integers(1, 40),
)
def test_every_window_of_shards_is_read_once_an_epoch(tmp_path_factory, sizes, length, seed, cut):
    folder = tmp_path_factory.mktemp("x")
    files = [numbered(folder / str(i), [size], first=1000 * i) for i, size in enumerate(sizes)]
    source = SourceSequences(files, length, seed)
    windows = [
        list(range(1000 * i + at, 1000 * i + at + length + 1))
        for i, size in enumerate(sizes)
        for at in range(0, size - length, length)
    ]
    samples = Samples([source], length)
    assert source.epoch_sequences == len(windows) and samples.epochs(3 * len(windows)) == [3.0]
    for epoch in range(2):
        read = samples.batch(epoch * len(windows), len(windows)).tolist()
        assert sorted(read) == windows
    parts = np.concatenate((samples.batch(0, cut), samples.batch(cut, 2 * len(windows))))
    assert np.array_equal(parts, samples.batch(0, cut + 2 * len(windows)))


class Numbers(SourceSequences):
    """Data source for tests. Each of its rows holds (number of the source, number of the
    sequence).
    """

    def __init__(self, source: int) -> None:
        self.source, self.epoch_sequences = source, 1

    def read_rows(self, numbers, batch, rows) -> None:
        batch[rows, 0], batch[rows, 1] = self.source, numbers


@st.composite
def mixes(draw):
    sources = draw(st.integers(1, 5))
    of_each = st.sampled_from([0.0, 0.01, 0.25, 1.0, 3.7])
    weights = st.lists(of_each, min_size=sources, max_size=sources).filter(any)
    lengths = draw(st.lists(st.integers(1, 3 * PERIOD), max_size=3))
    firsts = np.cumsum([0, *lengths]).tolist()
    return sources, [(first, draw(weights)) for first in firsts]


@settings(deadline=None, max_examples=12)
@given(mixes(), st.data())
def test_mix_with_phases_equals_a_counting_loop(mix, data):
    """The test computes the order with a simple loop that draws one source after another. A batch
    from any position equals a slice of this order.
    """
    num_sources, phases = mix
    samples = Samples([Numbers(i) for i in range(num_sources)], 1, phases)
    end, drawn = phases[-1][0] + PERIOD + 1000, np.zeros(num_sources, np.int64)
    whole = samples.batch(0, end)
    for (begin, weights), stop in zip(phases, [*(p[0] for p in phases[1:]), end], strict=True):
        sources = whole[begin:stop, 0]
        for i in range(num_sources):
            numbers = whole[begin:stop][sources == i, 1]
            # No sequence is repeated and none is left out.
            assert np.array_equal(numbers, drawn[i] + np.arange(numbers.size))
            share = weights[i] / sum(weights)
            due = share * np.arange(1, stop - begin + 1)
            bound = (num_sources + 1) / 2 + np.arange(1, stop - begin + 1) / PERIOD
            assert np.all(np.abs(np.cumsum(sources == i) - due) <= bound + 1e-6)
            drawn[i] += numbers.size
    assert samples.epochs(end) == drawn.tolist()
    begin, count = data.draw(st.integers(0, end)), data.draw(st.integers(0, 50))
    found = samples.batch(begin, min(count, end - begin))
    assert np.array_equal(found, whole[begin : begin + count])


def test_too_small_weight_is_refused():
    with pytest.raises(DataError, match="weight 1e-05: less than 1/65,536 of the mix"):
        Samples([Numbers(0), Numbers(1)], 1, [(0, [1e-5, 1.0])])


def test_sample_order_equals_pinned_order(tmp_path):
    """A run that is resumed with a later version of the kit must read the data in the order with
    which the run began.
    """
    files = [numbered(tmp_path / str(i), [31], first=100 * i) for i in range(2)]
    sources = [SourceSequences(files[:1], 3, 1234), SourceSequences(files, 3, 1234, 1)]
    samples = Samples(sources, 3, [(0, (3, 1)), (20, (1, 2))])
    assert samples.batch(0, 30)[:, 0].tolist() == [int(word) for word in PINNED.split()]


PINNED = """
0 12 0 3 24 21 24 18 9 27 124 15 6 21 21 18 24 12 100 0 127 3 6 12 6 115 3 27 9 109
"""


def test_file_truncated_after_opening_is_reported(tmp_path):
    file = numbered(tmp_path / "x", [100])
    samples = Samples([SourceSequences([file], 9, 0)], 9)
    samples.batch(0, 11)
    with (tmp_path / "x.bin").open("r+b") as stream:
        stream.truncate(40)
    with pytest.raises(DataError, match="x.bin: .* expected 200 bytes, found 40"):
        samples.batch(0, 11)
