"""Reads checkpoints of Megatron-DeepSpeed, with which the Frontier paper trained.

A checkpoint is a folder of files `layer_XX-model_YY-model_states.pt`, of pipeline layer XX and
tensor rank YY. Some pipeline layers hold no weights, and their number depends on the precision. A
layer is therefore identified by the weights that it holds, in the order of XX. The number of heads
does not follow from the shapes of the weights: with half as many heads, each twice as wide, the
shapes are equal. The number is read from the arguments that Megatron keeps beside the weights.

Sources: megatron/model/gpt_model.py (GPTModelPipe), transformer.py (ParallelAttention,
ParallelMLP), language_model.py (EmbeddingPipe) and checkpointing.py of
github.com/deepspeedai/Megatron-DeepSpeed.
"""

import argparse
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kit.config.spec import ModelSpec
from kit.errors import DataError
from kit.interop.weights.other_trainers import named
from kit.interop.weights.weights import Weights, load_tensors, numbered_files
from kit.run.checkpoint_reader import PlainUnpickler

FILE_NAME = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
SAME = "same"
"""Marks weights that tensor parallelism does not split: every tensor rank holds a copy."""
ROWS = "rows"
"""Marks weights that tensor parallelism splits by output features (rows of the matrix)."""
COLUMNS = "columns"
"""Marks weights that tensor parallelism splits by input features (columns of the matrix). Every
rank holds the whole bias."""
MODULES = {
    "embedding.tokens": ("word_embeddings.", ROWS),
    "embedding.positions": ("position_embeddings.", SAME),
    "norm": ("", SAME),
    "output": ("", ROWS),
    "attention_norm": ("input_layernorm.", SAME),
    "feed_forward_norm": ("post_attention_layernorm.", SAME),
    "attention.query": ("self_attention.query_key_value.", ROWS),
    "attention.key": ("self_attention.query_key_value.", ROWS),
    "attention.value": ("self_attention.query_key_value.", ROWS),
    "attention.output": ("self_attention.dense.", COLUMNS),
    "feed_forward.gate": ("mlp.dense_h_to_4h.", ROWS),
    "feed_forward.up": ("mlp.dense_h_to_4h.", ROWS),
    "feed_forward.down": ("mlp.dense_4h_to_h.", COLUMNS),
}
"""Dict from the kit's name of a module to (prefix of the module's weights inside a Megatron layer,
how tensor ranks split them: SAME, ROWS or COLUMNS)."""
FUSED = ("attention.query", "attention.key", "attention.value")
"""The kit's modules whose weights are joined to one weight in Megatron, in this order."""
GATED = ("feed_forward.gate", "feed_forward.up")
"""The kit's modules whose weights are joined to one weight in Megatron, in this order, if the
feed-forward is gated."""
OTHER_PREFIXES = {"attention.": "self_attention.", "lm_head.": ""}
"""Dict from prefix of a weight's name in other Megatron versions, or in the output layer, to the
prefix that MODULES uses."""


def import_megatron_deepspeed(folder: str | Path, spec: ModelSpec) -> Weights:
    """Returns the weights of a Megatron-DeepSpeed checkpoint.

    Args:
        folder: folder of the checkpoint, `global_stepN`.
        spec: Model that was trained, with the padded vocabulary. The layer files do not describe
            it.

    Raises:
        DataError: There are no layer files, some are missing, or they do not hold this model.

    Warns:
        UserWarning: Megatron's arguments are missing, so that a wrong number of heads cannot be
            noticed.
    """
    layers = LayerFiles(Path(folder), spec)
    _check_arguments(Path(folder), spec)
    return Weights.read_by(spec, layers.read, Path(folder))


class LayerFiles:
    """Reads the weights of a Megatron-DeepSpeed checkpoint one at a time. Joins the parts of a
    weight that the tensor ranks hold.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.layers: dict[str, list[Path]] = {}
        """Files of each layer, one file per tensor rank. Keys are the prefixes of the kit's weight
        names in the layer: `embedding`, `layers.0`, `norm`, `output`."""
        layers = _layer_files(folder)
        for layer in layers:
            self._place(layer, _load(layer[0]))
        ranks = len(layers[0])
        if spec.num_kv_heads % ranks:
            raise DataError(
                f"{folder}: num_kv_heads {spec.num_kv_heads} cannot be shared out over {ranks}"
                " tensor ranks."
            )
        if self._num_blocks != spec.num_layers:
            raise DataError(
                f"{folder}: has {self._num_blocks} blocks, but spec.num_layers is"
                f" {spec.num_layers}."
            )

    @property
    def _num_blocks(self) -> int:
        return sum(place.startswith("layers.") for place in self.layers)

    def _place(self, layer: list[Path], held: dict[str, Tensor]) -> None:
        """Adds a layer to `layers`. The kind of the layer follows from the weights that its first
        rank holds.

        With tied embeddings the last layer repeats the first layer, and is left out.
        """
        if any(name.startswith("input_layernorm") for name in held):
            self.layers[f"layers.{self._num_blocks}"] = layer
        elif "word_embeddings.weight" in held:
            self.layers.setdefault("embedding", layer)
        elif "weight" in held:
            self.layers["output" if held["weight"].ndim == 2 else "norm"] = layer

    def read(self, name: str) -> Tensor:
        """Returns the whole weight with the name `name` in the kit's decoder.

        Raises:
            DataError: The files do not hold the weight.
        """
        module, kind = name.rsplit(".", 1)
        place = module.split(".")[0]
        inner = module
        if place == "layers":
            _, number, inner = module.split(".", 2)
            place = f"layers.{number}"
        if place not in self.layers:
            raise DataError(
                f"{self.folder}: no layer holds {name!r}. Give the spec that it was trained with."
            )
        theirs, shared = MODULES[inner]
        parts = _parts(self.layers[place], theirs + kind)
        if shared == SAME or (shared == COLUMNS and kind == "bias"):
            return _one(parts, theirs + kind)
        if inner in GATED and self.spec.gated:
            # On each rank, the first half of the rows is the gate weight, the second half the up
            # weight.
            half = GATED.index(inner)
            parts = [part.chunk(2)[half] for part in parts]
        whole = torch.cat(parts, dim=1) if shared == COLUMNS else torch.cat(parts)
        if inner in FUSED:
            return self._query_key_value(whole, inner)
        return whole

    def _query_key_value(self, fused: Tensor, which: str) -> Tensor:
        """Returns the rows of the queries, of the keys or of the values.

        In the joined weight, the rows are ordered by key/value head. Each key/value head has its
        query heads first, then its key head, then its value head.
        """
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        heads = fused.unflatten(0, (spec.num_kv_heads, group + 2, spec.head_size))
        return heads.split([group, 1, 1], dim=1)[FUSED.index(which)].flatten(0, 2)


def _layer_files(folder: Path) -> list[list[Path]]:
    files = numbered_files(folder, FILE_NAME)
    if not files:
        raise DataError(
            f"{folder}: has no layer_XX-model_YY-model_states.pt."
            f" {named(folder, 'Megatron-DeepSpeed')}Give a folder global_stepN."
        )
    numbers = sorted({number for number, _ in files})
    ranks = sorted({rank for _, rank in files})
    for number in numbers:
        held = sorted(rank for layer, rank in files if layer == number)
        if held != [*range(len(ranks))]:
            raise DataError(
                f"{folder}: layer {number} has tensor ranks {held}, expected 0 to {len(ranks) - 1}."
            )
    return [[files[number, rank] for rank in ranks] for number in numbers]


def _load(file: Path) -> dict[str, Tensor]:
    """Returns the weights of a layer file. The prefixes of their names are converted to those of
    `MODULES`.
    """
    found = load_tensors(file)
    for old, new in OTHER_PREFIXES.items():
        found = {re.sub(f"^{re.escape(old)}", new, name): found[name] for name in found}
    return found


def _one(parts: list[Tensor], name: str) -> Tensor:
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise DataError(
            f"{name} is not the same on all {len(parts)} tensor ranks. They are not of one"
            " checkpoint."
        )
    return parts[0]


def _parts(layer: list[Path], name: str) -> list[Tensor]:
    parts = []
    for number, file in enumerate(layer):
        rank = _load(file)
        if name not in rank:
            raise DataError(
                f"tensor rank {number} holds no {name!r} in a layer, only {', '.join(rank)}. "
                "Give the spec that it was trained with."
            )
        parts.append(rank[name])
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise DataError(
            f"{name} has the shapes {shapes} on its tensor ranks. They are not of one checkpoint."
        )
    return parts


# Arguments ----------------------------------------------------------------------------------------

DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    EOFError,
    LookupError,
    zipfile.BadZipFile,
    pickle.PickleError,
)
"""Errors that can occur when a damaged file of torch.save is read."""
LARGEST_FACTS_BYTES = 16 << 20
"""Largest accepted size in bytes of the pickled values in a file of torch.save, tensors not
included. Megatron's arguments take a few thousand bytes."""
ARGUMENTS_FILE = "mp_rank_00_model_states.pt"
ARGUMENTS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "layernorm_epsilon": "norm_eps",
}
"""Dict from Megatron argument to the field of the kit's spec with this meaning."""


def _check_arguments(folder: Path, spec: ModelSpec) -> None:
    found = _read_facts(folder / ARGUMENTS_FILE)
    given = found.get("args")
    version = found.get("checkpoint_version", 3.0)
    if not isinstance(given, argparse.Namespace):
        warnings.warn(
            f"{folder}: no readable {ARGUMENTS_FILE}, so nothing says how many heads it was trained"
            f" with; {spec.num_heads} are taken from the spec.",
            stacklevel=3,
        )
        given = argparse.Namespace()
    if isinstance(version, int | float) and version < 2:
        raise DataError(
            f"{folder}: checkpoint_version {version} has another order of heads, which is not"
            " supported."
        )
    arguments = vars(given)
    for theirs, ours in ARGUMENTS.items():
        if arguments.get(theirs) is not None and arguments[theirs] != getattr(spec, ours):
            raise DataError(
                f"{folder}: trained with {theirs} {arguments[theirs]}, but spec.{ours} is"
                f" {getattr(spec, ours)}. Give the spec that it was trained with."
            )


def _read_facts(file: Path) -> dict[str, Any]:
    """Returns the plain values in a file of torch.save, without its tensors. The result is {} if
    the file is missing or damaged.

    Raises:
        DataError: Unpacked, the values take more than `LARGEST_FACTS_BYTES`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            [facts] = [
                member for member in archive.infolist() if member.filename.endswith("/data.pkl")
            ]
            # `zipfile` unpacks no more bytes than the size that it states here.
            if facts.file_size > LARGEST_FACTS_BYTES:
                raise DataError(
                    f"{file}: its {facts.filename} unpacks to {facts.file_size:,} bytes; at most"
                    f" {LARGEST_FACTS_BYTES:,} are read. Megatron's arguments take a few thousand:"
                    " move the file away to import without it."
                )
            found = PlainUnpickler(archive.read(facts)).load()
    except DataError:
        raise
    except DAMAGE:
        return {}
    return found if isinstance(found, dict) else {}
