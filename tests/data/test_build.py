"""A build in parts: whoever does them, and whoever is killed at it, the dataset's bytes are the same."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.data import Dataset, build_dataset
from kit.data.pieces import Work
from kit.errors import DataError

QUIET = {"vocab_size": 330, "validation_fraction": 0.2, "progress": False}
FILES, EACH = 5, 40
SMALL = {"kit.data.build.PART_BYTES": 1, "kit.data.lead.BLOCK_BYTES": 3000}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Five files of 40 documents, of which every tenth stands in all of them, and one twice in the first."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(FILES):
        words = [hashlib.sha256(f"{number if i % 10 else ''} {i}".encode()).hexdigest()[: 20 + i] for i in range(EACH)]
        rows = [json.dumps({"text": f"document {word} é"}) for word in (words[:1] * (number == 0) + words)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> dict[str, bytes]:
    """The dataset from one part."""
    return contents(build_dataset(tmp_path_factory.mktemp("data") / "whole", text, **QUIET))


@pytest.fixture
def in_parts(monkeypatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)


def contents(dataset: Dataset) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in dataset.directory.iterdir()}


@pytest.mark.parametrize("workers", [1, 3])
def test_parts_and_processes_leave_no_trace(whole, text, tmp_path, in_parts, monkeypatch, workers):
    monkeypatch.setattr("kit.data.pieces.RUN_BYTES", 500)
    monkeypatch.setattr("kit.data.pieces.CHUNK_BYTES", 300)
    built = build_dataset(tmp_path / "data", text, **QUIET, workers=workers)
    assert contents(built) == whole and built.info.duplicates == 4 * (FILES - 1) + 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "nothing is left over"


def test_a_limit_and_the_default_corpus_are_one_part(text, tmp_path, in_parts):
    limit = {**QUIET, "max_bytes": 4000, "vocab_size": 300}
    built = build_dataset(tmp_path / "data", text, **limit, workers=4)
    assert 3500 < built.info.train.text_bytes + built.info.validation.text_bytes <= 4000


@pytest.mark.parametrize("stage", ["survey", "encode", "block"])
def test_what_was_done_before_a_kill_is_not_done_again(whole, text, tmp_path, in_parts, monkeypatch, stage):
    done, do = [], Work.do

    def killed(work: Work, name: str, number: int, advance) -> None:
        if (name, number) == (stage, 2):
            raise KeyboardInterrupt
        do(work, name, number, advance)

    def noted(work: Work, name: str, number: int, advance) -> None:
        done.append((name, number))
        do(work, name, number, advance)

    monkeypatch.setattr(Work, "do", killed)
    with pytest.raises(KeyboardInterrupt):
        build_dataset(tmp_path / "data", text, **QUIET, workers=1)
    monkeypatch.setattr(Work, "do", noted)
    assert contents(build_dataset(tmp_path / "data", text, **QUIET, workers=1)) == whole
    before = ("survey", "encode", "block").index(stage)
    assert done[0] == (stage, 2) and {name for name, _ in done} == set(("survey", "encode", "block")[before:])


def test_a_killed_build_goes_on_and_its_processes_end(whole, text, tmp_path):
    """SIGKILL at the first encoded part; the processes beside it see that their parent has gone."""
    code = (
        "import kit.data.build, kit.data.lead, sys; kit.data.build.PART_BYTES = 1; kit.data.lead.BLOCK_BYTES = 3000\n"
        f"kit.data.build_dataset(sys.argv[1], sys.argv[2], **{QUIET}, workers=2)"
    )
    build = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "data"), str(text)])
    folder, deadline = tmp_path / ".data.building", time.monotonic() + 60
    while not list(folder.glob("encode-*.json")):
        assert time.monotonic() < deadline and build.poll() is None
        time.sleep(0.002)
    children = Path(f"/proc/{build.pid}/task/{build.pid}/children").read_text().split()
    build.kill()
    build.wait()
    assert len(children) == 1
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = {file: file.stat().st_mtime_ns for file in folder.glob("encode-*.json")}
    assert not (tmp_path / "data").exists() and done
    with pytest.MonkeyPatch.context() as small:
        for name, value in SMALL.items():
            small.setattr(name, value)
        small.setattr("kit.data.build.shutil.rmtree", lambda *_, **__: None)
        build_dataset(tmp_path / "data", text, **QUIET, workers=1)
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert contents(Dataset.open(tmp_path / "data")) == whole


def test_something_else_asked_begins_anew(text, tmp_path, in_parts, monkeypatch):
    def fail(*_) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as killed, contextlib.suppress(KeyboardInterrupt):
        killed.setattr("kit.data.lead._assemble", fail)
        build_dataset(tmp_path / "data", text, **QUIET, workers=1)
    assert list(tmp_path.glob(".data.building/block-*.json"))
    built = build_dataset(tmp_path / "data", text, **{**QUIET, "validation_fraction": 0.5}, workers=1)
    assert built.info.settings.validation_fraction == 0.5 and 60 < built.info.validation.documents < 130


def test_what_another_process_cannot_read_is_told(text, tmp_path, in_parts):
    source = tmp_path / "text"
    source.mkdir()
    for number in range(2):
        (source / f"{number}.jsonl").write_bytes((text / f"{number}.jsonl").read_bytes())
    with (source / "1.jsonl").open("a") as stream:
        stream.write('\n{"text"')
    with pytest.raises(DataError, match="1.jsonl:41: not valid JSON"):
        build_dataset(tmp_path / "data", source, **QUIET, workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_process_that_has_gone_is_told(text, tmp_path, in_parts, monkeypatch):
    class Killed(subprocess.Popen):
        def __init__(self, *words, **given) -> None:
            super().__init__(*words, **given)
            os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr("kit.data.team.subprocess.Popen", Killed)
    with pytest.raises(DataError, match="ended with code -9.* Build again: it goes on where it was"):
        build_dataset(tmp_path / "data", text, **QUIET, workers=2)
    with pytest.raises(DataError, match="workers: 0 is not allowed"):
        build_dataset(tmp_path / "data", text, **QUIET, workers=0)


def test_a_log_is_told_the_time_left(text, tmp_path, in_parts, monkeypatch, capsys):
    monkeypatch.setattr("kit.data.team.TELL_EVERY_S", 0)
    build_dataset(tmp_path / "data", text, **{**QUIET, "progress": True}, workers=1)
    assert re.search(r"^Encoding: 0.00 of 0.00 GB, 0 min left$", capsys.readouterr().out, re.MULTILINE)
