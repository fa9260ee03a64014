"""Hugging Face's `config.json` of a Llama or a GPT-2: written from a spec, read as transformers
reads it. No torch.

A Mistral without a sliding window is read as the Llama that it is, weights by the same names.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from cluster.record import suggestion
from kit.convert.other_trainers import megatron_spec, read_arguments, torchtitan_spec
from kit.errors import ConfigError
from kit.spec import ModelSpec, RopeScaling

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names in GPT-2's configuration, and the kit's."""
FIELDS = {
    "llama": {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "max_position_embeddings": "sequence_length",
        "rms_norm_eps": "norm_eps",
        "attention_bias": "bias",
        "tie_word_embeddings": "tied_embeddings",
    },
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_inner": "ffn_hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_positions": "sequence_length",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tied_embeddings",
    },
}
"""What both say by other names: theirs, and those of a spec."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    "gpt2": {
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}
"""What transformers takes where a configuration is silent."""
ROPE_THETA = 10_000.0
"""The same, for rotary frequencies."""
ALIASES = {
    "llama": {},
    "mistral": {},
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
}
"""Other names that transformers takes for the same."""
# What the kit's decoder does, where a configuration could ask for something else.
FIXED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu"},
    "mistral": {"hidden_act": "silu", "sliding_window": None},
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
}
EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
)
"""How configurations of Hugging Face say that a model has experts."""
ELSEWHERE = "Score this model with the harness's own Hugging Face model instead."

Precision = Literal["float32", "bfloat16", "float16"]


def config_of(spec: ModelSpec, *, precision: Precision = "float32") -> dict[str, Any]:
    """Returns the `config.json` of a model.

    Raises:
        ConfigError: it is neither Hugging Face's Llama nor its GPT-2.
    """
    is_llama = spec.family == "llama"
    wanted = (
        {"norm": "rmsnorm", "gated": True}
        if is_llama
        else {"norm": "layernorm", "gated": False, "bias": True}
    )
    for key, value in wanted.items():
        if getattr(spec, key) != value:
            raise ConfigError(
                f"spec.{key}: Hugging Face's {'Llama' if is_llama else 'GPT-2'} has {value!r} only,"
                f" this model has {getattr(spec, key)!r}. It cannot be written as one."
            )
    kind = "llama" if is_llama else "gpt2"
    common = {
        "model_type": kind,
        **{theirs: getattr(spec, ours) for theirs, ours in FIELDS[kind].items()},
        "dtype": precision,
        "initializer_range": spec.init_std,
        "use_cache": True,
    }
    if is_llama:
        return {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": spec.head_size,
            "rope_parameters": {
                "rope_type": "llama3" if spec.rope_scaling else "default",
                "rope_theta": spec.rope_theta,
                **(spec.rope_scaling.to_dict() if spec.rope_scaling else {}),
            },
            "hidden_act": "silu",
            "mlp_bias": spec.bias,
            **common,
        }
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new" if spec.activation == "gelu_tanh" else "gelu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **common,
    }


def load_spec(name: str) -> ModelSpec:
    """Returns a model by name: a preset, or a spec.json, or Hugging Face's config.json, or the
    folder of either.

    Or Megatron's arguments, as they are or in a .txt or .sh; or `torchtitan:` with a flavour of
    torchtitan's.

    Raises:
        ConfigError: there is no such preset, or the file is missing, or tells of no model that the
            kit has.
    """
    if name.startswith("torchtitan:"):
        return torchtitan_spec(name.removeprefix("torchtitan:"))
    if name.lstrip().startswith("--"):
        return megatron_spec(read_arguments(name), [])
    file = Path(name).expanduser()
    if file.is_dir():
        file = next(
            (file / each for each in ("spec.json", "config.json") if (file / each).exists()),
            file / "config.json",
        )
    if file.suffix in (".txt", ".sh") and file.is_file():
        return megatron_spec(read_arguments(file.read_text(encoding="utf-8")), [])
    if file.suffix != ".json":
        return ModelSpec.preset(name)
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        table = None  # the record's own reader says what is wrong
    if isinstance(table, dict):
        _refuse_experts(table)
    if not isinstance(table, dict) or "model_type" not in table:
        return ModelSpec.read(file)
    try:
        return spec_of(table, name=file.parent.resolve().name)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"{file}: damaged ({type(error).__name__}: {error}). Copy it again."
        ) from error


def spec_of(config: dict[str, Any], *, name: str) -> ModelSpec:
    """Returns the spec that a `config.json` describes.

    Raises:
        ConfigError: the kit's decoder is not that model.
    """
    kind = config.get("model_type", "")
    if kind not in FIXED:
        raise ConfigError(
            f"config.model_type: {kind!r} cannot be imported. {suggestion(kind, FIXED)}"
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "?") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"config.quantization_config: weights in {method!r} cannot be imported. {ELSEWHERE}"
        )
    given = {ALIASES[kind].get(key, key): value for key, value in config.items()}
    config = {**DEFAULTS[kind], **given}
    _refuse(config, FIXED[kind])
    return _gpt2(config, name) if kind == "gpt2" else _llama(config, name)


def _refuse_experts(config: dict[str, Any]) -> None:
    for key in EXPERTS:
        if config.get(key):
            raise ConfigError(
                f"config.{key}: {config[key]!r} makes a mixture of experts, which the kit neither"
                " plans nor trains: it has dense models only."
            )


def _llama(config: dict[str, Any], name: str) -> ModelSpec:
    config = {"attention_bias": False, "mlp_bias": False, **config}  # a Mistral has none
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    _refuse(config, {"head_dim": hidden // heads})
    if config["attention_bias"] != config["mlp_bias"]:
        raise ConfigError(
            f"config.attention_bias: {config['attention_bias']!r} beside mlp_bias"
            f" {config['mlp_bias']!r} cannot be imported, the kit's decoder has biases in both or"
            f" in neither. {ELSEWHERE}"
        )
    shapes = _shapes(
        {**config, "num_key_value_heads": config.get("num_key_value_heads") or heads}, "llama"
    )
    return ModelSpec.llama(name=name, **_rope(config), **shapes)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the base of the rotary frequencies, and how they are scaled, which may be as in Llama
    3.1 only.

    `rope_scaling`, the older name, goes before `rope_parameters`; inside, `rope_type` goes before
    the older `type`, and `rope_theta` before the one beside it. A `rope_type` at the top means
    nothing. All as transformers reads it.
    """
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(where) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    by_layer = [key for key, value in rope.items() if isinstance(value, dict)]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if kind not in ("default", "llama3") or by_layer or partial not in (None, 1):
        raise ConfigError(
            f"config.{where}: {rope} cannot be imported, the kit's decoder has rope_type 'default'"
            f" or 'llama3', over whole heads, for all layers. {ELSEWHERE}"
        )
    scaling = None
    if kind == "llama3":
        given = {"original_max_position_embeddings": config["max_position_embeddings"], **rope}
        scaling = RopeScaling(
            **{field.name: given[field.name] for field in dataclasses.fields(RopeScaling)}
        )
    return {
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", ROPE_THETA))),
        "rope_scaling": scaling,
    }


def _gpt2(config: dict[str, Any], name: str) -> ModelSpec:
    activation = config["activation_function"]
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.activation_function: {activation!r} cannot be imported."
            f" {suggestion(activation, ACTIVATIONS)}"
        )
    shapes = _shapes({**config, "n_inner": config.get("n_inner") or 4 * config["n_embd"]}, "gpt2")
    return ModelSpec.gpt(name=name, activation=ACTIVATIONS[activation], **shapes)


def _shapes(config: dict[str, Any], kind: str) -> dict[str, Any]:
    return {ours: config[theirs] for theirs, ours in FIELDS[kind].items()}


def _refuse(config: dict[str, Any], fixed: dict[str, Any]) -> None:
    for key, value in fixed.items():
        found = config.get(key)
        if found is not None and found != value:
            raise ConfigError(
                f"config.{key}: {found!r} cannot be imported, the kit's decoder has "
                f"{'none' if value is None else f'{value!r} only'}. {ELSEWHERE}"
            )
