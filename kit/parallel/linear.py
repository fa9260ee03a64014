"""Tensor parallelism with plain tensors: layers as in Megatron-LM, made from
`TENSOR_PARALLEL_SPLIT`, which says for each layer of the model how its matrix is split.

Engines that cannot train weights that are DTensors use these layers. Source of the layers:
Megatron-LM, arXiv 1909.08053, section 3.
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
    """Returns how a layer's matrix is split: `column` (by output features), `row` (by input
    features) or `vocabulary`. Returns None if the matrix is not split. `path` is the name of the
    layer in the complete model.
    """
    return TENSOR_PARALLEL_SPLIT.get(re.sub(r"^layers\.\d+\.", "", path))


def split_dim(name: str) -> int | None:
    """Returns the dimension along which a parameter is split over the tensor parallel ranks, or
    None if each rank has the full parameter. `name` is the parameter's name in the complete model.
    """
    path, _, kind = name.rpartition(".")
    split = split_of(path)
    if split == "row":
        return 1 if kind == "weight" else None
    return 0 if split else None


def rank_part(whole: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
    """Returns this rank's shard of a full parameter. If `group` is None, or the parameter is not
    split, returns the full parameter.
    """
    dim = split_dim(name)
    if group is None or dim is None:
        return whole
    return whole.chunk(group.size(), dim)[group.rank()]


def split_layers(module: nn.Module, group: ProcessGroup) -> None:
    """Replaces each layer whose matrix is split (`TENSOR_PARALLEL_SPLIT`) by its tensor parallel
    layer, in place. The caller must set the weights of the new layers.

    `module` is a decoder, or a part of a decoder in which layers keep the names that they have in
    the complete decoder. The module should be on the meta device.
    """

    def copied(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return copy_to_ranks(args[0], group), *args[1:]

    for path, parent in list(module.named_modules()):
        path = path + "." if path else ""
        splits = {name: split_of(path + name) for name, _ in parent.named_children()}
        # In a module that also has a row-split layer, all column-split layers read the same input.
        # The input is copied to the ranks once for all of them, so its gradient needs only one
        # all-reduce.
        shared = "row" in splits.values()
        if shared:
            parent.register_forward_pre_hook(copied)
        for name, split in splits.items():
            if split is None:
                continue
            whole: Any = parent.get_submodule(name)
            with torch.device(whole.weight.device):
                part = PARALLEL_LAYERS[split](whole, group)
            setattr(parent, name, part)
            if split == "column" and not shared:
                part.register_forward_pre_hook(copied)


def column_part(whole: nn.Linear, group: ProcessGroup) -> nn.Linear:
    """Returns a linear layer with this rank's part of the output features. The caller must pass the
    layer's input through `copy_to_ranks`.
    """
    return nn.Linear(
        whole.in_features, whole.out_features // group.size(), bias=whole.bias is not None
    )


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are split over the ranks. Each rank receives the full
    output, and the bias is added once.
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
    """An embedding whose vocabulary is split over the ranks. Each rank receives the full output."""

    def __init__(self, whole: nn.Embedding, group: ProcessGroup) -> None:
        super().__init__(whole.num_embeddings // group.size(), whole.embedding_dim)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        rows = input - self.group.rank() * self.num_embeddings
        mine = (rows >= 0) & (rows < self.num_embeddings)
        found = super().forward(rows.masked_fill(~mine, 0))
        return sum_over_ranks(found * mine.unsqueeze(-1), self.group)


PARALLEL_LAYERS: dict[str, Callable[[Any, ProcessGroup], nn.Module]] = {
    "column": column_part,
    "row": RowParallelLinear,
    "vocabulary": VocabularyParallelEmbedding,
}
"""Maps each kind of split in `TENSOR_PARALLEL_SPLIT` to the function that makes the tensor parallel
layer. The arguments of the function are the full layer and the group of ranks."""


def copy_to_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns x unchanged. The backward pass sums the gradients of x over the ranks of the
    group.
    """
    return _CopyToRanks.apply(x, group)  # pyright: ignore[reportReturnType]


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the sum of x over the ranks of the group. In the backward pass, the gradient of each
    rank's x is the gradient of the sum.
    """
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
