"""Checkpoints of NeuronX Distributed (NxD), with which HLAT was trained: shards to the kit's decoder, in plain torch.

A checkpoint is `TAG/model/dp_rank_00_tp_rank_XX_pp_rank_YY.pt`; names are those of Hugging Face's Llama, global over
the pipeline, with fused matrices. The rules invert what scripts/checkpoint_converter.py of NxD 0.18 does
(github.com/aws-neuron/neuronx-distributed). Trn1's order of heads is read; trn2's (grouped copies) is another.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kit.convert.names import fill, from_theirs
from kit.errors import ConfigError, DataError
from kit.model import Decoder, empty_decoder
from kit.spec import ModelSpec

FILE_NAME = re.compile(r"dp_rank_00_tp_rank_(\d+)_pp_rank_(\d+)\.pt")


def import_nxd(folder: str | Path, spec: ModelSpec) -> Decoder:
    """Returns the decoder of an NxD checkpoint, fp32, on the CPU, in evaluation mode.

    Args:
        folder: `TAG`, or the `model` folder in it.
        spec: of the model, which the files do not describe.

    Raises:
        ConfigError: the spec is not of the Llama family without biases.
        DataError: there are no shards, some are missing, or they do not hold this model.
    """
    if spec.family != "llama" or spec.bias:
        raise ConfigError(f"spec: {spec.name} is not a Llama without biases; NxD checkpoints of others are not read.")
    shards = NxdShards(Path(folder), spec)
    decoder = empty_decoder(spec).eval()
    fill(decoder, lambda name: from_theirs(spec, name, shards.read), Path(folder))
    return decoder


class NxdShards:
    """Merges the shards of tensor and pipeline ranks, weight by weight."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder = folder / "model" if (folder / "model").is_dir() else folder
        self.spec = spec
        found = {}
        for file in sorted(self.folder.glob("dp_rank_00_*.pt")):
            match = FILE_NAME.fullmatch(file.name)
            if match:
                found[int(match[1]), int(match[2])] = file
        self.tensor_parallel = 1 + max((tensor for tensor, _ in found), default=-1)
        stages = {stage for _, stage in found}
        wanted = {
            (tensor, stage) for tensor in range(self.tensor_parallel) for stage in range(max(stages, default=-1) + 1)
        }
        if not found or set(found) != wanted:
            missing = ", ".join(f"tp {tensor} pp {stage}" for tensor, stage in sorted(wanted - set(found)))
            raise DataError(
                f"{self.folder}: {'shards are missing: ' + missing if found else 'has no dp_rank_00_tp_rank_*.pt'}. "
                f"Give the folder of one complete NxD checkpoint."
            )
        self._shards = [
            {name: weight for stage in sorted(stages) for name, weight in _load(found[tensor, stage]).items()}
            for tensor in range(self.tensor_parallel)
        ]

    def read(self, name: str) -> Tensor:
        """Returns a whole weight by Hugging Face's name.

        Raises:
            DataError: it is not in the shards.
        """
        module = name.removesuffix(".weight")
        parent, _, leaf = module.rpartition(".")
        if leaf in ("q_proj", "k_proj", "v_proj"):
            return self._query_key_value(parent, leaf[0])
        if leaf == "o_proj":
            weight = torch.cat(self._parts(name), dim=1)
            return self._heads_in_order(weight.T).T if self._grouped(parent) else weight
        if leaf in ("gate_proj", "up_proj") and f"{parent}.gate_up_proj.weight" in self._shards[0]:
            half = ("gate_proj", "up_proj").index(leaf)  # each rank stacks its gate on its up
            return torch.cat([part.chunk(2)[half] for part in self._parts(f"{parent}.gate_up_proj.weight")])
        if leaf == "down_proj":
            return torch.cat(self._parts(name), dim=1)
        if leaf in ("embed_tokens", "lm_head", "gate_proj", "up_proj"):
            return torch.cat(self._parts(name))
        return self._parts(name)[0]  # norms are the same on all ranks

    def _query_key_value(self, parent: str, which: str) -> Tensor:
        if self._grouped(parent):
            weight = torch.cat(self._parts(f"{parent}.qkv_proj.weight_{which}"))
            # Ranks beyond the key/value heads hold copies of them.
            return (
                self._heads_in_order(weight) if which == "q" else weight[: self.spec.num_kv_heads * self.spec.head_size]
            )
        fused = f"{parent}.qkv_proj.weight"
        if fused in self._shards[0]:  # without groups, each rank stacks its query, key and value
            return torch.cat([part.chunk(3)["qkv".index(which)] for part in self._parts(fused)])
        return torch.cat(self._parts(f"{parent}.{which}_proj.weight"))

    def _grouped(self, parent: str) -> bool:
        return f"{parent}.qkv_proj.weight_q" in self._shards[0]

    def _heads_in_order(self, weight: Tensor) -> Tensor:
        """Returns query heads, in the first dimension, in the model's order.

        With every key/value head copied c times, c = tensor ranks / key/value heads, slot i k + j holds the block of
        heads j c + i: so that slot and key/value head j lie on the same rank.
        """
        heads = self.spec.num_kv_heads
        copies = max(1, self.tensor_parallel // heads)
        return weight.unflatten(0, (copies, heads, -1)).transpose(0, 1).flatten(0, 2)

    def _parts(self, name: str) -> list[Tensor]:
        if name not in self._shards[0]:
            raise DataError(f"{self.folder}: has no weight {name!r}. Give the spec that it was trained with.")
        return [shard[name] for shard in self._shards]


def _load(file: Path) -> dict[str, Tensor]:
    if Path(f"{file}.tensors").exists():
        raise DataError(
            f"{file}: was saved with use_xser, whose files only torch_xla reads. Convert it on the Neuron machine, or "
            f"save with use_xser=False."
        )
    state = load_tensors(file)
    return state["model"] if isinstance(state.get("model"), dict) else state


def load_tensors(file: Path) -> dict[str, Any]:
    """Returns what a .pt file holds by name, mapped from the disk; only tensors and plain values are unpickled.

    A tensor alone has the name "".

    Raises:
        DataError: the file is damaged, or holds code.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, dict | Tensor):
            raise TypeError(f"it holds a {type(state).__name__}")
        return state if isinstance(state, dict) else {"": state}
    except Exception as error:  # torch raises plain RuntimeError, UnpicklingError and others
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file}: cannot be read as tensors ({reason}). Copy it again, or re-save the weights alone."
        ) from error
