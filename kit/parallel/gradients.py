"""The global gradient norm, right under every axis, and clipping by it."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from kit.torch_private import multiply


def reduce_partial(parameters: list[Parameter]) -> None:
    """Adds up gradients that ranks of an axis still hold in parts (norms under sequence
    parallelism), in place.
    """
    for parameter in parameters:
        gradient = parameter.grad
        wanted = getattr(parameter, "placements", None)
        if isinstance(gradient, DTensor) and gradient.placements != wanted:
            parameter.grad = gradient.redistribute(placements=wanted)


def global_norm(parameters: list[Parameter], pipeline_group: dist.ProcessGroup | None) -> Tensor:
    """Returns the L2 norm over the gradients of the whole model, each weight counted once, as a
    scalar tensor.

    `parameters` are this rank's, reduced, without copies that another stage owns. Squares of local
    shards are added over the axes that cut them, then over the pipeline; replicated gradients are
    the same on all ranks of an axis.
    """
    total = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
    for group in group_parameters([p for p in parameters if p.grad is not None]):
        square = torch.nn.utils.get_total_norm(local_gradients(group)).float() ** 2
        if isinstance(group[0], DTensor):
            for axis, placement in enumerate(group[0].placements):
                if not placement.is_replicate() and group[0].device_mesh.size(axis) > 1:
                    dist.all_reduce(square, group=group[0].device_mesh.get_group(axis))
        total += square
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    return total.sqrt()


def clip(parameters: list[Parameter], norm: Tensor, limit: float) -> None:
    """Scales all gradients by limit / norm where the norm is above the limit, in place."""
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    multiply(local_gradients(parameters), scale)


def group_parameters(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Returns the parameters grouped by placement: torch's fused and foreach kernels cannot mix
    plain and DTensors.
    """
    groups: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        key = None
        if isinstance(parameter, DTensor):
            key = (parameter.device_mesh, parameter.placements)
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def local_gradients(parameters: list[Parameter]) -> list[Tensor]:
    """Returns this rank's part of each gradient that exists."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor: the local shard of a DTensor, a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
