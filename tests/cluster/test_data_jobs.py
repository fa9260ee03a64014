"""`kit data build --part all/N --site`: a node for each part, on the real Slurm of the sandbox."""

import json
from pathlib import Path

import pytest

from cluster.state import JobError
from kit.commands.app import app
from kit.data import Dataset, build_dataset
from kit.errors import ConfigError, DataError
from tests.cluster.jobs import occupy
from tests.cluster.waiting import eventually


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        rows = [
            json.dumps({"text": f"document {number} {i} " + "word " * (i % 50)}) for i in range(50)
        ]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def tokenizer(text, tmp_path) -> Path:
    return (
        build_dataset(tmp_path / "sample", text, vocab_size=260, progress=False).directory
        / "tokenizer.json"
    )


def build(out: Path, text: Path, tokenizer: Path, *words: str) -> None:
    asked = [
        "data",
        "build",
        str(out),
        "--source",
        str(text),
        "--tokenizer",
        str(tokenizer),
        "--validation-fraction=.1",
    ]
    app([*asked, *words], standalone_mode=False)


def test_a_site_builds_the_parts_and_what_was_lost_again(
    sandbox, site, text, tokenizer, tmp_path, capsys
):
    """As one by one here.

    A task that is cancelled and one that cannot read its files are sent again, no others.
    """
    data, told = tmp_path / "data", f"--site={sandbox.site_file}"
    whole = (text / "5.jsonl").read_text()
    (text / "5.jsonl").write_text(whole + '\n{"text"')
    other = occupy(sandbox, 600)
    build(data, text, tokenizer, "--part=all/3", told)
    array = capsys.readouterr().out.split("3 parts of 3 sent as job ")[1].split(";")[0]
    with pytest.raises(JobError, match=f"job {array} of this folder is still in the queue"):
        build(data, text, tokenizer, "--part=all/3", told)
    sandbox.run("scancel", f"{array}_1", other)
    assert eventually(lambda: not sandbox.run("squeue", "--noheader"), 120)
    assert "5.jsonl:51: not valid JSON" in (data / "logs" / "task-3.log").read_text()
    assert sorted(path.name for path in data.iterdir()) == ["array.sh", "logs", "part_2_of_3"]
    (text / "5.jsonl").write_text(whole)
    build(data, text, tokenizer, "--part=all/3", told)
    assert "2 parts of 3 sent as job" in capsys.readouterr().out
    assert eventually(lambda: not sandbox.run("squeue", "--noheader"), 120)
    for number in (1, 2, 3):
        build(tmp_path / "here", text, tokenizer, f"--part={number}/3")
        there = data / f"part_{number}_of_3"
        Dataset.open(there).verify()
        for file in (tmp_path / "here" / there.name).iterdir():
            assert (there / file.name).read_bytes() == file.read_bytes(), file
    build(data, text, tokenizer, "--part=all/3", told)
    assert "All 3 parts are in" in capsys.readouterr().out


def test_what_no_site_can_build_is_refused(text, tokenizer, tmp_path):
    data = tmp_path / "data"
    for words in (
        "--site=frontier",
        "--part=all/3",
        "--part=3",
        "--part=all/0 --site=frontier",
        "--part=1/3 --site=frontier",
    ):
        with pytest.raises(
            ConfigError,
            match="--part: .* is not allowed. Give I/N, such as 3/12, or all/N with --site",
        ):
            build(data, text, tokenizer, *words.split())
    with pytest.raises(
        ConfigError, match="--site laptop: parts are built on Slurm, by this command"
    ):
        build(data, text, tokenizer, "--part=all/3", "--site=laptop")
    with pytest.raises(DataError, match="part: give one --tokenizer to all"):
        app(["data", "build", str(data), "--part=all/3", "--site=frontier"], standalone_mode=False)
    with pytest.raises(ConfigError, match="site.slurm.account: still 'EDIT'"):
        build(data, text, tokenizer, "--part=all/3", "--site=frontier")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sample", "text"]
