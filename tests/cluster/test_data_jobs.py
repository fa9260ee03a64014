"""`kit data build --site`: the text shared out over the nodes of a job, on the real Slurm of the sandbox."""

import json
from pathlib import Path

import pytest

from cluster.job import Job
from cluster.state import JobError, JobState
from kit.commands.app import app
from kit.data import Dataset, build_dataset
from kit.errors import ConfigError


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        rows = [json.dumps({"text": f"document {number} {i} " + "word " * (i % 50)}) for i in range(50)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return folder


def build(out: Path, text: Path, tokenizer: Path, site: Path | str, *words: str) -> None:
    asked = ["data", "build", str(out), "--source", str(text), "--tokenizer", str(tokenizer), "--site", str(site)]
    app([*asked, *words], standalone_mode=False)


def test_ranks_of_a_job_build_what_one_process_does(sandbox, site, text, tmp_path, monkeypatch):
    monkeypatch.setattr("kit.data.build.PART_BYTES", 1)
    tokenizer = (
        build_dataset(tmp_path / "whole", text, vocab_size=260, workers=1, progress=False).directory / "tokenizer.json"
    )
    build_dataset(tmp_path / "again", text, tokenizer, progress=False, workers=1)
    build(tmp_path / "data", text, tokenizer, sandbox.site_file, "--nodes", "2", "--workers", "2")
    job = Job.attach(tmp_path / "data-build")
    with pytest.raises(JobError, match="in use"):
        build(tmp_path / "data", text, tokenizer, sandbox.site_file)
    assert job.wait(120).state is JobState.DONE, job.logs()
    assert job.spec.num_nodes == 2
    for file in (tmp_path / "again").iterdir():
        assert (tmp_path / "data" / file.name).read_bytes() == file.read_bytes(), file.name
    Dataset.open(tmp_path / "data").verify()
    assert not list(tmp_path.glob(".*.building"))
    build(tmp_path / "data", text, tokenizer, sandbox.site_file)  # it is there: no job
    assert Job.attach(tmp_path / "data-build").status().attempt == 1


def test_what_a_job_cannot_read_ends_it_with_the_reason(sandbox, site, text, tmp_path, monkeypatch):
    monkeypatch.setattr("kit.data.build.PART_BYTES", 1)
    tokenizer = (
        build_dataset(tmp_path / "whole", text, vocab_size=260, workers=1, progress=False).directory / "tokenizer.json"
    )
    with (text / "5.jsonl").open("a") as stream:
        stream.write('\n{"text"')
    build(tmp_path / "data", text, tokenizer, sandbox.site_file, "--nodes", "2")
    status = Job.attach(tmp_path / "data-build").wait(120)
    assert status.state is JobState.FAILED and "5.jsonl:51: not valid JSON" in status.reason and status.attempt == 1


def test_what_no_job_can_build_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="this machine alone. Leave it out and give --workers"):
        build(tmp_path / "data", text, tmp_path, "laptop")
    with pytest.raises(ConfigError, match="give --source, and --tokenizer"):
        app(["data", "build", str(tmp_path / "data"), "--site", "frontier"], standalone_mode=False)
    tokenizer = build_dataset(tmp_path / "a" / "whole", text, vocab_size=260, progress=False).directory
    with pytest.raises(ConfigError, match="site.slurm.account: still 'EDIT'"):
        build(tmp_path / "data", text, tokenizer, "frontier")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "text"]
