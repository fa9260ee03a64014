"""A dataset that is built in many small pieces is equal, byte for byte, to a dataset built in one
piece. Each part of a dataset is a dataset too.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.process import child_pids
from kit.data import Dataset, build_dataset
from kit.data.build import unbuilt_parts
from kit.errors import DataError
from tests.data.token_files import QUIET, contents, documents

FILES, EACH = 5, 40
SMALL = {
    "corpus.PIECE_BYTES": 1,
    "external_sort.RUN_TOKENS": 125,
    "external_sort.BATCH_TOKENS": 60,
    "steps.CHUNK_BYTES": 300,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Returns a folder with five files of about 40 documents. Every tenth document is in all files.
    The first file has one document twice.
    """
    folder = tmp_path_factory.mktemp("text")
    for number in range(FILES):
        names = [f"{number if i % 10 else ''} {i}".encode() for i in range(EACH)]
        words = [hashlib.sha256(name).hexdigest()[: 20 + i] for i, name in enumerate(names)]
        words = words[:1] * (number == 0) + words
        rows = [json.dumps({"text": f"document {word} é"}) for word in words]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> dict[str, bytes]:
    """Returns the files of a dataset that is built in one piece, by name."""
    folder = tmp_path_factory.mktemp("data") / "whole"
    return contents(build_dataset(folder, text, **QUIET).directory)


@pytest.fixture
def in_pieces(monkeypatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(f"kit.data.{name}", value)


@pytest.mark.parametrize("workers", [1, 8])
def test_dataset_does_not_depend_on_pieces_and_workers(whole, text, tmp_path, in_pieces, workers):
    built = build_dataset(tmp_path / "data", text, **QUIET, workers=workers)
    assert contents(built.directory) == whole and built.info.duplicates == 4 * (FILES - 1) + 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "nothing is left over"


def test_build_with_several_workers_respects_max_bytes(text, tmp_path, in_pieces):
    limit = {**QUIET, "max_bytes": 4000, "vocab_size": 300}
    built = build_dataset(tmp_path / "data", text, **limit, workers=4)
    assert 3500 < built.info.train.text_bytes + built.info.validation.text_bytes <= 4000


def test_killed_build_can_be_repeated_and_workers_end(whole, text, tmp_path, capsys):
    """SIGKILL ends the build at the first encoded piece. The worker processes end because their
    parent no longer exists.
    """
    code = (
        "import kit.data.corpus, sys\n"
        "kit.data.corpus.PIECE_BYTES = 1\n"
        f"kit.data.build_dataset(sys.argv[1], sys.argv[2], **{QUIET}, workers=2)"
    )
    build = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "data"), str(text)])
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".data.building-*/piece-*-validation.jsonl")):
        assert time.monotonic() < deadline and build.poll() is None
        time.sleep(0.002)
    children = child_pids(build.pid)
    build.kill()
    build.wait()
    assert children and not (tmp_path / "data").exists()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (left,) = tmp_path.iterdir()
    built = build_dataset(tmp_path / "data", text, **QUIET | {"progress": True}, workers=1)
    assert contents(built.directory) == whole
    assert f"{left}: of a build that runs now, or of one that was killed" in capsys.readouterr().out


def test_damage_found_by_a_worker_is_named(text, tmp_path, in_pieces):
    source = Path(shutil.copytree(text, tmp_path / "text"))
    with (source / "1.jsonl").open("a") as stream:
        stream.write('\n{"text"')
    with pytest.raises(DataError, match="1.jsonl:41: not valid JSON"):
        build_dataset(tmp_path / "data", source, **QUIET, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_killed_worker_is_reported(text, tmp_path, in_pieces, monkeypatch):
    class Killed(subprocess.Popen):
        def __init__(self, *words, **given) -> None:
            super().__init__(*words, **given)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr("kit.data.workers.subprocess.Popen", Killed)
    with pytest.raises(DataError, match="ended with code -9.* Build again on fewer cores"):
        build_dataset(tmp_path / "data", text, **QUIET, workers=2)
    with pytest.raises(DataError, match="workers: 0 is not allowed"):
        build_dataset(tmp_path / "data", text, **QUIET, workers=0)


def test_build_log_shows_the_time_left(text, tmp_path, in_pieces, monkeypatch, capsys):
    monkeypatch.setattr("kit.data.workers.LOG_INTERVAL_S", 0)
    build_dataset(tmp_path / "data", text, **QUIET | {"progress": True}, workers=1)
    told = capsys.readouterr().out
    assert re.search(r"^Encoding: 0.00 of 0.00 GB, 0 min left$", told, re.MULTILINE)


@pytest.fixture
def tokenizer(whole, tmp_path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(whole["tokenizer.json"])
    return tmp_path / "tokenizer.json"


def test_parts_together_equal_the_whole_dataset(whole, text, tmp_path, tokenizer):
    """All parts put the same documents into the validation set. A document that occurs in the
    source files of two parts is in both parts.
    """

    def built(name: str, part: tuple[int, int] | None) -> Dataset:
        given = {"validation_fraction": 0.2, "progress": False, "part": part}
        return build_dataset(tmp_path / name, text, tokenizer, **given)

    def trained(part: Dataset) -> set[tuple[int, ...]]:
        return set(map(tuple, documents(part.train)))

    parts = [built("data", (i, 3)) for i in (1, 2, 3)]
    assert [part.directory.name for part in parts] == [f"part_{i}_of_3" for i in (1, 2, 3)]
    assert [part.info.settings.sources[0].files for part in parts] == [2, 2, 1]
    held_out = [{row.text for row in part.validation_documents()} for part in parts]
    expected = {row["text"] for row in map(json.loads, whole["validation.jsonl"].splitlines())}
    assert set.union(*held_out) == expected
    alone, in_parts = built("whole", None), [trained(part) for part in parts]
    assert set.union(*in_parts) == trained(alone)
    repeated = 2 * len(set.intersection(*in_parts))
    assert sum(map(len, in_parts)) == alone.train.num_documents + repeated
    assert contents(built("again", (2, 3)).directory) == contents(parts[1].directory)


def test_incompatible_parts_are_refused(text, tmp_path, tokenizer):
    def refused(message: str, part: tuple[int, int], tokenizer: Path | None = tokenizer) -> None:
        with pytest.raises(DataError, match=message):
            build_dataset(tmp_path / "data", text, tokenizer, progress=False, part=part)

    for part in ((0, 3), (4, 3), (1, 6)):
        refused(f"part: {part[0]}/{part[1]} of 5 files is not allowed. Give I/N", part)
    refused("part: give one --tokenizer to all", (1, 3), None)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    (tmp_path / "data" / "part_1_of_4").mkdir(parents=True)
    refused(
        "part_1_of_4: belongs to a build with another number of parts. In a build with 3 parts",
        (1, 3),
    )


def test_only_missing_parts_are_listed_as_unbuilt(text, tmp_path, tokenizer):
    """A part counts as built if its settings and the names and sizes of its source files are equal.
    A part with other settings is refused, as any dataset is.
    """
    source = Path(shutil.copytree(text, tmp_path / "text"))
    asked = {
        "sources": source,
        "tokenizer": tokenizer,
        "vocab_size": None,
        "max_bytes": None,
        "validation_fraction": 0.2,
        "seed": 1234,
        "skip_corrupt": False,
        "text_key": "text",
    }
    assert unbuilt_parts(tmp_path / "data", 3, False, **asked) == [1, 2, 3]
    build_dataset(tmp_path / "data", progress=False, part=(2, 3), **asked)
    assert unbuilt_parts(tmp_path / "data", 3, False, **asked) == [1, 3]
    for changed in (asked | {"seed": 1}, asked | {"sources": [source / "0.jsonl", source]}):
        refused = "part_2_of_3: holds a dataset with other settings: (seed|sources)"
        with pytest.raises(DataError, match=refused):
            unbuilt_parts(tmp_path / "data", 3, False, **changed)
        assert unbuilt_parts(tmp_path / "data", 3, True, **changed) == [1, 2, 3]
