"""Checkpoints of Megatron-DeepSpeed, with which the Frontier paper trained: layer files to the kit's decoder.

A checkpoint is a folder of `layer_XX-model_YY-model_states.pt`: pipeline layer XX, tensor rank YY. Some layers hold no
weights, and how many depends on the precision, so layers are told apart by what they hold, in order of XX. Source:
megatron/model/gpt_model.py (GPTModelPipe), transformer.py (ParallelAttention, ParallelMLP) and language_model.py
(EmbeddingPipe) of github.com/deepspeedai/Megatron-DeepSpeed.
"""

import collections
import re
from pathlib import Path

import torch
from torch import Tensor

from kit.convert.names import fill
from kit.convert.neuron import load_tensors
from kit.errors import DataError
from kit.model import Decoder, empty_decoder
from kit.spec import ModelSpec

FILE_NAME = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.query": "self_attention.query_key_value",
    "attention.key": "self_attention.query_key_value",
    "attention.value": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "feed_forward.gate": "mlp.dense_h_to_4h",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}
ROW_SPLIT = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
"""Cut along the input features; other matrices and their biases are cut along the output features."""
COPIED = ("layernorm.weight", "layernorm.bias", "self_attention.dense.bias", "mlp.dense_4h_to_h.bias")
"""The same on all ranks."""

Layer = list[dict[str, Tensor]]  # one state dict for each tensor rank


def import_megatron_deepspeed(folder: str | Path, spec: ModelSpec) -> Decoder:
    """Returns the decoder of a Megatron-DeepSpeed checkpoint, fp32, on the CPU, in evaluation mode.

    Args:
        folder: `global_stepN`.
        spec: of the model, which the files do not describe; its vocabulary is the padded one.

    Raises:
        DataError: there are no layer files, some are missing, or they do not hold this model.
    """
    layers = LayerFiles(Path(folder), spec)
    decoder = empty_decoder(spec).eval()
    fill(decoder, layers.read, Path(folder))
    return decoder


class LayerFiles:
    """Merges the tensor ranks of each layer, weight by weight."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        self.blocks: list[Layer] = []
        outside: list[Layer] = []
        for layer in _read_layers(folder):
            is_block = any(name.startswith("input_layernorm") for name in layer[0])
            (self.blocks if is_block else outside).append(layer)
        if len(self.blocks) != spec.num_layers:
            raise DataError(f"{folder}: has {len(self.blocks)} blocks, but spec.num_layers is {spec.num_layers}.")
        self.embedding = next((layer for layer in outside if "word_embeddings.weight" in layer[0]), None)
        self.norm = next((layer for layer in outside if layer[0].get("weight", torch.empty(0, 0)).ndim == 1), None)
        matrices = (layer for layer in outside if self._output_name(layer))
        self.output = next(matrices, None)

    def read(self, name: str) -> Tensor:
        """Returns one of our weights, whole.

        Raises:
            DataError: the files do not hold it.
        """
        module, kind = name.rsplit(".", 1)
        if module.startswith("layers."):
            _, number, inner = module.split(".", 2)
            return self._in_block(self.blocks[int(number)], inner, kind)
        if module == "embedding.tokens":
            return _merge(self._layer(self.embedding, name), "word_embeddings.weight")
        if module == "embedding.positions":
            return _one(self._layer(self.embedding, name), "position_embeddings.weight")
        if module == "norm":
            return _one(self._layer(self.norm, name), kind)
        output = self._layer(self.output, name)
        return _merge(output, self._output_name(output))

    def _in_block(self, layer: Layer, inner: str, kind: str) -> Tensor:
        theirs = f"{IN_BLOCK[inner]}.{kind}"
        if inner in ("attention.query", "attention.key", "attention.value"):
            return self._query_key_value(_merge(layer, theirs), inner.removeprefix("attention."))
        if self.spec.gated and IN_BLOCK[inner] == "mlp.dense_h_to_4h":  # each rank stacks its gate on its up
            half = ("feed_forward.gate", "feed_forward.up").index(inner)
            return torch.cat([part.chunk(2)[half] for part in _parts(layer, theirs)])
        return _one(layer, theirs) if theirs.endswith(COPIED) else _merge(layer, theirs)

    def _query_key_value(self, fused: Tensor, which: str) -> Tensor:
        """Returns one of three: for each key/value head its query heads, then its key, then its value."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        parts = fused.unflatten(0, (spec.num_kv_heads, group + 2, spec.head_size))
        place = {"query": slice(group), "key": slice(group, group + 1), "value": slice(group + 1, None)}[which]
        return parts[:, place].flatten(0, 2)

    def _output_name(self, layer: Layer) -> str:
        found = [name for name, weight in layer[0].items() if name in ("lm_head.weight", "weight") and weight.ndim == 2]
        return found[0] if found else ""

    def _layer(self, layer: Layer | None, name: str) -> Layer:
        if layer is None:
            raise DataError(f"{self.folder}: no layer holds {name!r}. Give the spec that it was trained with.")
        return layer


def _read_layers(folder: Path) -> list[Layer]:
    files: dict[int, dict[int, Path]] = collections.defaultdict(dict)
    for file in folder.glob("layer_*-model_*-model_states.pt"):
        match = FILE_NAME.fullmatch(file.name)
        if match:
            files[int(match[1])][int(match[2])] = file
    if not files:
        raise DataError(f"{folder}: has no layer_XX-model_YY-model_states.pt. Give a folder global_stepN.")
    ranks = max(len(ranks) for ranks in files.values())
    for number, layer in files.items():
        if sorted(layer) != list(range(ranks)):
            raise DataError(f"{folder}: layer {number} has tensor ranks {sorted(layer)}, expected 0 to {ranks - 1}.")
    # Where embeddings are tied, the last layer is a copy of the first.
    return [[_renamed(load_tensors(files[number][rank])) for rank in range(ranks)] for number in sorted(files)]


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict by today's names: `self_attention` was once `attention`."""
    return {re.sub(r"^attention\.", "self_attention.", name): weight for name, weight in state.items()}


def _merge(layer: Layer, name: str) -> Tensor:
    return torch.cat(_parts(layer, name), dim=1 if name in ROW_SPLIT else 0)


def _one(layer: Layer, name: str) -> Tensor:
    return _parts(layer, name)[0]


def _parts(layer: Layer, name: str) -> list[Tensor]:
    if name not in layer[0]:
        raise DataError(
            f"A layer holds no {name!r}, only {', '.join(layer[0])}. Give the spec that it was trained with."
        )
    return [rank[name] for rank in layer]
