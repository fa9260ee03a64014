"""Model types of Hugging Face that the kit's decoder can be: the keys of their `config.json`, what
they mean for a `ModelSpec`, and back. Imports no torch.

`MODEL_TYPES` has one row per type. Everything else in this module reads or writes what is not just
a key: head size, biases, rotary positions, attention windows.

Source: the files configuration_*.py and modeling_*.py of the library transformers 5.23.
"""

import dataclasses
import math
from typing import Any, Literal, NoReturn

from kit.config.spec import MAX_LAYERS, ModelSpec, RopeScaling
from kit.errors import ConfigError

Purpose = Literal["import", "plan"]
"""Purpose for which a configuration is read. For `import`, weights are read or trained, so the
decoder must be exactly the model. For `plan`, features that change neither parameters nor FLOPs may
differ."""
VERBS = {"import": "imported", "plan": "planned"}
"""Participles for error messages, as in "cannot be imported", by purpose."""

GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
UNGATED = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
}
"""Dict from the name of an activation function in config.json to `ModelSpec.activation`."""
LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "sequence_length",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
"""Field of ModelSpec for each key of a Llama's config.json."""
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Value that transformers uses for each key that a Llama's config.json lacks."""
GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""Value that transformers uses for each key that the config.json of a Gemma 2 or 3 lacks."""
LLAMA_LIKE = {"norm": "rmsnorm", "positions": "rotary"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
    """One value of `model_type` in config.json."""

    title: str
    """Name of the family for error messages."""
    architecture: str
    """Class of transformers with the output projection."""
    keys: dict[str, str]
    """Field of ModelSpec for each key of config.json that holds the field's value."""
    defaults: dict[str, Any]
    """Value that transformers uses for each key that config.json lacks."""
    fixed: dict[str, Any]
    """Fields of ModelSpec that are equal in all models of the type."""
    activation_key: str = "hidden_act"
    """Key of config.json with the activation function of feed-forward."""
    activations: dict[str, str] = dataclasses.field(default_factory=lambda: GATED)
    """Value of `ModelSpec.activation` for each allowed value of the key `activation_key`."""
    biases: tuple[str | bool, str | bool, str | bool] = (False, False, False)
    """Biases of queries, keys and values, of the attention output, and of feed-forward: whether all
    models have them, or the key of config.json that says so."""
    only: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Only allowed values of keys of config.json. With other values, the model differs from the
    kit's decoder."""
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    """Usual key of config.json for each other name that transformers accepts."""
    head_dim: bool = True
    """Whether the head size may differ from hidden size / number of heads."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies if config.json states none."""
    partial_rotary_factor: float = 1.0
    """Share of a head that is rotated if config.json states none."""
    has_partial_rotary: bool = False
    """Whether a part of each head may be rotated instead of the whole head."""
    rope_theta_key: str = "rope_theta"
    """Key of config.json with the base of the rotary frequencies, if they have no table of their
    own."""
    partial_rotary_key: str = "partial_rotary_factor"
    """Key of config.json with the share of a head that is rotated, if rotary positions have no
    table of their own."""
    window: Literal["none", "all_layers", "by_layer", "if_used"] = "none"
    """Attention windows: in no layer, in all layers, in the layers that `layer_types` names, or in
    these layers if `use_sliding_window` is true."""
    weights: Literal["llama", "phi3", "gpt_neox", "gpt2"] = "llama"
    """Names and shapes of weights (`kit.interop.weights.weights`)."""


MODEL_TYPES = {
    "llama": ModelType(
        title="Llama",
        architecture="LlamaForCausalLM",
        keys=LLAMA_KEYS,
        defaults={**LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
        fixed=LLAMA_LIKE,
        biases=("attention_bias", "attention_bias", "mlp_bias"),
    ),
    "mistral": ModelType(
        title="Mistral",
        architecture="MistralForCausalLM",
        keys=LLAMA_KEYS,
        defaults={
            **LLAMA_DEFAULTS,
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
        fixed=LLAMA_LIKE,
        window="all_layers",
    ),
    "qwen2": ModelType(
        title="Qwen2",
        architecture="Qwen2ForCausalLM",
        keys=LLAMA_KEYS,
        defaults={
            **LLAMA_DEFAULTS,
            "vocab_size": 151_936,
            "intermediate_size": 22_016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32_768,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        fixed=LLAMA_LIKE,
        biases=(True, False, False),
        window="if_used",
    ),
    "qwen3": ModelType(
        title="Qwen3",
        architecture="Qwen3ForCausalLM",
        keys=LLAMA_KEYS,
        defaults={
            **LLAMA_DEFAULTS,
            "vocab_size": 151_936,
            "intermediate_size": 22_016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "attention_bias": False,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        fixed={**LLAMA_LIKE, "qk_norm": "per_head"},
        biases=("attention_bias", "attention_bias", False),
        window="if_used",
    ),
    "gemma": ModelType(
        title="Gemma",
        architecture="GemmaForCausalLM",
        keys=LLAMA_KEYS,
        defaults={
            **LLAMA_DEFAULTS,
            "vocab_size": 256_000,
            "hidden_size": 3072,
            "intermediate_size": 24_576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        fixed={**LLAMA_LIKE, "zero_centered_norm": True},
        activations={"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"},
        biases=("attention_bias", "attention_bias", False),
        only={"use_bidirectional_attention": False},
    ),
    "gemma2": ModelType(
        title="Gemma 2",
        architecture="Gemma2ForCausalLM",
        keys={
            **LLAMA_KEYS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={
            **GEMMA_DEFAULTS,
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fixed={**LLAMA_LIKE, "zero_centered_norm": True, "norm_placement": "both"},
        activation_key="hidden_activation",
        biases=("attention_bias", "attention_bias", False),
        only={"use_bidirectional_attention": False},
        window="by_layer",
    ),
    "gemma3_text": ModelType(
        title="Gemma 3",
        architecture="Gemma3ForCausalLM",
        keys={**LLAMA_KEYS, "final_logit_softcapping": "final_logit_softcapping"},
        defaults={
            **GEMMA_DEFAULTS,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "final_logit_softcapping": None,
        },
        fixed={
            **LLAMA_LIKE,
            "zero_centered_norm": True,
            "norm_placement": "both",
            "qk_norm": "per_head",
        },
        activation_key="hidden_activation",
        biases=("attention_bias", "attention_bias", False),
        only={"use_bidirectional_attention": False},
        rope_theta=1_000_000.0,
        window="by_layer",
    ),
    "olmo2": ModelType(
        title="OLMo 2",
        architecture="Olmo2ForCausalLM",
        keys=LLAMA_KEYS,
        defaults={
            **LLAMA_DEFAULTS,
            "vocab_size": 50_304,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
        },
        fixed={**LLAMA_LIKE, "norm_placement": "after", "qk_norm": "all_heads"},
        biases=("attention_bias", "attention_bias", False),
    ),
    "phi3": ModelType(
        title="Phi-3",
        architecture="Phi3ForCausalLM",
        keys=LLAMA_KEYS,
        defaults={
            **LLAMA_DEFAULTS,
            "vocab_size": 32_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        fixed=LLAMA_LIKE,
        has_partial_rotary=True,
        window="all_layers",
        weights="phi3",
    ),
    "smollm3": ModelType(
        title="SmolLM3",
        architecture="SmolLM3ForCausalLM",
        keys=LLAMA_KEYS,
        defaults={
            **LLAMA_DEFAULTS,
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "sliding_window": None,
        },
        fixed=LLAMA_LIKE,
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        rope_theta=2_000_000.0,
        window="if_used",
    ),
    "granite": ModelType(
        title="Granite",
        architecture="GraniteForCausalLM",
        keys={
            **LLAMA_KEYS,
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "attention_multiplier": "attention_multiplier",
            "logits_scaling": "logits_scaling",
        },
        defaults={
            **LLAMA_DEFAULTS,
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        fixed=LLAMA_LIKE,
        biases=("attention_bias", "attention_bias", "mlp_bias"),
    ),
    "stablelm": ModelType(
        title="StableLM",
        architecture="StableLmForCausalLM",
        keys={
            **{key: field for key, field in LLAMA_KEYS.items() if key != "rms_norm_eps"},
            "layer_norm_eps": "norm_eps",
        },
        defaults={
            **{key: value for key, value in LLAMA_DEFAULTS.items() if key != "rms_norm_eps"},
            "vocab_size": 50_304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
        },
        fixed={"norm": "layernorm", "positions": "rotary"},
        biases=("use_qkv_bias", False, False),
        only={"qk_layernorm": False, "use_parallel_residual": False},
        head_dim=False,
        partial_rotary_factor=0.25,
        has_partial_rotary=True,
    ),
    "nemotron": ModelType(
        title="Nemotron",
        architecture="NemotronForCausalLM",
        keys={
            **{key: field for key, field in LLAMA_KEYS.items() if key != "rms_norm_eps"},
            "norm_eps": "norm_eps",
        },
        defaults={
            **{key: value for key, value in LLAMA_DEFAULTS.items() if key != "rms_norm_eps"},
            "vocab_size": 256_000,
            "hidden_size": 6144,
            "intermediate_size": 24_576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
        },
        fixed={"norm": "layernorm", "positions": "rotary", "zero_centered_norm": True},
        activations=UNGATED,
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        partial_rotary_factor=0.5,
        has_partial_rotary=True,
    ),
    "gpt_neox": ModelType(
        title="GPT-NeoX",
        architecture="GPTNeoXForCausalLM",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "ffn_hidden_size",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "max_position_embeddings": "sequence_length",
            "layer_norm_eps": "norm_eps",
            "tie_word_embeddings": "tied_embeddings",
            "use_parallel_residual": "parallel_residual",
        },
        defaults={
            "vocab_size": 50_432,
            "hidden_size": 6144,
            "intermediate_size": 24_576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "attention_bias": True,
        },
        fixed={"norm": "layernorm", "positions": "rotary"},
        activations=UNGATED,
        biases=("attention_bias", "attention_bias", True),
        head_dim=False,
        partial_rotary_factor=0.25,
        has_partial_rotary=True,
        rope_theta_key="rotary_emb_base",
        partial_rotary_key="rotary_pct",
        weights="gpt_neox",
    ),
    "gpt2": ModelType(
        title="GPT-2",
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_inner": "ffn_hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_positions": "sequence_length",
            "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tied_embeddings",
        },
        defaults={
            "vocab_size": 50_257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        fixed={"norm": "layernorm", "positions": "learned"},
        activation_key="activation_function",
        activations=UNGATED,
        biases=(True, True, True),
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
        aliases={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        head_dim=False,
        weights="gpt2",
    ),
}
"""Model types that the kit plans, imports, trains and exports, by `model_type` of config.json."""
EXAMPLES: dict[str, Any] = {
    **dict.fromkeys(("head_dim", "num_key_value_heads", "n_inner", "sliding_window"), 1),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval", "max_window_layers"), 1),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), 1.0),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "query_pre_attn_scalar"), 1.0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 1.0),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "full_attention", "sliding_attention"), {}),
    **dict.fromkeys(("layer_types", "no_rope_layers", "short_factor", "long_factor"), []),
}
"""A value of the right type for keys of config.json and of its tables of rotary positions. The type
of any other key is that of its default."""
REQUIRED = ("hidden_size", "num_layers", "num_heads", "vocab_size", "sequence_length")
"""Fields of ModelSpec whose keys in config.json may not be null."""
NEVER_NULL = frozenset(
    ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "query_pre_attn_scalar")
)
"""Keys that may be missing but not null."""
KINDS = {
    bool: "true or false",
    int: "a whole number above 0",
    float: "a number above 0",
    str: "a text",
    dict: "a table",
    list: "a list",
}
"""Allowed values for error messages, by the type of the example."""
SIZE_FREE = frozenset(
    ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
)
"""Keys in `ModelType.only` that change neither parameters nor FLOPs of a model. For planning, any
value is allowed."""
AFTER = {
    "import": "`kit eval` scores its folder as it is.",
    "plan": (
        f"Planned are the model types {', '.join(sorted(MODEL_TYPES))}. For an estimate, plan a"
        " spec.json (fields of kit.ModelSpec) that has about as many parameters."
    ),
}
"""Advice at the end of error messages, by the purpose for which a model cannot be used."""


# From a configuration to a spec -------------------------------------------------------------------


def read_model(
    config: dict[str, Any], *, name: str, purpose: Purpose, notes: list[str]
) -> ModelSpec:
    """Returns the spec that a configuration describes. Its `model_type` must be in MODEL_TYPES.

    For the purpose `plan`, a note on each feature that the spec leaves out is appended to `notes`.

    Raises:
        ConfigError: The kit's decoder cannot be the model.
    """
    kind = config["model_type"]
    of = MODEL_TYPES[kind]
    given = {of.aliases.get(key, key): value for key, value in config.items()}
    config = {**of.defaults, **given}
    _check_values(config, of.defaults)
    _check_sizes(config, of)
    only = dict(of.only)
    if purpose == "plan":
        only = {key: value for key, value in only.items() if key not in SIZE_FREE}
    for key, value in only.items():
        if config.get(key) is not None and config[key] != value:
            refuse_key(key, repr(config[key]), f"{value!r} only", purpose)
    activation = config[of.activation_key]
    if activation not in of.activations:
        allowed = " or ".join(map(repr, of.activations))
        refuse_key(of.activation_key, repr(activation), f"{allowed} only", purpose)
    fields: dict[str, Any] = {"name": name, "num_kv_heads": None, **of.fixed}
    fields |= {field: config.get(key) for key, field in of.keys.items()}
    fields["activation"] = of.activations[activation]
    fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
    fields["ffn_hidden_size"] = fields["ffn_hidden_size"] or 4 * fields["hidden_size"]
    fields |= _head_dim(of, config, fields, purpose) | _biases(of, config)
    if of.fixed["positions"] == "rotary":
        fields |= _window(of, config, purpose)
        fields |= _rope(of, config, fields, purpose, notes)
    if kind.startswith("gemma"):
        fields |= _gemma(config)
    if kind == "smollm3":
        fields |= _no_rope_layers(config, purpose)
    return normalised(ModelSpec(**fields))


def _check_values(table: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raises ConfigError if a value of config.json, or of a table in it, has a wrong type. null is
    allowed except for NEVER_NULL. Keys of which neither a default nor an example is known are not
    checked.
    """
    for key, value in table.items():
        example = EXAMPLES.get(key, defaults.get(key))
        if example is None or (value is None and key not in NEVER_NULL):
            continue
        kind = type(example)
        is_right = isinstance(value, (int, float) if kind is float else kind)
        if kind in (int, float):
            lowest = 0 if key == "max_window_layers" else 1e-30
            is_right = is_right and not isinstance(value, bool)
            is_right = is_right and isinstance(value, int | float) and lowest <= value < math.inf
        if not is_right:
            raise ConfigError(f"config.{key}: {value!r} is not allowed. Give {KINDS[kind]}.")
        if isinstance(value, dict):
            _check_values(value, {})


def _check_sizes(config: dict[str, Any], of: ModelType) -> None:
    """Raises ConfigError if a size in REQUIRED is null, or if there are too many layers."""
    for key, field in of.keys.items():
        if field in REQUIRED and config.get(key) is None:
            raise ConfigError(f"config.{key}: null is not allowed. Give {KINDS[int]}.")
        if field == "num_layers" and config[key] > MAX_LAYERS:
            raise ConfigError(
                f"config.{key}: {config[key]:,} is not allowed. Give at most {MAX_LAYERS:,}."
            )


def refuse_key(key: str, found: str, decoder: str, purpose: Purpose) -> NoReturn:
    """Raises ConfigError for a key of config.json. `found` is its value, and `decoder` says what
    the kit's decoder has instead.
    """
    why = f", the kit's decoder has {decoder}" if decoder else ""
    raise ConfigError(f"config.{key}: {found} cannot be {VERBS[purpose]}{why}. {AFTER[purpose]}")


def normalised(spec: ModelSpec) -> ModelSpec:
    """Returns the spec in which each optional field is None if its default means the same model."""
    changes: dict[str, Any] = {}
    if spec.head_dim is not None and spec.head_dim * spec.num_heads == spec.hidden_size:
        changes["head_dim"] = None
    for name in ("qkv_bias", "ffn_bias"):
        if getattr(spec, name) == spec.bias:
            changes[name] = None
    for name in ("sliding_window_pattern", "no_rope_layer_interval"):
        if (getattr(spec, name) or 0) > spec.num_layers:
            changes[name] = None
    if spec.attention_multiplier == spec.head_size**-0.5:
        changes["attention_multiplier"] = None
    return spec.replace(**changes) if changes else spec


def _head_dim(
    of: ModelType, config: dict[str, Any], fields: dict[str, Any], purpose: Purpose
) -> dict[str, Any]:
    head_dim = config.get("head_dim")
    usual = fields["hidden_size"] // fields["num_heads"]
    if not of.head_dim and head_dim not in (None, usual):
        refuse_key("head_dim", repr(head_dim), f"{usual} only in a {of.title}", purpose)
    return {"head_dim": head_dim}


def _biases(of: ModelType, config: dict[str, Any]) -> dict[str, bool]:
    values = [bool(config[bias]) if isinstance(bias, str) else bias for bias in of.biases]
    return dict(zip(("qkv_bias", "bias", "ffn_bias"), values, strict=True))


def _gemma(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the multipliers of a Gemma. They follow from other keys of its configuration."""
    found = {"embedding_multiplier": config["hidden_size"] ** 0.5}
    if "query_pre_attn_scalar" in config:
        found["attention_multiplier"] = config["query_pre_attn_scalar"] ** -0.5
    return found


def _no_rope_layers(config: dict[str, Any], purpose: Purpose) -> dict[str, int | None]:
    """Returns in which layers a SmolLM3 has no rotary positions. `no_rope_layers` takes precedence.
    It has a 1 for each layer with rotary positions.
    """
    interval = config["no_rope_layer_interval"]
    layers = config.get("no_rope_layers")
    if layers is None:
        return {"no_rope_layer_interval": interval}
    found = interval_of([not is_rotary for is_rotary in layers])
    if found is None:
        refuse_key("no_rope_layers", str(layers), "every n-th layer without positions", purpose)
    return {"no_rope_layer_interval": found or None}


def interval_of(marks: list[bool]) -> int | None:
    """Returns n if every n-th mark is True and all others are False, 0 if no mark is True, and None
    if the marks have no such pattern.
    """
    if not any(marks):
        return 0
    n = marks.index(True) + 1
    regular = [(i + 1) % n == 0 for i in range(len(marks))]
    return n if regular == [bool(mark) for mark in marks] else None


def _window(of: ModelType, config: dict[str, Any], purpose: Purpose) -> dict[str, int | None]:
    """Returns the attention window of a configuration, and which layers have it."""
    none: dict[str, int | None] = {"sliding_window": None, "sliding_window_pattern": None}
    window = config.get("sliding_window")
    if of.window == "if_used":
        # transformers has 4,096 as default of Qwen, which matters only if the window is used.
        window = config.get("sliding_window", 4096) if config["use_sliding_window"] else None
    types = config.get("layer_types")
    _check_layer_types(of, types, window, purpose)
    if of.window == "none" or window is None:
        return none
    if of.window == "all_layers":
        return {"sliding_window": window, "sliding_window_pattern": None}
    layers = config["num_hidden_layers"]
    if types is not None:
        is_full = [kind == "full_attention" for kind in types]
    elif config["model_type"] == "gemma2":
        is_full = [i % 2 == 1 for i in range(layers)]
    elif config["model_type"] == "gemma3_text":
        pattern = config.get("sliding_window_pattern") or 6
        is_full = [(i + 1) % pattern == 0 for i in range(layers)]
    elif config["model_type"] == "smollm3":
        no_rope = config.get("no_rope_layers")
        interval = config["no_rope_layer_interval"]
        no_rope = no_rope or [int((i + 1) % interval != 0) for i in range(layers)]
        is_full = [bool(is_rotary) for is_rotary in no_rope]
    else:
        is_full = [i < config["max_window_layers"] for i in range(layers)]
    if all(is_full):
        return none
    pattern = interval_of(is_full)
    if pattern is None:
        key = "layer_types" if types is not None else "use_sliding_window"
        decoder = "a window in all layers, or in all but every n-th"
        refuse_key(key, "a window in some of the layers", decoder, purpose)
    return {"sliding_window": window, "sliding_window_pattern": pattern or None}


def _check_layer_types(
    of: ModelType, types: list[Any] | None, window: int | None, purpose: Purpose
) -> None:
    """Raises ConfigError if `layer_types` contradicts the other keys of the attention window.

    With layer_types, transformers loads a Mistral as another model type, and SmolLM3 uses the
    window even if use_sliding_window is false.
    """
    if of.window not in ("all_layers", "if_used") or types is None:
        return
    expected = {"full_attention"} if window is None else {"sliding_attention"}
    if of.window == "if_used" and window is not None:
        expected = {"full_attention", "sliding_attention"}
    if unexpected := set(map(str, types)) - expected:
        decoder = f"{' or '.join(sorted(expected))} in all layers for these other keys"
        refuse_key("layer_types", ", ".join(sorted(unexpected)), decoder, purpose)


def _rope(
    of: ModelType,
    config: dict[str, Any],
    fields: dict[str, Any],
    purpose: Purpose,
    notes: list[str],
) -> dict[str, Any]:
    """Returns the fields of the rotary positions.

    For the purpose `plan`, an unknown scaling is left out with a note, because it changes neither
    parameters nor FLOPs. For `import`, it raises ConfigError.

    The rules are those of transformers. `rope_scaling`, the older name, takes precedence over
    `rope_parameters`. Inside, `rope_type` takes precedence over the older `type`. A `rope_theta`
    inside takes precedence over a `rope_theta` outside. A `rope_type` outside is ignored. Gemma 3
    has one table for layers with an attention window and one for all other layers.
    """
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = dict(config.get(where) or {})
    found: dict[str, Any] = {}
    if config["model_type"] == "gemma3_text":
        tables = config.get("rope_parameters") or {}
        rope = {**(tables.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        local = dict(tables.get("sliding_attention") or {})
        local.setdefault("rope_theta", config.get("rope_local_base_freq", 10_000.0))
        if fields["sliding_window"] is not None and local != rope:
            kind = local.get("rope_type", "default")
            if kind != "default":
                decoder = "no scaling in layers with a window"
                refuse_key("rope_parameters", f"sliding_attention {kind!r}", decoder, purpose)
            found["local_rope_theta"] = float(local["rope_theta"])
    partial = rope.get("partial_rotary_factor", config.get(of.partial_rotary_key))
    found["rope_theta"] = float(
        rope.get("rope_theta", config.get(of.rope_theta_key, of.rope_theta))
    )
    found["partial_rotary_factor"] = float(of.partial_rotary_factor if partial is None else partial)
    if found["partial_rotary_factor"] != 1 and not of.has_partial_rotary:
        refuse_key(of.partial_rotary_key, repr(partial), f"1 only in a {of.title}", purpose)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if config["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"
    by_layer = [key for key, value in rope.items() if isinstance(value, dict)]
    has_factor = kind == "longrope" and rope.get("attention_factor") is not None
    if kind not in ("default", "llama3", "linear", "longrope") or by_layer or has_factor:
        if purpose == "import":
            decoder = "rope_type 'default', 'linear', 'llama3' or 'longrope', for all layers"
            refuse_key(where, str(config.get(where)), decoder, purpose)
        notes.append(
            f"config.{where} ({kind}) is left out: it changes neither parameters nor FLOPs, and the"
            " kit cannot train with it"
        )
    elif kind != "default":
        found["rope_scaling"] = _scaling(config, kind, rope)
    return found


def _scaling(config: dict[str, Any], kind: str, rope: dict[str, Any]) -> RopeScaling:
    """Returns the scaling of rotary frequencies in a table of rotary positions."""
    longest = config["max_position_embeddings"]
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("short_factor", "long_factor"),
    }
    missing = [key for key in needed.get(kind, ()) if key not in rope]
    if missing:
        raise ConfigError(
            f"config.rope_scaling: {', '.join(missing)} missing, which rope_type {kind!r} needs."
            " Copy the table from the model's own config.json."
        )
    if kind == "linear":
        return RopeScaling(rope_type="linear", factor=rope["factor"])
    original = rope.get("original_max_position_embeddings", longest)
    if kind == "llama3":
        return RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=original,
        )
    # A Phi-3 states the original length outside the table, which takes precedence.
    original = config.get("original_max_position_embeddings", original)
    return RopeScaling(
        rope_type="longrope",
        factor=rope.get("factor") or longest / original,
        original_max_position_embeddings=original,
        short_factor=tuple(rope["short_factor"]),
        long_factor=tuple(rope["long_factor"]),
    )


# From a spec to a configuration -------------------------------------------------------------------


def write_model(spec: ModelSpec) -> dict[str, Any]:
    """Returns the keys of `config.json` that describe a model, with its `model_type`.

    Each model type writes what it can of the spec. The first type whose configuration reads back as
    the spec is the answer.

    Raises:
        ConfigError: No model type of transformers can express the model. The message names what
            the closest type lacks.
    """
    wanted = comparable(spec)
    differences: dict[str, dict[str, Any]] = {}
    for kind in MODEL_TYPES:
        config = _written(kind, spec)
        try:
            found = comparable(read_model(config, name="", purpose="import", notes=[]))
        except (ConfigError, TypeError, ArithmeticError):
            continue  # The type has no such value, for example of the activation.
        different = {key: value for key, value in found.items() if value != wanted[key]}
        if not different:
            return config
        differences[kind] = different
    kind = min(differences, key=lambda each: len(differences[each]))
    key, value = next(iter(differences[kind].items()))
    raise ConfigError(
        f"spec.{key}: Hugging Face's {MODEL_TYPES[kind].title} has {value!r} only, this model has"
        f" {wanted[key]!r}. It cannot be written as one."
    )


def comparable(spec: ModelSpec) -> dict[str, Any]:
    """Returns the fields of a spec that describe the function of the model: all but its name and
    its initial weights.
    """
    fields = normalised(spec).to_dict()
    for name in ("name", "init_std", "scaled_init"):
        del fields[name]
    return fields


def _written(kind: str, spec: ModelSpec) -> dict[str, Any]:
    """Returns a configuration of a model type with as much of the spec as the type can express."""
    of = MODEL_TYPES[kind]
    config: dict[str, Any] = {"architectures": [of.architecture], "model_type": kind}
    config |= {key: getattr(spec, field) for key, field in of.keys.items()}
    names = {activation: name for name, activation in reversed(of.activations.items())}
    config[of.activation_key] = names.get(spec.activation)
    values = (spec.has_qkv_bias, spec.bias, spec.has_ffn_bias)
    for key, value in zip(of.biases, values, strict=True):
        if isinstance(key, str):
            config[key] = value
    if of.head_dim:
        config["head_dim"] = spec.head_size
    if of.fixed["positions"] == "rotary":
        config |= _written_window(of, spec) | _written_rope(of, spec)
    if kind == "granite" and spec.attention_multiplier is None:
        config["attention_multiplier"] = spec.head_size**-0.5
    if kind in ("gemma2", "gemma3_text"):
        multiplier = spec.attention_multiplier or spec.head_size**-0.5
        config["query_pre_attn_scalar"] = round(multiplier**-2)
    if kind == "smollm3":
        config["no_rope_layers"] = [int(spec.is_rotary(i)) for i in range(spec.num_layers)]
        config["no_rope_layer_interval"] = spec.no_rope_layer_interval or 4
    return config


def _written_window(of: ModelType, spec: ModelSpec) -> dict[str, Any]:
    if of.window == "none":
        return {}
    found: dict[str, Any] = {"sliding_window": spec.sliding_window}
    if of.window == "if_used":
        found["use_sliding_window"] = spec.sliding_window is not None
    if of.window != "all_layers":
        found["layer_types"] = [
            "sliding_attention" if spec.is_local(i) else "full_attention"
            for i in range(spec.num_layers)
        ]
    if of.window == "by_layer" and spec.sliding_window is None:
        # transformers requires a number for Gemma even if no layer has a window.
        found["sliding_window"] = spec.sequence_length
    return found


def _written_rope(of: ModelType, spec: ModelSpec) -> dict[str, Any]:
    """Returns the table of rotary positions, in the format of transformers 5."""
    base: dict[str, Any] = {}
    if of.has_partial_rotary:
        base["partial_rotary_factor"] = spec.partial_rotary_factor
    rope = {"rope_type": "default", "rope_theta": spec.rope_theta, **base}
    found: dict[str, Any] = {}
    scaling = spec.rope_scaling
    if scaling is not None:
        names = {
            "linear": ("factor",),
            "llama3": (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            ),
            "longrope": (
                "factor",
                "short_factor",
                "long_factor",
                "original_max_position_embeddings",
            ),
        }[scaling.rope_type]
        values = scaling.to_dict()
        rope |= {"rope_type": scaling.rope_type, **{name: values[name] for name in names}}
        if of.weights == "phi3":
            found["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if of.architecture == "Gemma3ForCausalLM":
        local = rope
        if spec.local_rope_theta is not None:
            local = {"rope_type": "default", "rope_theta": spec.local_rope_theta, **base}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {**found, "rope_parameters": rope}
