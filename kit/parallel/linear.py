"""Tensor parallelism with plain tensors: Megatron-style layers, made from the model's own table of
splits.

For engines that cannot take DTensors as weights. Source of the layers: Megatron-LM, arXiv
1909.08053, section 3.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from kit.model import TENSOR_PARALLEL_SPLIT


def split_of(path: str) -> str | None:
    """Returns how the table cuts the matrix of a layer, by the layer's global name; None where
    it stays whole.
    """
    return TENSOR_PARALLEL_SPLIT.get(re.sub(r"^layers\.\d+\.", "", path))


def split_dim(name: str) -> int | None:
    """Returns the dim over which a parameter is cut, by its global name; None where every rank
    has it whole.
    """
    path, _, kind = name.rpartition(".")
    split = split_of(path)
    if split == "row":
        return 1 if kind == "weight" else None
    return 0 if split else None


def rank_part(whole: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
    """Returns this rank's part of a whole parameter."""
    dim = split_dim(name)
    if group is None or dim is None:
        return whole
    return whole.chunk(group.size(), dim)[group.rank()]


def split_layers(module: nn.Module, group: ProcessGroup) -> None:
    """Replaces the layers that the table names by their parallel kind, in place; weights are left
    to be filled.

    The module, best on the meta device, is a decoder or a part of it that names its layers as the
    decoder does.
    """

    def copied(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return copy_to_ranks(args[0], group), *args[1:]

    for path, parent in list(module.named_modules()):
        path = path + "." if path else ""
        splits = {name: split_of(path + name) for name, _ in parent.named_children()}
        # One copy, and so one all-reduce of gradients, for all column-split layers that read the
        # same input.
        shared = "row" in splits.values()
        if shared:
            parent.register_forward_pre_hook(copied)
        for name, split in splits.items():
            if split is None:
                continue
            whole: Any = parent.get_submodule(name)
            with torch.device(whole.weight.device):
                part = PARTS[split](whole, group)
            setattr(parent, name, part)
            if split == "column" and not shared:
                part.register_forward_pre_hook(copied)


def column_part(whole: nn.Linear, group: ProcessGroup) -> nn.Linear:
    """Returns a linear layer of this rank's part of the output features; its input is to be copied
    to the ranks.
    """
    return nn.Linear(
        whole.in_features, whole.out_features // group.size(), bias=whole.bias is not None
    )


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are cut over the ranks; its output is whole, the bias
    added once.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__(
            whole.in_features // group.size(), whole.out_features, bias=whole.bias is not None
        )
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        output = sum_over_ranks(F.linear(input, self.weight), self.group)
        return output if self.bias is None else output + self.bias


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding whose vocabulary is cut over the ranks; its output is whole."""

    def __init__(self, whole: nn.Embedding, group: ProcessGroup) -> None:
        super().__init__(whole.num_embeddings // group.size(), whole.embedding_dim)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        rows = input - self.group.rank() * self.num_embeddings
        mine = (rows >= 0) & (rows < self.num_embeddings)
        found = super().forward(rows.masked_fill(~mine, 0))
        return sum_over_ranks(found * mine.unsqueeze(-1), self.group)


PARTS: dict[str, Callable[[Any, ProcessGroup], nn.Module]] = {
    "column": column_part,
    "row": RowParallelLinear,
    "vocabulary": VocabularyParallelEmbedding,
}
"""This rank's part of a layer, by how the table splits it."""


def copy_to_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns x; in the backward pass the ranks' gradients of it are added up."""
    return _CopyToRanks.apply(x, group)  # pyright: ignore[reportReturnType]


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the sum of the ranks' x; in the backward pass each gets the gradient of the sum."""
    return _SumOverRanks.apply(x, group)  # pyright: ignore[reportReturnType]


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
