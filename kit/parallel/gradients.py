"""The gradient norm of the complete model, correct for every kind of parallelism, and gradient
clipping by this norm.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from kit.torch_private import multiply


def reduce_partial(parameters: list[Parameter]) -> None:
    """Sums partial gradients over the ranks of the mesh axis on which they are partial, in place.
    Partial gradients occur under sequence parallelism: each rank computes the gradients of the norm
    weights from its part of the sequence only.
    """
    for parameter in parameters:
        gradient = parameter.grad
        wanted = getattr(parameter, "placements", None)
        if isinstance(gradient, DTensor) and gradient.placements != wanted:
            parameter.grad = gradient.redistribute(placements=wanted)


def global_norm(parameters: list[Parameter], pipeline_group: dist.ProcessGroup | None) -> Tensor:
    """Returns the L2 norm of the gradients of the complete model, as a scalar tensor. Each weight
    counts once.

    `parameters` are this rank's parameters, without copies of weights that another stage owns.
    Their gradients must already be reduced over the replicas. The squared norms of local shards are
    summed over the mesh axes that shard the weights, then over the pipeline. On an axis on which
    gradients are replicated, all ranks have equal gradients, so nothing is summed. All ranks must
    call this function.
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
    """Multiplies all gradients by limit / norm if the norm is above the limit, in place."""
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    multiply(local_gradients(parameters), scale)


def group_parameters(parameters: list[Parameter]) -> list[list[Parameter]]:
    """Returns the parameters in groups with equal mesh and placement. Torch's fused and foreach
    kernels cannot mix plain tensors and DTensors in one call.
    """
    groups: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        key = None
        if isinstance(parameter, DTensor):
            key = (parameter.device_mesh, parameter.placements)
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def local_gradients(parameters: list[Parameter]) -> list[Tensor]:
    """Returns this rank's shard of each gradient. Parameters without a gradient are left out."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """Returns the local shard of a DTensor. Returns a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
