"""Source files as users have them. Every format is detected from the file's content, and files that
are not read are reported.
"""

import bz2
import csv
import gzip
import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.data import Dataset, build_dataset, readers
from kit.data.corpus import Corpus
from kit.data.dataset import DatasetInfo
from kit.errors import DataError
from tests.data.token_files import QUIET, contents

TEXTS = [f"document {hashlib.sha256(bytes([number])).hexdigest()} é" for number in range(9)]
ROWS = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
ARRAY = json.dumps([{"text": text} for text in TEXTS], indent=1).encode()
SPREAD = "\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS).encode()
SMALL = {**QUIET, "vocab_size": 280}


def num_documents(info: DatasetInfo) -> int:
    """Returns the number of documents of a dataset. A document that is divided between train and
    validation counts once.
    """
    return info.train.documents + info.validation.documents - info.cut


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


def texts(*given, **options) -> list[str]:
    return [document.text for document in Corpus(*given, **options)]


FILES = {
    "c4-train.00000-of-01024.json.gz": gzip.compress(ROWS),
    "data.json": ROWS,
    "data.ndjson": ROWS,
    "data.jsonl.zstd": zstd(ROWS),
    "data.zst": zstd(ROWS),
    "data.gz": gzip.compress(ROWS),
    "data.jsonl.bz2": bz2.compress(ROWS),
    "data.jsonl.xz": lzma.compress(ROWS),
    "part-00000": ROWS,
    "part.00001": ROWS,
    "not packed.jsonl.gz": ROWS,
    "packed.jsonl": gzip.compress(ROWS),
    "BOM.json": b"\xef\xbb\xbf" + ROWS,
    "array.json": ARRAY,
    "array.jsonl": ARRAY,
    "spread.jsonl.gz": gzip.compress(SPREAD),
    "array.json.gz": gzip.compress(ARRAY),
    "one line.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
    "spread.json": SPREAD,
}


@pytest.mark.parametrize("name", FILES)
def test_json_is_read_under_any_file_name(name, tmp_path):
    """The folder also has a dataset card and checksums, which are not read as documents."""
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / name).write_bytes(FILES[name])
    (folder / "README.md").write_text("A card. " * 2000)
    (folder / "SHA256SUMS").write_text("0" * 64 + f"  {name}\n")
    (folder / "_SUCCESS").touch()
    corpus = Corpus(folder)
    assert [document.text for document in corpus] == TEXTS == texts(folder / name)
    assert {unread.kind for unread in corpus.unread} == {"description", "marker"}


def test_feather_and_extensionless_parquet_are_read(tmp_path):
    table = pyarrow.table({"text": TEXTS})
    pyarrow.feather.write_feather(table, str(tmp_path / "a.arrow"))
    pyarrow.parquet.write_table(table, tmp_path / "b")
    assert texts(tmp_path / "a.arrow") == texts(tmp_path / "b") == TEXTS


@pytest.mark.parametrize("size", [300, 3_000_000])
def test_damaged_json_array_is_read_to_the_damage(tmp_path, size):
    file = tmp_path / "a.json"
    rows = [{"text": f"{number} " + "x" * size} for number in range(5)]
    file.write_text(json.dumps(rows, indent=1)[:-30])
    with pytest.raises(DataError, match=r"a\.json:5: not valid JSON .*what followed is lost"):
        texts(file)
    corpus = Corpus(file, skip_corrupt=True)
    assert [document.text for document in corpus] == [row["text"] for row in rows[:4]]
    assert len(corpus.skipped) == 1


def test_text_key_reaches_nested_objects(tmp_path):
    rows = [{"meta": {"text": text, "id": 1}, "a.b": text} for text in TEXTS]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    for file in (lines, tmp_path / "b.parquet"):
        assert texts(file, text_key="meta.text") == texts(file, text_key="a.b") == TEXTS
    with pytest.raises(DataError, match=r"under the key 'text' \(found: meta.text, meta.id, a.b\)"):
        texts(lines)


# Folders of source files --------------------------------------------------------------------------


def test_unread_files_of_a_folder_are_recorded(tmp_path):
    """The build prints and records unread files. If unread files have more bytes than the files
    that are read, `allow_unread` is required.
    """
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(ROWS * 30)  # the file has each document 30 times
    (folder / "b.json.gz").write_bytes(gzip.compress(ROWS.replace(b"document", b"leaf")))
    (folder / "c.csv").write_text("a,b\n" * 50)
    (folder / "config.json").write_text('{"version": 1}')
    (folder / ".hidden.jsonl").write_text("{}")
    dataset = build_dataset(tmp_path / "data", folder, **SMALL)
    assert num_documents(dataset.info) == 18
    (csv, config, hidden) = dataset.info.unread
    assert (csv.kind, csv.files, csv.size_bytes) == (".csv", 1, 200)
    assert csv.example == "mixed/c.csv"
    assert config.reason.startswith("JSON without 'text' (found: version)")
    assert hidden.kind == "hidden"
    facts = [text for name, text in dataset.facts() if name == "not read"]
    assert facts[0].startswith("1 file (.csv), 0.00 MB, such as mixed/c.csv: a table, not one text")
    assert Dataset.open(tmp_path / "data").info == dataset.info
    (folder / "c.csv").write_text("a,b\n" * 9000)
    message = r"[12] files? with 0.04 MB would not be read, beside 2 files with 0.0. MB that"
    with pytest.raises(DataError, match=message):
        Corpus(folder)
    assert len(texts(folder, allow_unread=True)) == 18


def test_git_lfs_pointers_are_refused(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3000000\n"
    for name in ("a.parquet", "b.json.gz", "c.txt"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(DataError, match="a pointer of Git LFS.*git lfs pull"):
            Corpus(tmp_path / name)
    (tmp_path / "README.md").write_text("# A card")
    with pytest.raises(DataError, match=r"no files to read.*\n.*3 files \(Git LFS\), 9.00 MB"):
        Corpus(tmp_path)
    (tmp_path / "d.jsonl").write_bytes(ROWS * 100_000)
    with pytest.raises(DataError, match="3 files with 9.00 MB would not be read"):
        Corpus(tmp_path)


def test_broken_and_outside_links_are_named(tmp_path):
    folder, other = tmp_path / "corpus", tmp_path / "other"
    for place in (folder, other):
        place.mkdir()
    (folder / "a.jsonl").write_bytes(ROWS)
    (folder / "b.jsonl").symlink_to(".git/annex/objects/b")
    with pytest.raises(DataError, match=r"1 file \(missing link\), .*which is missing \(git-annex"):
        Corpus(folder)
    (folder / "b.jsonl").unlink()
    (folder / "sub").symlink_to(other)
    with pytest.raises(DataError, match=r"sub: a link to .*other, which is not in this folder"):
        Corpus(folder)


def test_wrong_text_key_error_lists_the_keys(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(ROWS.replace(b'"text"', b'"body"')))
    (tmp_path / "README.md").write_text("A card")
    with pytest.raises(DataError, match=r"JSON without 'text' \(found: body\).*--text-key"):
        Corpus(tmp_path)
    assert texts(tmp_path, text_key="body") == TEXTS


def test_command_for_csv_files_makes_json_lines(tmp_path):
    """The command that the error message advises is run. The texts have line ends and quotes."""
    quoted = [[str(i), f'The "text" {i},\nwith\ttwo lines' + i * "é"] for i in (1, 200_000)]
    for end, delimiter in ((".csv", ","), (".tsv", "\t")):
        table = tmp_path / f"a{end}"
        with table.open("w", newline="") as stream:
            csv.writer(stream, delimiter=delimiter).writerows([["id", "body"], *quoted])
        with pytest.raises(DataError) as refused:
            Corpus(table)
        command = re.search(r"python -c '.*' < FILE > FILE.jsonl", str(refused.value))
        assert command
        shell = command[0].replace("python", sys.executable).replace("FILE", str(table))
        subprocess.run(shell, shell=True, check=True)
        assert texts(tmp_path / f"a{end}.jsonl", text_key="body") == [row[1] for row in quoted]


NO_TEXT = {
    "null": (None, "but null. Repair or remove it, or leave such documents out: --skip-corrupt"),
    "number": (7, "but 7"),
    "list": ([{"role": "user"}], "but a list. Write its text as one string under a key of its own"),
    "object": ({"a": {"b": "Text"}}, r"but an object \(found: text.a.b\). Name the one"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_value_that_is_no_text_gets_advice(name, tmp_path):
    value, message = NO_TEXT[name]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": value}) + "\n")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"text": value}]), tmp_path / "a.parquet"
    )
    for file in (tmp_path / "a.jsonl", tmp_path / "a.parquet"):
        with pytest.raises(DataError, match=message):
            texts(file)


def test_missing_text_key_error_lists_all_nested_keys(tmp_path):
    row = {"id": 1, "meta": {"content": {"text": "Text"}, "source": "web"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    for file in (tmp_path / "a.jsonl", tmp_path / "a.parquet"):
        with pytest.raises(DataError, match=r"found: id, meta.content.text, meta.source\).*Name"):
            texts(file)
        assert texts(file, text_key="meta.content.text") == ["Text"]


def test_files_without_extension_are_read_only_if_alone(tmp_path):
    for name in ("wiki_00", "wiki_01"):
        (tmp_path / name).write_text(f"text of {name}")
    assert texts(tmp_path) == ["text of wiki_00", "text of wiki_01"]
    (tmp_path / "a.txt").write_text("a document of text, longer than the two others, is read")
    corpus = Corpus(tmp_path)
    assert len(list(corpus)) == 1 and corpus.unread[0].files == 2


REFUSED = {
    "a.zip": (b"PK\x03\x04rest", "a zip archive. Unpack it"),
    "a.tar.gz": (gzip.compress(bytes(257) + b"ustar" + bytes(500)), "a tar archive. Unpack it"),
    "a.bin": (bytes(range(256)), "not text in UTF-8"),
    "a.tex": (b"\\section{}", "name it .txt"),
    "a.csv": (b"id,text\n1,One\n", "a table, not one text. Convert it to JSON lines: `python -c"),
    "a.tsv.gz": (gzip.compress(b"id\ttext\n1\tOne\n"), "a table, not one text. Convert it"),
    "a.idx": (b"MMIDIDX\0\0", "an index of token files"),
    "a.json": (b'{"text": ', "damaged JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_file_error_names_its_format(name, tmp_path):
    data, message = REFUSED[name]
    (tmp_path / name).write_bytes(data)
    for source in (tmp_path / name, tmp_path):
        if source == tmp_path and name == "a.tex":
            message = "not one of the formats that are read"
        with pytest.raises(DataError, match=message):
            Corpus(source)


# Text files of any size ---------------------------------------------------------------------------

STORIES = (
    "\n<|endoftext|>\n".join(["Once\n\nupon a time é", "Two.", "", "Three."]) + "<|endoftext|>"
)


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("pack", [None, gzip.compress], ids=["plain", "gz"])
def test_separator_splits_text_into_documents(tmp_path, monkeypatch, read_bytes, pack):
    """The result does not depend on the size of the blocks in which the file is read."""
    monkeypatch.setattr(readers, "READ_BYTES", read_bytes)
    file = tmp_path / ("stories.txt.gz" if pack else "stories.txt")
    file.write_bytes(pack(STORIES.encode()) if pack else STORIES.encode())
    documents = list(Corpus(file, separator="<|endoftext|>"))
    assert [it.text for it in documents] == ["Once\n\nupon a time é", "Two.", "Three."]
    assert documents[0].name == f"{file.name}:1"
    file = tmp_path / "blank.txt"
    file.write_bytes(b"one\r\nline\r\n\r\n  \r\ntwo\n\n\n\nthree\n")
    assert texts(file, separator="\n\n") == ["one\r\nline", "two", "three"]


def test_too_large_separated_document_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT_BYTES", 5000)
    monkeypatch.setattr(readers, "READ_BYTES", 1000)
    file = tmp_path / "a.txt"
    file.write_text("\n".join(["one", "x" * 5500, "two", "y" * 20_000 + "|", "three", "z" * 9000]))
    with pytest.raises(DataError, match=r"a\.txt:2: one document of 5,500 bytes"):
        texts(file, separator="\n")
    corpus = Corpus(file, separator="\n", skip_corrupt=True)
    assert [document.text for document in corpus] == ["one", "two", "three"]
    sizes = [line.split(" of ")[1].split(" ")[0] for line in corpus.skipped]
    assert sizes == ["5,500", "20,001", "9,000"]


def test_large_text_is_read_in_pieces(tmp_path):
    """The whole text is read in little memory. A line longer than a piece is split at a space or
    between two characters.
    """
    file = tmp_path / "text8.txt"
    lines = "".join(f"line {number} of a text é\n" for number in range(400_000))
    words = "".join(f"word{number} " for number in range(400_000))
    whole = lines + words + "".join(chr(0x4E00 + number % 20_000) for number in range(1_500_000))
    file.write_text(whole)
    assert len(whole.encode()) > readers.LARGEST_DOCUMENT_BYTES
    tracemalloc.start()
    corpus = Corpus(file)
    pieces = [document.num_bytes for document in corpus]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 << 20 and max(pieces) <= readers.PIECE_BYTES
    assert "".join(document.text for document in corpus) == whole
    assert corpus.counts["parts"] == len(pieces) > 16
    file.write_text(STORIES * 400_000)
    with pytest.raises(DataError, match=r"whose documents end with '<\|endoftext\|>'.*--separator"):
        texts(file)


def test_json_lines_named_txt_are_reported(tmp_path):
    (tmp_path / "a.txt").write_bytes(ROWS)
    built = build_dataset(tmp_path / "data", tmp_path / "a.txt", **SMALL)
    assert built.info.json_texts == 1
    assert any("name such files .jsonl" in text for _, text in built.facts())
    (tmp_path / "a.txt").write_bytes(ROWS * 30_000)
    with pytest.raises(DataError, match=r"a\.txt: holds JSON lines. Name it \.jsonl"):
        texts(tmp_path / "a.txt")


def test_end_of_text_marks_in_one_document_are_reported(tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(TEXTS))
    built = build_dataset(tmp_path / "data", tmp_path / "a.txt", **SMALL)
    assert built.info.marked == 1
    assert any("--separator '<|endoftext|>'" in text for _, text in built.facts())


@pytest.mark.parametrize("size", [1 << 20, (1 << 24) + 1, 1 << 40])
def test_nul_bytes_after_a_crash_are_reported(size, tmp_path):
    """The file is sparse: a terabyte of NUL bytes takes no disk space and almost no time to
    check.
    """
    file = tmp_path / "a.txt"
    with file.open("wb") as sparse:
        sparse.truncate(size)
    with pytest.raises(DataError, match="NUL bytes"):
        texts(file)
    file.write_bytes(b"good text\n" + bytes(4096))
    with pytest.raises(DataError, match=r"a\.txt: 4,096 NUL bytes at its end"):
        texts(file)
    corpus = Corpus(file, skip_corrupt=True)
    assert [document.text for document in corpus] == ["good text\n"]
    assert corpus.skipped == ["a.txt: 4,096 NUL bytes at its end, as a crash leaves them"]
    file.write_text("text", encoding="utf-16")
    with pytest.raises(DataError, match="not UTF-8 text but UTF-16. Convert it"):
        texts(file)
    file.write_bytes(b"good\nbad \0 text\n")
    with pytest.raises(DataError, match=r"a\.txt:2: not text: a NUL byte at byte 9"):
        texts(file)


def test_separated_text_build_is_equal_with_workers(tmp_path, monkeypatch):
    """Parts of the dataset can be built too."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(3):
        names = (f"{number} {i}".encode() for i in range(40))
        stories = [f"story {hashlib.sha256(name).hexdigest()}" for name in names]
        (folder / f"{number}.txt").write_text("<|end|>".join(stories))
    options = {**QUIET, "separator": "<|end|>"}
    whole = contents(build_dataset(tmp_path / "whole", folder, **options).directory)
    monkeypatch.setattr("kit.data.corpus.PIECE_BYTES", 1)
    shared = contents(build_dataset(tmp_path / "shared", folder, **options, workers=2).directory)
    assert shared == whole
    with pytest.raises(DataError, match=r"separator: <\|end\|> there, None asked"):
        build_dataset(tmp_path / "whole", folder, **QUIET)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(whole["tokenizer.json"])
    parts = [
        build_dataset(
            tmp_path / "parts", folder, tokenizer, progress=False, separator="<|end|>", part=(i, 2)
        )
        for i in (1, 2)
    ]
    assert [num_documents(part.info) for part in parts] == [80, 40]


def test_separator_without_text_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    with pytest.raises(DataError, match="separator: there is no text file"):
        Corpus(tmp_path, separator="|")


def test_data_build_accepts_a_separator(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS * 20))
    words = ["data", "build", str(tmp_path / "data"), "--source", str(tmp_path / "a.txt")]
    words += ["--vocab-size", "262", "--separator", r"\n\n"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    info = Dataset.open(tmp_path / "data").info
    assert (info.settings.separator, info.duplicates) == ("\n\n", 19 * 9)
    assert num_documents(info) == 9


def test_unreadable_file_is_named_and_can_be_skipped(tmp_path, monkeypatch):
    for name in ("a.jsonl", "b.jsonl", "c.json"):
        (tmp_path / name).write_bytes(ROWS)
    opened = Path.open

    def refuse(file: Path, *words, **given):
        if file.name != "a.jsonl":
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *words, **given)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read \(Permission denied\)"):
        texts(tmp_path)
    corpus = Corpus(tmp_path, skip_corrupt=True)
    assert len(list(corpus)) == len(TEXTS) and len(corpus.skipped) == 2


def test_unlistable_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")

    def scandir(place: str | Path):
        if Path(place).name == "closed":
            raise PermissionError(13, "Permission denied", str(place))
        return listed(place)

    listed = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"closed: cannot be listed \(Permission denied\)"):
        Corpus(tmp_path)
