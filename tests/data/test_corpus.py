"""Documents are read from their source files completely and once each. Errors name damaged
documents.
"""

import gzip
import json
import sysconfig
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from kit.data import readers
from kit.data.corpus import Corpus
from kit.data.installed import installed_files
from kit.errors import DataError


def write_jsonl(file: Path, rows: list) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_folder_with_every_format_is_read(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "b.md").write_bytes(b"\xef\xbb\xbfsecond \xe6\x97\xa5")
    write_jsonl(tmp_path / "c.jsonl", [{"text": "third"}, {"text": "fourth", "url": "x"}])
    table = pyarrow.table({"id": [1, 2], "text": ["fifth", "sixth"]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    (tmp_path / "ignored.csv").write_text("not,text")
    (tmp_path / ".hidden.txt").write_text("hidden")
    documents = list(Corpus(tmp_path))
    root = tmp_path.name
    assert {document.name: document.text for document in documents} == {
        f"{root}/a.txt": "first",
        f"{root}/c.jsonl:1": "third",
        f"{root}/c.jsonl:2": "fourth",
        f"{root}/d.parquet:row 1": "fifth",
        f"{root}/d.parquet:row 2": "sixth",
        f"{root}/sub/b.md": "second 日",
    }
    for document in documents:
        assert document.num_bytes == len(document.text.encode())


def test_duplicate_and_empty_documents_are_dropped(tmp_path):
    rows = [{"text": text} for text in ("one", "two", "one", "  \n", "", "one", "three")]
    corpus = Corpus(write_jsonl(tmp_path / "a.jsonl", rows))
    for _ in range(2):
        assert [document.text for document in corpus] == ["one", "two", "three"]
        assert (corpus.counts["duplicates"], corpus.counts["empty"]) == (2, 2)


DAMAGED_LINES = {
    b'{"text": "cut': "not valid JSON",
    b'{"text": "\xff"}': "not UTF-8 text .byte 0xff",
    b'\xff\xfe{"text': "not UTF-8 text but UTF-16",
    b'{"body": "x"}': "no string under the key 'text' .found: body",
    b'{"text": 7}': "no string under the key 'text', but 7",
    b'{"text": null}': "no string under the key 'text', but null",
    b"[1, 2]": "no string under the key 'text' .found: list",
    b'{"text": "\\ud800"}': "not text: half a surrogate pair at character 0",
}


@pytest.mark.parametrize(("line", "message"), DAMAGED_LINES.items())
def test_damaged_line_is_named_and_can_be_skipped(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "also good"}\n')
    with pytest.raises(DataError, match="a.jsonl:2: " + message):
        list(Corpus(tmp_path / "a.jsonl"))
    corpus = Corpus(tmp_path / "a.jsonl", skip_corrupt=True)
    assert [document.text for document in corpus] == ["good", "also good"]
    assert len(corpus.skipped) == 1 and corpus.skipped[0].startswith("a.jsonl:2: ")
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xe9\n")
    with pytest.raises(DataError, match=r"a\.txt:2: not UTF-8 text \(byte 0xe9\)"):
        list(Corpus(tmp_path / "a.txt"))


NOT_UTF8 = pyarrow.array([b"good", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())


@pytest.mark.parametrize(
    ("columns", "lost", "message"),
    [
        ({"text": ["good", None, "also good"]}, 0, "row 2: 'text' holds no string, but null"),
        ({"body": ["x"]}, 0, r" no column 'text' \(found: body\)"),
        ({"text": NOT_UTF8}, 0, "row 2: not UTF-8 text"),
        ({"text": ["good"]}, 20, "row 1: damaged Parquet file"),
    ],
)
def test_damaged_parquet_is_named(columns, lost, message, tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size - lost])
    with pytest.raises(DataError, match=rf"a\.parquet:{message}"):
        list(Corpus(file))


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


@pytest.mark.parametrize("rows", [100, 30_000], ids=["small", "above 1 MB"])
@pytest.mark.parametrize(("end", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_truncated_compressed_file_is_read_to_the_cut(tmp_path, end, compress, rows):
    """The second of two compressed frames is cut. A gzip file loses only its checksum, a zstd file
    loses one block.
    """
    texts = [f"document {i} {i * i}" for i in range(2 * rows)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    frames = [compress(b"".join(part)) for part in (lines[:rows], lines[rows:])]
    file = tmp_path / f"a.jsonl{end}"
    file.write_bytes(b"".join(frames))
    names = [f"{tmp_path.name}/{file.name}:{line}" for line in range(1, 2 * rows + 1)]
    assert [document.name for document in Corpus(tmp_path)] == names
    file.write_bytes(b"".join(frames)[:-3])
    corpus = Corpus(file, skip_corrupt=True)
    read = [document.text for document in corpus]
    assert read == texts[: len(read)] and len(read) >= (2 * rows if end == ".gz" else rows)
    assert corpus.skipped == [
        f"a.jsonl{end}: cannot be read (Truncated compressed stream) beyond line {len(read):,}:"
        " what followed is lost"
    ]
    for damaged in (b"".join(frames)[:-3], b"no such thing"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=f"a.jsonl{end}: cannot be read"):
            list(Corpus(file))


def test_hugging_face_folder_gives_its_training_text(tmp_path):
    """The folder has the form that `save_to_disk` and the hub create: Arrow files, splits, a
    dataset card, and links to the data files.
    """
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        table = pyarrow.table({"id": [1, 2], "body": [f"{split} one", f"{split} two"]})
        for name in ("data-00000-of-00001.arrow", "cache-12ab.arrow"):
            with pyarrow.ipc.new_stream(tmp_path / split / name, table.schema) as stream:
                stream.write_table(table)
        (tmp_path / split / "state.json").write_text("{}")
    (tmp_path / "blob").write_bytes(b"")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["third"]}), tmp_path / "blob")
    (tmp_path / "train-00000-of-00001.parquet").symlink_to(tmp_path / "blob")
    (tmp_path / "README.md").write_text("a card")
    found = [document.text for document in Corpus(tmp_path, text_key="body")]
    assert found == ["train one", "train two", "third"]
    tested = [document.text for document in Corpus(tmp_path / "test", text_key="body")]
    assert tested == ["test one", "test two"]
    with pytest.raises(DataError, match=r"arrow: no column 'text' \(found: id, body\)"):
        list(Corpus(tmp_path))
    file = tmp_path / "test" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(DataError, match="damaged Arrow file"):
        list(Corpus(file, text_key="body"))


def test_other_splits_of_json_are_not_read(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        write_jsonl(tmp_path / split / "a.jsonl", [{"text": split}])
    corpus = Corpus(tmp_path)
    assert [document.text for document in corpus] == ["train"]
    (unread,) = corpus.unread
    assert (unread.kind, unread.files) == ("split", 1)


@pytest.mark.parametrize(
    ("train", "others"),
    [
        ("train.txt", ["test.txt", "val.txt"]),
        ("TinyStories-train.txt", ["TinyStories-valid.txt"]),
        ("train/pos/1_9.txt", ["test/neg/7_10.txt"]),
        ("c4-train.00000-of-01024.json", ["c4-validation.00003-of-00008.json"]),
    ],
)
def test_split_beside_train_is_named_and_not_read(tmp_path, train, others):
    for name in (train, *others):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": name}) if name.endswith(".json") else name)
    corpus = Corpus(tmp_path)
    assert [document.text for document in corpus] == [train]
    (unread,) = corpus.unread
    assert (unread.kind, unread.files) == ("split", len(others))


def test_repository_of_code_is_read_whole(tmp_path):
    names = ["docs/eval.md", "docs/train.md", "eval.py", "tests/data.txt", "tests/test_train.py"]
    names += ["train.py", "train/loop.py", "train/notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = Corpus(tmp_path)
    assert sorted(document.text for document in corpus) == names and not corpus.unread


def test_link_to_itself_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    (tmp_path / "b.jsonl").symlink_to("b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl: a link"):
        Corpus(tmp_path)


@pytest.mark.parametrize(
    ("source", "max_bytes", "message"),
    [
        ([], None, "the list is empty"),
        ("", None, r"no files to read in this folder. It holds:\n  1 file \(.csv\), .*table.csv"),
        ("absent.txt", None, "no such file or folder"),
        ("table.csv", None, r"cannot read this format: .*Allowed: text \(.txt"),
        (None, 0, "max_bytes: 0"),
    ],
)
def test_empty_or_missing_sources_are_refused(source, max_bytes, message, tmp_path):
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(DataError, match=message):
        Corpus(tmp_path / source if isinstance(source, str) else source, max_bytes)


def test_overlong_line_is_skipped_in_little_memory(tmp_path, monkeypatch):
    """The line is 1,000 times smaller when it is compressed."""
    monkeypatch.setattr(readers, "LARGEST_LINE_BYTES", 3 << 20)
    row, bomb = b'{"text": "%s"}\n', b"[" * (64 << 20) + b"\n"
    file = tmp_path / "b.jsonl.gz"
    file.write_bytes(gzip.compress(row % b"one" + bomb + row % b"two" + b"\n" + b'{"text"', 1))
    tracemalloc.start()
    corpus = Corpus(file, skip_corrupt=True)
    assert [document.name for document in corpus] == ["b.jsonl.gz:1", "b.jsonl.gz:3"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert [line.split(":")[1] for line in corpus.skipped] == ["2", "5"]
    assert "a line of 3,145,728 bytes or more, longer than any document" in corpus.skipped[0]


def test_link_out_of_the_folder_is_not_followed(tmp_path):
    """A link in the folder of another user may point to a private key. A link in the hub's cache
    points to a file of the cache.
    """
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "hub" / "snapshots" / "1f2e"
    folder.mkdir(parents=True)
    (tmp_path / "hub" / "blobs").mkdir()
    (tmp_path / "hub" / "blobs" / "0a").write_text("text")
    (folder / "a.txt").symlink_to("../../blobs/0a")
    assert [document.text for document in Corpus(folder)] == ["text"]
    (folder / "b.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"b\.txt: a link to .*secret, which is not in this folder"):
        Corpus(folder)
    named = [document.text for document in Corpus(folder / "b.txt")]
    assert named == ["key"], "named by its reader, it is meant"


def test_corpus_never_exceeds_max_bytes(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i:010}"} for i in range(10)])
    for most, count in ((35, 3), (40, 4), (None, 10)):
        assert len(list(Corpus(file, max_bytes=most))) == count


def test_default_corpus_is_the_python_installation(tmp_path):
    corpus = Corpus(max_bytes=2_000_000)
    documents = list(corpus)
    assert [document.name for document in documents] == [document.name for document in corpus]
    assert 1_500_000 < sum(document.num_bytes for document in documents) <= 2_000_000
    names = {source.name for source in corpus.sources()}
    assert {"language reference", "standard library"} <= names
    assert any(document.name == "pydoc_data/topics.py:lambda" for document in documents)


def test_default_corpus_leaves_out_pythons_tests():
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for _, group in installed_files() for path, _ in group]
    assert 10_000_000 < sum(path.stat().st_size for path in files) <= 24_000_000
    for path in files:
        inside = path.relative_to(library).parts
        assert not {"test", "tests", "site-packages", "dist-packages"} & set(inside)
        assert not path.name.startswith("_sysconfigdata")


def test_default_corpus_skips_broken_links(tmp_path, monkeypatch):
    (tmp_path / "here.py").write_text("x = 1")
    (tmp_path / "gone.py").symlink_to(tmp_path / "absent")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert {name for _, group in installed_files() for _, name in group} == {"here.py"}


def test_draw_is_uniform_and_independent_per_purpose(tmp_path):
    rows = [{"text": str(i)} for i in range(4000)]
    documents = list(Corpus(write_jsonl(tmp_path / "a.jsonl", rows)))
    draws = [document.draw("a") for document in documents]
    assert sum(draw < 0.1 for draw in draws) == pytest.approx(400, abs=80)
    assert draws == [document.draw("a") for document in documents]
    both = sum(document.draw("a") < 0.5 and document.draw("b") < 0.5 for document in documents)
    assert both == pytest.approx(1000, abs=150)
