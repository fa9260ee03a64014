"""Token files equal those of megatron-core byte for byte, and errors for damaged files state the
wrong numbers.
"""

import itertools
import json
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.config.recipe import DataSource, Recipe
from kit.data import resolve_paths, training_samples
from kit.data.token_file import TokenFile, TokenFileWriter, token_dtype
from kit.errors import DataError
from tests.data.token_files import documents

VOCAB_SIZES = [32_000, 65_536, 65_537, 131_072]


def random_documents(vocab_size: int, count: int = 50) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length) for length in rng.integers(1, 300, count)]


def write(prefix, texts, vocab_size: int) -> TokenFile:
    with TokenFileWriter(prefix, vocab_size) as writer:
        for text in texts:
            writer.add(text)
    return TokenFile(prefix)


@pytest.fixture
def megatron():
    """Returns megatron-core's module that reads and writes token files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


@pytest.fixture
def written(tmp_path):
    write(tmp_path / "train", random_documents(1000), 1000)
    return tmp_path


def by_megatron(megatron, prefix: Path, texts, dtype, **options) -> None:
    """Writes a token file with megatron-core's own builder. Each document is a list of
    sequences.
    """
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, **options)
    for sequences in texts:
        for sequence in sequences:
            builder.add_item(torch.as_tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def assert_same_bytes(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        own, reference = (folder / (name + suffix) for name in ("own", "reference"))
        assert own.read_bytes() == reference.read_bytes()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_token_file_equals_megatron_core(megatron, tmp_path, vocab_size):
    texts = random_documents(vocab_size)
    write(tmp_path / "own", texts, vocab_size)
    dtype = token_dtype(vocab_size).type
    by_megatron(megatron, tmp_path / "reference", [[text] for text in texts], dtype)
    assert_same_bytes(tmp_path)
    reader = megatron.IndexedDataset(str(tmp_path / "own"))
    assert len(reader) == len(texts)
    assert all(np.array_equal(reader[i], text) for i, text in enumerate(texts))


@pytest.mark.parametrize(("code", "dtype"), [(4, np.int32), (8, np.uint16)])
def test_documents_of_several_sequences_are_joined(megatron, tmp_path, code, dtype):
    """`preprocess_data` of Megatron-LM writes documents of several sequences if it splits the text
    into sentences.
    """
    texts = [[[1, 2], [3]], [[4, 5, 6]], [], [[7], [8], [9]]]
    by_megatron(megatron, tmp_path / "reference", texts, dtype)
    as_published(tmp_path / "own", texts, code)
    assert_same_bytes(tmp_path)
    theirs, ours = megatron.IndexedDataset(str(tmp_path / "own")), TokenFile(tmp_path / "own")
    assert documents(ours) == [[1, 2, 3], [4, 5, 6], [], [7, 8, 9]] and ours.dtype == dtype
    assert theirs.document_indices.tolist() == [0, 2, 3, 3, 6]
    assert np.concatenate([theirs[i] for i in range(len(theirs))]).tolist() == ours.tokens.tolist()


def as_published(prefix: Path, documents: list[list[list[int]]], code: int) -> None:
    """Writes a token file byte by byte in the published format: magic, version, type code, counts,
    lengths, offsets, first sequences.
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


def test_shards_of_other_tools_are_read_unchanged(tiny_dataset, tmp_path):
    """The shards have a vocabulary above 65,536, one sequence per sentence, and no end-of-document
    token.
    """
    data = tmp_path / "data"
    shutil.copytree(tiny_dataset.directory, data)
    told = json.loads((data / "dataset.json").read_text()) | {"dtype": "int32"}
    (data / "dataset.json").write_text(json.dumps(told))
    for i, shard in enumerate([[[[5, 6, 7], [8]], [], [[9] * 5]], [[[60], [61]], [[62] * 7]]]):
        as_published(tmp_path / f"web_{i}_text_document", shard, 4)
    sources = [DataSource(paths=(f"{tmp_path}/web_*",))]
    samples = training_samples(
        resolve_paths(Recipe(data=str(data), num_steps=1, sources=sources)), 4
    )
    assert samples.epochs(4) == [1.0]
    read = sorted(samples.batch(0, 4).tolist())
    assert read == [[5, 6, 7, 8, 9], [9] * 5, [60, 61, 62, 62, 62], [62] * 5]


def test_token_dtype_is_smallest_for_the_vocabulary():
    names = [token_dtype(size).name for size in VOCAB_SIZES]
    assert names == ["uint16", "uint16", "int32", "int32"]


@settings(deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 65_535)), min_size=1).filter(any))
def test_token_file_round_trips(tmp_path_factory, texts):
    file = write(tmp_path_factory.mktemp("x") / "name.with.dots", texts, 65_536)
    assert documents(file) == texts and file.num_tokens == sum(map(len, texts))
    assert file.tokens.tolist() == [token for text in texts for token in text]


@pytest.mark.parametrize("token", [-1, 1000, 70_000])
def test_token_outside_vocabulary_is_refused(tmp_path, token):
    refused = f"token {token} in document 1 is not in the vocabulary of 1,000"
    with pytest.raises(DataError, match=refused):
        write(tmp_path / "x", [[1, 2], [3, token]], 1000)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="holds no documents"):
        write(tmp_path / "x", [], 1000)


def byte_changed(offset: int, value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + bytes([value]) + data[offset + 1 :]


SIZE = r": .*expected {size:,} bytes, found {found:,}\. .*kit data build {folder}"
FORMAT = ": not a Megatron index: found magic"
SUFFIXES = (".bin", ".idx")
DAMAGE = [
    *[(suffix, lambda data, n=n: data[:n], SIZE) for suffix in SUFFIXES for n in (-1, -200)],
    *[(suffix, lambda data: data + b"x", SIZE) for suffix in SUFFIXES],
    *[(suffix, lambda data: b"", ": .*expected .* bytes, found 0") for suffix in SUFFIXES],
    # Changes the first byte of the magic, of the version and of the type code.
    *[(".idx", byte_changed(offset, 99), FORMAT) for offset in (0, 9, 17)],
]


@pytest.mark.parametrize(("suffix", "change", "message"), DAMAGE)
def test_damaged_token_file_error_gives_sizes(written, suffix, change, message):
    file = written / f"train{suffix}"
    data = file.read_bytes()
    file.write_bytes(change(data))
    told = message.format(size=len(data), found=len(change(data)), folder=written)
    with pytest.raises(DataError, match=rf"train\{suffix}{told}"):
        TokenFile(written / "train")
    file.unlink()
    with pytest.raises(DataError, match=rf"train\{suffix}: no such file. .*kit data build"):
        TokenFile(written / "train")


def test_multimodal_index_is_refused(megatron, tmp_path):
    by_megatron(megatron, tmp_path / "x", [[[1, 2], [3]]], np.int32, multimodal=True)
    with pytest.raises(DataError, match="x.idx: .*expected 74 bytes, found 76"):
        TokenFile(tmp_path / "x")
