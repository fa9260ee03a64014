"""Process groups: number of connections and of calls that create them, and the error when a rank is
missing.
"""

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.process_group import control_group, start_process_group
from kit.parallel import groups
from kit.parallel.groups import build_mesh
from tests.bench.groups import join_lazily, use
from tests.support.parity import build, make_plan
from tests.support.workers import become_rank, free_port, run_ranks

GPT_1T = Plan(
    tensor_parallel=8, pipeline_parallel=64, data_parallel=6, zero_stage=1, global_batch_size=384
)


def test_ranks_join_without_a_full_mesh() -> None:
    seen = run_ranks(32, use, 2, start=join_lazily)
    others = max(rank["descriptors"] for rank in seen[1:])
    assert others < 32, "fewer than one for each other rank, with two groups"
    assert seen[0]["descriptors"] < 32 + 40, "rank 0 has the store, to which all come"
    assert all(rank["reads_to_join"] == 0 and rank["reads"] < 32 for rank in seen)


def listening() -> list[str]:
    """Returns the local addresses at which the port of the ranks' store is open, in the kernel's
    hexadecimal format.
    """
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    return [line[1] for line in lines if line[3] == "0A" and line[1].endswith(port)]


def test_single_machine_store_listens_on_localhost() -> None:
    [(found,)] = run_ranks(2, listening)[:1]
    assert found.startswith("0100007F:"), "127.0.0.1"


def leave_or_join(rank: int, port: int, queue: Any) -> None:
    become_rank(rank, 3, port)
    start_process_group()
    assert control_group() is dist.group.WORLD, "one CPU group"
    if rank == 1:
        os._exit(0)
    groups.COLLECTIVE_TIMEOUT, start = datetime.timedelta(seconds=2), time.monotonic()
    try:
        groups.cpu_group("checkpoint")
    except RuntimeError as error:
        queue.put((str(error), time.monotonic() - start))
    os._exit(0)


def test_group_creation_times_out_for_an_exited_rank() -> None:
    context, port = mp.get_context("fork"), free_port()
    queue = context.SimpleQueue()
    ranks = [context.Process(target=leave_or_join, args=(rank, port, queue)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    for _ in range(2):
        error, seconds = queue.get()
        assert "could not join the process group 'checkpoint' of 3 ranks" in error and seconds < 10


def start_fake() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=100, world_size=GPT_1T.num_devices)


def count_calls(is_bound: bool) -> tuple[list[int], tuple[str, ...], int]:
    """Builds the device mesh of 3,072 ranks. Returns (group size for each call that creates a
    group, names of the mesh axes, size of the shard axis). `is_bound` says whether the world group
    is bound to a GPU.
    """
    asked, make = [], dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        asked.append(len(ranks))
        return make(ranks, **options)

    def split_group(split_ranks: list[list[int]], **options: Any) -> Any:
        asked.append(len(split_ranks[0]))
        return dist.group.WORLD

    dist.new_group, dist.split_group = new_group, split_group
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda:0") if is_bound else None
    mesh = build_mesh(GPT_1T, "cpu")
    if is_bound:
        ends = mesh.mesh[[0, -1]].flatten(1).t().tolist()
        groups.split_world(ends, "tied")
        world.bound_device_id = None
    return asked, mesh.mesh_dim_names or (), mesh["shard"].size()


def test_bound_device_splits_groups_once_per_axis() -> None:
    """The mesh has 3,072 ranks. Axes of size 1 are left out."""
    [(asked, axes, shards)] = run_ranks(1, count_calls, True, start=start_fake)
    assert axes == ("pipeline", "shard", "tensor") and shards == 6, "no axis of size 1"
    assert asked == [64, 6, 8, 2], "one split for each, and one for tied stages"


def test_unbound_device_creates_each_group_separately() -> None:
    """The device mesh has 3,072 ranks. Each process group of each mesh axis is created by a
    separate call.
    """
    [(asked, _, _)] = run_ranks(1, count_calls, False, start=start_fake)
    assert len(asked) == 3072 // 64 + 3072 // 6 + 3072 // 8


def build_with_a_device(spec: ModelSpec, plan: Plan) -> bool:
    """Builds the engine, and binds the world group to a GPU while DeepSpeed creates its groups.
    Gloo has no backend for a GPU, so a new group would fail if the binding were used. Returns
    whether the world group is bound again after DeepSpeed's groups were created.
    """
    from kit.engines.deepspeed.layers import LayerBuilder

    world: Any = dist.group.WORLD
    real = LayerBuilder.pipeline

    def pipeline(self: LayerBuilder, loss: Any) -> Any:
        world.bound_device_id = torch.device("cuda:0")
        made = real(self, loss)
        SEEN.append(world.bound_device_id == torch.device("cuda:0"))
        world.bound_device_id = None
        return made

    LayerBuilder.pipeline = pipeline
    build(spec, plan)
    return SEEN == [True]


SEEN: list[bool] = []


def test_deepspeed_grid_ignores_the_bound_device(gpt_spec: ModelSpec) -> None:
    """If the world group is bound to a device, torch would split the world's communicator for each
    new group.
    """
    pytest.importorskip("deepspeed")
    plan = make_plan({"pipeline_parallel": 2}, "deepspeed")
    assert all(run_ranks(2, build_with_a_device, gpt_spec.replace(num_layers=2), plan))
