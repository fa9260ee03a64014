"""Builds the part of the model that one rank holds under a Plan. Pipeline, tensor and data
parallelism are applied in this order.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.config.weight_groups import initial_factor, weight_group
from kit.model import Decoder, initial_weight
from kit.parallel.data import needs_sharding, shard, shard_ends
from kit.parallel.gradients import local
from kit.parallel.groups import pipeline_rank
from kit.parallel.pipeline import stage_indices
from kit.parallel.tensor import apply_tensor_parallel
from kit.torch_private import local_part


def build_decoders(
    spec: ModelSpec,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    seed: int | None,
    recipe: Recipe | None = None,
) -> list[Decoder]:
    """Returns one Decoder per pipeline stage of this rank. Its layers and matrices are split as the
    plan says, and its weights are initialised and sharded.

    Blocks are allocated one at a time, so that memory holds at most one unsharded block in addition
    to the shards. On the device `meta`, parameters have shapes but no memory. If `seed` is None,
    weights stay uninitialised until a checkpoint is loaded. If `recipe` is given, its width rule
    (muP) changes the initial weights.
    """
    decoders = []
    for stage in stage_indices(plan, pipeline_rank(mesh)):
        with torch.device("meta"):
            decoder = Decoder(
                spec,
                layers=plan.stage_layers(spec, stage),
                is_first=stage == 0,
                is_last=stage == plan.num_stages - 1,
                recompute=plan.recompute,
                recompute_layers=plan.stage_recomputed(spec, stage),
            )
        if plan.tensor_parallel > 1:
            apply_tensor_parallel(decoder, mesh["tensor"], sequence_parallel=plan.sequence_parallel)
        for number, block in decoder.layers.items():
            _materialise(block, spec, f"layers.{number}.", device, seed, recipe)
            if plan.compile:
                block.compile()
            if needs_sharding(plan):
                shard(block, plan, mesh)
        for name, child in decoder.named_children():
            if name != "layers":
                _materialise(child, spec, f"{name}.", device, seed, recipe)
        decoder.tie()
        if plan.compile and decoder.output is not None:
            decoder.output.compile()
        if needs_sharding(plan):
            shard_ends(decoder, plan, mesh)
        decoders.append(decoder)
    return decoders


def _materialise(
    module: Module,
    spec: ModelSpec,
    prefix: str,
    device: torch.device,
    seed: int | None,
    recipe: Recipe | None,
) -> None:
    """Allocates the parameters of a meta module on `device`, and initialises them if there is a
    seed. Does nothing if `device` is `meta`.
    """
    if device.type == "meta":
        return
    module.to_empty(device=device)
    if seed is None:
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            whole = initial_weight(spec, prefix + name, parameter.shape, seed, device)
            if recipe is not None:
                group = weight_group(prefix + name, parameter.ndim)
                factor = initial_factor(recipe, spec, group)
                whole = whole if factor == 1 else factor * whole
            # Every rank computes the same full tensor, so its shard is cut out without
            # communication.
            part = local_part(whole, parameter) if isinstance(parameter, DTensor) else whole
            local(parameter).copy_(part)
