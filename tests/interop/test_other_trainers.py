"""Model specs are read from Megatron's command-line arguments and from the names of torchtitan's
flavours.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.cli.app import app
from kit.config.spec import ModelSpec, RopeScaling
from kit.errors import ConfigError
from kit.interop.weights.hugging_face_config import load_spec

# Arguments of examples/llama/train_llama3_8b_h100_fp8.sh of Megatron-LM, with a vocabulary size and
# the rotary scaling of Llama 3.1 added.
LLAMA3_8B = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
  --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 \\
  --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0 --attention-dropout 0.0 --swiglu \\
  --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --use-rope-scaling \\
  --vocab-size 128256 --tensor-model-parallel-size 2  # and what is not of the model
  --lr 0.00015 --bf16
"""  # noqa: E501
GPT = "--num-layers 48 --hidden-size=6144 --num-attention-heads 48 --seq-length 2048"
GPT += " --vocab-size 50257"


def test_megatron_and_torchtitan_give_the_same_llama(tmp_path: Path) -> None:
    (tmp_path / "llama.sh").write_text(f"torchrun pretrain_gpt.py {LLAMA3_8B}")
    megatron, titan = load_spec(str(tmp_path / "llama.sh")), load_spec("torchtitan:llama3/8B")
    assert megatron == load_spec(LLAMA3_8B) == titan.replace(name=megatron.name)
    assert titan.rope_scaling == RopeScaling() and titan.num_params == 8_030_261_248


@pytest.mark.parametrize(
    ("flavour", "num_params"),  # parameters of meta-llama's Llama 3.1 models on the hub
    [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)],
)
def test_torchtitan_flavours_have_published_sizes(flavour: str, num_params: int) -> None:
    assert load_spec(f"torchtitan:llama3/{flavour}").num_params == num_params


def test_megatron_defaults_fill_missing_arguments() -> None:
    preset = ModelSpec.preset("gpt-22b")
    # 50,257 tokens, padded to a multiple of 128 x 8
    found = load_spec(f"{GPT} --tensor-model-parallel-size 8")
    assert found == preset.replace(name=found.name, init_std=found.init_std)
    assert found.vocab_size == 51_200
    # The feed-forward size is two thirds of 4 x hidden size, rounded to a multiple of 64. Without
    # tensor parallelism the vocabulary is padded to a multiple of 128.
    gated = load_spec(f"{GPT} --swiglu")
    assert (gated.ffn_hidden_size, gated.vocab_size) == (16_384, 50_304)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            f"{GPT} --num-experts 8",
            "--model: --num-experts 8: the kit's decoder has no such option",
        ),
        (f"{GPT} --window-size 1024,0", "--window-size 1024,0"),
        (f"{GPT} --kv-channels 64", "--kv-channels 64"),
        (f"{GPT} --position-embedding-type none", "--position-embedding-type none"),
        (f"{GPT} --rotary-percent 0.5", "--rotary-percent 0.5"),
        (f"{GPT} --qk-layernorm", "--qk-layernorm True"),
        (GPT.replace("48", "${LAYERS}", 1).split("--vocab")[0], "num_layers, padded_vocab"),
        ("--num-layers '4", "cannot be read"),
        ("torchtitan:llama4/17bx16e", "torchtitan:llama4/17bx16e has experts"),
        ("torchtitan:qwen3/8B", "has norms of queries and keys"),
        ("torchtitan:llama3/8b", "Did you mean 'llama3/8B'"),
    ],
)
def test_unsupported_model_arguments_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(name)
    assert message in str(caught.value)


def test_plan_accepts_megatron_arguments_and_flavours() -> None:
    asked = ["--site", "frontier", "--devices", "64", "--batch", "64", "--json"]
    by_arguments = CliRunner().invoke(app, ["plan", "--json", *asked, "--", LLAMA3_8B])
    by_name = CliRunner().invoke(app, ["plan", "torchtitan:llama3/8B", *asked])
    first, second = (json.loads(found.output) for found in (by_arguments, by_name))
    assert first["answers"] == second["answers"] and first["answers"]
    with pytest.raises(ConfigError, match="MODEL: missing"):
        CliRunner().invoke(app, ["plan", *asked], catch_exceptions=False, standalone_mode=False)
