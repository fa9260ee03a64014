"""The device mesh of a Plan: which rank sits where on each parallel axis."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kit.plan import Plan


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Returns the mesh (pipeline, replicate, shard, tensor) over all ranks.

    Tensor parallel ranks are neighbours (they talk most), pipeline stages lie farthest apart, as in Megatron-LM
    (arXiv 2104.04473). The data axis is `replicate` for ZeRO 0 and `shard` for ZeRO 1-3; the other has size 1.
    """
    replicate, shard = (plan.data_parallel, 1) if plan.zero_stage == 0 else (1, plan.data_parallel)
    shape = (plan.pipeline_parallel, replicate, shard, plan.tensor_parallel)
    return init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))


def data_axis(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """Returns the one-axis mesh of the ranks that hold the same weights but read different sequences."""
    return mesh["replicate"] if plan.zero_stage == 0 else mesh["shard"]
