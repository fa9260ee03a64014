"""Models are converted to Hugging Face's format and back without a changed bit. transformers
computes equal logits.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kit.config.spec import RopeScaling
from kit.errors import ConfigError, DataError
from kit.interop.weights.hugging_face import export_hugging_face, import_hugging_face
from kit.interop.weights.hugging_face_config import config_of, spec_of
from kit.interop.weights.model_types import MODEL_TYPES
from kit.interop.weights.weights import Weights, from_hugging_face
from kit.model import Decoder, build_decoder
from tests.support.distinct_models import GPT, LLAMA, assert_equal, randomised

SCALING = RopeScaling(factor=4.0, original_max_position_embeddings=16)
SPECS = {
    "Llama": LLAMA,
    "Llama, tied, with biases": LLAMA.replace(tied_embeddings=True, bias=True),
    "Llama 3.1": LLAMA.replace(rope_scaling=SCALING, rope_theta=500.0),
    "GPT, tied": GPT,
    "GPT, untied, gelu by tanh": GPT.replace(
        tied_embeddings=False, activation="gelu_tanh", ffn_hidden_size=100
    ),
}


@torch.inference_mode()
def assert_same_logits(decoder: Decoder, model: Any) -> None:
    tokens = torch.randint(0, 300, (3, 32), generator=torch.Generator().manual_seed(0))
    ours, theirs = decoder(tokens), model.eval()(tokens).logits
    assert theirs.std() > 0.1, "logits too small to tell models apart"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", SPECS)
def test_hugging_face_round_trip_keeps_every_bit(name: str, tmp_path: Path) -> None:
    decoder = randomised(SPECS[name])
    folder = export_hugging_face(decoder, tmp_path / "model")
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(folder, output_loading_info=True)
    assert not any(report.values()), f"weights that did not fit: {report}"
    assert type(model).__name__ == ("LlamaForCausalLM" if "Llama" in name else "GPT2LMHeadModel")
    assert_same_logits(decoder, model)
    assert_equal(import_hugging_face(folder).decoder(), decoder)
    model.save_pretrained(tmp_path / "theirs")  # a model folder that transformers itself writes
    assert_equal(import_hugging_face(tmp_path / "theirs").decoder(), decoder)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_sharded_export_round_trips(tmp_path: Path) -> None:
    """A model in several weight files has the logits of the original. If one of the files is
    damaged, the error names this file.
    """
    decoder = randomised(LLAMA)
    folder = export_hugging_face(decoder, tmp_path / "model", max_shard_bytes=100_000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2 and max(shard.stat().st_size for shard in shards) < 110_000
    assert_equal(import_hugging_face(folder).decoder(), decoder)
    assert_same_logits(decoder, transformers.AutoModelForCausalLM.from_pretrained(folder))
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{shards[1].name}: not a readable safetensors file"):
        import_hugging_face(folder).decoder()


def test_bfloat16_export_rounds_weights_once(tmp_path: Path) -> None:
    decoder = randomised(GPT)
    folder = export_hugging_face(decoder, tmp_path / "model", precision="bfloat16")
    assert_equal(import_hugging_face(folder).decoder(), decoder.bfloat16().float())


def test_old_gpt2_files_without_prefix_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    decoder = randomised(GPT)
    folder = export_hugging_face(decoder, tmp_path / "model")
    file = folder / "model.safetensors"
    bare = {name.removeprefix("transformer."): w for name, w in load_file(file).items()}
    save_file(bare, file)
    assert_equal(import_hugging_face(folder).decoder(), decoder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "opt"}, "model_type: 'opt' cannot be .*ReLU. Allowed: gemma, .* gpt2"),
        ({"hidden_act": "gelu"}, "config.hidden_act: 'gelu' .*the kit's decoder has 'silu' or"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "factor: 0.5 .* 1 only in a Llama"),
        (
            {"rope_parameters": {"rope_type": "longrope", "attention_factor": 1.1}},
            "config.rope_p.*'default', 'linear', 'llama3' or 'longrope'",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_type": "default"}, "config.rope_p.*yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for all layers"),
        ({"rope_scaling": {"type": "dynamic"}}, "config.rope_scaling"),
        (
            {"model_type": "gpt_neox", "head_dim": 32, "hidden_act": "gelu"},
            "config.head_dim: 32 cannot be imported, the kit's decoder has 16 only in a GPT-NeoX",
        ),
        (
            {"model_type": "stablelm", "qk_layernorm": True},
            "config.qk_layernorm: True cannot be imported, the kit's decoder has False only",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "config.use_sliding_window: a window in some of the layers",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0, 0]},
            r"config.no_rope_layers: \[1, 0, 0\] cannot be imported.*every n-th layer",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: weights in 'fp8'"),
        (
            {"model_type": "gpt2", "activation_function": "relu"},
            "config.activation_function: 'relu' cannot be imported, .*'gelu' or 'gelu_new'",
        ),
    ],
)
def test_unsupported_hugging_face_config_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of({**config_of(LLAMA), **change}, name="other")


FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"rope_type": "llama3", **FACTORS}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"max_position_embeddings": 99, "rope_theta": 5e5, "num_key_value_heads": 2},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e5},
    {"rope_scaling": {"type": "default", "rope_theta": 7e5}, "rope_parameters": {"rope_theta": 1}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
    {"rope_scaling": SCALED, "rope_theta": 5e5, "max_position_embeddings": 16},
    {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e5, "rope_type": "linear"},
    {"rope_parameters": {}, "rope_scaling": None, "partial_rotary_factor": 1.0},
    {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2, "rope_theta": 1e6},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_llama_configs_are_read_as_in_transformers(config: dict[str, Any]) -> None:
    size = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 32}
    size |= {"num_hidden_layers": 1, "vocab_size": 300}
    given: dict[str, Any] = {"model_type": "llama", **size, **config}
    found = spec_of(given, name="x")
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(given))
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    theirs_of = model.state_dict().__getitem__
    weights = Weights.read_by(
        found, lambda name: from_hugging_face(found, name, theirs_of), Path("here")
    )
    assert found.sequence_length == theirs.max_position_embeddings
    assert found.norm_eps == theirs.rms_norm_eps
    assert_same_logits(weights.decoder(), model)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_config_defaults_equal_transformers(kind: str) -> None:
    theirs = transformers.AutoConfig.for_model(kind)
    ours = MODEL_TYPES[kind]
    assert {key: getattr(theirs, key) for key in ours.defaults} == ours.defaults
    assert ours.aliases == {key: value for key, value in theirs.attribute_map.items()}
    rope = getattr(theirs, "rope_parameters", {"rope_theta": 1e4})
    rope = rope.get("full_attention", rope)
    partial = rope.get("partial_rotary_factor", 1.0)
    assert (rope["rope_theta"], partial) == (ours.rope_theta, ours.partial_rotary_factor)
    if kind == "gpt2":
        sizes = {"hidden_size": 64, "num_attention_heads": 4}
        assert spec_of({"model_type": kind, **sizes}, name="x").hidden_size == 64


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GPT.replace(bias=False), "spec.bias: .*GPT-2 has True only"),
        (LLAMA.replace(qk_norm="all_heads"), "spec.qk_norm: .*Llama has 'none' only"),
    ],
)
def test_export_refuses_unsupported_model(spec, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        export_hugging_face(build_decoder(spec), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_export_overwrites_nothing_and_damage_is_named(tmp_path: Path) -> None:
    folder = export_hugging_face(randomised(LLAMA), tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_hugging_face(randomised(GPT), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"vocab_size": 301}, r"tokens.weight has shape \[300, 64\], expected \[301, 64\]"),
        ({"num_hidden_layers": 4}, "has no weight 'model.layers.3"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(DataError, match=message):
            import_hugging_face(folder).decoder()
    with pytest.raises(DataError, match="has no config.json. Give a folder"):
        import_hugging_face(tmp_path).decoder()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        DataError, match="pickled weights .*is not read, since unpickling can run code"
    ):
        import_hugging_face(folder).decoder()
