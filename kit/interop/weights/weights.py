"""Reads the weights of a model one at a time, from any source, so that no conversion needs memory
for a whole model.

Converts names and shapes of weights between the kit's decoder and Hugging Face's LlamaForCausalLM
and GPT2LMHeadModel, in both directions.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cluster.record import check_file_name
from kit.config.spec import ModelSpec
from kit.errors import DataError, needed
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
        out `transformer.` at the beginning of names.

        Raises:
            DataError: The folder has no such weight.
        """
        found = name if name in self._file_of else name.removeprefix("transformer.")
        if found not in self._file_of:
            advice = missing_weight_advice(self.folder)
            raise DataError(f"{self.folder}: has no weight {name!r}. {advice}")
        return found

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
# GPT-2 stores the matrices of its blocks transposed (input features first), and the query, key and
# value weights of a block as one matrix.
OUTSIDE = {
    "llama": {"embedding.tokens": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    "gpt": {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    },
}
BLOCKS = {"llama": "model.layers", "gpt": "transformer.h"}
IN_BLOCK = {
    "llama": {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    },
    "gpt": {
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
FUSED = {"attention.query": 0, "attention.key": 1, "attention.value": 2}
"""Position of query, key and value in GPT-2's weight `c_attn`, which consists of three equal
parts."""


def their_name(spec: ModelSpec, name: str) -> str:
    """Returns the name that Hugging Face gives to a weight of the kit."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{OUTSIDE[spec.family][module]}.{kind}"
    _, number, inner = module.split(".", 2)
    return f"{BLOCKS[spec.family]}.{number}.{IN_BLOCK[spec.family][inner]}.{kind}"


def to_theirs(spec: ModelSpec, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns weights of the kit with the names and shapes of Hugging Face.

    GPT-2 has query, key and value in one matrix. They are joined in the order of `weights`, which
    must be this order.
    """
    found: dict[str, Tensor] = {}
    for name, weight in weights:
        theirs = their_name(spec, name)
        if _transposed(spec, name, weight):
            weight = weight.T
        if theirs in found:
            weight = torch.cat((found[theirs], weight), dim=-1)
        found[theirs] = weight
    return {name: weight.contiguous() for name, weight in found.items()}


def from_theirs(spec: ModelSpec, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """Returns the weight `name` of the kit's decoder, as a view of the Hugging Face weight that
    `read` returns. `read` takes Hugging Face's name of the weight.
    """
    weight = read(their_name(spec, name))
    inner = name.split(".", 2)[-1].rsplit(".", 1)[0]
    if spec.family == "gpt" and inner in FUSED:
        weight = weight.chunk(3, dim=-1)[FUSED[inner]]
    return weight.T if _transposed(spec, name, weight) else weight


def _transposed(spec: ModelSpec, name: str, weight: Tensor) -> bool:
    return spec.family == "gpt" and name.startswith("layers.") and weight.ndim == 2
