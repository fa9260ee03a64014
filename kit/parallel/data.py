"""Sharded data parallelism (ZeRO 0-3) and mixed precision, both by torch's fully_shard.

ZeRO (arXiv 1910.02054) in terms of fully_shard: weights, gradients and optimizer states are cut
  over the shard axis. 0  shard axis of size 1, replicate axis of size data_parallel: gradients are
                          all-reduced
  1  weights are gathered once a step; gradients are summed whole, then reduce-scattered once, at
     the last micro-batch
  2  as 1, but gradients are reduce-scattered at each micro-batch, so that only a shard of them is
     ever kept
  3  as 2, and weights are dropped after each block's forward pass and gathered again for its
     backward pass; those of the output, used last and first, are not
With `plan.shard_size` the shard axis has that many ranks and the replicate axis the rest (hybrid
sharding, HSDP: arXiv 2304.11277, section 3.2.2): what a group has reduced is all-reduced across
groups once, at the last micro-batch. Under a pipeline, torch sums gradients whole until the last
micro-batch for every stage above 0, so 2 keeps what 1 does.
"""

from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module

from kit.config.plan import Plan
from kit.model import Decoder


def needs_sharding(plan: Plan) -> bool:
    """True if the plan has replicas, or bf16 compute beside fp32 master weights."""
    return plan.data_parallel > 1 or plan.precision == "bf16"


def shard_ends(decoder: Decoder, plan: Plan, mesh: DeviceMesh) -> None:
    """Applies fully_shard to what a decoder has beside its blocks, which have it already, in place.

    Embedding, and norm with output, are gathered and reduced while blocks compute, unless they
    share a weight.
    """
    tied = (
        decoder.spec.tied_embeddings
        and decoder.embedding is not None
        and decoder.output is not None
    )
    if decoder.embedding is not None and not tied:
        shard(decoder.embedding, plan, mesh)
        # Whose gradient needs no weights.
        cast(FSDPModule, decoder.embedding).set_unshard_in_backward(False)
    if decoder.norm is not None and decoder.output is not None and not tied:
        shard([decoder.norm, decoder.output], plan, mesh, last=True)
    shard(decoder, plan, mesh, last=True)


def shard(
    module: Module | list[Module], plan: Plan, mesh: DeviceMesh, *, last: bool = False
) -> None:
    """Applies fully_shard to one group of weights, in place; the last one stays gathered for its
    backward pass.

    bf16 casts weights for compute and keeps fp32 master weights, gradients and gradient reduction.
    """
    axes = mesh["replicate", "shard"] if plan.data_parallel > plan.num_shards else mesh["shard"]
    policy = MixedPrecisionPolicy()
    if plan.precision == "bf16":
        # Inputs are not cast: the rotary table must stay fp32, and activations are bf16 from the
        # embedding on.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    fully_shard(
        module, mesh=axes, reshard_after_forward=plan.zero_stage == 3 and not last, mp_policy=policy
    )


def prepare_backward(decoder: Module, plan: Plan, *, last_microbatch: bool) -> None:
    """Tells a sharded decoder when to reduce gradients and drop weights in the coming backward
    pass.
    """
    if isinstance(decoder, FSDPModule):
        decoder.set_requires_gradient_sync(last_microbatch or plan.zero_stage >= 2)
        decoder.set_requires_all_reduce(last_microbatch)
        decoder.set_is_last_backward(last_microbatch)
        decoder.set_reshard_after_backward(last_microbatch or plan.zero_stage == 3)


def drop_gathered(decoder: Module) -> None:
    """Gives a sharded decoder its shards back after a forward pass without a backward pass.

    Below ZeRO 3 that leaves gathered weights in place of the parameters that the optimizer knows,
    so that a checkpoint taken then would find no moments for any of them.
    """
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
