"""The memory model for other code bases than the kit's engines, and in narrow formats."""

import dataclasses

import numpy as np

from kit.estimate.fit import published
from kit.estimate.theory.activations import KIT, MEGATRON_CORE
from kit.estimate.theory.layouts import Layouts, transformer_engine
from kit.estimate.theory.memory import CODE_BASES, memory, memory_by_stage
from kit.plan import Plan
from kit.spec import ModelSpec

GPT = ModelSpec.preset("gpt-22b")


def test_megatron_core_runs_that_ran_fit_by_its_own_kernels_and_reserve():
    runs = [
        run for run in published.load() if run.system == "Eos-class H100" or "Bridge" in run.source
    ]
    # Megatron-FSDP's recipes leave the activations of some layers in the host's memory.
    fully = {"GB200": 40, "GB300": 20}
    runs = [
        dataclasses.replace(run, offloaded_layers=fully[run.device])
        if run.plan.zero_stage == 3
        else run
        for run in runs
    ]
    layouts, base = published.layouts(runs), CODE_BASES["megatron-core"]
    used = memory(layouts, kernels=base.kernels, reserve=base.reserve).used_bytes
    device = np.array([run.site().device.memory_bytes.value for run in runs])
    risk = base.reserve.out_of_memory_probability(used, device)
    assert len(runs) == 70 and (risk > 0.05).sum() == 2 == (risk > 0.5).sum()
    kit = memory(layouts, kernels=KIT).used_bytes
    assert (kit > device).mean() > 0.3, "by the kit's own kernels many of them are impossible"


def test_fp8_keeps_narrow_inputs_and_on_some_devices_one_copy_of_a_weight():
    kernels = {
        name: transformer_engine(*name)
        for name in (("bf16", True), ("fp8", False), ("fp8", True), ("mxfp8", True))
    }
    plan = Plan(
        tensor_parallel=4,
        zero_stage=1,
        data_parallel=2,
        sequence_parallel=True,
        global_batch_size=2,
    )
    wide, hopper, blackwell, blocks = (
        memory_by_stage(
            Layouts.of(GPT, [plan], native=False, **each),
            kernels=MEGATRON_CORE,
        )
        for each in kernels.values()
    )
    assert 0.7 < (hopper.activations / wide.activations).item() < 0.85
    assert blackwell.activations == hopper.activations < blocks.activations < wide.activations
    assert hopper.bytes_per_param["weights"] == blocks.bytes_per_param["weights"] == 2
    assert blackwell.bytes_per_param["weights"] == 1
    half = memory_by_stage(Layouts.of(GPT, [plan], offloaded_layers=GPT.num_layers / 2))
    whole = memory_by_stage(Layouts.of(GPT, [plan]))
    assert half.activations == whole.activations / 2
