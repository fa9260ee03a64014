"""Each model type of Hugging Face that the kit supports: transformers computes equal logits and
gradients before and after the exchange of a model folder, and has equally many parameters.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kit.errors import ConfigError
from kit.interop.weights.hugging_face import export_hugging_face, import_hugging_face
from kit.interop.weights.hugging_face_config import config_of, load_spec, spec_of
from kit.interop.weights.model_types import MODEL_TYPES
from kit.interop.weights.weights import from_hugging_face
from kit.model import Decoder

LENGTH = 24
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
    # The embedding of a padding token would have no gradient.
    "pad_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0],
}
LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA_3 = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {}),
    "Llama 3.1": ("llama", {"rope_scaling": LLAMA_31, "rope_theta": 5e5}),
    "Llama, linear scaling": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "Llama, biases of attention": ("llama", {"attention_bias": True, "head_dim": 12}),
    "Mistral, window": ("mistral", {"sliding_window": 7}),
    "Mistral, head size": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Gemma": ("gemma", {"head_dim": 16}),
    "Gemma 2": ("gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 12}),
    "Gemma 3": ("gemma3_text", {**GEMMA_3, "sliding_window_pattern": 2}),
    "Gemma 3, scaled": (
        "gemma3_text",
        {**GEMMA_3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "OLMo 2": ("olmo2", {}),
    "Phi-3": ("phi3", {"sliding_window": 9}),
    "Phi-3, longrope": (
        "phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "Phi-3, longrope, short": (
        "phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": LENGTH - 1},
    ),
    "Phi-4-mini": (
        "phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.5,
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3": ("smollm3", {"no_rope_layer_interval": 2}),
    "Granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "mlp_bias": True,
        },
    ),
    "StableLM": ("stablelm", {"use_qkv_bias": True}),
    "Nemotron": ("nemotron", {}),
    "Pythia": ("gpt_neox", {}),
    "GPT-NeoX, one after the other": (
        "gpt_neox",
        {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False},
    ),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}),
}
TOKENS = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def model_of(kind: str, extra: dict[str, Any]) -> Any:
    """Returns a small model of transformers whose weights are all different."""
    size = {} if kind == "gpt2" else SMALL
    if kind == "gpt2":
        size = {"vocab_size": 96, **dict.fromkeys(("bos_token_id", "eos_token_id"), 0)}
    config = transformers.AutoConfig.for_model(kind, **{**size, **extra})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += (0.3 if parameter.ndim == 1 else 0.15) * noise
    return model


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def assert_same_gradients(decoder: Decoder, theirs: Any, kind: str) -> None:
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}

    def read(name: str) -> torch.Tensor:
        return gradients[name.replace("embed_out", "lm_head")]

    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, weight in decoder.named_parameters():
        expected = from_hugging_face(decoder.spec, name, read, kind)
        # The gradient of a bias of all keys is only rounding error: it shifts all scores equally.
        scale = max(float(expected.abs().max()), 0.1 * largest)
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers_both_ways(family: str, tmp_path: Path) -> None:
    kind, extra = copy.deepcopy(FAMILIES[family])  # transformers changes nested dicts.
    theirs = model_of(kind, extra)
    expected = theirs(TOKENS).logits
    loss_of(expected).backward()
    theirs.save_pretrained(tmp_path / "theirs")
    decoder = import_hugging_face(tmp_path / "theirs").decoder()
    spec = decoder.spec
    assert spec.num_params == sum(weight.numel() for weight in theirs.parameters())
    found = decoder(TOKENS)
    assert expected.std() > 0.1, "logits too small to tell models apart"
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale)
    loss = decoder(TOKENS[:, :-1], TOKENS[:, 1:])
    if "long" not in family and "Phi-4" not in family:  # Their factors depend on the length.
        assert loss.item() == pytest.approx(loss_of(expected).item(), rel=1e-5)
    loss_of(found).backward()
    assert_same_gradients(decoder, theirs, kind)

    folder = export_hugging_face(decoder, tmp_path / "ours")
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    again, report = load(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(report.values()), f"weights that did not fit: {report}"
    logits = again.eval()(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * scale)
    # The exported folder reads back as the model.
    back = import_hugging_face(folder).decoder()
    assert back.spec.replace(name="", init_std=1) == spec.replace(name="", init_std=1)
    state = dict(decoder.named_parameters())
    assert all(torch.equal(p, state[name]) for name, p in back.named_parameters())


QWEN = {"vocab_size": 151_936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768}
PUBLIC: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        **QWEN,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 131_072,
        "max_window_layers": 28,
    },
    "Qwen3-4B": {
        "model_type": "qwen3",
        **QWEN,
        "head_dim": 128,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000,
    },
    "gemma-2-9b": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "intermediate_size": 14_336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window_size": 4096,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32_768,
        "rope_local_base_freq": 10_000,
        "rope_theta": 1_000_000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "OLMo-2-7B": {
        "model_type": "olmo2",
        "vocab_size": 100_352,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000,
    },
    "Phi-3-mini-128k": {
        "model_type": "phi3",
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "sliding_window": 262_144,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.5] * 48,
            "short_factor": [1.1] * 48,
        },
    },
    "SmolLM3-3B": {
        "model_type": "smollm3",
        "max_position_embeddings": 65_536,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "rope_theta": 5_000_000.0,
    },
    "granite-3.1-8b": {
        "model_type": "granite",
        "vocab_size": 49_152,
        "hidden_size": 4096,
        "intermediate_size": 12_800,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rope_theta": 10_000_000.0,
    },
    "pythia-1.4b": {
        "model_type": "gpt_neox",
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "rotary_emb_base": 10_000,
        "rotary_pct": 0.25,
    },
    "stablelm-2-1_6b": {
        "model_type": "stablelm",
        "vocab_size": 100_352,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "use_qkv_bias": True,
    },
    "Mistral-Nemo-12B": {
        "model_type": "mistral",
        "vocab_size": 131_072,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    "Minitron-4B": {
        "model_type": "nemotron",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Public configurations by the name of the model on the Hugging Face hub. Keys without influence on
the model are left out."""
COUNTS = {"Qwen2.5-7B": 7_615_616_512, "gemma-2-9b": 9_241_705_984, "pythia-1.4b": 1_414_647_808}
"""Number of parameters that the hub states for some of these models."""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configuration_counts_exactly(name: str) -> None:
    config = copy.deepcopy(PUBLIC[name])
    spec = spec_of(config, name=name)
    with torch.device("meta"):
        theirs = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert spec.num_params == sum(weight.numel() for weight in model.parameters())
    assert spec.num_params == COUNTS.get(name, spec.num_params)
    assert spec_of(config_of(spec), name=name) == spec


def test_every_model_type_is_compared() -> None:
    assert {kind for kind, _ in FAMILIES.values()} == set(MODEL_TYPES)


WRONG = ("x", -1, 0, [], {}, True, 1.5, [1], {"a": 1}, 10**9, 10**30, float("nan"), None)
"""Values that are wrong for most keys of a config.json."""
FURTHER_KEYS = ("rope_scaling", "rope_parameters", "layer_types", "no_rope_layers", "head_dim")
"""Keys of config.json that are tested for every model type, although most model types have no
default for them."""


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
def test_wrong_value_of_any_key_is_read_or_refused(kind: str) -> None:
    """No value makes the reader raise another error than ConfigError, or loop over a huge
    number.
    """
    defaults = MODEL_TYPES[kind].defaults
    keys = {*defaults, *MODEL_TYPES[kind].keys, *FURTHER_KEYS, "rope_theta", "sliding_window"}
    num_refused = 0
    for key in sorted(keys):
        for value in WRONG:
            config = {"model_type": kind, **defaults, key: value}
            try:
                spec_of(config, name="x", purpose="import")
            except ConfigError:
                num_refused += 1
    assert num_refused > 4 * len(keys)


def test_refusal_of_a_wrong_value_names_key_and_allowed_values() -> None:
    for changes, message in (
        ({"attention_bias": "some"}, "config.attention_bias: 'some' is not allowed. Give true or"),
        ({"num_hidden_layers": 10**9}, "config.num_hidden_layers: 1,000,000,000 is not allowed."),
        ({"hidden_size": None}, "config.hidden_size: null is not allowed. Give a whole number"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor, low_freq_factor, high_freq_factor"),
    ):
        config = {"model_type": "llama", **MODEL_TYPES["llama"].defaults, **changes}
        with pytest.raises(ConfigError, match=re.escape(message)):
            spec_of(config, name="x", purpose="import")


def test_layer_types_that_change_the_window_are_refused() -> None:
    """transformers loads a Mistral with layer_types as a model type with windows by layer, and
    SmolLM3 then ignores use_sliding_window.
    """
    for kind, changes in (
        ("mistral", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention"] * 2}),
        (
            "smollm3",
            {"use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"]},
        ),
    ):
        config = {"model_type": kind, **MODEL_TYPES[kind].defaults, "num_hidden_layers": 2}
        with pytest.raises(ConfigError, match="layer_types: (full|sliding)_attention cannot be"):
            spec_of(config | changes, name="x", purpose="import")


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_exported_gemma_without_a_window_runs(kind: str, tmp_path: Path) -> None:
    changes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "layer_types": ["full_attention"] * 2,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(kind, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "given")
    decoder = import_hugging_face(tmp_path / "given")
    export_hugging_face(decoder, tmp_path / "written")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written").eval()
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5
        )


def test_model_has_the_name_of_its_folder_or_file(tmp_path: Path) -> None:
    text = json.dumps({"model_type": "llama", **MODEL_TYPES["llama"].defaults})
    for name in ("config.json", "small-llama.json"):
        (tmp_path / name).write_text(text)
    assert load_spec(str(tmp_path / "config.json")).name == tmp_path.name
    assert load_spec(str(tmp_path / "small-llama.json")).name == "small-llama"
