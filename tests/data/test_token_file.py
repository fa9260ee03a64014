"""Token files: equal to megatron-core's byte for byte, and damage is told with numbers."""

import hashlib
import itertools
import json
import shutil
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.data import located, training_samples
from kit.data.token_file import HEADER, TokenFile, TokenFileWriter, token_dtype
from kit.errors import DataError
from kit.recipe import DataSource, Recipe

VOCAB_SIZES = [32_000, 65_536, 65_537, 131_072]


def random_documents(vocab_size: int, count: int = 50) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length) for length in rng.integers(1, 300, count)]


def write(prefix, documents, vocab_size: int) -> TokenFile:
    with TokenFileWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(document)
    return TokenFile(prefix)


def assert_refused(error: type[Exception], words: str, call, *given) -> None:
    with pytest.raises(error, match=words):
        call(*given)


@pytest.fixture
def megatron():
    """Megatron-core's own module of such files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


@pytest.fixture
def written(tmp_path):
    write(tmp_path / "train", random_documents(1000), 1000)
    return tmp_path


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_equal_to_megatron_core(megatron, tmp_path, vocab_size):
    documents = random_documents(vocab_size)
    write(tmp_path / "own", documents, vocab_size)
    builder = megatron.IndexedDatasetBuilder(
        str(tmp_path / "reference.bin"), dtype=token_dtype(vocab_size).type
    )
    for document in documents:
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "reference.idx"))
    for suffix in (".bin", ".idx"):
        hashes = {
            hashlib.sha256((tmp_path / (name + suffix)).read_bytes()).digest()
            for name in ("own", "reference")
        }
        assert len(hashes) == 1
    reader = megatron.IndexedDataset(str(tmp_path / "own"))
    assert len(reader) == len(documents)
    assert all(np.array_equal(reader[i], document) for i, document in enumerate(documents))


def test_documents_of_several_sequences_are_joined(megatron, tmp_path):
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    for sentences in ([[1, 2], [3]], [[4, 5, 6]], [[7], [8], [9]]):
        for sentence in sentences:
            builder.add_item(torch.tensor(sentence))
        builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    file = TokenFile(tmp_path / "x")
    assert [file.document(i).tolist() for i in range(file.num_documents)] == [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]


def as_published(prefix: Path, documents: list[list[list[int]]], code: int) -> None:
    """Writes documents of sequences byte by byte: magic, version, type, counts, lengths,
    offsets, first sequences.
    """
    form, size = {4: ("<i", 4), 8: ("<H", 2)}[code]
    sequences = [sequence for document in documents for sequence in document]
    firsts = [0, *itertools.accumulate(len(document) for document in documents)]
    offsets = [0, *itertools.accumulate(size * len(sequence) for sequence in sequences)]
    words = [struct.pack("<i", len(sequence)) for sequence in sequences]
    words += [struct.pack("<q", number) for number in (*offsets[:-1], *firsts)]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
    prefix.with_name(prefix.name + ".idx").write_bytes(head + b"".join(words))
    tokens = [struct.pack(form, token) for sequence in sequences for token in sequence]
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(tokens))


@pytest.mark.parametrize(
    "names", ["web_{}_text_document", "web_0000{}_tokens"], ids=["preprocess_data", "datatrove"]
)
@pytest.mark.parametrize("code", [4, 8])
def test_shards_of_other_tools_are_read_as_they_are(tiny_dataset, tmp_path, names, code):
    """`preprocess_data` of Megatron-LM, with sentences apart, and datatrove's
    `MegatronDocumentTokenizer`.
    """
    info = tiny_dataset.info
    if code == 4:  # a vocabulary above 65,536
        shutil.copytree(tiny_dataset.directory, tmp_path / "data")
        told = json.loads((tmp_path / "data" / "dataset.json").read_text()) | {"dtype": "int32"}
        (tmp_path / "data" / "dataset.json").write_text(json.dumps(told))
    shards = [
        [[[5, 6, 7], [8]], [], [[9] * 20]],
        [[[10 + i for i in range(40)]]],
        [[[60], [61]], [[62] * 30]],
    ]
    for i, documents in enumerate(shards):
        as_published(tmp_path / names.format(i), documents, code)
        file = TokenFile(tmp_path / names.format(i))
        joined = [[token for sequence in document for token in sequence] for document in documents]
        assert [file.document(j).tolist() for j in range(file.num_documents)] == joined
        assert (
            file.dtype == {4: np.int32, 8: np.uint16}[code]
            and max(map(max, filter(None, joined))) < info.vocab_size
        )
    data = str(tmp_path / "data" if code == 4 else tiny_dataset.directory)
    recipe = located(
        Recipe(data=data, num_steps=1, sources=[DataSource(paths=(f"{tmp_path}/web_*",))])
    )
    assert len(recipe.sources[0].paths) == 3
    windows = [(sum(map(len, itertools.chain(*documents))) - 1) // 4 for documents in shards]
    samples = training_samples(recipe, 4)
    assert samples.epochs(sum(windows)) == [1.0]
    read = samples.batch(0, sum(windows))
    assert (
        sorted(read[:, 0].tolist())[:2] == [5, 9]
        and np.count_nonzero(np.isin(read[:, 0], range(10, 60))) == 9
    )


def test_megatron_core_reads_the_same_of_them(megatron, tmp_path):
    as_published(tmp_path / "x", [[[1, 2], [3]], [], [[4, 5, 6]]], 8)
    theirs, ours = megatron.IndexedDataset(str(tmp_path / "x")), TokenFile(tmp_path / "x")
    assert theirs.document_indices.tolist() == [0, 2, 2, 3] and ours.num_documents == 3
    assert np.concatenate([theirs[i] for i in range(len(theirs))]).tolist() == ours.tokens.tolist()


def test_type_is_the_smallest_that_fits():
    assert [token_dtype(size).name for size in VOCAB_SIZES] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


@settings(deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 65_535)), min_size=1).filter(any))
def test_what_is_written_is_read(tmp_path_factory, documents):
    file = write(tmp_path_factory.mktemp("x") / "name.with.dots", documents, 65_536)
    assert file.num_documents == len(documents)
    assert file.num_tokens == sum(map(len, documents))
    assert [file.document(i).tolist() for i in range(len(documents))] == documents
    assert file.tokens.tolist() == [token for document in documents for token in document]


def test_counts(written):
    file = TokenFile(written / "train")
    assert (
        file.counts(1000).tolist()
        == np.bincount(np.concatenate(random_documents(1000)), minlength=1000).tolist()
    )


@pytest.mark.parametrize("token", [-1, 1000, 70_000])
def test_a_token_outside_the_vocabulary_is_refused_and_nothing_is_left(tmp_path, token):
    with pytest.raises(
        DataError, match=f"token {token} in document 1 is not in the vocabulary of 1,000"
    ):
        with TokenFileWriter(tmp_path / "x", 1000) as writer:
            writer.add([1, 2])
            writer.add([3, token])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", [-1, 1, -200])
def test_a_wrong_size_is_told_in_bytes(written, suffix, change):
    file = written / f"train{suffix}"
    data = file.read_bytes()
    file.write_bytes(data[:change] if change < 0 else data + b"x" * change)
    message = (
        rf"train\{suffix}: .*expected {len(data):,} bytes, found {len(data) + change:,}\. .*kit"
        rf" data build {written}"
    )
    with pytest.raises(DataError, match=message):
        TokenFile(written / "train")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_and_empty_files_are_named(written, suffix):
    file = written / f"train{suffix}"
    file.write_bytes(b"")
    assert_refused(
        DataError, rf"train\{suffix}: .*expected .* bytes, found 0", TokenFile, written / "train"
    )
    file.unlink()
    assert_refused(
        DataError, rf"train\{suffix}: no such file. .*kit data build", TokenFile, written / "train"
    )


@pytest.mark.parametrize("offset, name", [(0, "magic"), (9, "version"), (17, "type code")])
def test_another_format_is_refused(written, offset, name):
    data = bytearray((written / "train.idx").read_bytes())
    data[offset] = 99
    (written / "train.idx").write_bytes(data)
    with pytest.raises(DataError, match="train.idx: not a Megatron index: found magic"):
        TokenFile(written / "train")


def test_an_index_of_a_multimodal_file_is_refused(megatron, tmp_path):
    builder = megatron.IndexedDatasetBuilder(
        str(tmp_path / "x.bin"), dtype=np.int32, multimodal=True
    )
    builder.add_item(torch.tensor([1, 2]), mode=0)
    builder.add_item(torch.tensor([3]), mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    assert_refused(DataError, "x.idx: .*expected 74 bytes, found 76", TokenFile, tmp_path / "x")


def test_an_index_that_does_not_cover_the_tokens_is_refused(written):
    data = bytearray((written / "train.idx").read_bytes())
    data[HEADER.size : HEADER.size + 4] = (1).to_bytes(4, "little")
    (written / "train.idx").write_bytes(data)
    with pytest.raises(DataError, match="train.idx: damaged: its documents do not cover train.bin"):
        TokenFile(written / "train").document(0)


def test_a_file_without_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no documents"):
        write(tmp_path / "x", [], 1000)
