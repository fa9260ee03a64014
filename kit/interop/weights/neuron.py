"""Reads checkpoints of NeuronX Distributed (NxD), the library that trained HLAT, with plain torch.

The shard of tensor rank XX and pipeline stage YY is the file
`TAG/model/dp_rank_00_tp_rank_XX_pp_rank_YY.pt`. Weights are named as in Hugging Face's Llama, with
layers numbered over the whole pipeline, and some matrices are joined. If the checkpoint was saved
with `use_xser`, as HLAT's were, each tensor is in a separate file, in a folder beside the shard.

The rules are the inverse of scripts/checkpoint_converter.py in NxD 0.18
(github.com/aws-neuron/neuronx-distributed).
"""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kit.config.spec import ModelSpec
from kit.errors import ConfigError, DataError
from kit.interop.weights.weights import (
    Weights,
    exported_type,
    from_hugging_face,
    load_tensors,
    numbered_files,
)

FILE_NAME = re.compile(r"dp_rank_00_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
REFERENCE = "torch_xla.utils.serialization.TensorReference"
"""Pickled name of Torch-XLA's class that replaces each tensor in a shard that was saved with
`use_xser`."""


def import_nxd(folder: str | Path, spec: ModelSpec) -> Weights:
    """Returns the weights of an NxD checkpoint.

    Args:
        folder: folder of the checkpoint, `TAG`, or the folder `model` in it.
        spec: Model that was trained. The checkpoint does not describe it.

    Raises:
        ConfigError: The spec is not of the Llama family without biases.
        DataError: There are no shards, some are missing, or they do not hold this model.
    """
    if exported_type(spec) != "llama" or spec.bias or spec.switches:
        raise ConfigError(
            f"spec: {spec.name} is not a Llama without biases; NxD checkpoints of others are not"
            " read."
        )
    shards = NxdShards(Path(folder), spec)
    return Weights.read_by(
        spec, lambda name: from_hugging_face(spec, name, shards.read), Path(folder)
    )


class NxdShards:
    """Reads the weights of an NxD checkpoint one at a time. Joins the parts of a weight that the
    tensor ranks hold.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder / "model" if (folder / "model").is_dir() else folder
        self.spec = spec
        found = numbered_files(self.folder, FILE_NAME)
        advice = "Give the folder of one complete NxD checkpoint."
        if not found:
            raise DataError(f"{self.folder}: has no dp_rank_00_tp_rank_*.pt. {advice}")
        self.tensor_parallel = 1 + max(tensor for tensor, _ in found)
        stages = 1 + max(stage for _, stage in found)
        grid = itertools.product(range(self.tensor_parallel), range(stages))
        missing = [ranks for ranks in grid if ranks not in found]
        if missing:
            words = ", ".join(f"tp {tensor} pp {stage}" for tensor, stage in missing)
            raise DataError(f"{self.folder}: shards are missing: {words}. {advice}")
        self._shards: list[dict[str, Path]] = []
        """Dicts from the name of a weight to the file that holds it, one dict per tensor rank."""
        for tensor in range(self.tensor_parallel):
            files: dict[str, Path] = {}
            for stage in range(stages):
                files |= _files(found[tensor, stage])
            self._shards.append(files)

    def read(self, name: str) -> Tensor:
        """Returns the whole weight with Hugging Face's name `name`.

        Raises:
            DataError: The shards do not hold the weight.
        """
        module = name.removesuffix(".weight")
        parent, _, leaf = module.rpartition(".")
        if leaf in ("q_proj", "k_proj", "v_proj"):
            return self._query_key_value(parent, leaf[0])
        if leaf == "o_proj":
            return self._queries_in_order(torch.cat(self._parts(name), dim=1).T).T
        if leaf in ("gate_proj", "up_proj") and f"{parent}.gate_up_proj.weight" in self._shards[0]:
            # On each rank, the first half of the rows is the gate weight, the second half the up
            # weight.
            half = ("gate_proj", "up_proj").index(leaf)
            fused = self._parts(f"{parent}.gate_up_proj.weight")
            return torch.cat([part.chunk(2)[half] for part in fused])
        if leaf == "down_proj":
            return torch.cat(self._parts(name), dim=1)
        if leaf in ("embed_tokens", "lm_head", "gate_proj", "up_proj"):
            return torch.cat(self._parts(name))
        return self._parts(name)[0]  # Norm weights are equal on all ranks.

    def _query_key_value(self, parent: str, which: str) -> Tensor:
        weight = torch.cat(self._pieces(parent, which))
        if which == "q":
            return self._queries_in_order(weight)
        if not self._copies_are_neighbours:
            return weight[: self.spec.num_kv_heads * self.spec.head_size]
        return weight.unflatten(0, (self.spec.num_kv_heads, self._copies, -1))[:, 0].flatten(0, 1)

    def _pieces(self, parent: str, which: str) -> list[Tensor]:
        """Returns the part of a layer's query, key or value weight (`which`: q, k or v) on each
        tensor rank.
        """
        index = "qkv".index(which)
        held = self._shards[0]
        if f"{parent}.qkv_proj.weight_{which}" in held:
            return self._parts(f"{parent}.qkv_proj.weight_{which}")
        # The checkpoint was saved with NxD's option fuse_qkv, which is on by default.
        if f"{parent}.qkv_proj.weight_qkv" in held:
            query = self.spec.num_heads * self.spec.head_size // self.tensor_parallel
            fused = self._parts(f"{parent}.qkv_proj.weight_qkv")
            parts = []
            for part in fused:
                key = (len(part) - query) // 2
                parts.append(part.split([query, key, key])[index])
            return parts
        if f"{parent}.qkv_proj.weight" in held:  # The model has no grouped-query attention.
            return [part.chunk(3)[index] for part in self._parts(f"{parent}.qkv_proj.weight")]
        return self._parts(f"{parent}.{which}_proj.weight")

    @functools.cached_property
    def _copies(self) -> int:
        """Number of copies of each key/value head in the checkpoint. NxD copies these heads if
        there are more tensor ranks than heads.
        """
        held = sum(len(part) for part in self._pieces("model.layers.0.self_attn", "k"))
        rows = self.spec.num_kv_heads * self.spec.head_size
        if held % rows:
            raise DataError(
                f"{self.folder}: its key/value heads have {held} rows in all, which is no multiple"
                f" of the {rows} of {self.spec.name}. Give the spec that it was trained with."
            )
        return held // rows

    @functools.cached_property
    def _copies_are_neighbours(self) -> bool:
        """Whether the copies of a key/value head follow each other, as on Trn2. On Trn1 all heads
        follow each other, and then their copies.

        The checkpoint does not state the order. So the keys of the first head are compared with the
        two heads that would be its copies in these two orders.

        Raises:
            DataError: Neither order fits.
        """
        heads = self.spec.num_kv_heads
        if self._copies == 1 or heads == 1:
            return False
        keys = (
            torch.cat(self._pieces("model.layers.0.self_attn", "k"))
            .unflatten(0, (heads * self._copies, -1))
            .float()
        )
        beside = (keys[0] - keys[1]).norm().item()
        # The second operand is the last copy of the first head on Trn1, and another head on Trn2.
        apart = (keys[0] - keys[heads * (self._copies - 1)]).norm().item()
        # The copies are close but not equal, since stochastic rounding lets them drift apart.
        if max(beside, apart) < 10 * min(beside, apart) or beside == apart:
            raise DataError(
                f"{self.folder}: {heads * self._copies} key/value heads are there for the {heads}"
                f" of {self.spec.name}, and neither neighbours nor every {heads}th are copies of"
                " each other. Give the spec that it was trained with."
            )
        return beside < apart

    def _queries_in_order(self, weight: Tensor) -> Tensor:
        """Returns the query heads, which the first dimension holds, in the order of the model.

        On Trn1 with k key/value heads and c copies of each, the query heads are divided into k c
        blocks. Block j c + i is at position i k + j, so that it is on the rank that holds a copy of
        key/value head j. On Trn2 the query heads are in the order of the model.
        """
        if self._copies_are_neighbours:
            return weight
        return (
            weight.unflatten(0, (self._copies, self.spec.num_kv_heads, -1))
            .transpose(0, 1)
            .flatten(0, 2)
        )

    def _parts(self, name: str) -> list[Tensor]:
        if not all(name in shard for shard in self._shards):
            raise DataError(
                f"{self.folder}: has no weight {name!r}. Give the spec that it was trained with."
            )
        parts = []
        for shard in self._shards:
            tensors = _weights(shard[name])
            # A tensor that is alone in its file has no name.
            parts.append(tensors[name] if name in tensors else tensors[""])
        return parts


class TensorReference:
    """Replaces Torch-XLA's class of this name when a shard is unpickled, so that Torch-XLA is not
    needed.
    """

    tid: int
    """Number in the name of the file that holds the tensor: `tensor_NUMBER.pt`."""


def _files(file: Path) -> dict[str, Path]:
    """Returns the file of each weight of a shard: the shard itself, or the file that a reference in
    it names.

    The folder beside the shard can be empty: AWS's converter writes all weights into the shard,
    even with its option to save with xser.
    """
    found = {}
    for name, held in _weights(file).items():
        found[name] = file
        if isinstance(held, TensorReference):
            number = getattr(held, "tid", None)
            if not isinstance(number, int):
                raise DataError(
                    f"{file}: tensor_{number!r} is no file's name, of {name}. Copy the checkpoint"
                    " again."
                )
            found[name] = Path(f"{file}.tensors") / f"tensor_{number}.pt"
    return found


def _weights(file: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([(TensorReference, REFERENCE)]):
        state = load_tensors(file)
    return state["model"] if isinstance(state.get("model"), dict) else state
