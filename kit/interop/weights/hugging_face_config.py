"""Reads and writes Hugging Face's `config.json`, with the rules of transformers. Imports no torch.

`kit.interop.weights.model_types` has the model types and their keys. This module finds the file or
preset that a user names, refuses what is no dense decoder, and chooses the training length.
"""

import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from cluster.files import read_small
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.interop.weights.model_arguments import megatron_spec, read_arguments, torchtitan_spec
from kit.interop.weights.model_types import (
    AFTER,
    MODEL_TYPES,
    VERBS,
    Purpose,
    read_model,
    refuse_key,
    write_model,
)

EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
)
"""Keys of config.json that only mixtures of experts have. The kit has only dense models."""
LACKING = {
    "bloom": "positions as biases of attention (ALiBi)",
    "cohere": "rotary positions of neighbouring pairs, and one norm for both halves of a block",
    "cohere2": "rotary positions of neighbouring pairs, and one norm for both halves of a block",
    "falcon": "one norm for both halves of a block, and positions as biases of attention (ALiBi)",
    "glm4": "rotary positions of neighbouring pairs",
    "mamba": "state-space layers",
    "olmo": "norms without weights",
    "olmo3": "the YaRN scaling of rotary positions in a part of the layers",
    "opt": "learned positions with an offset, and ReLU",
    "phi": "one norm for both halves of a block, and a bias of the output projection",
}
"""Dict from `model_type` to the features of this model that the kit's decoder lacks, as text for
error messages."""
TRAINING_LENGTH = 8192
"""Largest training length in tokens that is assumed for a config.json. Its
`max_position_embeddings` is the longest sequence that the model serves, often longer than those of
its pre-training."""
PLANNED = ", ".join(sorted(MODEL_TYPES))
"""Values of `model_type` for which the planner accepts a config.json, as text for error messages
and help."""

Precision = Literal["float32", "bfloat16", "float16"]


def config_of(spec: ModelSpec, *, precision: Precision = "float32") -> dict[str, Any]:
    """Returns the `config.json` of a model.

    Raises:
        ConfigError: No model type of transformers in MODEL_TYPES can express the model.
    """
    config = {
        **write_model(spec),
        "dtype": precision,
        "initializer_range": spec.init_std,
        # The default of some model types is a token outside a small vocabulary.
        "pad_token_id": None,
        "use_cache": True,
    }
    if config["model_type"] == "gpt2":
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return config


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
        ConfigError: See `load_spec`. For the purpose `plan`, scalings of rotary positions that the
            kit does not have are accepted, since they change neither the parameters nor the FLOPs.
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
    """Returns the spec of the model that a Hugging Face configuration describes. The model has the
    name of the folder of a `config.json`, or of a file that is called otherwise.

    Raises:
        ConfigError: The file is damaged, or the kit's decoder cannot be the model.
    """
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    try:
        return spec_of(table, name=name, purpose=purpose, notes=notes)
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
    if kind not in MODEL_TYPES:
        _refuse_type(kind, config, purpose)
    if quantized := config.get("quantization_config"):
        method = quantized
        if isinstance(quantized, dict):
            method = quantized.get("quant_method", "?")
        if purpose == "import":
            refuse_key("quantization_config", f"weights in {method!r}", "", purpose)
        raise ConfigError(
            f"config.quantization_config: {method!r} describes quantized weights, for which the kit"
            " cannot plan training. Give the config.json of the model before quantization, or"
            " remove this entry."
        )
    return read_model(config, name=name, purpose=purpose, notes=[] if notes is None else notes)


def _refuse_type(kind: Any, config: dict[str, Any], purpose: Purpose) -> NoReturn:
    """Raises ConfigError for a model type that the kit's decoder cannot be."""
    text = f"config.model_type: {kind!r} cannot be {VERBS[purpose]}."
    inner = config.get("text_config")
    if isinstance(inner, dict) and inner.get("model_type") in MODEL_TYPES:
        raise ConfigError(
            f"{text} Its language model is a {inner['model_type']!r}, in `text_config`: save that"
            " object as a config.json of its own and give it."
        )
    if lacking := LACKING.get(str(kind)):
        text += f" The kit's decoder lacks {lacking}."
    allowed = f" Allowed: {PLANNED}." if purpose == "import" else ""
    raise ConfigError(f"{text}{allowed} {AFTER[purpose]}")


def _refuse_experts(config: dict[str, Any]) -> None:
    for key in EXPERTS:
        if config.get(key):
            raise ConfigError(
                f"config.{key}: {config[key]!r} makes a mixture of experts, which the kit neither"
                " plans nor trains: it has dense models only."
            )


def _training_length(config: dict[str, Any], spec: ModelSpec) -> int:
    """Returns the sequence length in tokens that is assumed for training a configuration."""
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
