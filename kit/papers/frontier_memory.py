"""Frontier: memory by model size, and device by device along the pipeline against the logs of
Frontier and LUMI.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kit.config.spec import ModelSpec
from kit.estimate.theory.activations import MEGATRON, MEGATRON_DEEPSPEED
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import CONVENTIONS, StageMemory, memory_by_stage
from kit.estimate.theory.out_of_memory import RESERVE
from kit.papers.frontier_model import FACTS, LUMI, MODELS, lumi_plan, paper_plan
from kit.papers.layers import Drawn, Layer, Runs, on_clusters, table
from kit.papers.panels import picture

MIB = 2.0**20
GIB = 2.0**30
TB = 1e12


def memory_figure(runs: Runs = (), *, dress: Sequence[Mapping[str, Any]]) -> Drawn:
    """Returns the model state of each model size by convention, and the table: TB, and GCDs that
    hold no less. `dress` as `picture` takes it, without the ticks.
    """
    specs = {name: ModelSpec.preset(preset) for name, preset in MODELS.items()}
    sizes = np.array([float(spec.num_params) for spec in specs.values()])
    parts = sum(fact.number for fact in FACTS["bytes_per_parameter"])
    conventions = {
        f"paper's parts, {parts:.0f} B": parts,
        "paper's text, 24 B": 24.0,
        "with fp32 gradients, 18 B": 18.0,
    }
    error = "parameters counted exactly; bytes per parameter are conventions, not measurements"
    quoted = [
        fact.replace(x=str(specs["1T"].num_params))
        for fact in (*FACTS["minimum_memory_tb"], *FACTS["minimum_memory_tb_v2"])
    ]
    published = Layer.published(quoted, label="1T as quoted: 14 and 24 TB")
    own = on_clusters(
        runs,
        x=lambda run: run.spec.num_params,
        y=lambda run: run.metrics()["memory_bytes"] * run.plan.num_devices / TB,
    )
    models = [
        Layer.modelled(label, sizes, size * sizes / TB, error=error)
        for label, size in conventions.items()
    ]
    figure, _ = picture(
        [published, *models, *own],
        [{**dress[0], "ticks": dict(zip(sizes, specs, strict=True))}],
        "Weights, gradients and optimizer by model size; activations come on top.",
        f"1T takes {quoted[0].number:.0f} TB by the paper's parts, {quoted[-1].number:.0f} by"
        " its text, as quoted.",
        "The paper's own table could not be read.",
        height=4.4,
    )
    rows = [
        {
            "model": name,
            "layer": "modelled",
            "parameters": spec.num_params,
            "convention": label,
            "bytes": size,
            "TB": size * spec.num_params / TB,
            "GCDs of 64 GiB": math.ceil(size * spec.num_params / (64 * GIB)),
        }
        for name, spec in specs.items()
        for label, size in conventions.items()
    ]
    return figure, [*rows, *table([published, *own])]


def stage_memory_figure(runs: Runs = (), *, dress: Sequence[Mapping[str, Any]]) -> Drawn:
    """Returns memory along the pipeline of 175B on Frontier, and by replicas on LUMI, beside the
    logs; its table. `dress` as `picture` takes it, without the ends of y.
    """
    after, peak = frontier_stages()
    static, dynamic, lumi = (
        Layer.published(FACTS[series], label="log", scale=MIB / GIB)
        for series in ("stage_allocated_mib", "stage_peak_mib", "lumi_allocated_mib")
    )
    panels = {
        "a": [static, _against(static, "after a skipped step", after.state_bytes + after.buffers)],
        "b": [
            dynamic,
            _against(dynamic, "state and activations", peak.total_bytes),
            _against(
                dynamic, "and reserve", RESERVE.used_bytes(peak.state_bytes, peak.dynamic_bytes)
            ),
        ],
        "c": [lumi, _against(lumi, "bf16 Adam, ZeRO 1", [lumi_bytes(int(x)) for x in lumi.x])],
    }
    caption, note = _stage_texts(**panels)
    panels["c"] += on_clusters(
        runs,
        x=lambda run: run.plan.data_parallel,
        y=lambda run: run.metrics()["memory_bytes"] / GIB,
    )
    dressed = [
        {**style, "ylim": (0, 1.7 * max(float(layer.y.max()) for layer in layers))}
        for layers, style in zip(panels.values(), dress, strict=True)
    ]
    return picture(panels, dressed, *caption, notes=[note], mosaic="ab;cc", height=5.9)


def frontier_stages() -> tuple[StageMemory, StageMemory]:
    """Returns the modelled memory of the authors' logged run: after its skipped first step, and
    within it.
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
    """Returns the modelled bytes between steps on the last of LUMI's 8 pipeline devices, which
    has 7 layers.
    """
    stage = memory_by_stage(
        Layouts.of(LUMI, [lumi_plan(replicas)], flash_attention=0),
        layers=np.array([9] * 7 + [7]),
        kernels=MEGATRON,
        convention=CONVENTIONS["deepspeed_bf16"],
    )
    return float((stage.state_bytes + stage.buffers)[-1])


def _against(log: Layer, label: str, held_bytes: Any) -> Layer:
    """Returns a modelled line without an interval, whose error is that on the log beside it."""
    y = np.broadcast_to(np.asarray(held_bytes) / GIB, log.y.shape)
    error = (
        f"{label}: {np.mean(np.abs(y / log.y - 1)):.0%} mean error on the log, nothing fitted to it"
    )
    return Layer.modelled(label, log.x, y, error=error)


def _stage_texts(
    a: list[Layer], b: list[Layer], c: list[Layer]
) -> tuple[tuple[str, str, str], str]:
    """Returns the caption and the note."""
    logged, modelled = (-float(np.diff(layer.y[1:15]).mean()) * GIB / MIB for layer in b[:2])
    params = frontier_stages()[0].params[1]
    held, counted = (float(layer.y[1] * GIB / params) for layer in a)
    return (
        "Memory along the pipeline of Frontier, and by replicas of LUMI, with logs.",
        f"(b) falls by {logged:.0f} MiB a stage in the log and by {modelled:.0f} in the model.",
        f"(a) What is constant: {held:.1f} bytes a parameter in the log, {counted:.1f} modelled.",
    ), (
        "1F1B keeps one micro-batch less on each next stage. (a): DeepSpeed 0.10 made Adam's"
        " moments before the first step, and keeps the gradients of a rank's part after a step"
        f" skipped for overflow. (b): the log has {float(np.mean(b[0].y - b[1].y)):.1f}"
        " GiB more; `and reserve` is what the planner adds. (c): bf16 Adam with ZeRO 1,"
        f" {float(c[1].y[0] / c[0].y[0] - 1):+.0%} at 2 replicas."
    )
