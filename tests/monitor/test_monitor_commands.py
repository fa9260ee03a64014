"""The commands runs, export and import, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.foreign.logs import frontier
from tests.monitor.test_runs import make


def kit(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "kit", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_import_then_runs_then_export_and_compare(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(frontier())
    options = ["--format", "megatron", "--site", "frontier", "--json", "--out"]
    answer = kit("import", "train.log", *options, tmp_path / "runs" / "old", folder=tmp_path)
    assert answer.returncode == 0 and json.loads(answer.stdout)["steps"] == 5
    make(tmp_path / "runs" / "new")
    rows = json.loads(kit("runs", "runs", "--json", folder=tmp_path).stdout)
    states = [(row["run"], row["state"]) for row in rows]
    assert states == [("new", "not started"), ("old", "imported")]
    shown = kit("runs", "runs", folder=tmp_path).stdout
    assert "not started" in shown and "imported" in shown
    answer = kit("export", "runs/old", "--format", "csv", "--json", folder=tmp_path)
    assert json.loads(answer.stdout)["rows"] == 5 and (tmp_path / "runs/old/export.csv").is_file()
    both = ["--compare", "old", "--compare", "new", "--out", "both.png"]
    answer = kit("runs", "runs", *both, folder=tmp_path)
    assert answer.returncode == 0 and (tmp_path / "both.png").stat().st_size > 10_000


def test_export_to_a_tracker_says_what_it_has_copied(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    make(tmp_path / "run")
    answer = kit("--json", "export", "run", "--format", "tensorboard", folder=tmp_path)
    assert json.loads(answer.stdout)["rows"] == 40
    assert list((tmp_path / "run/tensorboard/attempt_01").iterdir())


NXDT = ("import", "none.log", "--format", "nxdt", "--out", "out", "--site")
MISTAKES = [
    (("export", "run", "--step", "3"), "--step: only with --format hf"),
    (("export", "run", "--format", "wandbb"), "Did you mean 'wandb'?"),
    ((*NXDT, "lumi"), "cannot be read"),
    ((*NXDT, "lumni"), "Did you mean 'lumi'?"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistake_is_one_sentence(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    answer = kit(*arguments, folder=tmp_path)
    assert answer.returncode == 1 and "Traceback" not in answer.stderr
    assert message in " ".join(answer.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before and run.directory.is_dir()
