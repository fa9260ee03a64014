"""Reads the weights of a model one at a time, from any source, so that no conversion needs memory
for a whole model.

Converts names and shapes of weights between the kit's decoder and Hugging Face's models, in both
directions.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cluster.record import check_file_name
from kit.config.spec import ModelSpec
from kit.errors import DataError, needed
from kit.interop.weights.model_types import MODEL_TYPES, write_model
from kit.interop.weights.other_trainers import check_safetensors, missing_weight_advice, read_index
from kit.model import Decoder, empty_decoder
from kit.torch_private import local_part


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of one model, from any source. Calling `fill` reads them."""

    spec: ModelSpec
    fill: Callable[[dict[str, Tensor]], object]
    """Function that copies weights into the given tensors, which are named as in the kit's decoder.
    Each tensor has the shape of its weight, and any dtype and strides. If a tensor is a DTensor,
    the part of this rank is filled."""

    @classmethod
    def read_by(cls, spec: ModelSpec, read: Callable[[str], Tensor], source: Path) -> Self:
        """Returns a `Weights` object whose weights are read by the function `read`.

        Args:
            spec: Model that the weights belong to.
            read: Function that returns one whole weight. Its argument is the name of the weight in
                the kit's decoder.
            source: File or folder that errors name.

        `fill` raises DataError if a weight is missing or does not have the shape that the spec
        gives it.
        """
        advice = (
            f"{source} does not hold {spec.name}; give the spec, or the config.json, that it was"
            " trained with."
        )

        def fill(targets: dict[str, Tensor]) -> None:
            for name, target in targets.items():
                try:
                    weight = read(name)
                except RuntimeError as error:  # The weight cannot be divided into the spec's heads.
                    raise DataError(f"{name}: {error}. {advice}") from error
                if weight.shape != target.shape:
                    raise DataError(
                        f"{name} has shape {list(weight.shape)}, expected {list(target.shape)}."
                        f" {advice}"
                    )
                if isinstance(target, DTensor):
                    # If the file is mapped into memory, only the part of this rank is read from
                    # disk.
                    weight = local_part(weight, target)
                    target = target.to_local()
                target.copy_(weight)

        return cls(spec, fill)

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Returns the weights of a decoder that is not divided between ranks."""
        return cls.read_by(
            decoder.spec, lambda name: decoder.get_parameter(name).detach(), Path(decoder.spec.name)
        )

    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        """Returns the whole model on the CPU, in evaluation mode."""
        decoder = empty_decoder(self.spec).to(dtype).eval()
        self.fill({name: parameter.detach() for name, parameter in decoder.named_parameters()})
        return decoder


def average(parts: Sequence[Weights]) -> Weights:
    """Returns the mean of the weights of several checkpoints of one model, computed in fp32. All
    weights are averaged, also those of the norms.
    """

    def fill(targets: dict[str, Tensor]) -> None:
        sums = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in targets.items()}
        read = {name: torch.empty_like(total) for name, total in sums.items()}
        for part in parts:
            part.fill(read)
            for name, total in sums.items():
                total += read[name]
        for name, target in targets.items():
            target.copy_(sums[name] / len(parts))

    return Weights(parts[0].spec, fill)


def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Returns a dict from the name of each weight in the kit's decoder to its shape, in the order
    of the decoder.
    """
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}


def load_tensors(file: Path) -> dict[str, Any]:
    """Returns the tensors and plain values in a .pt file, by name. Tensors are mapped into memory,
    not read.

    A single tensor without a name has the name "". Only tensors and plain values are unpickled.

    Raises:
        DataError: The file is damaged, or holds code.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict | Tensor):
            raise TypeError(f"it holds a {type(state).__name__}")
        return state if isinstance(state, dict) else {"": state}
    except Exception as error:  # torch.load raises RuntimeError, UnpicklingError and others.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file}: cannot be read as tensors ({reason}). Copy it again, or re-save the weights"
            " alone."
        ) from error


def numbered_files(folder: Path, name: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    """Returns the .pt files of a folder whose names match a pattern. Keys are the numbers in the
    file name that the groups of the pattern match, such as (layer, rank).
    """
    found = ((name.fullmatch(file.name), file) for file in sorted(folder.glob("*.pt")))
    return {tuple(map(int, match.groups())): file for match, file in found if match}


# Safetensors -------------------------------------------------------------------------------------


class SafetensorsFolder:
    """Reads weights by Hugging Face's names from `model.safetensors`, or from the shards that
    `model.safetensors.index.json` lists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._file_of: dict[str, str] = _weight_map(index)
            return
        check_safetensors(folder)
        with self._open("model.safetensors") as weights:
            self._file_of = dict.fromkeys(weights.keys(), "model.safetensors")

    @property
    def size_bytes(self) -> int:
        """Size of all weight files of the folder, in bytes."""
        files = (self.folder / name for name in set(self._file_of.values()))
        return sum(file.stat().st_size for file in files if file.exists())

    def require(self, name: str) -> str:
        """Returns the name under which the folder has a weight. Folders of GPT-2 on the hub leave
        out `transformer.` at the beginning of names. The output projection of GPT-NeoX has two
        names.

        Raises:
            DataError: The folder has no such weight.
        """
        others = (name.removeprefix("transformer."), name.replace("embed_out.", "lm_head."))
        for found in (name, *others):
            if found in self._file_of:
                return found
        advice = missing_weight_advice(self.folder)
        raise DataError(f"{self.folder}: has no weight {name!r}. {advice}")

    def read(self, name: str) -> Tensor:
        """Returns the weight with Hugging Face's name `name`.

        Raises:
            DataError: The folder has no such weight, or its file is missing or damaged.
        """
        name = self.require(name)
        with self._open(self._file_of[name]) as weights:
            return weights.get_tensor(name)

    def _open(self, file: str) -> Any:
        safetensors = safetensors_library()
        try:
            return safetensors.safe_open(self.folder / file, framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(
                f"{self.folder / file}: not a readable safetensors file ({error}). Copy it again."
            ) from error


def safetensors_library() -> Any:
    """Returns the package `safetensors`, with its module for torch.

    Raises:
        MissingPackageError: The package `safetensors` is not installed.
    """
    with needed("safetensors", "eval", "A Hugging Face folder"):
        import safetensors.torch
    return safetensors


def _weight_map(index: Path) -> dict[str, str]:
    """Returns a dict from the name of each weight to the name of the file that holds it.

    Raises:
        DataError: The index is damaged.
        ConfigError: The index names a file outside its folder.
    """
    try:
        files = {str(name): str(file) for name, file in read_index(index)["weight_map"].items()}
    except (OSError, ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        raise DataError(
            f"{index}: damaged: it has no weight_map from names to files. Copy it again."
        ) from error
    for file in set(files.values()):
        check_file_name(file, f"{index.name}: weight_map")
    return files


# Hugging Face's names -----------------------------------------------------------------------------

# The tables map modules. A weight has the name of its module, a dot, and `weight` or `bias`.
# The keys are values of `ModelType.weights`.
OUTSIDE = {
    "llama": {"embedding.tokens": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    "gpt_neox": {
        "embedding.tokens": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    "gpt2": {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    },
}
BLOCKS = {"llama": "model.layers", "gpt_neox": "gpt_neox.layers", "gpt2": "transformer.h"}
LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
NORMS_AFTER = {
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}
"""Names in a Llama-like block of a model with norms after attention and feed-forward. In other
models, `post_attention_layernorm` is the norm before feed-forward."""
QKV = ("attention.query", "attention.key", "attention.value")
GATE_UP = ("feed_forward.gate", "feed_forward.up")
"""Modules of the kit that some models have as one matrix, in the order in which it has them."""
IN_BLOCK = {
    "llama": LLAMA_BLOCK,
    "phi3": {
        **LLAMA_BLOCK,
        **dict.fromkeys(QKV, "self_attn.qkv_proj"),
        **dict.fromkeys(GATE_UP, "mlp.gate_up_proj"),
    },
    "gpt_neox": {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "attention.query": "attention.query_key_value",
        "attention.key": "attention.query_key_value",
        "attention.value": "attention.query_key_value",
        "attention.output": "attention.dense",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    },
    "gpt2": {
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
        "attention.query": "attn.c_attn",
        "attention.key": "attn.c_attn",
        "attention.value": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    },
}


@functools.cache
def exported_type(spec: ModelSpec) -> str:
    """Returns the `model_type` as which a model is exported."""
    return write_model(spec)["model_type"]


def hugging_face_name(spec: ModelSpec, name: str, model_type: str | None = None) -> str:
    """Returns the name that Hugging Face gives to a weight of the kit. `model_type` is the type of
    the folder, by default the type as which the model is exported.
    """
    names = MODEL_TYPES[model_type or exported_type(spec)].weights
    outer = "llama" if names == "phi3" else names
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{OUTSIDE[outer][module]}.{kind}"
    _, number, inner = module.split(".", 2)
    theirs = IN_BLOCK[names].get(inner)
    if spec.norm_placement != "before":
        theirs = NORMS_AFTER.get(inner, theirs)
    return f"{BLOCKS[outer]}.{number}.{theirs}.{kind}"


def to_hugging_face(
    spec: ModelSpec, weights: Iterable[tuple[str, Tensor]], model_type: str | None = None
) -> dict[str, Tensor]:
    """Returns weights of the kit with the names and shapes of Hugging Face.

    GPT-2, GPT-NeoX and Phi-3 have query, key and value in one matrix, and Phi-3 also gate and up.
    Each must be followed by the others in `weights`, in this order.
    """
    model_type = model_type or exported_type(spec)
    names = MODEL_TYPES[model_type].weights
    parts: dict[str, list[Tensor]] = {}
    for name, weight in weights:
        parts.setdefault(hugging_face_name(spec, name, model_type), []).append(weight)
    found = {}
    for theirs, tensors in parts.items():
        if names == "gpt_neox" and len(tensors) > 1:
            # Each head has its query, key and value features one after the other.
            heads = [tensor.unflatten(0, (spec.num_heads, spec.head_size)) for tensor in tensors]
            joined = torch.stack(heads, dim=1).flatten(0, 2)
        else:
            joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        found[theirs] = (joined.T if _transposed(names, theirs, joined) else joined).contiguous()
    return found


def from_hugging_face(
    spec: ModelSpec, name: str, read: Callable[[str], Tensor], model_type: str | None = None
) -> Tensor:
    """Returns the weight `name` of the kit's decoder. `read` takes Hugging Face's name of a weight
    and returns it. `model_type` is the type of the folder, by default the type as which the model
    is exported.
    """
    model_type = model_type or exported_type(spec)
    names = MODEL_TYPES[model_type].weights
    theirs = hugging_face_name(spec, name, model_type)
    weight = read(theirs)
    if _transposed(names, theirs, weight):
        weight = weight.T
    inner = name.split(".", 2)[-1].rsplit(".", 1)[0]
    if names == "phi3" and inner in GATE_UP:
        return weight.chunk(2)[GATE_UP.index(inner)]
    if names == "llama" or inner not in QKV:
        return weight
    position = QKV.index(inner)
    if names == "gpt_neox":
        return weight.unflatten(0, (spec.num_heads, 3, spec.head_size))[:, position].flatten(0, 1)
    return weight.split((spec.attention_size, spec.kv_size, spec.kv_size))[position]


def _transposed(names: str, theirs: str, weight: Tensor) -> bool:
    """Returns whether Hugging Face stores a weight transposed, with input features first. GPT-2
    does so with the matrices of its blocks.
    """
    return names == "gpt2" and theirs.startswith("transformer.h.") and weight.ndim == 2
