"""The device mesh of a Plan: which rank sits where on each parallel axis."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from kit.parallel.groups import split_world
from kit.plan import Plan


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Returns the mesh (pipeline, replicate, shard, tensor) over all ranks, without axes of size 1
    but for `shard`.

    Tensor parallel ranks are neighbours (they talk most), pipeline stages lie farthest apart, as in
    Megatron-LM (arXiv 2104.04473). Replicas are on the axis `replicate` for ZeRO 0, on `shard` for
    ZeRO 1-3, and on both with a `shard_size`: those that share states are neighbours. fully_shard
    needs an axis `shard` even if nothing is cut.
    """
    replicate, shard = plan.data_parallel // plan.num_shards, plan.num_shards
    sizes = {
        "pipeline": plan.pipeline_parallel,
        "replicate": replicate,
        "shard": shard,
        "tensor": plan.tensor_parallel,
    }
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    ranks = torch.arange(plan.num_devices).view(*axes.values())
    groups = [
        split_world(ranks.movedim(number, -1).reshape(-1, size).tolist(), name)
        for number, (name, size) in enumerate(axes.items())
    ]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(axes))


def pipeline_rank(mesh: DeviceMesh) -> int:
    """Returns which part of the pipeline this rank is."""
    return mesh["pipeline"].get_local_rank() if "pipeline" in (mesh.mesh_dim_names or ()) else 0


def data_axis(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """Returns the one-axis mesh of the ranks that read different sequences, of a plan without
    `shard_size`.
    """
    return mesh["replicate"] if plan.zero_stage == 0 and plan.data_parallel > 1 else mesh["shard"]


def data_rank(mesh: DeviceMesh) -> int:
    """Returns which replica this rank is part of."""
    copy = mesh["replicate"].get_local_rank() if "replicate" in (mesh.mesh_dim_names or ()) else 0
    return copy * mesh["shard"].size() + mesh["shard"].get_local_rank()
