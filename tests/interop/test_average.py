"""The mean of several checkpoints, written as a Hugging Face folder."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.engine import state_key
from kit.errors import ConfigError
from kit.interop.weights.hugging_face import export_average
from kit.interop.weights.weights import to_hugging_face
from kit.model import build_decoder
from kit.run import Run
from tests.support.workers import complete_checkpoint, local_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_dataset) -> Run:
    """A run with three checkpoints whose weights are drawn from the seeds 10, 20 and 30."""
    spec = ModelSpec.llama(
        name="tiny",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=48,
        vocab_size=300,
        sequence_length=16,
    )
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=30)
    made = local_run(tmp_path_factory.mktemp("average") / "run", spec, Plan(), recipe)
    for step in STEPS:
        complete_checkpoint(made, weights(spec, step), step)
    return made


def weights(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    named = build_decoder(spec, seed=seed).named_parameters()
    return {state_key("weight", name): parameter.detach() for name, parameter in named}


@pytest.mark.parametrize("last", [2, 3])
def test_average_loads_in_transformers_as_mean_of_weights(run: Run, last: int, tmp_path) -> None:
    folder, steps = export_average(run, last, tmp_path / "out")
    assert steps == [*STEPS[-last:]]
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    drawn = [weights(run.spec, step) for step in steps]
    means = (
        (name.removeprefix("model."), torch.stack([each[name] for each in drawn]).mean(dim=0))
        for name in drawn[0]
    )
    expected = to_hugging_face(run.spec, means)
    assert expected.keys() == found.keys()
    for name, mean in expected.items():
        assert torch.allclose(found[name], mean, rtol=1e-6, atol=1e-8), name
    assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("last", [1, 4])
def test_average_refuses_more_checkpoints_than_there_are(run: Run, last: int, tmp_path) -> None:
    with pytest.raises(ConfigError, match=rf"last: {last} .* 3 \(steps: 10, 20, 30\)"):
        export_average(run, last, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_average_command_writes_into_the_run(run: Run) -> None:
    result = CliRunner().invoke(app, ["average", str(run.directory), "--last", "2", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer == {"folder": str(run.directory / "average.hf"), "steps": [20, 30]}
    assert (Path(answer["folder"]) / "config.json").exists()
