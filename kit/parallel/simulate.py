"""Simulates one rank of a plan with any number of ranks, to show its stages and shards. A fake
process group replaces the other processes, and the meta device needs no memory.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.errors import RunError
from kit.parallel.apply import build_decoders
from kit.parallel.gradients import local
from kit.parallel.groups import build_mesh, pipeline_rank
from kit.parallel.pipeline import stage_indices
from kit.torch_private import fake_store


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """One parameter on one rank. Its fields are the shape before tensor and data parallelism split
    it, the shape of the rank's shard, and the placement as text.
    """

    name: str
    whole_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankView:
    """Stages, layers and parameters of one rank of a plan. `coordinates` has the rank's index on
    each axis of the mesh, by name of the axis.
    """

    rank: int
    coordinates: dict[str, int]
    stages: list[int]
    layers: list[range]
    parameters: list[ShardedParameter]

    @property
    def num_params(self) -> int:
        """Number of weights that this rank stores, summed over its shards."""
        return sum(torch.Size(parameter.local_shape).numel() for parameter in self.parameters)


def view_rank(spec: ModelSpec, plan: Plan, rank: int) -> RankView:
    """Returns stages, layers and parameters of `rank`. Runs the code that splits a model for
    training, only for this rank and on the meta device.

    Raises:
        RunError: This process is already part of a process group.
        ConfigError: The plan cannot run the model.
    """
    plan.check(spec)
    if dist.is_initialized():
        raise RunError(
            "A rank can only be simulated in a process outside any process group. Use a fresh one."
        )
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=plan.num_devices)
    try:
        mesh = build_mesh(plan, "cpu")
        decoders = build_decoders(spec, plan, mesh, device=torch.device("meta"), seed=None)
        stages = stage_indices(plan, pipeline_rank(mesh))
        return RankView(
            rank=rank,
            coordinates={name: mesh[name].get_local_rank() for name in mesh.mesh_dim_names or ()},
            stages=stages,
            layers=[plan.stage_layers(spec, stage) for stage in stages],
            parameters=[
                ShardedParameter(
                    name=name,
                    whole_shape=tuple(parameter.shape),
                    local_shape=tuple(local(parameter).shape),
                    placement=_placement(parameter),
                )
                for decoder in decoders
                for name, parameter in decoder.named_parameters()
            ],
        )
    finally:
        dist.destroy_process_group()


def _placement(parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "not sharded"
    names = parameter.device_mesh.mesh_dim_names or ()
    cuts = [
        f"dim {getattr(placement, 'dim', '?')} over {name} ({parameter.device_mesh.size(axis)})"
        for axis, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
    ]
    return ", ".join(cuts) or "not sharded"
