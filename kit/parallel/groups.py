"""Process groups: creates the groups of a mesh axis with one call for any number of ranks, and
connects groups before their first use. Also builds the mesh, and exchanges values and errors
between ranks.
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
    """Creates one process group per list of ranks. Returns the group that contains this rank, or
    None. The lists must be disjoint.

    All ranks must call this function with equal lists. If the world's group is bound to a device,
    torch makes a group by splitting NCCL's communicator, in which all ranks take part. With one
    call per list, this would take minutes at thousands of ranks. Therefore one call makes all
    groups.
    """
    world: Any = dist.group.WORLD
    if len(lists[0]) == world.size():
        return world
    if world.bound_device_id is not None:
        # The groups of a mesh axis communicate only GPU tensors, so they need only NCCL. Torch
        # before 2.13 cannot split only the NCCL group. It also splits the gloo group of the world,
        # and warns once per rank and axis that gloo was given options for NCCL. The warning is
        # harmless, since the gloo groups that result are never used.
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
    """Returns a new gloo group of all ranks, for tensors in host memory. The ranks are already
    connected.

    Raises:
        RuntimeError: A rank did not connect within COLLECTIVE_TIMEOUT.
    """
    # No `group_desc` is passed, since the `new_group` of Torch-XLA does not accept it.
    group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    connect(group, name, COLLECTIVE_TIMEOUT)
    return group


def connect(group: Any, name: str, timeout: datetime.timedelta) -> None:
    """Connects the ranks of a new gloo group. Groups of other backends are not changed.

    Without this call, gloo may connect two ranks only when they first communicate. If one of the
    ranks has exited before, the other rank may wait for much less or much more time than the
    timeout (github.com/pytorch/gloo/issues/520).

    Raises:
        RuntimeError: A rank did not connect within `timeout`.
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


def from_rank_0(function: Callable[[], Found], group: Any = None) -> Found:
    """Calls `function` on rank 0 only and returns its result on all ranks. If `function` reads
    files, for example, only rank 0 accesses the disk.

    All ranks must call `from_rank_0`. `group` must be a CPU group of all ranks. An error of
    `function` is raised on all ranks.
    """
    found: list[Any] = [None]
    with raised_on_all(group):
        if dist.get_rank() == 0:
            found = [function()]
    dist.broadcast_object_list(found, src=0, group=group)
    return found[0]


@contextlib.contextmanager
def raised_on_all(group: Any = None) -> Iterator[None]:
    """Context manager that raises an error of one rank on all ranks, so that no rank waits for the
    failed rank. All ranks must enter and leave the context.

    If several ranks fail, the error of the rank with the lowest number is raised. CheckpointError,
    ConfigError, DataError and OSError keep their type. Any other exception becomes a
    CheckpointError.
    """
    met: list[Any] = [None]
    try:
        yield
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        met = [error]
    # Errors are sent to the other ranks by pickle. This may fail for an exception whose type pickle
    # cannot serialise or another rank cannot import, so such an exception is replaced.
    except Exception as error:
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
    """Waits until all ranks are ready to exit, for at most COLLECTIVE_TIMEOUT. The ranks count
    themselves in the key-value store of the rendezvous.

    Gloo's barrier cannot be used here. A rank exits as soon as it has passed the barrier. Its
    connection to another rank may then break, or may never be made if gloo connects only at first
    use (seen in one of four runs of four ranks). If the store no longer exists, either all ranks
    have passed, or rank 0 has failed, which its supervisor reports. Neither case is an error of
    this rank.
    """
    store = default_store()
    with contextlib.suppress(RuntimeError):
        if store.add("parting", 1) == dist.get_world_size():
            store.set("parted", "")
        store.wait(["parted"], COLLECTIVE_TIMEOUT)


@contextlib.contextmanager
def unbound_device() -> Iterator[None]:
    """Context manager that unbinds the world's group from its GPU. A library may then create
    process groups in a loop: NCCL connects only the members of a group, at its first use. With a
    bound GPU, all ranks would take part in each new group.
    """
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Returns the mesh over all ranks with the axes (pipeline, replicate, shard, tensor). Axes of
    size 1 are left out, except `shard`, which fully_shard always needs.

    Ranks of one tensor parallel group have consecutive numbers, since they communicate most. Ranks
    of different pipeline stages are farthest apart, as in Megatron-LM (arXiv 2104.04473).
    Data-parallel replicas are on the axis `replicate` for ZeRO 0 and on the axis `shard` for ZeRO 1
    to 3. With a `shard_size`, the replicas are on both axes. Replicas between which one set of
    weights and optimizer states is sharded are then neighbours.
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
    """Returns this rank's index on the pipeline axis, or 0 without a pipeline."""
    if "pipeline" not in (mesh.mesh_dim_names or ()):
        return 0
    return mesh["pipeline"].get_local_rank()


def data_axis(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """Returns the one-dimensional mesh over the data-parallel replicas, which read different
    sequences. The plan must have no `shard_size`.
    """
    if plan.zero_stage == 0 and plan.data_parallel > 1:
        return mesh["replicate"]
    return mesh["shard"]


def data_rank(mesh: DeviceMesh) -> int:
    """Returns the index of the data-parallel replica that this rank belongs to."""
    copy = 0
    if "replicate" in (mesh.mesh_dim_names or ()):
        copy = mesh["replicate"].get_local_rank()
    return copy * mesh["shard"].size() + mesh["shard"].get_local_rank()
