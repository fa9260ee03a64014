"""DocumentOrder: what runs on older datasets read, to the token; each token of an epoch exactly once."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.data import Dataset
from kit.data.document_order import DocumentOrder
from kit.data.samples import Samples
from kit.data.token_file import TokenFile
from kit.errors import DataError
from tests.data.token_files import numbered


def documents(file: TokenFile, sequence_length: int, seed: int) -> Samples:
    return Samples([DocumentOrder(file, sequence_length, seed)], sequence_length)


@pytest.fixture
def token_file(tmp_path):
    return numbered(tmp_path / "x", [int(n) for n in np.random.default_rng(0).integers(1, 60, 100)])


@st.composite
def shapes(draw):
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(lambda x: sum(x) > 1))
    return lengths, draw(st.integers(1, sum(lengths) - 1)), draw(st.integers(0, 2**32 - 1))


@settings(deadline=None)
@given(shapes(), st.integers(1, 4))
def test_each_epoch_reads_every_token_once(tmp_path_factory, shape, num_epochs):
    lengths, sequence_length, seed = shape
    samples = documents(numbered(tmp_path_factory.mktemp("x") / "x", lengths), sequence_length, seed)
    count = -(-num_epochs * sum(lengths) // sequence_length)
    inputs = samples.batch(0, count)[:, :-1]
    times = np.bincount(inputs.ravel(), minlength=sum(lengths))
    # The last window of the last epoch may reach into the next one, by less than its own length.
    assert times.min() >= num_epochs and times.max() <= num_epochs + 1
    assert (times == num_epochs + 1).sum() == inputs.size - num_epochs * sum(lengths) < sequence_length


@settings(deadline=None)
@given(shapes())
def test_windows_are_whole_documents_end_to_end(tmp_path_factory, shape):
    lengths, sequence_length, seed = shape
    token_file = numbered(tmp_path_factory.mktemp("x") / "x", lengths)
    begins = set(token_file.document_starts.tolist())
    for row in documents(token_file, sequence_length, seed).batch(0, 12):
        for token, following in itertools.pairwise(row.tolist()):
            assert following == token + 1 or (token + 1 in begins and following in begins)


def test_windows_of_an_epoch_join_to_its_stream(token_file):
    samples = documents(token_file, 16, seed=5)
    count = -(-token_file.num_tokens // 16)  # the windows that begin in the first epoch
    following = {int(row[0]): row for row in samples.batch(0, count)}
    chained = sum(int(row[-1]) in following for row in following.values())
    assert chained == len(following) - 1


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(0, 300), st.integers(0, 300))
def test_any_split_of_a_batch_reads_the_same(tmp_path_factory, first, count, cut):
    samples = documents(numbered(tmp_path_factory.mktemp("x") / "x", [7, 300, 2, 1, 90]), 8, seed=3)
    whole = samples.batch(first, count)
    cut = min(cut, count)
    parts = np.concatenate((samples.batch(first, cut), samples.batch(first + cut, count - cut)))
    assert np.array_equal(whole, parts)


def test_a_fresh_object_reads_on_where_another_stopped(token_file):
    samples = documents(token_file, 16, seed=1)
    straight = np.concatenate([samples.batch(i * 8, 8) for i in range(100)])
    resumed = documents(token_file, 16, seed=1).batch(400, 400)
    assert straight.dtype == np.int64 and straight.shape == (800, 17)
    assert np.array_equal(straight[400:], resumed)


def test_seeds_and_epochs_differ(token_file):
    samples = documents(token_file, 16, seed=1)
    per_epoch = token_file.num_tokens // 16
    first, second = samples.batch(0, per_epoch), samples.batch(per_epoch + 1, per_epoch)
    other = documents(token_file, 16, seed=2).batch(0, per_epoch)
    assert (first == second).mean() < 0.05 and (first == other).mean() < 0.05
    assert not np.array_equal(np.sort(first[:, 0]), first[:, 0])


def test_the_order_never_changes(tmp_path):
    """A run resumed by a later version must read the data in the order it began with."""
    samples = documents(numbered(tmp_path / "x", [3, 10, 1, 7, 20, 5]), 6, seed=1234)
    assert samples.batch(0, 3).tolist() == PINNED


PINNED = [[3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 21, 22, 23, 24], [20, 41, 42, 43, 44, 45, 3]]


def test_a_sequence_longer_than_the_data_is_refused(tmp_path):
    token_file = numbered(tmp_path / "x", [5, 6])
    assert documents(token_file, 10, seed=0).batch(0, 3).shape == (3, 11)
    message = "sequence_length: 11 needs at least 12 tokens, but x.bin holds 11. Give at most 10"
    with pytest.raises(DataError, match=message):
        documents(token_file, 11, seed=0)
    with pytest.raises(DataError, match="sequence_length: 0 is not allowed"):
        documents(token_file, 0, seed=0)


def test_impossible_requests_are_refused(token_file):
    with pytest.raises(DataError, match="seed: -1"):
        documents(token_file, 16, seed=-1)
    with pytest.raises(DataError, match="samples -1 "):
        documents(token_file, 16, seed=0).batch(-1, 4)


def test_a_dataset_of_before_says_so_and_is_read_as_then(tiny_dataset, tmp_path):
    """Its description has no order; what a run on it reads, training and held out, is pinned by the older version."""
    old = Path(shutil.copytree(tiny_dataset.directory, tmp_path / "old"))
    told = json.loads((old / "dataset.json").read_text())
    assert told["settings"].pop("order") == "windows"
    (old / "dataset.json").write_text(json.dumps(told))
    opened = Dataset.open(old)
    for file, read, new in (
        (tiny_dataset.train, opened.samples("train", 16, seed=7), tiny_dataset.samples("train", 16, seed=7)),
        (tiny_dataset.validation, opened.samples("validation", 16, 7), tiny_dataset.samples("validation", 16, 7)),
    ):
        assert np.array_equal(read.batch(3, 40), documents(file, 16, 7).batch(3, 40))
        assert not np.array_equal(read.batch(3, 40), new.batch(3, 40))


def test_too_many_documents_are_refused_by_the_name_of_their_order(token_file, monkeypatch):
    monkeypatch.setattr("kit.data.document_order.MOST_DOCUMENTS", 99)
    with pytest.raises(
        DataError, match="order 'documents', .* 100 documents are too many, 99 are allowed. Build it ag"
    ):
        DocumentOrder(token_file, 16, seed=0)
