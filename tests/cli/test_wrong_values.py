"""Wrong paths and values in commands. Each command ends with a message and an exit code, without a
traceback.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cluster.process import Process
from cluster.state import JobState
from kit.cli.app import app
from kit.data import Dataset, build_dataset
from kit.errors import ConfigError, DataError
from kit.interop.weights.hugging_face import whole_folder
from tests.support.recorded_runs import recorded_run, say

PATHS = "nowhere", "file", "empty", "loop", "x" * 260, "file/inside", "~nobody-at-all/x", "a\udc80"
COMMANDS = """
status PATH
watch PATH
watch run --html PATH
watch run --html file/inside/PATH.html
logs PATH
stop PATH
checkpoint PATH
resume PATH
figure PATH
export PATH
export PATH --format tensorboard
calibrate PATH
validate --rows PATH
bench --apply PATH
runs . --compare PATH
launch new --model PATH.json
launch new --site PATH.toml
import PATH --format megatron --out new --site lumi
data build new --source PATH
figure run --out PATH.txt
figure run --out file/inside/PATH.png
figure frontier-memory --out PATH.txt
figure --out file
runs . --compare run --out PATH
export run --out file/inside/PATH
export run --out empty
"""
OF_WORDS = """
WORD
logs run --rank WORD
export run --format WORD
eval run --set limit=WORD
launch new --set WORD
launch new --set plan.tensor_parallel=WORD
launch new --steps WORD
plan WORD --site lumi --devices 8 --batch 8
data build new --max-megabytes WORD
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished run, an unrelated file, an empty folder, and a link that points to
    itself. The folder is the working directory.
    """
    recorded_run(tmp_path / "run", steps=30, state=JobState.DONE)
    (tmp_path / "file").write_text("plain text\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS.strip().splitlines())
def test_wrong_paths_give_a_message_not_a_traceback(words, place, answer) -> None:
    for path in PATHS:
        text = answer([word.replace("PATH", path) for word in words.split()])
        assert len(text) < 1500, text
    assert (place / "file").read_text() == "plain text\n" and not (place / "new").exists()


@pytest.mark.parametrize("words", OF_WORDS.strip().splitlines())
def test_wrong_values_give_a_message_not_a_traceback(words, place, answer) -> None:
    for word in ("", "nope", "-1", "nan", "[/b]", "x" * 300):
        answer([each.replace("WORD", word) for each in words.split()])
    assert not (place / "new").exists()


def test_site_file_of_bench_is_enough_for_a_plan(place, monkeypatch, capsys) -> None:
    def measured(site, dtype="fp32"):
        return site.with_measured_peak(dtype, 1e11, "here", 0.01)

    for module in ("kit.cli.machines", "kit.measure.site"):
        monkeypatch.setattr(f"{module}.measured_site", measured)
    monkeypatch.setattr("kit.measure.site.memory_bytes_per_s", lambda: 1e10)
    row = {"operation": "all_reduce", "ranks": 2, "bus_bytes_per_s": 1e9}
    monkeypatch.setattr("kit.measure.site.by_ranks", lambda module, num_processes: [row])
    app(["bench", "--out", "mine.toml"], standalone_mode=False)
    words = "plan demo --devices 2 --batch 8 --site mine.toml"
    app(words.split(), standalone_mode=False)
    said = capsys.readouterr()
    assert said.err.startswith("Measuring ") and "demo on 2 devices of mine" in said.out


def test_folder_created_meanwhile_is_not_replaced(tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="exists and is not empty"), whole_folder(out):
        out.mkdir()
        (out / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.fixture
def as_nobody():
    """Returns a function that changes the user of this process to nobody, until the test ends.
    Needs root.
    """
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    yield lambda: os.setresuid(65534, 65534, 0)
    os.setresuid(0, 0, 0)


@pytest.mark.parametrize("words", ["stop", "stop --now", "checkpoint"])
def test_commands_for_run_of_another_user_are_refused(words, tmp_path, as_nobody, answer) -> None:
    run = recorded_run(tmp_path / "run", steps=30)
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (run.directory / "control").mkdir(exist_ok=True)
    with subprocess.Popen(["sleep", "60"]) as job:
        ticks = int(Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = Process.current().replace(pid=job.pid, start_ticks=ticks)
        say(run, JobState.RUNNING, step=30, process=process)
        # The first call imports all modules while this process is root, since only root may be able
        # to read them.
        answer(f"{words} {tmp_path}")
        as_nobody()
        text = answer(f"{words} {run.directory}")
        os.setresuid(0, 0, 0)
        assert job.poll() is None, "it goes on"
        job.kill()
    assert "JobError" in text and "it belongs to root" in text


def test_data_build_errors_name_the_option_that_helps(tmp_path, monkeypatch, answer) -> None:
    monkeypatch.chdir(tmp_path)
    text = "the model is trained on %d tokens of data "
    rows = [json.dumps({"content": text % i * 9}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join([*rows, '{"content": "half']))
    build = "data build data --source text.jsonl --vocab-size 280 --json"
    assert "Name the one that holds the text: --text-key" in answer(build)
    build += " --text-key content"
    assert "--skip-corrupt" in answer(build)
    app([*build.split(), "--skip-corrupt"], standalone_mode=False)
    assert Dataset.open(tmp_path / "data").info.settings.text_key == "content"
    options = {"vocab_size": 280, "progress": False, "skip_corrupt": True}
    with pytest.raises(DataError, match="text_key: content there, text asked"):
        build_dataset(tmp_path / "data", tmp_path / "text.jsonl", **options)


def test_message_about_a_huge_value_keeps_its_start_and_end(answer, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "llama", "hidden_act": "x" * 300_000}))
    text = answer(f"plan {model} --site lumi --devices 8 --batch 64")
    assert text.startswith("ConfigError: ") and len(text) < 9_000
    assert "characters) … " in text and text.endswith(".")
