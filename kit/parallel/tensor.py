"""Tensor and sequence parallelism with torch's DTensor. `TENSOR_PARALLEL_SPLIT` says for each layer
of the model how its matrix is split.

A column-split matrix followed by a row-split matrix needs a single all-reduce (Megatron-LM, arXiv
1909.08053). With sequence parallelism a reduce-scatter and an all-gather replace the all-reduce,
and hidden states between blocks are split along the sequence axis T (arXiv 2205.05198).
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from kit.model import TENSOR_PARALLEL_SPLIT, Decoder
from kit.model.cross_entropy import ZLoss
from kit.parallel.linear import sum_over_ranks

T_AXIS = Shard(1)
V_AXIS = Shard(-1)
HEADS_DIM = 2
"""Dimension of the heads in a tensor of shape [B, T, N, D]."""


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Splits the decoder's matrices over the ranks of the one-axis `mesh` and adds the
    communication between them, in place.

    Afterwards the logits of a rank have shape [B, T, V / tensor_parallel]: micro-batch B, sequence
    length T, vocabulary size V. `cross_entropy` of this module takes these logits.
    """
    between_blocks = T_AXIS if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name, split in TENSOR_PARALLEL_SPLIT.items():
        if split == "vocabulary":
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif split == "row":
            styles[name] = RowwiseParallel(output_layouts=between_blocks)
        else:
            styles[name] = ColwiseParallel()
    styles["output"] = ColwiseParallel(input_layouts=between_blocks, output_layouts=V_AXIS)
    # Column-split matrices with a common input share one gathered copy of it. The gradient of this
    # input is then reduced over the ranks only once.
    styles |= {
        "attention": PrepareModuleInput(
            input_layouts=(between_blocks, None), desired_input_layouts=(Replicate(), None)
        ),
        "feed_forward": PrepareModuleInput(
            input_layouts=(between_blocks,), desired_input_layouts=(Replicate(),)
        ),
    }
    # Queries and keys are split by heads, with and without sequence parallelism.
    qk_norm: ParallelStyle = NormOfSplitFeatures()
    if decoder.spec.qk_norm == "per_head":
        qk_norm = SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True)
    styles |= dict.fromkeys(("attention.query_norm", "attention.key_norm"), qk_norm)
    if sequence_parallel:
        styles["embedding"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=T_AXIS
        )
        for name in ("attention_norm", "feed_forward_norm", "norm"):
            styles[name] = SequenceParallel()
        # Their results are added to the residual stream, whose parts are plain tensors.
        for name in ("attention_post_norm", "feed_forward_post_norm"):
            styles[name] = SequenceParallel(use_local_output=True)
    for module in (decoder, *decoder.layers.values()):
        inner = dict(module.named_modules())
        here = {name: style for name, style in styles.items() if name in inner}
        parallelize_module(module, mesh, here)
    if decoder.embedding is not None:
        # The local part of a DTensor is a view. Without the clone, a compiled block returns a
        # gradient that DTensor rejects.
        decoder.embedding.register_forward_hook(lambda _module, _inputs, x_BTH: x_BTH.clone())
    decoder.tie()


class NormOfSplitFeatures(ParallelStyle):
    """An RMSNorm whose features are split over the ranks, as the norms of queries and keys over all
    heads. Input and output are plain tensors with this rank's features.

    The mean of squares needs one all-reduce of a number per token. Torch's own RMSNorm would gather
    all features on each rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.get_parameter("weight"), device_mesh, (Shard(0),))
        module.register_parameter("weight", nn.Parameter(weight))
        module.forward = functools.partial(_normalise, module, device_mesh)
        return module


def _normalise(norm: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Returns the result of an RMSNorm whose features are split over the ranks of `mesh`. `x` has
    this rank's features. All operations are elementary, so that a DTensor computes them on shards.
    """
    wide = DTensor.from_local(x, mesh, (Shard(-1),), run_check=False).float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (wide * scale * norm.weight).to(x.dtype).to_local()


def cross_entropy(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    mesh: DeviceMesh | None,
    z_loss: ZLoss | None = None,
) -> Tensor:
    """Returns the mean negative log-likelihood per token in nats, computed in fp32. If `z_loss` is
    given, the result contains it.

    If `mesh` is given, it is the mesh of the tensor parallel axis. The logits then cover only this
    rank's part of the vocabulary, and are never gathered. In this case, the function and its
    backward pass must run within torch's `loss_parallel`.
    """
    logits = logits_BTV.flatten(0, 1).float()
    if mesh is None:
        loss = F.cross_entropy(logits, targets_BT.flatten())
        return loss if z_loss is None else loss + z_loss.add(logits.logsumexp(-1))
    loss = F.cross_entropy(
        DTensor.from_local(logits, mesh, (V_AXIS,), run_check=False), targets_BT.flatten()
    )
    # Zero-bubble schedules detach the loss in place. A view of a DTensor cannot be detached in
    # place, so the loss is cloned.
    loss = loss.to_local().clone() if isinstance(loss, DTensor) else loss
    return loss if z_loss is None else loss + z_loss.add(_log_denominator(logits, mesh))


def _log_denominator(logits_NV: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the logarithm of the softmax's denominator of each token, of shape [N]. Each rank of
    `mesh` passes the logits of its part of the vocabulary.
    """
    group = mesh.get_group()
    largest_N = logits_NV.detach().amax(-1)
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    own_N = (logits_NV - largest_N[:, None]).exp().sum(-1)
    return largest_N + sum_over_ranks(own_N, group).log()
