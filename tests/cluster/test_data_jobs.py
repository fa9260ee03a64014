"""`kit data build --part=all/N --site`: a Slurm array with one task for each part of a dataset."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.state import JobError
from kit.cli.app import app
from kit.data import Dataset, build_dataset
from kit.errors import ConfigError, DataError
from tests.cluster.jobs import occupy
from tests.support.waiting import eventually


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        texts = [f"document {number} {i} " + "word " * (i % 50) for i in range(50)]
        lines = (json.dumps({"text": text}) for text in texts)
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def build(text, tmp_path) -> Callable[..., None]:
    """Returns a function that builds a dataset from the files in `text` into a folder, with the
    command `kit data build`.
    """
    sample = build_dataset(tmp_path / "sample", text, vocab_size=260, progress=False)
    given = f"--source {text} --tokenizer {sample.directory}/tokenizer.json"
    given += " --validation-fraction=.1"

    def run(out: Path, *words: str) -> None:
        app(["data", "build", str(out), *given.split(), *words], standalone_mode=False)

    return run


def test_slurm_array_rebuilds_only_failed_parts(sandbox, text, build, tmp_path, capsys):
    """Parts built by a Slurm array equal parts built by this process.

    A part is submitted again if its task was cancelled or could not read its files. Finished parts
    are not built again.
    """
    data, told = tmp_path / "data", f"--site={sandbox.site_file}"
    whole = (text / "5.jsonl").read_text()
    (text / "5.jsonl").write_text(whole + '\n{"text"')
    other = occupy(sandbox, 600)
    build(data, "--part=all/3", told)
    array = capsys.readouterr().out.split("3 parts of 3 sent as job ")[1].split(";")[0]
    with pytest.raises(JobError, match=f"job {array} of this folder is still in the queue"):
        build(data, "--part=all/3", told)
    sandbox.run("scancel", f"{array}_1", other)
    assert eventually(lambda: not sandbox.run("squeue", "--noheader"), 120)
    assert "5.jsonl:51: not valid JSON" in (data / "logs" / "task-3.log").read_text()
    assert sorted(path.name for path in data.iterdir()) == ["array.sh", "logs", "part_2_of_3"]
    (text / "5.jsonl").write_text(whole)
    build(data, "--part=all/3", told)
    said = capsys.readouterr()
    assert "2 parts of 3 sent as job" in said.out
    assert "Part 3 was not built by an earlier job." in said.err
    assert "5.jsonl:51: not valid" in said.err
    assert eventually(lambda: not sandbox.run("squeue", "--noheader"), 120)
    for number in (1, 2, 3):
        build(tmp_path / "here", f"--part={number}/3")
        there = data / f"part_{number}_of_3"
        Dataset.open(there).verify()
        for file in (tmp_path / "here" / there.name).iterdir():
            assert (there / file.name).read_bytes() == file.read_bytes(), file
    build(data, "--part=all/3", told)
    assert "All 3 parts are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("TOKENIZER --site=frontier", "--part: .*Give I/N, such as 3/12, or all/N with --site"),
        ("TOKENIZER --part=all/3", "--part: .*Give I/N, such as 3/12, or all/N with --site"),
        ("TOKENIZER --part=3", "--part: .*Give I/N"),
        ("TOKENIZER --part=all/0 --site=frontier", "--part: .*Give I/N"),
        ("TOKENIZER --part=1/3 --site=frontier", "--part: .*Give I/N"),
        ("TOKENIZER --part=all/1 --site=laptop", "--site laptop: parts are built on Slurm, by"),
        ("TOKENIZER --part=all/1 --site=frontier", "site.slurm.account: still 'EDIT'"),
        ("--part=all/1 --site=frontier", "part: give one --tokenizer to all"),
    ],
)
def test_invalid_part_or_site_of_a_build_is_refused(
    tiny_dataset, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words")
    words = words.replace("TOKENIZER", f"--tokenizer={tiny_dataset.directory}/tokenizer.json")
    with pytest.raises((ConfigError, DataError), match=message):
        app(["data", "build", "data", "--source=text.txt", *words.split()], standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
