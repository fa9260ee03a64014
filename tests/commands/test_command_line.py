"""The command line: mistakes are told in one sentence on standard error, and nothing is started."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def _kit(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "kit", *arguments], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status", "nowhere"), "nowhere is not a run directory"),
        (("launch", "new", "--set", "tensor_parallel=2"), "--set 'tensor_parallel=2' is not allowed"),
        (("launch", "new", "--set", "plan.tensr_parallel=2"), "Did you mean 'tensor_parallel'?"),
        (("launch", "new", "--model", "dmeo"), "spec.preset: 'dmeo' is unknown"),
        (("launch", "new", "--data", "[/red]none"), "[/red]none: not a dataset"),
    ],
)
def test_mistake_is_one_sentence_and_starts_nothing(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    answer = _kit(*arguments, folder=tmp_path)
    words = " ".join(answer.stderr.split()).replace("/ ", "/")
    assert answer.returncode == 1 and message in words and "Traceback" not in words
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_help_names_every_command_with_a_sentence(tmp_path: Path) -> None:
    words = _kit("--help", folder=tmp_path).stdout
    for command in ("launch", "resume", "status", "watch", "logs", "stop", "checkpoint", "eval", "data", "figure"):
        assert f"│ {command} " in words


def test_doctor_finds_what_the_tests_use(tmp_path: Path) -> None:
    found = {each["subject"]: each for each in json.loads(_kit("doctor", "--json", folder=tmp_path).stdout)}
    assert found["torch"]["ok"] and "imported in" in found["torch"]["found"]
    assert found["optuna"]["ok"] and found["Python"]["found"].startswith("3.1")
    if find_spec("deepspeed"):
        assert found["deepspeed"]["ok"], found["deepspeed"]
    assert found["neuronx-distributed"]["ok"] is not True
