"""Frontier: memory by model size, and memory of each pipeline device. The memory of pipeline
devices is compared with the training logs of Frontier and LUMI.
"""

import math
from typing import Any

import numpy as np

from kit.config.spec import ModelSpec
from kit.estimate.theory.activations import MEGATRON, MEGATRON_DEEPSPEED
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import CONVENTIONS, StageMemory, memory_by_stage
from kit.estimate.theory.out_of_memory import RESERVE
from kit.papers.frontier_model import FACTS, LUMI, MODELS, lumi_plan, paper_plan
from kit.papers.layers import FigureLayer, Runs, measured_on_clusters, table
from kit.papers.panels import FigureContent

MIB = 2.0**20
GIB = 2.0**30
TB = 1e12


def memory_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of the memory of weights, gradients and optimizer state of each model size
    in TB. Each curve assumes another number of bytes per parameter.

    The rows of the data table also state the smallest number of GCDs with 64 GiB that can hold
    these tensors.
    """
    specs = {name: ModelSpec.preset(preset) for name, preset in MODELS.items()}
    sizes = np.array([float(spec.num_params) for spec in specs.values()])
    bytes_of_parts = sum(fact.number for fact in FACTS["bytes_per_parameter"])
    bytes_by_convention = {
        f"paper's parts, {bytes_of_parts:.0f} B": bytes_of_parts,
        "paper's text, 24 B": 24.0,
        "with fp32 gradients, 18 B": 18.0,
    }
    error = "the number of parameters is exact; bytes per parameter are conventions, not measured"
    modelled = [
        FigureLayer.modelled(convention, sizes, size * sizes / TB, error=error)
        for convention, size in bytes_by_convention.items()
    ]
    quoted = [
        fact.replace(x=str(specs["1T"].num_params))
        for fact in (*FACTS["minimum_memory_tb"], *FACTS["minimum_memory_tb_v2"])
    ]
    published = FigureLayer.published(quoted, label="1T as quoted: 14 and 24 TB")
    own = measured_on_clusters(
        runs,
        x=lambda run: run.spec.num_params,
        y=lambda run: run.metrics()["memory_bytes"] * run.plan.num_devices / TB,
    )
    rows = []
    for name, spec in specs.items():
        for convention, size in bytes_by_convention.items():
            state_bytes = size * spec.num_params
            rows.append(
                {
                    "model": name,
                    "layer": "modelled",
                    "parameters": spec.num_params,
                    "convention": convention,
                    "bytes": size,
                    "TB": state_bytes / TB,
                    "GCDs of 64 GiB": math.ceil(state_bytes / (64 * GIB)),
                }
            )
    return FigureContent(
        panels={"": [published, *modelled, *own]},
        values={"parts_tb": f"{quoted[0].number:.0f}", "text_tb": f"{quoted[-1].number:.0f}"},
        ticks={"": dict(zip(sizes, specs, strict=True))},
        rows=[*rows, *table([published, *own])],
    )


def stage_memory_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of modelled and logged memory in GiB. The panels show the memory of each
    pipeline stage of the 175B model on Frontier, and the memory of LUMI's runs by number of
    replicas.
    """
    between_steps, peak = frontier_stages()
    state_log, peak_log, lumi_log = (
        FigureLayer.published(FACTS[series], label="log", scale=MIB / GIB)
        for series in ("stage_allocated_mib", "stage_peak_mib", "lumi_allocated_mib")
    )
    state = _modelled_beside(
        state_log, "after a skipped step", between_steps.state_bytes + between_steps.buffers
    )
    whole = _modelled_beside(peak_log, "state and activations", peak.total_bytes)
    reserved = RESERVE.used_bytes(peak.state_bytes, peak.dynamic_bytes)
    with_reserve = _modelled_beside(peak_log, "with reserve", reserved)
    lumi = _modelled_beside(
        lumi_log, "bf16 Adam, ZeRO 1", [lumi_bytes(int(replicas)) for replicas in lumi_log.x]
    )
    own = measured_on_clusters(
        runs,
        x=lambda run: run.plan.data_parallel,
        y=lambda run: run.metrics()["memory_bytes"] / GIB,
    )
    num_params = between_steps.params[1]
    lumi_error = float(lumi.y[0] / lumi_log.y[0] - 1)
    return FigureContent(
        panels={
            "a": [state_log, state],
            "b": [peak_log, whole, with_reserve],
            "c": [lumi_log, lumi, *own],
        },
        values={
            "logged_mib": f"{_mib_less_per_stage(peak_log):.0f}",
            "modelled_mib": f"{_mib_less_per_stage(whole):.0f}",
            "logged_bytes": f"{float(state_log.y[1] * GIB / num_params):.1f}",
            "modelled_bytes": f"{float(state.y[1] * GIB / num_params):.1f}",
            "missing_gib": f"{float(np.mean(peak_log.y - whole.y)):.1f}",
            "lumi_error": f"{lumi_error:+.0%}",
        },
    )


def _mib_less_per_stage(layer: FigureLayer) -> float:
    """Returns the mean decrease of memory from one pipeline stage to the next, in MiB. The first
    and the last stage are left out.
    """
    return -float(np.diff(layer.y[1:15]).mean()) * GIB / MIB


def frontier_stages() -> tuple[StageMemory, StageMemory]:
    """Returns the modelled memory of each pipeline device in the authors' logged run of 175B.

    The result is (memory after the first step, memory during a step). The run skipped the update of
    its first step, since gradients had overflowed.
    """
    plan = paper_plan(
        tensor_parallel=4, pipeline_parallel=16, data_parallel=2, global_batch_size=320
    )
    layouts = Layouts.of(
        ModelSpec.preset("gpt-175b"), [plan], flash_attention=1, gradient_bytes=2.0
    )
    skipped = CONVENTIONS["deepspeed_fp16_skipped"]
    return (
        memory_by_stage(layouts, kernels=MEGATRON_DEEPSPEED, convention=skipped),
        memory_by_stage(layouts, kernels=MEGATRON_DEEPSPEED),
    )


def lumi_bytes(replicas: int) -> float:
    """Returns the modelled bytes in use between two steps on the last of the 8 pipeline devices of
    LUMI's runs.

    This device has 7 transformer layers. The other seven devices have 9 layers each.
    """
    stage = memory_by_stage(
        Layouts.of(LUMI, [lumi_plan(replicas)], flash_attention=0),
        layers=np.array([9] * 7 + [7]),
        kernels=MEGATRON,
        convention=CONVENTIONS["deepspeed_bf16"],
    )
    return float((stage.state_bytes + stage.buffers)[-1])


def _modelled_beside(log: FigureLayer, label: str, modelled_bytes: Any) -> FigureLayer:
    """Returns a modelled curve (figure layer) without an interval, at the x coordinates of the
    logged layer `log`. The error that the layer states is the mean absolute relative deviation from
    the log.
    """
    y = np.broadcast_to(np.asarray(modelled_bytes) / GIB, log.y.shape)
    error = np.mean(np.abs(y / log.y - 1))
    source = f"mean error {error:.0%} beside the log; no coefficient was fitted to the log"
    return FigureLayer.modelled(label, log.x, y, error=source)
