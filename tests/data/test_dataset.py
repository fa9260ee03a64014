"""`build_dataset` and `Dataset`: a dataset's folder is complete or does not exist, and damage is
detected.
"""

import hashlib
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.data import Corpus, Dataset, TokenFile, build_dataset
from kit.data.tokenizer import train_tokenizer
from kit.errors import ConfigError, DataError
from tests.data.token_files import QUIET, contents, documents


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Returns a .jsonl file of 100 documents. The last document is a duplicate."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    words = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(99)]
    quoted = "and quotes <|endoftext|>"
    texts = [f"document {i} says é {words[i][: i % 64]} {quoted}" for i in range(99)]
    rows = [{"text": text} for text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[3]]))
    return file


@pytest.fixture(scope="module")
def dataset(text, tmp_path_factory) -> Dataset:
    return build_dataset(tmp_path_factory.mktemp("data") / "built", text, **QUIET)


@pytest.fixture
def copy(dataset, tmp_path) -> Path:
    return shutil.copytree(dataset.directory, tmp_path / "copy")


def decoded(dataset: Dataset, file: TokenFile) -> list[str]:
    tokenizer = dataset.tokenizer()
    return [tokenizer.decode(ids[:-1]) for ids in documents(file)]


def test_every_document_is_in_train_or_validation(dataset, text):
    sizes = {document.text: document.num_bytes for document in Corpus(text)}
    sides = []
    parts = (dataset.train, dataset.info.train), (dataset.validation, dataset.info.validation)
    for file, split in parts:
        tokens, texts = documents(file), decoded(dataset, file)
        assert all(ids[-1] == dataset.eos_id and dataset.eos_id not in ids[:-1] for ids in tokens)
        assert (split.documents, split.tokens) == (len(texts), sum(map(len, tokens)))
        assert split.text_bytes == sum(sizes[text] for text in texts)
        sides.append(texts)
    assert sorted(sides[0] + sides[1]) == sorted(sizes)
    assert 8 <= len(sides[1]) <= 32
    assert (dataset.info.duplicates, dataset.info.skipped) == (1, ())


def test_validation_text_matches_validation_tokens(dataset):
    rows, tokens = list(dataset.validation_documents()), documents(dataset.validation)
    assert [row.text for row in rows] == decoded(dataset, dataset.validation)
    for row, ids in zip(rows, tokens, strict=True):
        assert (row.tokens, row.num_bytes) == (len(ids), len(row.text.encode()))
        assert row.name.startswith("text.jsonl:")


def test_description_lists_tokenizer_files_and_sources(dataset):
    info, folder = dataset.info, dataset.directory
    assert (info.vocab_size, dataset.vocab_size, info.dtype) == (330, 330, "uint16")
    assert info.tokenizer_sha256 == dataset.tokenizer().sha256
    assert {stored.name for stored in info.files} | {"dataset.json"} == set(contents(folder))
    assert [source.name for source in info.settings.sources] == ["text.jsonl"]
    assert str(folder.parent) not in (folder / "dataset.json").read_text()
    assert "330 entries" in dataset._repr_html_() and "1 duplicate," in dataset._repr_html_()


def test_tokenizer_is_trained_on_training_text_only(dataset, text, tmp_path, monkeypatch):
    """The tokenizer is not trained on validation documents. For a large corpus it is trained on a
    sample of the training text.
    """
    whole = dataset.tokenizer().sha256
    assert train_tokenizer(decoded(dataset, dataset.train), 330).sha256 == whole
    monkeypatch.setattr("kit.data.steps.TOKENIZER_BYTES", dataset.info.train.text_bytes // 2)
    sampled = build_dataset(tmp_path / "sampled", text, **QUIET)
    assert sampled.tokenizer().sha256 != whole
    assert sampled.info.train.documents == dataset.info.train.documents


def test_concurrent_builds_agree(dataset, text, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(build_dataset, tmp_path / "data", text, **QUIET) for _ in range(2)]
    for build in builds:
        assert contents(build.result().directory) == contents(dataset.directory)
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_text_changed_during_the_build_is_refused(text, tmp_path, monkeypatch):
    own = Path(shutil.copy(text, tmp_path / "text.jsonl"))

    def train_and_append(texts, vocab_size):
        tokenizer = train_tokenizer(texts, vocab_size)
        own.write_text(text.read_text() + '{"text": "one more"}')
        return tokenizer

    monkeypatch.setattr("kit.data.steps.train_tokenizer", train_and_append)
    with pytest.raises(DataError, match="the text changed while it was read"):
        build_dataset(tmp_path / "data", own, **QUIET)
    assert list(tmp_path.iterdir()) == [own]


def test_training_documents_are_in_random_order(dataset, text, tmp_path):
    """Documents are sorted by a random number that is drawn for each document. Another seed gives
    another order.
    """
    draws = {document.text: document.draw("order 1234") for document in Corpus(text)}
    texts = decoded(dataset, dataset.train)
    assert dataset.info.settings.order == "windows"
    assert texts == sorted(texts, key=draws.__getitem__)
    read = [list(draws).index(text) for text in texts]
    assert abs(np.corrcoef(read[:-1], read[1:])[0, 1]) < 0.4
    other = build_dataset(tmp_path / "other", text, **QUIET, seed=5)
    assert [each for each in decoded(other, other.train) if each in texts] != texts


def test_seed_and_fraction_choose_validation_documents(text, tmp_path):
    def held_out(**changes) -> set[str]:
        dataset = build_dataset(tmp_path / f"{changes}", text, **QUIET | changes)
        return {document.name for document in dataset.validation_documents()}

    assert held_out() != held_out(seed=1)
    assert held_out() < held_out(validation_fraction=0.5)
    assert len(held_out(validation_fraction=0.001)) == 1


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    """Returns a source file with a long text, a text that is not UTF-8, and a short document."""
    folder = tmp_path_factory.mktemp("uneven") / "text"
    folder.mkdir()
    lines = [hashlib.sha256(b"%d" % i).hexdigest()[:20] + "\n" for i in range(4000)]
    (folder / "good.txt").write_text("".join(lines))
    (folder / "latin.txt").write_bytes("é".encode("latin-1") * 90_000)
    (folder / "short.jsonl").write_text('{"text": "small one"}')
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_only_the_end_of_a_long_text_is_validation(seed, uneven, tmp_path):
    """For every seed the validation text has the requested size, and no text is in both splits. The
    long text is divided: its end is validation text.
    """
    usual = {"vocab_size": 300, "progress": False, "skip_corrupt": True}
    dataset = build_dataset(tmp_path / "data", uneven, **usual, seed=seed)
    info, long = dataset.info, (uneven / "good.txt").read_text()
    assert info.train.text_bytes + info.validation.text_bytes == len(long) + len("small one")
    assert 0.019 * len(long) < info.validation.text_bytes < 0.021 * len(long) and info.cut == 1
    decode = dataset.tokenizer().decode
    files = dataset.train, dataset.validation
    parts = [decode(file.read(0, file.num_tokens).tolist()) for file in files]
    pieces = {piece for part in parts for piece in part.split("<|endoftext|>") if piece}
    assert "small one" in pieces and "".join(sorted(pieces - {"small one"}, key=long.index)) == long
    facts = dict(dataset.facts())
    assert facts["read"].startswith("3 documents in 3 files, 0.17 MB")
    assert facts["left out"] == "0 duplicates, 0 empty, 1 unreadable, 0.09 MB"
    assert facts["unreadable"] == "text/latin.txt:1: not UTF-8 text (byte 0xe9)"


def test_data_build_reports_read_and_left_out_text(uneven, tmp_path):
    words = f"data build {tmp_path / 'data'} --source {uneven / 'good.txt'} --vocab-size 300"
    said = CliRunner().invoke(app, words.split())
    assert "1 document in 1 file" in said.stdout and "of 1 document the end" in said.stdout
    many = Path(shutil.copytree(uneven, tmp_path / "many"))
    (many / "good.txt").unlink()
    refused = r"many: 9 of 90,009 bytes .* less than 1 %: .* 90,000 cannot be read; many/latin"
    with pytest.raises(DataError, match=refused):
        build_dataset(tmp_path / "none", many, **QUIET, skip_corrupt=True)
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".*"))


def test_equal_dataset_is_reused(dataset, text, tmp_path, capsys):
    own, folder = shutil.copy(text, tmp_path / "text.jsonl"), dataset.directory
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    build_dataset(folder, own, **QUIET | {"progress": True})
    assert "Reusing" in capsys.readouterr().out
    Path(own).write_text(text.read_text().replace("document 5 ", "document V "))
    with pytest.raises(DataError, match="other settings: sources: text.jsonl"):
        build_dataset(folder, own, **QUIET)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_other_dataset_is_replaced_only_with_overwrite(copy, text):
    before, other = contents(copy), QUIET | {"vocab_size": 320}
    refused = "other settings: vocab_size: 330 there, 320 asked. Nothing was changed"
    with pytest.raises(DataError, match=refused):
        build_dataset(copy, text, **other)
    assert contents(copy) == before
    assert build_dataset(copy, text, **other, overwrite=True).vocab_size == 320
    assert list(copy.parent.iterdir()) == [copy]


def test_folder_without_dataset_is_never_overwritten(text, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="exists and is not a dataset; nothing was changed"):
        build_dataset(tmp_path, text, **QUIET, overwrite=True)
    with pytest.raises(DataError, match="not a dataset .dataset.json is missing"):
        Dataset.open(tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b"precious"}


def test_failed_build_leaves_nothing(text, tmp_path):
    damaged = tmp_path / "source" / "damaged.jsonl"
    damaged.parent.mkdir()
    damaged.write_text(text.read_text() + '{"text": ')
    with pytest.raises(DataError, match="damaged.jsonl:101: not valid JSON"):
        build_dataset(tmp_path / "out" / "data", damaged, **QUIET)
    for size, message in ((50_000, "50000 entries asked"), (256, "256 is .* Give at least 257")):
        with pytest.raises(DataError, match=f"vocab_size: {message}"):
            build_dataset(tmp_path / "out" / "data", text, vocab_size=size, progress=False)
    assert list((tmp_path / "out").iterdir()) == []
    skipping = build_dataset(tmp_path / "out" / "data", damaged, **QUIET, skip_corrupt=True)
    (line,) = skipping.info.skipped
    assert line.startswith("damaged.jsonl:101: not valid JSON")


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("one document")
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(DataError, match="none.txt: 0 of 0 bytes of text would be trained on"):
        build_dataset(tmp_path / "data", tmp_path / "none.txt", **QUIET)
    (tmp_path / "two.txt").write_text("another")
    both, most = [tmp_path / "one.txt", tmp_path / "two.txt"], 0.999999
    with pytest.raises(DataError, match="all 2 documents would be held out. Lower validation_frac"):
        build_dataset(tmp_path / "data", both, validation_fraction=most)
    with pytest.raises(DataError, match="validation_fraction: 0 is not allowed"):
        build_dataset(tmp_path / "data", tmp_path, validation_fraction=0)


@pytest.mark.parametrize(
    "name", ["train.bin", "train.idx", "validation.bin", "validation.idx", "validation.jsonl"]
)
def test_damaged_dataset_is_detected_and_rebuilt(copy, text, name):
    Dataset.open(copy).verify()
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-1])
    sizes = f"{name}: expected {len(data):,} bytes, found {len(data) - 1:,}"
    message = f"{sizes}. Build it again: kit data build {copy}"
    with pytest.raises(DataError, match=message):
        Dataset.open(copy)
    (copy / name).unlink()
    with pytest.raises(DataError, match=f"{name}: expected {len(data):,} bytes, found no file"):
        Dataset.open(copy)
    (copy / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataError, match=f"{name}: changed: expected sha256"):
        Dataset.open(copy).verify()
    build_dataset(copy, text, **QUIET, overwrite=True).verify()
    assert (copy / name).read_bytes() == data


def test_damaged_description_is_refused(copy, text):
    (copy / "dataset.json").write_text('{"format": 1')
    with pytest.raises(ConfigError, match="dataset.json: .*not valid JSON"):
        Dataset.open(copy)
    with pytest.raises(DataError, match="holds a damaged dataset"):
        build_dataset(copy, text, **QUIET)
    build_dataset(copy, text, **QUIET, overwrite=True).verify()


def test_given_tokenizer_is_copied_unchanged(dataset, text, tmp_path):
    file = dataset.directory / "tokenizer.json"
    info = build_dataset(tmp_path / "data", text, file, progress=False).info
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert info.settings.tokenizer_sha256 == info.tokenizer_sha256
    with pytest.raises(DataError, match="4096 asked, but .* has 330. Leave vocab_size out"):
        build_dataset(tmp_path / "other", text, file, vocab_size=4096)


def test_unigram_baseline_equals_a_plain_computation(dataset):
    counts = np.ones(330)
    for token in dataset.train.tokens:
        counts[token] += 1
    nats = -sum(math.log(counts[token] / counts.sum()) for token in dataset.validation.tokens)
    baseline = dataset.unigram_baseline()
    assert baseline.nats_per_token == pytest.approx(nats / dataset.validation.num_tokens, rel=1e-9)
    num_bytes = sum(document.num_bytes for document in dataset.validation_documents())
    assert baseline.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-9)
    assert 0 < baseline.nats_per_token < math.log(330)


def test_default_corpus_gives_training_batches(tmp_path):
    dataset = build_dataset(tmp_path / "data", max_bytes=300_000, vocab_size=512, progress=False)
    batch = dataset.samples("train", 128, seed=0).batch(0, 8)
    assert batch.shape == (8, 129) and batch.max() < 512
    assert dataset.unigram_baseline().bits_per_byte < 8
