"""The command line: mistakes are told in one sentence on standard error, and nothing is started."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from kit.commands.app import GONE, app
from kit.doctor import SLOW_IMPORT_S
from kit.estimate.fit.published import FILE
from kit.plan import Plan
from kit.spec import ModelSpec
from tests.monitor.recorded import recorded_run


def _kit(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    command, env = [sys.executable, "-m", "kit", *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", GONE)
def test_a_command_that_went_is_answered_with_what_does_its_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    assert name not in typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    result = CliRunner().invoke(app, [name, "RUN", "--json"])
    assert result.exit_code == 2 and f"No such command {name!r}. {GONE[name]}" in result.output


def test_help_names_every_command_and_cuts_no_option_at_80_columns(monkeypatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    whole = typer.main.get_command(app)
    asked = [[name] for name in whole.commands]  # pyright: ignore[reportAttributeAccessIssue]
    for words in [[], *asked, ["data", "build"], ["site", "init"]]:
        text = CliRunner().invoke(app, [*words, "--help"]).stdout
        assert "Usage" in text and "…" not in text, text
        assert words or all(f"│ {name} " in text for [name] in asked)


def test_brackets_in_a_table_are_text(tmp_path: Path) -> None:
    spec = ModelSpec.preset("demo").replace(name="odd [/b] name")
    spec.write(tmp_path / "spec.json")
    asked = "plan spec.json --site frontier --devices 8 --batch 16 --choose 2 --out".split()
    answer = _kit(*asked, "new/below/[b]second.json", folder=tmp_path)
    assert "odd [/b] name on 8 devices" in answer.stdout
    assert "Layout 2 is in new/below/[b]second.json" in answer.stdout
    kept = Plan.read(tmp_path / "new" / "below" / "[b]second.json")
    assert kept.engine == "native"
    assert f"DP{kept.data_parallel} ZeRO{kept.zero_stage}" in answer.stdout
    kept.check(spec, 8)
    (tmp_path / "plan.json").write_text("a run's")
    answer = _kit(*asked, "plan.json", folder=tmp_path)
    assert answer.returncode == 1 and answer.stderr.startswith("ConfigError: ")
    assert "plan.json: already exists" in answer.stderr
    assert (tmp_path / "plan.json").read_text() == "a run's"
    rows = FILE.read_text().splitlines()
    selene = next(line for line in rows if "Selene" in line)
    selene = selene.replace("Selene", "a [/b] machine")
    (tmp_path / "rows.csv").write_text(f"{rows[0]}\n{selene}\n")
    answer = _kit("validate", "--rows", "rows.csv", folder=tmp_path)
    assert answer.returncode == 0 and "a [/b] machine:" in answer.stdout, answer.stdout


def test_a_terminal_that_knows_only_ascii_is_told_everything(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run", steps=40)
    coding = {"PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ascii_only = {**coding, "LC_ALL": "C"}
    answer = _kit("status", "run", folder=tmp_path, **ascii_only)
    unicode = _kit("status", "run", folder=tmp_path, PYTHONIOENCODING="utf-8")
    blocks = re.search("MFU .*", unicode.stdout)[0]  # pyright: ignore[reportOptionalSubscript]
    assert answer.returncode == 0
    assert blocks.encode("ascii", "backslashreplace").decode() in answer.stdout
    answer = _kit("generate", "nowhere", "née", folder=tmp_path, **ascii_only)
    assert answer.stdout == "" and "nowhere is not a run directory" in answer.stderr


def test_doctor_finds_what_the_tests_use(tmp_path: Path) -> None:
    found = {
        each["subject"]: each
        for each in json.loads(_kit("doctor", "--deep", "--json", folder=tmp_path).stdout)
    }
    seconds = re.search(r"imported in ([\d.]+) s", found["torch"]["found"])
    assert seconds and found["torch"]["ok"] == (float(seconds[1]) < SLOW_IMPORT_S), (
        "a busy machine is told that it is"
    )
    assert found["matrix product"]["ok"] and found["all-reduce"]["found"].startswith("right, ")
    assert found["optuna"]["ok"]
    if find_spec("deepspeed"):
        assert found["deepspeed"]["ok"] and "made a training step" in found["deepspeed"]["found"], (
            found["deepspeed"]
        )
    assert found["neuronx-distributed"]["ok"] is not True
