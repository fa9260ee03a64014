"""The command line: help texts, printed text, encodings, and `kit doctor`."""

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

from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.doctor import SLOW_IMPORT_S
from kit.estimate.fit.published import FILE
from tests.support.recorded_runs import recorded_run

# Program that runs `kit status` and a failing command, in a process with another encoding.
TWICE = """
import sys
from kit.__main__ import main
for words in (["status", "run"], ["generate", "nowhere", sys.argv[1]]):
    sys.argv = ["kit", *words]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code or 0)
"""


def test_help_names_commands_and_truncates_no_option(monkeypatch) -> None:
    """The help is printed for a terminal of 80 columns."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    whole = typer.main.get_command(app)
    asked = [[name] for name in whole.commands]  # pyright: ignore[reportAttributeAccessIssue]
    for words in [[], *asked, ["data", "build"], ["site", "init"]]:
        text = CliRunner().invoke(app, [*words, "--help"]).stdout
        assert "Usage" in text and "…" not in text, text
        assert words or all(f"│ {name} " in text for [name] in asked)


def test_brackets_in_tables_are_printed_literally(tmp_path, monkeypatch, capsys, answer) -> None:
    monkeypatch.chdir(tmp_path)
    spec = ModelSpec.preset("demo").replace(name="odd [/b] name")
    spec.write(Path("spec.json"))
    asked = "plan spec.json --site frontier --devices 8 --batch 16 --choose 2 --out".split()
    app([*asked, "new/below/[b]second.json"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "odd [/b] name on 8 devices" in said
    assert "Layout 2 is in new/below/[b]second.json" in said
    kept = Plan.read(Path("new/below/[b]second.json"))
    assert kept.engine == "native" and f"DP{kept.data_parallel} ZeRO{kept.zero_stage}" in said
    kept.check(spec, 8)
    Path("plan.json").write_text("a run's")
    refused = answer([*asked, "plan.json"])
    assert refused.startswith("ConfigError: ") and "plan.json: already exists" in refused
    assert Path("plan.json").read_text() == "a run's"
    head, *rows = FILE.read_text().splitlines()
    selene = next(line for line in rows if "Selene" in line).replace("Selene", "a [/b] machine")
    Path("rows.csv").write_text(f"{head}\n{selene}\n")
    app(["validate", "--rows", "rows.csv"], standalone_mode=False)
    assert "a [/b] machine:" in capsys.readouterr().out


def test_ascii_terminal_gets_the_complete_output(tmp_path) -> None:
    recorded_run(tmp_path / "run", steps=40)
    coding = {"PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    environment = {**os.environ, **coding, "LC_ALL": "C"}
    words = [sys.executable, "-c", TWICE, "née"]
    told = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    unicode = CliRunner().invoke(app, ["status", str(tmp_path / "run")]).stdout
    blocks = re.findall("MFU .*", unicode)[-1]
    assert not blocks.isascii()
    assert blocks.encode("ascii", "backslashreplace").decode() in told.stdout
    assert told.stdout.endswith("ended with 0\nended with 1\n")
    assert "nowhere: no such folder" in told.stderr


def test_deep_doctor_finds_the_installed_packages(tmp_path) -> None:
    words = [sys.executable, "-m", "kit", "doctor", "--deep", "--json"]
    told = json.loads(subprocess.run(words, cwd=tmp_path, capture_output=True).stdout)
    found = {each["subject"]: each for each in told}
    seconds = re.search(r"imported in ([\d.]+) s", found["torch"]["found"])
    is_fast = float(seconds[1]) < SLOW_IMPORT_S
    assert found["torch"]["ok"] == is_fast, "a busy machine is told that it is"
    assert found["matrix product"]["ok"] and found["all-reduce"]["found"].startswith("right, ")
    assert found["optuna"]["ok"]
    if find_spec("deepspeed"):
        assert found["deepspeed"]["ok"], found["deepspeed"]
        assert "made a training step" in found["deepspeed"]["found"]
    assert found["neuronx-distributed"]["ok"] is not True


UNKNOWN = """
launch x --step 5 | Give --steps 5.
launch x --lr 1e-3 | Give --learning-rate 1e-3.
launch x --lerning-rate=1e-3 | Give --learning-rate 1e-3.
launch x --lenght 5 | Give --set spec.sequence_length=5.
launch x --seq 5 | Give --set spec.sequence_length=5.
launch x --batch_size 8 | Give --batch 8.
launch x --weight-decay 0.1 | Give --set recipe.weight_decay=0.1.
launch x --z-loss 1e-4 | Give --set recipe.z_loss=1e-4.
launch x --warmup | Give --set recipe.warmup_steps=VALUE.
launch x --tensor-model-parallel-size 2 | Give --set plan.tensor_parallel=2.
launch x --bf16 | Give --set plan.precision=bf16.
launch x --nproc_per_node 4 | Give --set plan.data_parallel=REPLICAS.
launch x --nnodes 4 | Did you mean --nodes?
launch x --sit a | Did you mean --site?
plan demo --lr 1e-3 | It is a setting of `kit launch`: --set recipe.learning_rate=1e-3.
plan demo --seq-len 9 | Give --seq 9.
plan demo --gpus 8 | Give --devices 8.
plan demo --dp 4 | Give --set plan.data_parallel=4.
plan demo --tp 8 | Give --set plan.tensor_parallel=8.
eval x --steps 9 | Did you mean --step?
eval x --batch 9 | Did you mean --batch-size?
data build x --vocab 300 | Give --vocab-size 300.
launch x --set lr=1 | --set 'lr' is not allowed. Give recipe.learning_rate=VALUE.
launch x --set recipe.lr=1 | recipe.lr: unknown key. Recipe's field is learning_rate.
launch x --set recipe.tp=1 | recipe.tp: unknown key. Plan has this setting: plan.tensor_parallel.
"""
"""Commands with a name that the kit does not have, and the advice in the error message."""


@pytest.mark.parametrize("row", UNKNOWN.strip().splitlines())
def test_unknown_option_or_setting_gets_advice(row, answer, monkeypatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    words, advice = row.split(" | ")
    assert advice in answer(words)


def test_unknown_option_without_a_near_name_is_only_named(answer) -> None:
    said = answer("stop x --zzz")
    assert "No such option: --zzz" in said and "Possible" not in said
