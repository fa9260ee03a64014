"""Sharded data parallelism (ZeRO 0 to 3) and mixed precision, both with torch's fully_shard.

ZeRO (arXiv 1910.02054) shards weights, gradients and optimizer states over the shard axis of the
mesh. The ZeRO stages in terms of fully_shard:
  0  The shard axis has size 1, the replicate axis size data_parallel. Gradients are all-reduced.
  1  Weights are gathered once per step. Each rank sums unsharded gradients over the micro-batches.
     At the last micro-batch the sums are reduce-scattered.
  2  Weights as in stage 1. Gradients are reduce-scattered at each micro-batch, so that a rank keeps
     only its shard of the sums.
  3  Gradients as in stage 2. Weights are dropped after each block's forward pass and gathered again
     for its backward pass. Weights of the output stay gathered, since the output is last in the
     forward pass and first in the backward pass.
With `plan.shard_size` the shard axis has that many ranks, and the replicate axis has the rest
(hybrid sharding, HSDP: arXiv 2304.11277, section 3.2.2). Gradients that a shard group has reduced
are all-reduced across groups once, at the last micro-batch. Under a pipeline torch sums unsharded
gradients until the last micro-batch for every ZeRO stage above 0, so stage 2 keeps as many bytes as
stage 1.
"""

from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module

from kit.config.plan import Plan
from kit.model import Decoder


def needs_sharding(plan: Plan) -> bool:
    """Returns whether the model needs fully_shard. It is needed if the plan has several
    data-parallel replicas, or computes in bf16 with fp32 master weights.
    """
    return plan.data_parallel > 1 or plan.precision == "bf16"


def shard_ends(decoder: Decoder, plan: Plan, mesh: DeviceMesh) -> None:
    """Applies fully_shard to the modules of a decoder that are outside its blocks, in place. The
    blocks must be sharded already.

    The embedding forms one group of weights, and the final norm forms another group with the output
    layer. The weights of a group are gathered together, and its gradients are reduced together,
    while blocks compute. If embedding and output share a weight, all three modules belong to the
    group of the decoder itself.
    """
    tied = (
        decoder.spec.tied_embeddings
        and decoder.embedding is not None
        and decoder.output is not None
    )
    if decoder.embedding is not None and not tied:
        shard(decoder.embedding, plan, mesh)
        # The gradient of an embedding does not depend on its weights, so the backward pass need not
        # gather them.
        cast(FSDPModule, decoder.embedding).set_unshard_in_backward(False)
    if decoder.norm is not None and decoder.output is not None and not tied:
        shard([decoder.norm, decoder.output], plan, mesh, last=True)
    shard(decoder, plan, mesh, last=True)


def shard(
    module: Module | list[Module], plan: Plan, mesh: DeviceMesh, *, last: bool = False
) -> None:
    """Applies fully_shard to a module or a list of modules, whose weights form one group, in place.
    If `last` is True, the weights stay gathered after the forward pass, since the backward pass of
    these modules follows at once.

    In bf16, weights are cast to bf16 for compute. Master weights, gradients and the reduction of
    gradients stay in fp32.
    """
    axes = mesh["replicate", "shard"] if plan.data_parallel > plan.num_shards else mesh["shard"]
    policy = MixedPrecisionPolicy()
    if plan.precision == "bf16":
        # Inputs of modules are not cast to bf16. The rotary table must stay fp32, and activations
        # are already bf16 after the embedding.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    fully_shard(
        module, mesh=axes, reshard_after_forward=plan.zero_stage == 3 and not last, mp_policy=policy
    )


def prepare_backward(decoder: Module, plan: Plan, *, last_microbatch: bool) -> None:
    """Sets, according to the plan's ZeRO stage, whether the next backward pass of a sharded decoder
    reduces gradients over the ranks, and whether it frees gathered weights. A decoder without
    fully_shard is not changed.
    """
    if isinstance(decoder, FSDPModule):
        decoder.set_requires_gradient_sync(last_microbatch or plan.zero_stage >= 2)
        decoder.set_requires_all_reduce(last_microbatch)
        decoder.set_is_last_backward(last_microbatch)
        decoder.set_reshard_after_backward(last_microbatch or plan.zero_stage == 3)


def drop_gathered(decoder: Module) -> None:
    """Frees the gathered weights of a sharded decoder. Must be called after a forward pass without
    a backward pass.

    Below ZeRO 3, such a forward pass leaves gathered weights in place of the sharded parameters
    that the optimizer knows. If a checkpoint were written in this state, no optimizer moments would
    be found, since the optimizer does not know the gathered weights.
    """
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
