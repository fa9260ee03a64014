"""Frontier, section III: throughput against tensor parallelism, micro-batches and pipeline stages,
and what it says.

The paper's curves could not be read, so there are no published points here; its four observations
are checked as relations on the model, with the interval, and on demo-scale runs of this machine.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from kit.papers.frontier_demo import MICROBATCHES, select
from kit.papers.frontier_model import layouts_of, paper_plan, throughput_layer
from kit.papers.layers import (
    Layer,
    Runs,
    hfu_percent,
    measured,
    on_clusters,
    tokens_per_s_and_device,
)
from kit.papers.panels import draw, finish
from kit.plan import Plan
from kit.show.style import Rows, new_figure
from kit.spec import ModelSpec

MODEL = "gpt-22b"
TENSOR = (1, 2, 4, 8, 16)
STAGES = (4, 6, 8, 12, 16, 24)
PER_STAGE = 8
"""Micro-batches per stage; both lines meet where 8 stages have 64 of them."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ALONE = {"data_parallel": 1, "micro_batch_size": 1}
"""Fields of the demo-scale runs that these figures show: one replica."""
NOT_PUBLISHED = "The paper's own points could not be read, so none are drawn."
NAMES = {
    "tensor_parallel": "tensor parallel",
    "num_microbatches": "micro-batches",
    "pipeline_parallel": "stages",
}


def tensor_parallel_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns throughput against tensor parallelism at constant pipeline and micro-batches, and
    its table.
    """
    model = _modelled("22B, 8 stages, 128 micro-batches", TENSOR, tensor_plans())
    caption = (
        "Throughput of 22B as each layer is split over more GCDs.",
        "It falls, as the paper observes; a node has 8 of them.",
    )
    chosen = select(runs, **ALONE, pipeline_parallel=1, num_microbatches=MICROBATCHES)
    demo = _demo(chosen, "tensor_parallel", "this machine")
    return _draw([model], runs, demo, "tensor_parallel", caption, TENSOR)


def pipeline_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns throughput against pipeline stages, batch fixed and micro-batches per stage fixed,
    and its table.
    """
    fixed, scaled = pipeline_plans()
    models = [
        _modelled("64 micro-batches", STAGES, fixed),
        _modelled(f"{PER_STAGE} per stage", STAGES, scaled),
    ]
    caption = (
        "Throughput of 22B, TP 2, by pipeline stages, at two ways to set the batch.",
        "It falls at a fixed batch, and less at fixed micro-batches per stage.",
    )
    fields = ALONE | {"tensor_parallel": 1}
    scaled_demo = [
        run
        for run in select(runs, **fields)
        if run.plan.num_microbatches == 4 * run.plan.pipeline_parallel
    ]
    demo = [
        *_demo(select(runs, **fields, global_batch_size=4), "pipeline_parallel", "batch fixed"),
        *_demo(scaled_demo, "pipeline_parallel", "4 per stage"),
    ]
    note = "At fixed micro-batches per stage it still falls, since one stage has all logits."
    return _draw(models, runs, demo, "pipeline_parallel", caption, STAGES, note)


def microbatch_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns throughput against micro-batches per replica at a constant number of stages, and
    its table.
    """
    model = _modelled("22B, TP 2, 8 stages", COUNTS, microbatch_plans())
    caption = (
        "Throughput of 22B by micro-batches of one replica.",
        "It rises as the bubble, (p - 1) of (m + p - 1) slots, shrinks.",
    )
    chosen = select(runs, **ALONE, pipeline_parallel=2, tensor_parallel=1)
    demo = _demo(chosen, "num_microbatches", "this machine")
    return _draw([model], runs, demo, "num_microbatches", caption, COUNTS)


# Plans --------------------------------------------------------------------------------------------


def tensor_plans() -> list[Plan]:
    """Returns one replica of 8 stages and 128 micro-batches at each tensor-parallel degree."""
    return [
        paper_plan(tensor_parallel=t, pipeline_parallel=8, global_batch_size=128) for t in TENSOR
    ]


def pipeline_plans() -> tuple[list[Plan], list[Plan]]:
    """Returns (64 micro-batches whatever the stages, a constant number of them per stage)."""
    common = {"tensor_parallel": 2}
    fixed = [
        paper_plan(pipeline_parallel=p, global_batch_size=8 * PER_STAGE, **common) for p in STAGES
    ]
    return fixed, [
        paper_plan(pipeline_parallel=p, global_batch_size=p * PER_STAGE, **common) for p in STAGES
    ]


def microbatch_plans() -> list[Plan]:
    """Returns 8 stages with more and more micro-batches."""
    return [paper_plan(tensor_parallel=2, pipeline_parallel=8, global_batch_size=m) for m in COUNTS]


# Drawing ------------------------------------------------------------------------------------------


def _modelled(label: str, x: Sequence[int], plans: Sequence[Plan]) -> Layer:
    spec = ModelSpec.preset(MODEL)
    return throughput_layer(label, x, [(spec, layouts_of(spec, plans))])


def _demo(runs: Runs, name: str, label: str) -> list[Layer]:
    layers = measured(
        runs, x=attrgetter(f"plan.{name}"), y=tokens_per_s_and_device, label=label, line=True
    )
    return [layer for layer in layers if layer.scale == "demo"]


def _draw(
    models: list[Layer],
    runs: Runs,
    demo: list[Layer],
    name: str,
    caption: tuple[str, str],
    ticks: Sequence[int],
    *notes: str,
) -> tuple[Any, Rows]:
    """Returns one panel at the paper's scale, and beside it one at demo scale where such runs
    are given.
    """
    paper = [*models, *on_clusters(runs, x=attrgetter(f"plan.{name}"), y=hfu_percent)]
    widths = [3, 2] if demo else [1]
    with new_figure(1, len(widths), height=4.2, squeeze=False, width_ratios=widths) as (
        figure,
        axes,
    ):
        left = axes[0, 0]
        draw(left, paper)
        top = max(float(np.nanmax(layer.high)) for layer in paper)
        left.set(ylim=(0, 1.08 * top), title="% of peak per GCD (HFU)")
        _scale_x(left, ticks, name)
        left.set_xlim(ticks[0] / 1.3, 1.3 * max(float(layer.x.max()) for layer in paper))
        if demo:
            right = axes[0, 1]
            draw(right, demo)
            right.set(
                title="tokens/s per core",
                ylim=(0, 1.25 * max(float(layer.high.max()) for layer in demo)),
            )
            _scale_x(right, sorted({int(x) for layer in demo for x in layer.x}), name)
        notes = (
            "HFU counts the forward pass that recomputation repeats. Here a process is a core.",
            *notes,
        )
        return finish(
            figure,
            {"paper's scale": paper, "demo scale": demo},
            *caption,
            NOT_PUBLISHED,
            notes=notes,
        )


def _scale_x(axis: Any, ticks: Sequence[int], name: str) -> None:
    axis.set_xscale("log", base=2)
    shown = ticks if len(ticks) <= 6 else ticks[::2]
    axis.set_xticks(shown, [str(tick) for tick in shown])
    axis.minorticks_off()
    axis.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
    axis.set_xlabel(NAMES[name])
    axis.legend(loc="lower right" if name == "num_microbatches" else "lower left")
