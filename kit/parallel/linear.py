"""Tensor parallelism with plain tensors: Megatron-style layers, made from the model's own table of
splits.

For engines that cannot take DTensors. Shape letters as in `kit.model`, and N tokens in all (B x T);
under tensor parallelism F, V and head counts are this rank's part. Source of the layers:
Megatron-LM, arXiv 1909.08053, section 3.
"""

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
    for name, split in TENSOR_PARALLEL_SPLIT.items():
        if path == name or ("." in name and path.endswith("." + name)):
            return split
    return None


def split_dim(name: str) -> int | None:
    """Returns the dim over which a parameter is cut, by its global name; None where every rank
    has it whole.
    """
    path, _, kind = name.rpartition(".")
    split = split_of(path)
    if split == "row":
        return 1 if kind == "weight" else None
    return 0 if split else None


def cut(whole: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
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
        index, mine = _own_tokens(input, self.num_embeddings, self.group)
        return sum_over_ranks(super().forward(index) * mine.unsqueeze(-1), self.group)


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


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns the mean negative log-likelihood in nats, fp32; with a group, of its ranks' parts
    of the vocabulary.
    """
    logits_NV, targets_N = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    if group is None:
        return F.cross_entropy(logits_NV, targets_N)
    return _CrossEntropy.apply(logits_NV, targets_N, group)  # pyright: ignore[reportReturnType]


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


class _CrossEntropy(torch.autograd.Function):
    """log(sum exp(z - max)) + max - z[target]; its gradient is softmax - 1 at the target, over
    N.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: ProcessGroup) -> Tensor:
        peak_N = logits_NV.amax(-1)
        dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
        exponentials_NV = (logits_NV - peak_N.unsqueeze(-1)).exp()
        index_N, mine_N = _own_tokens(targets_N, logits_NV.shape[-1], group)
        own_N = logits_NV.gather(-1, index_N.unsqueeze(-1)).squeeze(-1) * mine_N
        sums_2N = torch.stack((exponentials_NV.sum(-1), own_N))
        dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(exponentials_NV.div_(sums_2N[0].unsqueeze(-1)), index_N, mine_N)
        return (sums_2N[0].log() + peak_N - sums_2N[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax_NV, index_N, mine_N = ctx.saved_tensors
        gradient_NV = softmax_NV.clone()
        gradient_NV.scatter_add_(
            -1, index_N.unsqueeze(-1), -mine_N.to(softmax_NV.dtype).unsqueeze(-1)
        )
        return gradient_NV.mul_(gradients[0] / len(index_N)), None, None


def _own_tokens(tokens: Tensor, count: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Returns each token's row in this rank's part of the vocabulary (0 where it has none) and
    whether it has it.
    """
    first = group.rank() * count
    mine = (tokens >= first) & (tokens < first + count)
    return (tokens - first).masked_fill(~mine, 0), mine
