"""Gradient norms of the complete model, correct for every kind of parallelism, and gradient
clipping by the norm of all gradients.
"""

from collections.abc import Sequence

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


class GradientNorms:
    """Computes the gradient norm of each group of weights over the complete model. Each weight
    counts once.

    Args:
        groups: this rank's parameters by group, without copies of weights that another stage owns.
            All ranks must name the same groups. A group may be empty on some ranks.
        pipeline_group: process group of the ranks of a pipeline, or None without a pipeline.
    """

    def __init__(
        self, groups: Sequence[list[Parameter]], pipeline_group: dist.ProcessGroup | None
    ) -> None:
        self.pipeline_group = pipeline_group
        number = {parameter: i for i, group in enumerate(groups) for parameter in group}
        self.placed: list[list[list[Parameter]]] = []
        """Parameters by placement, and within a placement by group."""
        for parameters in group_parameters(list(number)):
            members: list[list[Parameter]] = [[] for _ in groups]
            for parameter in parameters:
                members[number[parameter]].append(parameter)
            self.placed.append(members)

    def squares(self) -> Tensor:
        """Returns the squared L2 norm of the gradients of each group, of shape [number of groups].
        All ranks must call this method.

        Gradients must already be reduced over the replicas. The squared norms of local shards are
        summed over the mesh axes that shard the weights, then over the pipeline. On an axis on
        which gradients are replicated, all ranks have equal gradients, so nothing is summed.
        """
        by_placement = []
        for members in self.placed:
            example = next(parameter for group in members for parameter in group)
            squares = torch.stack([_squared_norm(group, example.device) for group in members])
            if isinstance(example, DTensor):
                for axis, placement in enumerate(example.placements):
                    if not placement.is_replicate() and example.device_mesh.size(axis) > 1:
                        dist.all_reduce(squares, group=example.device_mesh.get_group(axis))
            by_placement.append(squares)
        total = torch.stack(by_placement).sum(dim=0)
        if self.pipeline_group is not None:
            dist.all_reduce(total, group=self.pipeline_group)
        return total


def _squared_norm(parameters: list[Parameter], device: torch.device) -> Tensor:
    """Returns the squared L2 norm of this rank's shards of the gradients. Returns 0 if there are no
    gradients.
    """
    gradients = local_gradients(parameters)
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.nn.utils.get_total_norm(gradients).float() ** 2


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
