"""Checkpoints on this machine: speed of saving and loading compared with a plain write of equal
size, and rank 0's CPU seconds for planning a save of gpt-1t and writing its metadata.

Saving: the stall is the time for which `save` stops training to copy the tensors. Writing continues
in the background. Its effect on steps is measured by the benchmark `overhead`.

Planning: the save plans of one stage's 48 ranks are made by the real sharding code (fake process
group, meta device). The other stages get copies with their own layer names. Nothing is sent between
ranks: the objects that rank 0 would gather are pickled before the measurement and unpickled in it.
"""

import dataclasses
import gc
import multiprocessing
import os
import pickle
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.testing._internal.distributed.fake_pg import FakeStore

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import build_engine
from kit.engines.engine import PortableEngine
from kit.engines.process_group import keep_freed_memory
from kit.parallel.apply import build_decoders
from kit.parallel.groups import build_mesh
from kit.run.checkpoint import DESCRIPTION, Checkpoints
from kit.run.checkpoint_reader import CheckpointTensors
from kit.run.checkpoint_writer import CheckpointWriter, SteadyPlanner, Writer
from kit.show.results import Row, row
from tests.bench.alone import alone
from tests.bench.contestants import join_alone, llama
from tests.bench.turns import ratio_row

SMALL = llama("checkpoint-26m")
REPEATS = 5
PAUSE_S = 3.0
"""Pause before each write in seconds. During the pause a virtual machine returns freed memory to
its host, as between real checkpoints."""


def measure(workplace: Path, spec: ModelSpec = SMALL, *, pause_s: float = PAUSE_S) -> list[Row]:
    """Returns rows with MB/s of saving, of loading and of a plain write, and with the stall of
    training in a save.
    """
    found = alone(times, workplace, spec, pause_s).found
    size = found.pop("bytes") / 1e6
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    rates = {name: size / seconds for name, seconds in middle.items()}
    note = f"{size:,.0f} MB, median of {REPEATS} saves"
    stall = f"the tensors are copied at {rates['stall']:,.0f} MB/s"
    cached = {"at_least": 500.0, "note": "the files are in the page cache"}
    plain = "plain write of a file of equal size"
    ratio = "time of a save / time of a plain write"
    return [
        row("save of a checkpoint to the disk", rates["save"], "MB/s", note=note),
        row(plain, rates["plain"], "MB/s", note="one file, with fsync"),
        ratio_row(ratio, found["save"], found["plain"], at_most=1.5),
        row("load of a checkpoint into the engine", rates["load"], "MB/s", **cached),
        row("pause of training by a save", 1e3 * middle["stall"], "ms", note=stall),
    ]


def times(folder: Path, spec: ModelSpec, pause_s: float) -> dict[str, Any]:
    """Returns the bytes of a checkpoint, and lists with the seconds of each repeat: saving, stall,
    loading and a plain write.
    """
    keep_freed_memory()
    join_alone()
    plan = Plan(global_batch_size=2)
    engine = build_engine(spec, plan, Recipe(data="none", num_steps=1), torch.device("cpu"))
    assert isinstance(engine, PortableEngine)
    # The first step creates the moments of AdamW.
    engine.train_step(torch.zeros((2, spec.sequence_length + 1), dtype=torch.long), 1e-4)
    checkpoints = Checkpoints(folder / "checkpoints")
    writer = CheckpointWriter(checkpoints, attempt=1, keep_last=1, keep_every=None)
    found: dict[str, Any] = {"save": [], "stall": [], "load": [], "plain": []}
    for step in range(REPEATS + 1):
        time.sleep(pause_s)
        facts = {"step": step, "samples": step, "tokens": step, "seed": 1}
        start = time.perf_counter()
        writer.start(engine.state_dict(), {**facts, "spec": spec, "plan": plan})
        # This stall is an upper limit: in training, the wait comes only after a forward and a
        # backward pass.
        writer.wait_for_copies()
        found["stall"].append(time.perf_counter() - start)
        writer.finish()
        found["save"].append(time.perf_counter() - start)
        start = time.perf_counter()
        described = checkpoints.describe(step)
        CheckpointTensors(checkpoints, described, spec).fill_all(engine.state_dict())
        found["load"].append(time.perf_counter() - start)
        found["bytes"] = sum(file.stat().st_size for file in checkpoints.path(step).iterdir())
        time.sleep(pause_s)
        found["plain"].append(_plain_write(folder / f"plain-{step}", found["bytes"]))
        (folder / f"plain-{step - 1}").unlink(missing_ok=True)
    dist.destroy_process_group()
    # The first repeat is the warm-up and is left out.
    return {name: value[1:] if isinstance(value, list) else value for name, value in found.items()}


def _plain_write(file: Path, size: int) -> float:
    """Returns the seconds of writing a new file of `size` bytes. The previous file still exists, as
    with checkpoints.
    """
    content = memoryview(bytearray(os.urandom(1 << 20)) * (size // (1 << 20)))
    start = time.perf_counter()
    with file.open("wb") as stream:
        stream.write(content)
        os.fsync(stream.fileno())
    return time.perf_counter() - start


# Planning of a save

TRILLION = ModelSpec.preset("gpt-1t")
PLAN = Plan(
    tensor_parallel=8,
    pipeline_parallel=64,
    data_parallel=6,
    zero_stage=1,
    precision="bf16",
    global_batch_size=384,
)


def measure_planning(
    workplace: Path, stages: int = 64, spec: ModelSpec = TRILLION, plan: Plan = PLAN
) -> list[Row]:
    """Returns rows with rank 0's CPU seconds for a first and a later save of a job with `stages`
    stages of 48 ranks.
    """
    found = alone(saves, workplace, stages, spec, plan).found
    first, later = found["seconds"]
    note = f"{found['items']:,} tensors and parts of tensors to write, `.metadata` of"
    note += f" {found['files'][DESCRIPTION] / 1e6:.1f} MB"
    kept = "the plan of the first save is used again"
    ranks = f"of {found['ranks']:,} ranks"
    return [
        row(f"CPU time of rank 0 in the first save {ranks}", first, "s", at_most=15.0, note=note),
        row(f"CPU time of rank 0 in a later save {ranks}", later, "s", at_most=5.0, note=kept),
    ]


def plans_of_a_stage(spec: ModelSpec, plan: Plan) -> list[Any]:
    """Returns the save plans of the second pipeline stage's ranks, made by torch's own code."""
    size = plan.num_devices // plan.pipeline_parallel
    ranks = range(size, 2 * size)
    # Each rank gets its own process, because torch caches the shards of one rank and would return
    # them for another rank with a mesh of equal shape.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(_plan, [(spec, plan, rank) for rank in ranks], chunksize=1)


def _plan(spec: ModelSpec, plan: Plan, rank: int) -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.num_devices)
    mesh, device = build_mesh(plan, "cpu"), torch.device("meta")
    (decoder,) = build_decoders(spec, plan, mesh, device=device, seed=None)
    state = {
        f"{kind}.{name}": parameter.detach()
        for kind in ("model", "adamw.exp_avg", "adamw.exp_avg_sq")
        for name, parameter in decoder.named_parameters()
    }
    made = create_default_local_save_plan(state, is_coordinator=False)
    return dataclasses.replace(made, planner_data={name: (name,) for name in state})


def of_stage(plans: list[Any], spec: ModelSpec, plan: Plan, stage: int) -> list[Any]:
    """Returns copies of the second stage's plans in which the layer names are those of stage
    `stage`.
    """
    layers = zip(plan.stage_layers(spec, 1), plan.stage_layers(spec, stage), strict=True)
    names = {f".layers.{a}.": f".layers.{b}." for a, b in layers}

    def renamed(name: str) -> str:
        old = next(old for old in names if old in name)
        return name.replace(old, names[old])

    def moved(item: Any) -> Any:
        index = dataclasses.replace(item.index, fqn=renamed(item.index.fqn))
        return dataclasses.replace(item, index=index)

    return [
        dataclasses.replace(
            each,
            items=[moved(item) for item in each.items],
            planner_data={renamed(name): (renamed(name),) for name in each.planner_data},
        )
        for each in plans
    ]


def saves(folder: Path, stages: int, spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    """Returns rank 0's CPU seconds of two saves, the numbers of ranks and items, and the bytes of
    each file.

    Only the metadata of checkpoints 1 and 2 is written to `folder`.
    """
    own = plans_of_a_stage(spec, plan)
    plans = [each for stage in range(stages) for each in of_stage(own, spec, plan, stage)]
    sent, items = [pickle.dumps(each) for each in plans], sum(len(each.items) for each in plans)
    del plans, own
    planner, files = SteadyPlanner(), dict[str, int]()
    took, results = [], []
    for save in (1, 2):
        path = Checkpoints(folder).path(save)
        path.mkdir(parents=True)
        writer = Writer(path, planner, lambda sizes, _: files.update(sizes))
        start = time.process_time()
        gc.disable()  # the trainer disables garbage collection too
        planner.set_up_planner({}, is_coordinator=True)
        gathered = [pickle.loads(each) for each in sent]
        planned, described = planner.create_global_plan(gathered)
        scattered = [pickle.dumps(each) for each in writer.prepare_global_plan(planned)]
        paused = time.process_time()
        results = results or [pickle.dumps(_results(pickle.loads(each))) for each in scattered]
        resumed = time.process_time()
        writer.finish(described, [pickle.loads(each) for each in results])
        took.append(time.process_time() - resumed + paused - start)
        gc.enable()
        # Ranks whose plan is unchanged since the last save send only this empty plan.
        sent = [pickle.dumps(SavePlan([], usable=False))] * len(sent)
    return {"seconds": took, "ranks": len(sent), "items": items, "files": files}


def _results(plan: Any) -> list[Any]:
    """Returns the write results that a rank with this plan would report."""
    file = f"{plan.storage_data.prefix}0.distcp"
    return [
        WriteResult(item.index, 1000, _StorageInfo(file, 1000 * i, 1000))
        for i, item in enumerate(plan.items)
    ]
