"""Hugging Face configurations that the planner reads. Settings that change neither size nor FLOPs
are accepted, and the sequence length is that of training, not of serving.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import device
from typer.testing import CliRunner

from kit.cli.app import app
from kit.cli.launch_settings import gather_settings
from kit.errors import ConfigError
from kit.interop.weights.hugging_face_config import LACKING, load_spec, training_spec

SMALL = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=1000,
    max_position_embeddings=32_768,
)
LLAMA = {"model_type": "llama", **SMALL}
LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
MISTRAL = {"model_type": "mistral", **SMALL, "sliding_window": 4096}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


PLANNED = [
    MISTRAL,
    {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    {**LLAMA, "rope_scaling": LLAMA_31},
]


@pytest.mark.parametrize("config", PLANNED, ids=lambda it: str(it.get("rope_scaling", "window")))
def test_plan_accepts_settings_that_change_no_size(config, tmp_path):
    file = write(tmp_path, config)
    spec, notes = training_spec(file, sequence_length=4096)
    with device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    assert spec.num_params == sum(weight.numel() for weight in theirs.parameters())
    plain, _ = training_spec(write(tmp_path, LLAMA), sequence_length=4096)
    assert spec.flops_per_token() == plain.flops_per_token()
    write(tmp_path, config)
    rope = config.get("rope_scaling", {})
    is_left_out = rope.get("rope_type") in ("yarn", "dynamic")
    if is_left_out:
        with pytest.raises(ConfigError, match="cannot be imported.*`kit eval` scores its folder"):
            load_spec(file)
    left_out = [note for note in notes if "is left out: it changes neither" in note]
    assert len(left_out) == is_left_out


def test_window_shorter_than_sequence_counts_its_keys(tmp_path):
    """The term 12 L A s of the model FLOPs has the window of 4,096 tokens in place of s."""
    spec, _ = training_spec(write(tmp_path, MISTRAL), sequence_length=16_384)
    full, _ = training_spec(write(tmp_path, LLAMA), sequence_length=16_384)
    keys = SMALL["num_hidden_layers"] * (16_384 - 4096)
    fewer = 12 * SMALL["hidden_size"] * keys
    assert spec.flops_per_token() == full.flops_per_token() - fewer
    executed = spec.hardware_flops_per_token("none", whole=True)
    assert executed == full.hardware_flops_per_token("none", whole=True)


LENGTHS = [
    (LLAMA, 8192),
    ({**LLAMA, "max_position_embeddings": 2048}, 2048),
    ({**LLAMA, "rope_scaling": LLAMA_31}, 4096),
    ({**LLAMA, "rope_parameters": {**LLAMA_31, "rope_theta": 5e5}}, 4096),
    ({**LLAMA, "original_max_position_embeddings": 4096}, 4096),
    ({**MISTRAL, "sliding_window": None}, 8192),
    ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_positions": 16_384}, 16_384),
]


@pytest.mark.parametrize(("config", "length"), LENGTHS, ids=lambda it: str(it)[-40:])
def test_training_length_differs_from_serving_length(config, length, tmp_path):
    spec, (note,) = training_spec(write(tmp_path, config))
    assert spec.sequence_length == length and f"{length:,} tokens" in note
    assert training_spec(write(tmp_path, config), sequence_length=512)[1] == ()
    if "gpt2" != config["model_type"]:
        assert f"({config['max_position_embeddings']:,})" in note or length == 2048


def test_length_above_model_maximum_gives_a_note(tmp_path):
    file = write(tmp_path, {**LLAMA, "max_position_embeddings": 2048})
    spec, (note,) = training_spec(file, sequence_length=4096)
    assert spec.sequence_length == 4096 and "max_position_embeddings (2,048)" in note


def test_presets_and_specs_keep_their_sequence_length(tmp_path):
    spec = load_spec("llama3-8b").replace(sequence_length=131_072)
    spec.write(tmp_path / "spec.json")
    assert training_spec(str(tmp_path / "spec.json")) == (spec, ())
    assert training_spec("hlat-7b") == (load_spec("hlat-7b"), ())


def test_launch_uses_the_training_length(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text('data = "d"\nnum_steps = 9\nlearning_rate = 1e-3\n')
    file, changes = write(tmp_path, LLAMA), {"plan": {"global_batch_size": 8}, "recipe": {}}
    for spec, length in (({}, 8192), ({"sequence_length": 32_768}, 32_768)):
        asked = gather_settings(
            file, str(tmp_path / "recipe.toml"), None, {}, {"spec": spec, **changes}
        )
        assert asked.spec.sequence_length == length
        assert ("the training length is taken as 8,192" in capsys.readouterr().err) == (not spec)


REFUSED = [
    ({**SMALL, "model_type": "falcon"}, "lacks one norm for both halves of a block"),
    (
        {**SMALL, "model_type": "stablelm", "head_dim": 48},
        "config.head_dim: 48 cannot be planned, .*32 only",
    ),
    ({"model_type": "llava", "text_config": LLAMA}, "'llama', in `text_config`: save that"),
    ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "before quantization"),
    (SMALL, "model_type: missing. A Hugging Face config.json names its family"),
    ({"model_type": "never-heard-of"}, "'never-heard-of' cannot be planned. Planned are"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda it: str(it)[:30])
def test_plan_error_explains_unsupported_config(config, message, tmp_path):
    file = write(tmp_path, config)
    with pytest.raises(ConfigError, match=message) as refused:
        training_spec(file)
    for word in ("import", "harness", "score", "Did you mean"):
        assert word not in str(refused.value)


def test_plan_writes_a_layout_that_cannot_be_launched(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    file = write(tmp_path, {**LLAMA, "rope_scaling": scaling})
    out = tmp_path / "plan.json"
    words = ["plan", file, "--site", "dgx-h100", "--devices", "8", "--batch", "64"]
    shown = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert shown.exit_code == 0 and out.exists()
    assert "This layout cannot be launched" in shown.output
    assert "config.rope_scaling" in shown.output and "kit launch" not in shown.output


def test_unsupported_types_exist_in_transformers():
    """The list of unsupported model types must not have a type that transformers does not know,
    because such an entry would never be used.
    """
    for kind in LACKING:
        transformers.AutoConfig.for_model(kind)


def test_plan_command_shows_length_and_parameters(tmp_path):
    file = write(tmp_path, LLAMA)
    words = ["plan", file, "--site", "dgx-h100", "--devices", "8", "--batch", "64"]
    shown = CliRunner().invoke(app, words)
    assert "of 8,192 tokens" in shown.output
    assert "the training length is taken as 8,192 tokens, since" in shown.output
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told["sequence_length"] == 8192 and "(32,768)" in told["notes"][0]
    assert told["num_params"] == told["num_active_params"] == load_spec(file).num_params
    assert f"{told['num_params']:,}, all active" in shown.output
    assert "gpt2, gpt_neox, granite, llama" in " ".join(
        CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "300"}).output.split()
    )
