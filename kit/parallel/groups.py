"""Groups of ranks: one call for each axis however many ranks there are, and connected before
anybody needs them; what one rank reads or meets, and all must know.
"""

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kit.config.plan import Plan
from kit.errors import CheckpointError, ConfigError, DataError
from kit.torch_private import default_store

Found = TypeVar("Found")
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


def split_world(lists: Sequence[Sequence[int]], name: str) -> Any:
    """Returns this rank's group of those that disjoint `lists` of ranks make, None if it is in no
    list.

    All ranks must call it with the same lists. Where a device is bound to the world's group, torch
    makes a group by splitting NCCL's communicator of all ranks, so that a call for each list would
    take minutes at thousands of ranks.
    """
    world: Any = dist.group.WORLD
    if len(lists[0]) == world.size():
        return world
    if world.bound_device_id is not None:
        # Only tensors of the device travel along an axis. Before 2.13 torch splits the gloo group
        # of the world too, and warns once per rank and axis that gloo gets NCCL's options. That is
        # harmless: nothing uses these gloo groups.
        options: Any = {"timeout": COLLECTIVE_TIMEOUT, "group_desc": name}
        if "backend" in signature(dist.split_group).parameters:
            options["backend"] = "cuda:nccl"
        return dist.split_group(split_ranks=[list(ranks) for ranks in lists], **options)
    mine = None
    for ranks in lists:
        group: Any = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
        if dist.get_rank() in ranks:
            mine = group
    if mine is not None:
        connect(mine, name, COLLECTIVE_TIMEOUT)
    return mine


def cpu_group(name: str) -> Any:
    """Returns a new group of all ranks for tensors in memory, connected."""
    # Torch-XLA's takes no description.
    group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    connect(group, name, COLLECTIVE_TIMEOUT)
    return group


def connect(group: Any, name: str, timeout: datetime.timedelta) -> None:
    """Makes the connections of a new group, if it is one of gloo's; raises RuntimeError if a rank
    does not come.

    Later a rank may be gone, and gloo's wait for it ends when it likes
    (github.com/pytorch/gloo/issues/520).
    """
    if "gloo" not in dist.get_backend_config(group):
        return
    try:
        work: Any = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
        work.wait(timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {dist.get_rank()} could not join the process group {name!r} of {group.size()}"
            f" ranks within {timeout.total_seconds():.0f} s: {error} A rank has ended or its node"
            " cannot be reached: see the logs of the other ranks."
        ) from error


def from_rank_0(ask: Callable[[], Found], group: Any = None) -> Found:
    """Returns to all ranks what `ask` returns on rank 0, which alone calls it, and so reads files.

    All ranks of the group, which is on the CPU and has all of them, must call this. An error is
    raised on all.
    """
    found: list[Any] = [None]
    with raised_on_all(group):
        if dist.get_rank() == 0:
            found = [ask()]
    dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


@contextlib.contextmanager
def raised_on_all(group: Any = None) -> Iterator[None]:
    """Raises an error that one rank meets on all ranks, so that none waits for it; a strange one
    as CheckpointError.
    """
    met: list[Any] = [None]
    try:
        yield
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        met = [error]
    except Exception as error:  # may not survive pickling
        met = [CheckpointError(f"{type(error).__name__}: {error}")]
        met[0].__cause__ = error
    num_ranks = dist.get_world_size()
    rank = dist.get_rank() if met[0] else num_ranks
    first = torch.tensor([rank])
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if int(first) < num_ranks:
        dist.broadcast_object_list(met, src=int(first), group=group)
        raise met[0]


def final_barrier() -> None:
    """Waits for all ranks before this one ends, by way of the store in which they met.

    Not by gloo's barrier: a rank that has passed it is gone, and another's connection to it may
    then break or, where it is made at first use, never come (seen in one of four runs of four
    ranks). When the store itself is gone, all ranks have parted, or rank 0 has died, of which its
    supervisor tells.
    """
    store = default_store()
    with contextlib.suppress(RuntimeError):
        if store.add("parting", 1) == dist.get_world_size():
            store.set("parted", "")
        store.wait(["parted"], COLLECTIVE_TIMEOUT)


@contextlib.contextmanager
def unbound_device() -> Iterator[None]:
    """Lets a library make groups in loops: without a bound device, NCCL connects their members
    at first use, alone.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Returns the mesh (pipeline, replicate, shard, tensor) over all ranks, without axes of size 1
    but for `shard`.

    Tensor parallel ranks are neighbours (they talk most), pipeline stages lie farthest apart, as in
    Megatron-LM (arXiv 2104.04473). Replicas are on the axis `replicate` for ZeRO 0, on `shard` for
    ZeRO 1-3, and on both with a `shard_size`: those that share states are neighbours. fully_shard
    needs an axis `shard` even if nothing is cut.
    """
    sizes = {
        "pipeline": plan.pipeline_parallel,
        "replicate": plan.data_parallel // plan.num_shards,
        "shard": plan.num_shards,
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
    if "pipeline" not in (mesh.mesh_dim_names or ()):
        return 0
    return mesh["pipeline"].get_local_rank()


def data_axis(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """Returns the one-axis mesh of the ranks that read different sequences, of a plan without
    `shard_size`.
    """
    if plan.zero_stage == 0 and plan.data_parallel > 1:
        return mesh["replicate"]
    return mesh["shard"]


def data_rank(mesh: DeviceMesh) -> int:
    """Returns which replica this rank is part of."""
    copy = 0
    if "replicate" in (mesh.mesh_dim_names or ()):
        copy = mesh["replicate"].get_local_rank()
    return copy * mesh["shard"].size() + mesh["shard"].get_local_rank()
