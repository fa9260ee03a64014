"""Rank 0's CPU seconds for planning and describing a save of gpt-1t, as torch does it by default
and as the kit does.

    python -m tests.benchmarks.planning STAGES FOLDER WAY     WAY is before or empty; in a process
    of its own

The plans of one stage's 48 ranks come from the real cutting code (fake process group, meta device);
the other stages get copies with their own layers' names. Nothing is sent: what is gathered was
pickled before, and is unpickled.
"""

import dataclasses
import gc
import json
import multiprocessing as mp
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from kit.plan import Plan
from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.alone import alone

SPEC = ModelSpec.preset("gpt-1t")
PLAN = Plan(
    tensor_parallel=8,
    pipeline_parallel=64,
    data_parallel=6,
    zero_stage=1,
    precision="bf16",
    global_batch_size=384,
)


def measure(workplace: Path, stages: int = 64) -> list[Row]:
    """Returns CPU seconds of a first and a second save of so many stages, 48 ranks each, and of the
    way before.

    Raises:
        RuntimeError: a process failed; with its last words.
    """
    old, new = (alone("planning", stages, workplace, way) for way in ("before", ""))
    note = f"{new['items']:,} tensors and parts to write, .metadata of {new['bytes'] / 1e6:.1f} MB"
    ranks = f"{new['ranks']:,} ranks"
    return [
        row(
            f"before: every save of {ranks}",
            old["seconds"][1],
            "s",
            note=f"{note}, sent to every rank at the end",
        ),
        row(f"first save of {ranks}", new["seconds"][0], "s", at_most=15.0, note=note),
        row(
            f"later saves of {ranks}", new["seconds"][1], "s", at_most=5.0, note="the plan is kept"
        ),
    ]


def plans_of_a_stage(spec: ModelSpec, plan: Plan) -> list[Any]:
    """Returns the plans of the ranks of the second pipeline stage, by torch's own code."""
    from kit.parallel import apply, mesh  # noqa: F401  # once, for all

    size = plan.num_devices // plan.pipeline_parallel
    # A process each: torch keeps what it once computed of a rank's parts for every mesh of that
    # shape.
    with mp.get_context("fork").Pool(1, maxtasksperchild=1) as ranks:
        return ranks.starmap(
            _plan, [(spec, plan, rank) for rank in range(size, 2 * size)], chunksize=1
        )


def _plan(spec: ModelSpec, plan: Plan, rank: int) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from kit.parallel.apply import build_decoders
    from kit.parallel.mesh import build_mesh

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.num_devices)
    (decoder,) = build_decoders(
        spec, plan, build_mesh(plan, "cpu"), device=torch.device("meta"), seed=None
    )
    state = {
        f"{kind}.{name}": parameter.detach()
        for kind in ("model", "adamw.exp_avg", "adamw.exp_avg_sq")
        for name, parameter in decoder.named_parameters()
    }
    made = create_default_local_save_plan(state, is_coordinator=False)
    return dataclasses.replace(made, planner_data={name: (name,) for name in state})


def of_stage(plans: list[Any], spec: ModelSpec, plan: Plan, stage: int) -> list[Any]:
    """Returns copies of the plans of the second stage for another."""
    from kit.parallel.pipeline import stage_layers

    names = {
        f".layers.{a}.": f".layers.{b}."
        for a, b in zip(stage_layers(spec, plan, 1), stage_layers(spec, plan, stage), strict=True)
    }

    def renamed(name: str) -> str:
        old = next(old for old in names if old in name)
        return name.replace(old, names[old])

    return [
        dataclasses.replace(
            each,
            items=[
                dataclasses.replace(
                    item, index=dataclasses.replace(item.index, fqn=renamed(item.index.fqn))
                )
                for item in each.items
            ],
            planner_data={renamed(name): (renamed(name),) for name in each.planner_data},
        )
        for each in plans
    ]


def seconds(
    folder: Path, stages: int, *, is_before: bool, spec: ModelSpec = SPEC, plan: Plan = PLAN
) -> dict[str, Any]:
    """Returns rank 0's CPU seconds of two saves, ranks, items and bytes of the description."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan

    from kit.run.checkpoint_writer import SteadyPlanner, Writer

    own = plans_of_a_stage(spec, plan)
    plans = [each for stage in range(stages) for each in of_stage(own, spec, plan, stage)]
    sent, items = [pickle.dumps(each) for each in plans], sum(len(each.items) for each in plans)
    del plans, own
    planner: Any = DefaultSavePlanner() if is_before else SteadyPlanner()
    took, results, path = [], [], folder
    for save in range(2):
        path = folder / f"{stages}-{is_before}-{save}"
        path.mkdir()
        writer: Any = (
            FileSystemWriter(path) if is_before else Writer(path, planner, lambda *_: None)
        )
        start = time.process_time()
        planner.set_up_planner({}, is_coordinator=True)
        gathered = [pickle.loads(each) for each in sent]
        planned, described = planner.create_global_plan(gathered)
        scattered = [pickle.dumps(each) for each in writer.prepare_global_plan(planned)]
        paused = time.process_time()
        if save == 0:
            results = [pickle.dumps(_results(pickle.loads(each))) for each in scattered]
        resumed = time.process_time()
        writer.finish(described, [pickle.loads(each) for each in results])
        took.append(time.process_time() - resumed + paused - start)
        gc.enable()
        if not is_before:
            sent = [pickle.dumps(SavePlan([], usable=False))] * len(
                sent
            )  # what ranks whose plan has not changed send
    size = (path / ".metadata").stat().st_size
    return {"seconds": took, "ranks": len(sent), "items": items, "bytes": size}


def _results(plan: Any) -> list[Any]:
    """Returns what a rank says that it has written."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    file = f"{plan.storage_data.prefix}0.distcp"
    return [
        WriteResult(item.index, 1000, _StorageInfo(file, 1000 * i, 1000))
        for i, item in enumerate(plan.items)
    ]


if __name__ == "__main__":
    print(
        json.dumps(seconds(Path(sys.argv[2]), int(sys.argv[1]), is_before=sys.argv[3] == "before"))
    )
