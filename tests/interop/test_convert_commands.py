"""`kit import` of a checkpoint writes a model folder that can be loaded again. It detects mistakes
before it writes a file.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.errors import ConfigError, DataError
from kit.interop.weights.hugging_face import import_hugging_face
from tests.interop.test_shards import write_megatron
from tests.support.distinct_models import GPT, assert_equal, randomised


def test_import_converts_megatron_to_hugging_face(tmp_path: Path) -> None:
    decoder = randomised(GPT)
    source = write_megatron(decoder, tmp_path / "global_step10", 2, first=1)
    GPT.write(tmp_path / "spec.json")
    command = ["import", str(source), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, [*command, "--model", str(tmp_path / "spec.json"), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["bytes"] > 4 * GPT.num_params
    assert_equal(import_hugging_face(tmp_path / "out").decoder(), decoder)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ([], "--model: missing. The files of a checkpoint"),
        (["--model", "none.json"], "none.json: No such file or directory"),
        (["--model", "none"], "'none' is unknown. Allowed: demo, gemma3"),
        (["--model", "demo", "--follow"], "--follow: only with a log"),
        (["--model", "demo"], "no checkpoint that can be imported"),
        (["--model", "demo", "--format", "nxdt"], "format: 'nxdt' is unknown. Did you mean 'nxd'?"),
        (None, "--site: missing. Name the machine"),
    ],
)
def test_wrong_import_options_are_refused(rest, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = ["none.log"] if rest is None else [".", *rest]
    answer = CliRunner().invoke(app, ["import", *source, "--out", "out"])
    assert isinstance(answer.exception, ConfigError | DataError)
    assert message in str(answer.exception)
    assert not list(tmp_path.iterdir())
