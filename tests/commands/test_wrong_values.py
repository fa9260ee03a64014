"""Whatever is typed: every command answers in a sentence, with its own exit code, and never with
a traceback.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.process import Process
from cluster.state import JobState
from kit.__main__ import main
from kit.commands.app import app
from kit.convert.whole_folder import whole_folder
from kit.errors import ConfigError, DataError
from kit.spec import ModelSpec
from tests.monitor.recorded import recorded_run, say

PATHS = (
    "nowhere",
    "file",
    "empty",
    "loop",
    "x" * 260,
    "file/inside",
    "~nobody-of-this-name/x",
    "a\udc80",
)
READERS = [
    [command, "PATH"]
    for command in (
        "status",
        "watch",
        "logs",
        "stop",
        "checkpoint",
        "resume",
        "figure",
        "export",
        "calibrate",
    )
] + [
    ["validate", "--rows", "PATH"],
    ["bench", "--apply", "PATH"],
    ["runs", ".", "--compare", "PATH"],
    ["export", "PATH", "--format", "tensorboard"],
    ["launch", "new", "--model", "PATH.json"],
    ["import", "PATH", "--format", "megatron", "--out", "new", "--site", "lumi"],
    ["launch", "new", "--site", "PATH.toml"],
    ["data", "build", "new", "--source", "PATH"],
]
WRITERS = [
    ["figure", "run", "--out", "PATH.txt"],
    ["figure", "run", "--out", "file/inside/PATH.png"],
    ["figure", "frontier-memory", "--out", "PATH.txt"],
    ["runs", ".", "--compare", "run", "--out", "PATH"],
    ["export", "run", "--out", "file/inside/PATH"],
    ["export", "run", "--out", "empty"],
    ["figure", "--out", "file"],
]
WORDS = [
    ["logs", "run", "--rank", "WORD"],
    ["export", "run", "--format", "WORD"],
    ["eval", "run", "--set", "limit=WORD"],
    ["launch", "new", "--set", "WORD"],
    ["launch", "new", "--set", "plan.tensor_parallel=WORD"],
    ["WORD"],
    ["launch", "new", "--steps", "WORD"],
    ["plan", "WORD", "--site", "lumi", "--devices", "8", "--batch", "8"],
    ["data", "build", "new", "--max-megabytes", "WORD"],
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that has ended, a file that is none of ours, an empty folder and a
    link to itself.
    """
    recorded_run(tmp_path / "run", steps=30, state=JobState.DONE)
    (tmp_path / "file").write_text("plain text\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """Returns what a command that must fail has said; an exception that is told by a traceback
    comes out of here.
    """
    monkeypatch.setattr(sys, "argv", ["kit", *words])
    with pytest.raises(SystemExit) as end:
        main()
    text = capsys.readouterr().err
    assert end.value.code in (1, 2) and text.strip() and "Traceback" not in text, words
    return " ".join(text.split())


@pytest.mark.parametrize("words", [*READERS, *WRITERS], ids=" ".join)
def test_wrong_paths_are_told_in_a_sentence(
    words: list[str], place: Path, monkeypatch, capsys
) -> None:
    for path in PATHS:
        text = said([word.replace("PATH", path) for word in words], monkeypatch, capsys)
        assert len(text) < 1500, text
    assert (place / "file").read_text() == "plain text\n" and not (place / "new").exists()


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_wrong_words_are_told_in_a_sentence(
    words: list[str], place: Path, monkeypatch, capsys
) -> None:
    for word in ("", "nope", "-1", "nan", "[/b]", "x" * 300):
        said([each.replace("WORD", word) for each in words], monkeypatch, capsys)
    assert not (place / "new").exists()


PLAN = ["plan", "demo", "--devices", "2", "--batch", "8", "--site"]
REFUSED = [
    (
        ["launch", "new", "--data", "run"],
        "not a dataset (dataset.json is missing). Give a folder made by `kit data build`",
    ),
    (["launch", "new", "--data", "file"], "Give a folder made by `kit data build`"),
    (
        ["launch", "new", "--data", "nowhere"],
        "nowhere: not a dataset, but empty or absent. Build it: kit data build /",
    ),
    (["launch", "new", "--minutes", "-1"], "--minutes -1: not allowed. Give a number above 0"),
    (["resume", "run", "--minutes", "nan"], "--minutes nan: not allowed. Give a number above 0"),
    (["validate", "--calibrate", "3"], "--calibrate 3: only with --rows FILE"),
    ([*PLAN, "frontier", "--tokens", "-5"], "which takes 2,048. Give more"),
    ([*PLAN, "laptop"], "measure them (`kit bench --out FILE.toml`)"),
    (["data", "build", "new", "--source", "nowhere.txt"], "no such file or folder. Give text"),
    (
        ["data", "build", "new", "--source", "file", "--tokenizer", "empty"],
        "finds none. Give a tokenizer.json",
    ),
    (["eval", "empty"], "empty: neither a run directory (no spec.json) nor a Hugging Face folder"),
    (["stop", "run"], "Go on with `kit resume run --steps N`."),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=str)
def test_a_refusal_says_what_to_do_instead(
    words: list[str], message: str, place: Path, monkeypatch, capsys
) -> None:
    # All of its steps.
    monkeypatch.setattr("kit.run.checkpoint.Checkpoints.steps", lambda self: [10**6])
    assert message in said(words, monkeypatch, capsys) and not (place / "new").exists()


def test_what_bench_site_measures_is_enough_for_a_plan(place: Path, monkeypatch, capsys) -> None:
    for module in ("kit.commands.machines", "kit.measure.site"):
        monkeypatch.setattr(
            f"{module}.measured_site",
            lambda site, dtype="fp32": site.with_measured_peak(dtype, 1e11, "here", 0.01),
        )
    monkeypatch.setattr("kit.measure.site.memory_bytes_per_s", lambda: 1e10)
    row = {"operation": "all_reduce", "ranks": 2, "bus_bytes_per_s": 1e9}
    monkeypatch.setattr("kit.measure.site.by_ranks", lambda module, num_processes: [row])
    app(["bench", "--out", "mine.toml"], standalone_mode=False)
    app([*PLAN, "mine.toml"], standalone_mode=False)
    said = capsys.readouterr()
    assert said.err.startswith("Measuring ") and "demo on 2 devices of mine" in said.out


def test_a_folder_that_somebody_else_made_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="exists and is not empty"),
        whole_folder(tmp_path / "out"),
    ):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.fixture
def as_nobody():
    """A function that makes this process somebody else's, until the test ends; needs root."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    yield lambda: os.setresuid(65534, 65534, 0)
    os.setresuid(0, 0, 0)


@pytest.mark.parametrize("words", [["stop"], ["stop", "--now"], ["checkpoint"]], ids=" ".join)
def test_a_run_of_somebody_else_is_left_to_them(
    words: list[str], tmp_path: Path, as_nobody, monkeypatch, capsys
) -> None:
    run = recorded_run(tmp_path / "run", steps=30)
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (run.directory / "control").mkdir(exist_ok=True)
    with subprocess.Popen(["sleep", "60"]) as job:
        ticks = int(Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[19])
        say(
            run,
            JobState.RUNNING,
            step=30,
            process=Process.current().replace(pid=job.pid, start_ticks=ticks),
        )
        said([*words, str(tmp_path)], monkeypatch, capsys)  # what it imports may be root's alone
        as_nobody()
        text = said([*words, str(run.directory)], monkeypatch, capsys)
        os.setresuid(0, 0, 0)
        assert job.poll() is None, "it goes on"
        job.kill()
    assert "JobError" in text and "the run belongs to root" in text


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("llama3-70b", "Did you mean 'hlat-70b'?"),
        ("llama2-7b", "Did you mean 'hlat-7b'?"),
        ("gpt3-175B", "Did you mean 'gpt-175b'?"),
        ("dmeo", "Did you mean 'demo'?"),
        ("llama-13b", "None has 13B"),
    ],
)
def test_an_unknown_model_is_answered_by_one_of_its_size(name: str, advice: str) -> None:
    with pytest.raises(Exception, match=advice):
        ModelSpec.preset(name)


def test_text_under_another_key_and_broken_lines_are_a_matter_of_options(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    from kit.data import Dataset

    monkeypatch.chdir(tmp_path)
    rows = [
        json.dumps({"content": f"the model is trained on {i} tokens of data " * 9})
        for i in range(40)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join([*rows, '{"content": "half']))
    build = ["data", "build", "data", "--source", "text.jsonl", "--vocab-size", "280", "--json"]
    assert "Name the one that holds the text: --text-key" in said(build, monkeypatch, capsys)
    assert "--skip-corrupt" in said([*build, "--text-key", "content"], monkeypatch, capsys)
    monkeypatch.setattr(sys, "argv", ["kit", *build, "--text-key", "content", "--skip-corrupt"])
    with pytest.raises(SystemExit) as end:
        main()
    dataset = Dataset.open(tmp_path / "data")
    assert end.value.code == 0 and dataset.info.settings.text_key == "content"
    with pytest.raises(DataError, match="text_key: content there, text asked"):
        from kit.data import build_dataset

        build_dataset(
            tmp_path / "data",
            tmp_path / "text.jsonl",
            vocab_size=280,
            progress=False,
            skip_corrupt=True,
        )
