"""Reads and writes Hugging Face's `config.json` of a Llama or a GPT-2, with the rules of
transformers. Imports no torch.

A Mistral without a sliding window is read as a Llama. Its weights have a Llama's names.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from cluster.files import read_small
from cluster.record import suggestion
from kit.config.spec import ModelSpec, RopeScaling
from kit.errors import ConfigError
from kit.interop.weights.model_arguments import megatron_spec, read_arguments, torchtitan_spec

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""Dict from the name of an activation function in GPT-2's config.json to the kit's name."""
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
"""Name of the field of the kit's spec for each key of config.json, in one dict per model type."""
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
"""Value that transformers uses for each key that config.json lacks, in one dict per model type."""
ROPE_THETA = 10_000.0
"""Base of the rotary frequencies that transformers uses if config.json states no `rope_theta`."""
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
"""Usual key of config.json for each other name that transformers accepts, in one dict per model
type."""
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
"""Only allowed values of keys of config.json, in one dict per model type. With other values, the
model differs from the kit's decoder."""
EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
)
"""Keys of config.json that only mixtures of experts have. The kit has only dense models."""
SIZE_FREE = frozenset(
    ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
)
"""Keys of config.json in FIXED that change neither parameters nor FLOPs of a model. For planning,
any value is allowed."""
LACKING = {
    "cohere": "parallel attention and feed-forward, and a scale of the logits",
    "falcon": "parallel attention and feed-forward",
    "gemma": "a head size of its own, and a feed-forward gated by GELU",
    "gemma2": "a head size of its own, norms before and after each block, and local layers",
    "gemma3_text": "a head size of its own, norms of queries and keys, and local layers",
    "glm4": "norms before and after each block, and rotary positions over half a head",
    "gpt_neox": "parallel attention and feed-forward, and rotary positions over part of a head",
    "granite": "scales of embeddings, residuals and logits",
    "mamba": "state-space layers",
    "nemotron": "a feed-forward of squared ReLU, and rotary positions over half a head",
    "olmo2": "norms behind each block, and norms of queries and keys",
    "olmo3": "norms behind each block, norms of queries and keys, and local layers",
    "opt": "learned positions with an offset, and ReLU",
    "phi": "parallel attention and feed-forward",
    "phi3": "fused projections, and long rotary factors",
    "qwen2": "biases of queries, keys and values alone",
    "qwen3": "norms of queries and keys, and a head size of its own",
    "smollm3": "layers without positions",
    "stablelm": "rotary positions over part of a head",
}
"""Dict from `model_type` to the features of this model that the kit's decoder lacks, as text for
error messages."""
TRAINING_LENGTH = 8192
"""Largest training length in tokens that is assumed for a config.json. Its
`max_position_embeddings` is the longest sequence that the model serves, often longer than those of
its pre-training."""
PLANNED = "gpt2, llama and mistral"
"""Values of `model_type` for which the planner accepts a config.json, as text for error messages
and help."""
AFTER = {
    "import": "`kit eval` scores its folder as it is.",
    "plan": (
        f"Planned are the model types {PLANNED}. For an estimate, plan a spec.json (fields of"
        " kit.ModelSpec) that has about as many parameters."
    ),
}
"""Advice at the end of error messages, by the purpose for which a model cannot be used."""
VERBS = {"import": "imported", "plan": "planned"}
"""Participles for error messages, as in "cannot be imported", by purpose."""

Purpose = Literal["import", "plan"]
"""Purpose for which a configuration is read. For `import`, weights are read or trained, so the
decoder must be exactly the model. For `plan`, features that change neither parameters nor FLOPs may
differ."""
Precision = Literal["float32", "bfloat16", "float16"]


def config_of(spec: ModelSpec, *, precision: Precision = "float32") -> dict[str, Any]:
    """Returns the `config.json` of a model.

    Raises:
        ConfigError: The model can be written neither as transformers' Llama nor as its GPT-2.
    """
    if spec.family == "llama":
        kind = "llama"
        title = "Llama"
        required = {"norm": "rmsnorm", "gated": True}
    else:
        kind = "gpt2"
        title = "GPT-2"
        required = {"norm": "layernorm", "gated": False, "bias": True}
    for key, value in required.items():
        if getattr(spec, key) != value:
            raise ConfigError(
                f"spec.{key}: Hugging Face's {title} has {value!r} only, this model has"
                f" {getattr(spec, key)!r}. It cannot be written as one."
            )
    common = {
        "model_type": kind,
        **{theirs: getattr(spec, ours) for theirs, ours in FIELDS[kind].items()},
        "dtype": precision,
        "initializer_range": spec.init_std,
        "use_cache": True,
    }
    if kind == "llama":
        rope = {"rope_type": "default", "rope_theta": spec.rope_theta}
        if spec.rope_scaling:
            rope |= {"rope_type": "llama3", **spec.rope_scaling.to_dict()}
        return {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": spec.head_size,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "mlp_bias": spec.bias,
            **common,
        }
    activation = "gelu_new" if spec.activation == "gelu_tanh" else "gelu"
    return {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": activation,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **common,
    }


def load_spec(name: str) -> ModelSpec:
    """Returns the spec of a model. `name` is a preset, a spec.json, Hugging Face's config.json, or
    the folder of one of these files. It may also be Megatron's arguments, as text or in a .txt or
    .sh file, or `torchtitan:` with a flavour of torchtitan.

    Raises:
        ConfigError: There is no such preset, or the file is missing, or describes no model that the
            kit has.
    """
    config = _hugging_face_config(name)
    if config is not None:
        return _read_config(*config, purpose="import")
    return _other_spec(name)


def training_spec(
    name: str, *, sequence_length: int | None = None, purpose: Purpose = "plan"
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Returns (spec of a model with its training length, notes for the user).

    `name` is a preset, a file, a folder or a text with arguments, as `load_spec` explains. If
    `sequence_length` is None, a training length is assumed for a Hugging Face configuration: 8,192
    tokens, or less if its original or its largest length is smaller. `max_position_embeddings`
    alone is only the longest sequence that the model serves.

    Raises:
        ConfigError: See `load_spec`. For the purpose `plan`, features that change neither the
            parameters nor the FLOPs are accepted. They are the scaling of rotary positions, and a
            sliding window that is not shorter than the sequence.
    """
    config = _hugging_face_config(name)
    if config is None:
        spec = _other_spec(name)
        if sequence_length is not None:
            spec = spec.replace(sequence_length=sequence_length)
        return spec, ()
    file, table = config
    notes = list[str]()
    spec = _read_config(file, table, purpose=purpose, notes=notes)
    longest = spec.sequence_length
    if sequence_length is None:
        spec = spec.replace(sequence_length=_training_length(table, spec))
        notes.append(_length_note(table, spec.sequence_length, longest))
    else:
        spec = spec.replace(sequence_length=sequence_length)
        if sequence_length > longest:
            key = _length_key(table)
            notes.append(
                f"the sequence of {sequence_length:,} tokens is longer than {key} ({longest:,}),"
                " the longest that this configuration serves"
            )
    window = _window(table)
    if window is not None and window < spec.sequence_length:
        raise ConfigError(
            f"config.sliding_window: {window:,} is shorter than the sequence of"
            f" {spec.sequence_length:,} tokens, and the FLOPs of local attention are not planned."
            f" Give --seq {window} or less."
        )
    return spec, tuple(notes)


def _hugging_face_config(name: str) -> tuple[Path, dict[str, Any]] | None:
    """Returns (file, content) of a Hugging Face configuration, or None if `name` is no such
    configuration.

    Raises:
        ConfigError: The configuration is a mixture of experts, or lacks `model_type`.
    """
    if name.startswith("torchtitan:") or name.lstrip().startswith("--"):
        return None
    file = _model_file(name)
    if file.suffix != ".json":
        return None
    try:
        table = json.loads(read_small(file, follows=True))
    except (OSError, ValueError, RecursionError):
        return None  # `ModelSpec.read` reports what is wrong with the file.
    if not isinstance(table, dict):
        return None
    _refuse_experts(table)
    if "model_type" not in table and {"architectures", "num_hidden_layers"} & table.keys():
        raise ConfigError(
            f"{file}: model_type: missing. A Hugging Face config.json names its family in it: add"
            ' a line such as "model_type": "llama".'
        )
    return (file, table) if "model_type" in table else None


def _model_file(name: str) -> Path:
    """Returns the file that describes a model: `name` itself, or a file in the folder `name`."""
    file = Path(name).expanduser()
    if not file.is_dir():
        return file
    if (file / "spec.json").exists():
        return file / "spec.json"
    return file / "config.json"


def _other_spec(name: str) -> ModelSpec:
    """Returns the spec of a model that is described by anything but a Hugging Face
    configuration: a preset, a spec.json, a torchtitan flavour or Megatron's arguments.
    """
    if name.startswith("torchtitan:"):
        return torchtitan_spec(name.removeprefix("torchtitan:"))
    if name.lstrip().startswith("--"):
        return megatron_spec(read_arguments(name), [])
    file = _model_file(name)
    if file.suffix in (".txt", ".sh") and file.is_file():
        return megatron_spec(read_arguments(read_small(file, follows=True).decode()), [])
    return ModelSpec.read(file) if file.suffix == ".json" else ModelSpec.preset(name)


def _read_config(
    file: Path, table: dict[str, Any], *, purpose: Purpose, notes: list[str] | None = None
) -> ModelSpec:
    """Returns the spec of the model that a Hugging Face configuration describes.

    Raises:
        ConfigError: The file is damaged, or the kit's decoder cannot be the model.
    """
    try:
        return spec_of(table, name=file.parent.resolve().name, purpose=purpose, notes=notes)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"{file}: damaged ({type(error).__name__}: {error}). Copy it again."
        ) from error


def spec_of(
    config: dict[str, Any],
    *,
    name: str,
    purpose: Purpose = "import",
    notes: list[str] | None = None,
) -> ModelSpec:
    """Returns the spec that a `config.json` describes.

    For the purpose `plan`, a note on each feature that the spec leaves out is appended to `notes`.

    Raises:
        ConfigError: The kit's decoder cannot be the model.
    """
    kind = config.get("model_type", "")
    if kind not in FIXED:
        _refuse_type(kind, config, purpose)
    if quantized := config.get("quantization_config"):
        method = quantized
        if isinstance(quantized, dict):
            method = quantized.get("quant_method", "?")
        if purpose == "import":
            _refuse_key("quantization_config", f"weights in {method!r}", "", purpose)
        raise ConfigError(
            f"config.quantization_config: {method!r} describes stored weights, which are not"
            " planned. Give the config.json of the model before quantization, or remove this entry."
        )
    given = {ALIASES[kind].get(key, key): value for key, value in config.items()}
    config = {**DEFAULTS[kind], **given}
    fixed = FIXED[kind]
    if purpose == "plan":
        free = {*SIZE_FREE, "sliding_window"}
        fixed = {key: value for key, value in fixed.items() if key not in free}
    _refuse(config, fixed, purpose)
    if kind == "gpt2":
        return _gpt2(config, name, purpose)
    if notes is None:
        notes = []
    return _llama(config, name, purpose, notes)


def _refuse_type(kind: Any, config: dict[str, Any], purpose: Purpose) -> NoReturn:
    """Raises ConfigError for a model type that the kit's decoder cannot be."""
    text = f"config.model_type: {kind!r} cannot be {VERBS[purpose]}."
    inner = config.get("text_config")
    if isinstance(inner, dict) and inner.get("model_type") in FIXED:
        raise ConfigError(
            f"{text} Its language model is a {inner['model_type']!r}, in `text_config`: save that"
            " object as a config.json of its own and give it."
        )
    if lacking := LACKING.get(str(kind)):
        text += f" The kit's decoder lacks {lacking}."
    allowed = f" Allowed: {', '.join(sorted(FIXED))}." if purpose == "import" else ""
    raise ConfigError(f"{text}{allowed} {AFTER[purpose]}")


def _refuse_key(key: str, found: str, decoder: str, purpose: Purpose) -> NoReturn:
    """Raises ConfigError for a key of config.json. `found` is its value, and `decoder` says what
    the kit's decoder has instead.
    """
    why = f", the kit's decoder has {decoder}" if decoder else ""
    raise ConfigError(f"config.{key}: {found} cannot be {VERBS[purpose]}{why}. {AFTER[purpose]}")


def _refuse_experts(config: dict[str, Any]) -> None:
    for key in EXPERTS:
        if config.get(key):
            raise ConfigError(
                f"config.{key}: {config[key]!r} makes a mixture of experts, which the kit neither"
                " plans nor trains: it has dense models only."
            )


def _training_length(config: dict[str, Any], spec: ModelSpec) -> int:
    """Returns the training length in tokens that is assumed for a configuration."""
    if spec.positions == "learned":
        # The number of learned positions is fixed: it is a dimension of a weight.
        return spec.sequence_length
    lengths = [TRAINING_LENGTH, spec.sequence_length]
    for table in (config, config.get("rope_scaling"), config.get("rope_parameters")):
        original = (table or {}).get("original_max_position_embeddings")
        if isinstance(original, int | float) and original >= 1:
            lengths.append(int(original))
    return min(lengths)


def _length_note(config: dict[str, Any], length: int, longest: int) -> str:
    """Returns a note for the user on the training length that was assumed."""
    key = _length_key(config)
    if length == longest:
        return f"the training length is taken as {key}, {longest:,} tokens"
    return (
        f"the training length is taken as {length:,} tokens, since {key} ({longest:,}) is the"
        " longest sequence that the model serves"
    )


def _length_key(config: dict[str, Any]) -> str:
    """Returns the key of a configuration that holds its longest sequence."""
    return "n_positions" if config["model_type"] == "gpt2" else "max_position_embeddings"


def _window(config: dict[str, Any]) -> int | None:
    """Returns the sliding window of a Mistral's attention in tokens, or None for full attention."""
    if config.get("model_type") != "mistral":
        return None
    return config.get("sliding_window", DEFAULTS["mistral"]["sliding_window"])


def _llama(config: dict[str, Any], name: str, purpose: Purpose, notes: list[str]) -> ModelSpec:
    config = {
        "attention_bias": False,
        "mlp_bias": False,
        **config,
    }  # A Mistral has no biases.
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    _refuse(config, {"head_dim": hidden // heads}, purpose)
    if config["attention_bias"] != config["mlp_bias"]:
        found = f"{config['attention_bias']!r} beside mlp_bias {config['mlp_bias']!r}"
        _refuse_key("attention_bias", found, "biases in both or in neither", purpose)
    shapes = _shapes(
        {**config, "num_key_value_heads": config.get("num_key_value_heads") or heads}, "llama"
    )
    return ModelSpec.llama(name=name, **_rope(config, purpose, notes), **shapes)


def _rope(config: dict[str, Any], purpose: Purpose, notes: list[str]) -> dict[str, Any]:
    """Returns the base of the rotary frequencies, and their scaling if it is that of Llama 3.1.

    For the purpose `plan`, another scaling is left out with a note, because it changes neither
    parameters nor FLOPs. For `import`, it raises ConfigError.

    The rules are those of transformers. `rope_scaling`, the older name, takes precedence over
    `rope_parameters`. Inside, `rope_type` takes precedence over the older `type`. A `rope_theta`
    inside takes precedence over a `rope_theta` outside. A `rope_type` outside is ignored.
    """
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(where) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    by_layer = [key for key, value in rope.items() if isinstance(value, dict)]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    scaling = None
    if kind not in ("default", "llama3") or by_layer or partial not in (None, 1):
        if purpose == "import":
            decoder = "rope_type 'default' or 'llama3', over whole heads, for all layers"
            _refuse_key(where, str(rope), decoder, purpose)
        notes.append(
            f"config.{where} ({kind}) is left out: it changes neither parameters nor FLOPs, and the"
            " kit cannot train with it"
        )
    elif kind == "llama3":
        given = {"original_max_position_embeddings": config["max_position_embeddings"], **rope}
        scaling = RopeScaling(
            **{field.name: given[field.name] for field in dataclasses.fields(RopeScaling)}
        )
    return {
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", ROPE_THETA))),
        "rope_scaling": scaling,
    }


def _gpt2(config: dict[str, Any], name: str, purpose: Purpose) -> ModelSpec:
    activation = config["activation_function"]
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.activation_function: {activation!r} cannot be {VERBS[purpose]}."
            f" {suggestion(activation, ACTIVATIONS)}"
        )
    shapes = _shapes({**config, "n_inner": config.get("n_inner") or 4 * config["n_embd"]}, "gpt2")
    return ModelSpec.gpt(name=name, activation=ACTIVATIONS[activation], **shapes)


def _shapes(config: dict[str, Any], kind: str) -> dict[str, Any]:
    return {ours: config[theirs] for theirs, ours in FIELDS[kind].items()}


def _refuse(config: dict[str, Any], fixed: dict[str, Any], purpose: Purpose) -> None:
    """Raises ConfigError if a key of a configuration has another value than in `fixed`, the values
    of the kit's decoder.
    """
    for key, value in fixed.items():
        found = config.get(key)
        if found is not None and found != value:
            decoder = "none" if value is None else f"{value!r} only"
            _refuse_key(key, repr(found), decoder, purpose)
