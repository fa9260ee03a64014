"""Frontier, section III: throughput against tensor parallelism, micro-batches and pipeline stages,
and what it says.

The paper's curves could not be read, so there are no published points here; its four observations
are checked as relations on the model, with the interval, and on demo-scale runs of this machine.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from kit.papers.frontier_demo import MICROBATCHES, median_rate, select
from kit.papers.frontier_model import (
    facts,
    hfu_percent,
    layouts_of,
    model_error,
    paper_plan,
    ratio_interval,
    step_draws,
    throughput_layer,
)
from kit.papers.layers import (
    Layer,
    Relation,
    Runs,
    measured,
    on_clusters,
    opened,
    run_hfu_percent,
    tokens_per_s_and_device,
)
from kit.papers.panels import finish, panel, paper_table
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
SCALES = {"modelled": "modelled, paper's scale", "measured": "measured, demo scale"}
BOUNDS: dict[str, dict[str, float]] = {
    "below 1": {"at_most": 1.0},
    "above 1": {"at_least": 1.0},
    "at least 0.9": {"at_least": 0.9},
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
    paper = [*models, *on_clusters(runs, x=attrgetter(f"plan.{name}"), y=run_hfu_percent)]
    panels = {"paper's scale": paper, "demo scale": demo}
    own_ticks = sorted({int(x) for layer in demo for x in layer.x})
    dress = (("% of peak per GCD (HFU)", ticks, 1.08), ("tokens/s per core", own_ticks, 1.25))
    widths = [3, 2] if demo else [1]
    with new_figure(1, len(widths), height=4.2, squeeze=False, width_ratios=widths) as (
        figure,
        axes,
    ):
        for axis, layers, (title, places, room) in zip(
            axes[0], panels.values(), dress, strict=False
        ):
            axis.set_xscale("log", base=2)
            panel(
                axis,
                layers,
                title=title,
                xlabel=NAMES[name],
                xlim=(places[0] / 1.3, 1.3 * max(float(layer.x.max()) for layer in layers)),
                ylim=(0, room * max(float(np.nanmax(layer.high)) for layer in layers)),
                ticks=places if len(places) <= 6 else places[::2],
                legend={"loc": "lower right" if name == "num_microbatches" else "lower left"},
            )
        hfu = "HFU counts the forward pass that recomputation repeats. Here a process is a core."
        return finish(figure, panels, *caption, NOT_PUBLISHED, notes=[hfu, *notes])


# Observations -------------------------------------------------------------------------------------


def observations_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the paper's four observations, checked on the model and on demo-scale runs, as a
    table.
    """
    relations = [*modelled_relations(), *measured_relations(runs)]
    statements = {fact.x: fact.value for fact in facts()["observation"]}
    shown = []
    for relation in relations:
        number, _, expected = relation.expected.partition(": ")
        shown.append(
            {
                "": relation.claim,
                "observation": statements[relation.claim],
                "number": number,
                "layer": SCALES[relation.layer],
                "found": f"{relation.value:.2f} ({relation.low:.2f} to {relation.high:.2f})",
                "expected": expected,
                "verdict": relation.verdict,
            }
        )
    layers = [Layer.modelled("22B", error=model_error())] + measured(
        runs, x=lambda run: 0.0, y=tokens_per_s_and_device, label="demo-scale runs"
    )
    drawn = paper_table(
        shown,
        layers,
        "The paper's four observations, in our words, checked on the model and on runs here.",
        "That it makes them is remembered, not read; they are tested as trends.",
        runs=[name for layer in layers for name in layer.runs],
    )
    return drawn, [relation.row() for relation in relations]


def modelled_relations() -> list[Relation]:
    """Returns the four observations as ratios of modelled throughput, with intervals from the
    posterior.
    """
    fixed, scaled = pipeline_plans()
    tensor, counts = tensor_plans(), microbatch_plans()
    eight, sixteen = STAGES.index(8), STAGES.index(16)
    pairs = {
        "III.1": ([tensor[0], tensor[3]], "TP 8 over TP 1: below 1"),
        "III.2": ([counts[3], counts[7]], "128 micro-batches over 8: above 1"),
        "III.3": ([fixed[eight], fixed[sixteen]], "16 stages over 8, same batch: below 1"),
        "III.4": ([scaled[eight], scaled[sixteen]], "16 stages over 8, same m/p: at least 0.9"),
    }
    spec, found = ModelSpec.preset(MODEL), []
    for claim, (plans, expected) in pairs.items():
        layouts = layouts_of(spec, plans)
        rate = hfu_percent(spec, layouts, step_draws(layouts))
        found.append(
            _relation(claim, "modelled", ratio_interval(rate[:, 1] / rate[:, 0]), expected)
        )
    return found


def measured_relations(runs: Runs) -> list[Relation]:
    """Returns the same four from the demo-scale study, as far as its runs are given; intervals from
    quartiles.

    With one and two stages only, III.4 is that two lose less at constant micro-batches per stage
    than at one batch.
    """
    runs = opened(runs)

    def rate(**degrees: int) -> tuple[float, float, float]:
        base = {"tensor_parallel": 1, "pipeline_parallel": 1, "num_microbatches": MICROBATCHES}
        return median_rate(runs, **ALONE | base | degrees)

    alone, split = rate(), rate(pipeline_parallel=2)
    one, most = (rate(pipeline_parallel=2, num_microbatches=count) for count in (1, 8))
    pairs = {
        "III.1": (alone, rate(tensor_parallel=2), "TP 2 over TP 1: below 1"),
        "III.2": (one, most, "8 micro-batches over 1: above 1"),
        "III.3": (alone, split, "2 stages over 1, same batch: below 1"),
        "III.4": (split, most, "2 stages, same m/p over same batch: above 1"),
    }
    return [
        _relation(claim, "measured", (new[0] / old[0], new[1] / old[2], new[2] / old[1]), expected)
        for claim, (old, new, expected) in pairs.items()
        if np.isfinite(old[0] + new[0])
    ]


def _relation(claim: str, layer: Any, value: Sequence[Any], expected: str) -> Relation:
    middle, low, high = map(float, value)
    bounds = BOUNDS[expected.partition(": ")[2]]
    return Relation(
        claim=claim, layer=layer, value=middle, low=low, high=high, expected=expected, **bounds
    )
