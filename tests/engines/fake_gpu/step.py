"""Three training steps of the native engine on a simulated H100, as rank 0 of a simulated world.

Usage: `python -m tests.engines.fake_gpu.step PLAN SPEC_CHANGES`

The arguments are JSON. The last line of the output is JSON too, and says what was compiled and
called.
"""

import tests.engines.fake_gpu.h100  # noqa: F401  # isort: skip - before the rest of torch

import collections
import dataclasses
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.engines import engine as engine_module
from kit.engines.native import NativeEngine
from kit.model import Block, cross_entropy
from tests.bench.contestants import llama
from tests.engines.fake_gpu import triton_code
from tests.engines.fake_gpu.h100 import outside_fake_tensors


class Devices(TorchDispatchMode):
    """Counts the operators that receive both host tensors and GPU tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if {x.device.type for x in tensors if x.dim()} >= {"cpu", "cuda"}:
            self.mixed[str(func)] += 1
        return result


def materialise(module: torch.nn.Module, *, device: torch.device, recurse: bool = True) -> Any:
    """Replaces `Module.to_empty`, which exchanges the storage of parameters. The simulated (fake)
    parameters have no storage.
    """
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=device)
                part._parameters[name] = torch.nn.Parameter(empty)
    return module


def main(plan_json: str, changes_json: str) -> None:
    """Runs the steps, prints what was compiled and called, and ends the process without torch's
    clean-up. The clean-up would ask the driver for a device.
    """
    plan = Plan.from_json(plan_json)
    spec = llama("llama-1b").replace(**json.loads(changes_json))
    plan.check(spec)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.num_devices)
    compile_block = Block.compile
    Block.compile = lambda self: compile_block(self, backend=triton_code.backend)  # type: ignore
    softmax = torch.compile(cross_entropy._softmax, dynamic=False, backend=triton_code.backend)
    cross_entropy._compiled_softmax = lambda: softmax  # type: ignore[assignment]
    # torch 2.11 has no fake-tensor version of the product that is added to an fp32 sum.
    cross_entropy._adds_to_fp32 = lambda *_: False  # type: ignore[assignment]
    torch.nn.Module.to_empty = materialise  # type: ignore[method-assign]
    engine_module.build_mesh = outside_fake_tensors(engine_module.build_mesh)
    devices = Devices()
    with FakeTensorMode(allow_non_fake_inputs=True):
        engine = NativeEngine(
            spec,
            plan,
            Recipe(data="none", num_steps=10),
            torch.device("cuda", 0),
            initialise=False,
        )
        num_samples = plan.global_batch_size // plan.data_parallel
        samples = torch.zeros(num_samples, spec.sequence_length + 1, dtype=torch.int64)
        for _ in range(2):
            result = engine.begin_step(samples, 1e-4)
        with devices:
            result = engine.begin_step(samples, 1e-4)
        places = sorted({str(tensor.device) for tensor in engine.state_dict().values()})
    found = {
        "graphs": [dataclasses.asdict(graph) for graph in triton_code.GRAPHS],
        "graph_breaks": dict(counters["graph_break"]),
        "mixed_devices": dict(devices.mixed),
        "state_on": places,
        "result_on": str(result.values.device),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
