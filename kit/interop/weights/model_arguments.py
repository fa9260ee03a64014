"""Reads models from the settings of other trainers: Megatron's arguments and torchtitan's flavours.
Imports no torch.

Sources: `_add_network_size_args` of megatron/training/arguments.py, github.com/NVIDIA/Megatron-LM.
For torchtitan, models/llama3 of github.com/pytorch/torchtitan v0.2.0: `llama3_args`, `FeedForward`,
and the seq_len of its train_configs.
"""

import shlex

from cluster.record import suggestion
from kit.config.spec import ModelSpec, RopeScaling
from kit.errors import ConfigError

OTHER_WORK = (
    "num_experts",
    "multi_latent_attention",
    "window_size",
    "mtp_num_layers",
    "hybrid_attention_ratio",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
)
"""Arguments of Megatron that change the FLOPs per token compared with the kit's decoder. The kit's
FLOPs would be wrong for such a model."""
REFUSED = (
    *OTHER_WORK,
    "qk_layernorm",
    "add_qkv_bias",
    "squared_relu",
    "quick_geglu",
    "rotary_interleaved",
    "no_rope_freq",
    "rotary_seq_len_interpolation_factor",
    "apply_residual_connection_post_layernorm",
)
"""Arguments of Megatron for models that the kit's decoder cannot be. They are refused."""
REQUIRED_VALUES = {
    "rotary_percent": ("1", "1.0"),
    "softmax_type": ("vanilla",),
    "position_embedding_type": ("learned_absolute", "rope"),
}
"""Allowed values of Megatron's arguments, by name. With other values, the model differs from the
kit's decoder."""
FLAGS = (
    "swiglu",
    "group_query_attention",
    "use_rope_scaling",
    "use_rotary_position_embeddings",
    "disable_bias_linear",
    "untie_embeddings_and_output_weights",
)
"""Megatron's arguments about the model that are flags, so that no value follows them."""
SHAPES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size")
"""Megatron's arguments that are required, since the shape of the model does not follow without
them."""
TORCHTITAN = {
    "llama3/debugmodel": (6, 256, 16, 16, 768, 2048, 2048),
    "llama3/8B": (32, 4096, 32, 8, 14_336, 128_256, 8192),
    "llama3/70B": (80, 8192, 64, 8, 28_672, 128_256, 8192),
    "llama3/405B": (126, 16_384, 128, 8, 53_248, 128_256, 8192),
}
"""Sizes of each flavour of torchtitan: (layers, hidden size, heads, key/value heads, feed-forward
size, vocabulary size, sequence length)."""
UNSUPPORTED_FAMILIES = {
    "llama4": "experts",
    "deepseek_v3": "experts",
    "qwen3": "norms of queries and keys",
}
"""Dict from a model family of torchtitan to the feature of this family that the kit's decoder
lacks."""


def torchtitan_spec(name: str) -> ModelSpec:
    """Returns the spec of a torchtitan model. `name` is FAMILY/FLAVOUR, such as `llama3/8B`.

    Raises:
        ConfigError: The flavour is unknown, or the kit's decoder is not that model.
    """
    family = name.partition("/")[0]
    if family in UNSUPPORTED_FAMILIES:
        raise ConfigError(
            f"--model: torchtitan:{name} has {UNSUPPORTED_FAMILIES[family]}, which the kit's"
            " decoder has not."
        )
    if name not in TORCHTITAN:
        raise ConfigError(f"--model: torchtitan:{name} is unknown. {suggestion(name, TORCHTITAN)}")
    layers, hidden, heads, kv_heads, ffn, vocabulary, length = TORCHTITAN[name]
    return ModelSpec.llama(
        name=f"torchtitan-{name.replace('/', '-')}",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocabulary,
        sequence_length=length,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(),
    )


def read_arguments(text: str) -> dict[str, str]:
    """Returns Megatron's arguments in a command line, as a dict from name (as in Megatron's log) to
    text. Flags have the text `True`.

    Sizes that follow from other sizes, such as the feed-forward size, are added by Megatron's
    rules.

    Raises:
        ConfigError: The kit's decoder cannot be the model, because of one of the arguments.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"--model: Megatron's arguments cannot be read ({error}).") from error
    arguments = {"add_bias_linear": "True"}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            arguments[name] = value or "True"
        elif arguments.get(name) == "True" and name not in FLAGS:
            arguments[name] = word
    sizes = {name: int(value) for name, value in arguments.items() if value.isdigit()}
    hidden = sizes.get("hidden_size", 0)
    heads = sizes.get("num_attention_heads") or 1
    _refuse_other_models(arguments, head_size=hidden // heads)
    if "disable_bias_linear" in arguments:
        arguments["add_bias_linear"] = "False"
    ffn_hidden_size = 4 * hidden
    if "swiglu" in arguments:
        ffn_hidden_size = int(4 * hidden * 2 / 3 / 64) * 64
    arguments.setdefault("ffn_hidden_size", str(ffn_hidden_size))
    if "vocab_size" in sizes:
        multiple = sizes.get("make_vocab_size_divisible_by", 128)
        multiple *= sizes.get("tensor_model_parallel_size", 1)
        padded = -(-sizes["vocab_size"] // multiple) * multiple
        arguments.setdefault("padded_vocab_size", str(padded))
    return arguments


def _refuse_other_models(arguments: dict[str, str], *, head_size: int) -> None:
    """Raises ConfigError if one of Megatron's arguments means a model that the kit's decoder cannot
    be.
    """
    required = {**REQUIRED_VALUES, "kv_channels": (str(head_size),)}
    for name, value in arguments.items():
        if name in REFUSED or value not in required.get(name, (value,)):
            raise ConfigError(
                f"--model: --{name.replace('_', '-')} {value}: the kit's decoder has no such"
                " option. Leave the argument out if a similar model is enough."
            )


def megatron_spec(arguments: dict[str, str], notes: list[str]) -> ModelSpec:
    """Returns the spec of a model from Megatron's or GPT-NeoX's arguments, named as in their logs.
    Notes on features that are replaced by similar features are appended to `notes`.

    Raises:
        ConfigError: A shape is missing.
    """
    missing = [name for name in SHAPES if not arguments.get(name, "").isdigit()]
    if missing:
        raise ConfigError(
            f"model: what was given does not tell {', '.join(missing)}. Add it as a number (for the"
            " last, vocab_size will do), or give --model with a preset or a spec.json, and --set"
            " spec.KEY=VALUE for what differs."
        )
    flags = {name for name, value in arguments.items() if value == "True"}
    heads = int(arguments["num_attention_heads"])
    hidden = int(arguments["hidden_size"])
    kv_heads = "num_key_value_heads"
    if "group_query_attention" in flags:
        kv_heads = "num_query_groups"
    is_gated = "swiglu" in flags or arguments.get("glu_activation") == "swiglu"
    has_rms_norm = "rms" in arguments.get("normalization", "").lower()
    scaling = None
    if "use_rope_scaling" in flags:
        scaling = RopeScaling(factor=_number(arguments, 8.0, "rope_scaling_factor"))
    return ModelSpec(
        name=f"megatron-{arguments['num_layers']}x{hidden}",
        num_layers=int(arguments["num_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(_number(arguments, heads, kv_heads)),
        ffn_hidden_size=int(_number(arguments, 4 * hidden, "ffn_hidden_size")),
        vocab_size=int(arguments["padded_vocab_size"]),
        sequence_length=int(arguments["seq_length"]),
        norm="rmsnorm" if has_rms_norm else "layernorm",
        positions="rotary" if _is_rotary(arguments, notes) else "learned",
        activation="swiglu" if is_gated else "gelu",
        bias=arguments.get("add_bias_linear") != "False",
        tied_embeddings="untie_embeddings_and_output_weights" not in flags,
        norm_eps=_number(arguments, 1e-5, "norm_epsilon", "layernorm_epsilon"),
        rope_theta=_number(arguments, 10_000, "rotary_base"),
        rope_scaling=scaling,
    )


def _is_rotary(arguments: dict[str, str], notes: list[str]) -> bool:
    """Returns whether Megatron's arguments state rotary positions. Any other kind is counted
    as learned positions. If the arguments name a kind that is neither learned nor absolute, a note
    is appended to `notes`.
    """
    kind = arguments.get("position_embedding_type", "").lower()
    has_flag = arguments.get("use_rotary_position_embeddings") == "True"
    if has_flag or "rope" in kind or "rotary" in kind:
        return True
    if kind and "learned" not in kind and "absolute" not in kind:
        notes.append(
            f"positions {arguments['position_embedding_type']!r} are counted as learned ones"
        )
    return False


def _number(arguments: dict[str, str], default: float, *names: str) -> float:
    """Returns the value of the first argument in `names` that is given. Returns `default` if none
    is given, or if that value is no number.
    """
    for name in names:
        if name in arguments:
            try:
                return float(arguments[name])
            except ValueError:
                return default
    return default
