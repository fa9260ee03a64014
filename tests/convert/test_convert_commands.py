"""The commands write folders that load again, and tell mistakes before anything is written."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kit.commands.app import app
from kit.convert.hugging_face import import_hugging_face
from kit.errors import ConfigError, DataError
from tests.convert.test_shards import GPT, randomised, write_megatron


def test_megatron_layers_become_a_hugging_face_folder(tmp_path: Path) -> None:
    decoder = randomised(GPT)
    source = write_megatron(decoder, tmp_path / "global_step10", 2, first=1)
    GPT.write(tmp_path / "spec.json")
    command = ["import", str(source), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, [*command, "--model", str(tmp_path / "spec.json"), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["bytes"] > 4 * GPT.num_params
    found = import_hugging_face(tmp_path / "out").decoder()
    assert all(
        torch.equal(a, b) for a, b in zip(found.parameters(), decoder.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["import", ".", "--out", "out"], "--model: missing. The files of a checkpoint"),
        (["import", ".", "--out", "out", "--model", "none.json"], "none.json: no such file"),
        (
            ["import", ".", "--out", "out", "--model", "none"],
            "'none' is unknown. Allowed: demo, gpt",
        ),
        (
            ["import", ".", "--out", "out", "--model", "demo", "--follow"],
            "--follow: only with a log",
        ),
        (["import", ".", "--out", "out", "--model", "demo"], "no checkpoint that can be imported"),
        (
            ["import", ".", "--out", "out", "--model", "demo", "--format", "nxdt"],
            "format: 'nxdt' is unknown. Did you mean 'nxd'?",
        ),
        (["import", "none.log", "--out", "out"], "--site: missing. Name the machine"),
    ],
)
def test_mistakes_are_told(
    command: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, command)
    assert isinstance(answer.exception, ConfigError | DataError) and message in str(
        answer.exception
    )
    assert not list(tmp_path.iterdir())
