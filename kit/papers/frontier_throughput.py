"""Frontier, section III: throughput against tensor parallelism, micro-batches and pipeline stages,
and what it says.

The paper's curves could not be read, so there are no published points here; its four observations
are checked as relations on the model, with the interval, and on demo-scale runs of this machine.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from kit.papers.facts import Relation
from kit.papers.frontier_demo import (
    MICROBATCHES,
    median_rate,
    run_hfu_percent,
    select,
    tokens_per_s_and_device,
)
from kit.papers.frontier_model import (
    FACTS,
    layouts_of,
    model_error,
    paper_plan,
    ratio_interval,
    relative_rates,
    throughput_layer,
)
from kit.papers.layers import Layer, Rows, Runs, measured, on_clusters, opened
from kit.papers.panels import paper_table, picture
from kit.plan import Plan
from kit.run import Run
from kit.spec import ModelSpec

MODEL = "gpt-22b"
PER_STAGE = 8
"""Micro-batches per stage; both lines meet where 8 stages have 64 of them."""
STAGES = (4, 6, 8, 12, 16, 24)
TENSOR_PLANS = {
    t: paper_plan(tensor_parallel=t, pipeline_parallel=8, global_batch_size=128)
    for t in (1, 2, 4, 8, 16)
}
"""One replica of 8 stages and 128 micro-batches, by tensor-parallel degree."""
COUNT_PLANS = {
    m: paper_plan(tensor_parallel=2, pipeline_parallel=8, global_batch_size=m)
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 256)
}
"""8 stages, by micro-batches."""
FIXED_PLANS = {
    p: paper_plan(tensor_parallel=2, pipeline_parallel=p, global_batch_size=8 * PER_STAGE)
    for p in STAGES
}
"""64 micro-batches, by stages."""
SCALED_PLANS = {
    p: paper_plan(tensor_parallel=2, pipeline_parallel=p, global_batch_size=p * PER_STAGE)
    for p in STAGES
}
"""A constant number of micro-batches per stage, by stages."""
ALONE = {"data_parallel": 1, "micro_batch_size": 1}
"""Fields of the demo-scale runs that these figures show: one replica."""
NAMES = {
    "tensor_parallel": "tensor parallel",
    "num_microbatches": "micro-batches",
    "pipeline_parallel": "stages",
}
SCALES = {"modelled": "modelled, paper's scale", "measured": "measured, demo scale"}
BOUNDS = {"below 1": (-np.inf, 1.0), "above 1": (1.0, np.inf), "at least 0.9": (0.9, np.inf)}


def tensor_parallel_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns throughput against tensor parallelism at constant pipeline and micro-batches, and
    its table.
    """
    return _figure(
        "tensor_parallel",
        {"22B, 8 stages, 128 micro-batches": TENSOR_PLANS},
        runs,
        {"this machine": select(runs, **ALONE, pipeline_parallel=1, num_microbatches=MICROBATCHES)},
        "Throughput of 22B as each layer is split over more GCDs.",
        "It falls, as the paper observes; a node has 8 of them.",
    )


def pipeline_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns throughput against pipeline stages, batch fixed and micro-batches per stage fixed,
    and its table.
    """
    fields = ALONE | {"tensor_parallel": 1}
    scaled = [
        run
        for run in select(runs, **fields)
        if run.plan.num_microbatches == 4 * run.plan.pipeline_parallel
    ]
    return _figure(
        "pipeline_parallel",
        {"64 micro-batches": FIXED_PLANS, f"{PER_STAGE} per stage": SCALED_PLANS},
        runs,
        {"batch fixed": select(runs, **fields, global_batch_size=4), "4 per stage": scaled},
        "Throughput of 22B, TP 2, by pipeline stages, at two ways to set the batch.",
        "It falls at a fixed batch, and less at fixed micro-batches per stage.",
        "At fixed micro-batches per stage it still falls, since one stage has all logits.",
    )


def microbatch_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns throughput against micro-batches per replica at a constant number of stages, and
    its table.
    """
    return _figure(
        "num_microbatches",
        {"22B, TP 2, 8 stages": COUNT_PLANS},
        runs,
        {"this machine": select(runs, **ALONE, pipeline_parallel=2, tensor_parallel=1)},
        "Throughput of 22B by micro-batches of one replica.",
        "It rises as the bubble, (p - 1) of (m + p - 1) slots, shrinks.",
    )


def _figure(
    name: str,
    plans: dict[str, dict[int, Plan]],
    runs: Runs,
    demo_runs: dict[str, list[Run]],
    shows: str,
    holds: str,
    *notes: str,
) -> tuple[Any, Rows]:
    """Returns throughput against a field of the plan: one panel at the paper's scale, and beside
    it one at demo scale where such runs are given.

    `plans` and `demo_runs` are those of each line, by its label.
    """
    spec, x = ModelSpec.preset(MODEL), attrgetter(f"plan.{name}")
    paper = [
        throughput_layer(label, [*line], [(spec, layouts_of(spec, [*line.values()]))])
        for label, line in plans.items()
    ]
    demo = [
        layer
        for label, group in demo_runs.items()
        for layer in measured(group, x=x, y=tokens_per_s_and_device, label=label, line=True)
        if layer.scale == "demo"
    ]
    panels = {"paper's scale": [*paper, *on_clusters(runs, x=x, y=run_hfu_percent)]}
    dress = [_dress(name, panels["paper's scale"], [*next(iter(plans.values()))], 1.08)]
    dress[0]["title"] = "% of peak per GCD (HFU)"
    if demo:
        panels["demo scale"] = demo
        places = sorted({int(x) for layer in demo for x in layer.x})
        dress.append(_dress(name, demo, places, 1.25) | {"title": "tokens/s per core"})
    return picture(
        panels,
        dress,
        shows,
        holds,
        "The paper's own points could not be read, so none are drawn.",
        notes=[
            "HFU counts the forward pass that recomputation repeats. Here a process is a core.",
            *notes,
        ],
        height=4.2,
        width_ratios=[3, 2] if demo else [1],
    )


def _dress(
    name: str, layers: Sequence[Layer], places: Sequence[int], room: float
) -> dict[str, Any]:
    """Returns scale, ticks and legend of a panel, with some room above its points."""
    return {
        "xscale": "log",
        "xlabel": NAMES[name],
        "xlim": (places[0] / 1.3, 1.3 * max(float(layer.x.max()) for layer in layers)),
        "ylim": (0, room * max(float(np.nanmax(layer.high)) for layer in layers)),
        "ticks": places if len(places) <= 6 else places[::2],
        "legend": {"loc": "lower right" if name == "num_microbatches" else "lower left"},
    }


# Observations -------------------------------------------------------------------------------------


def observations_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the paper's four observations, checked on the model and on demo-scale runs, as a
    table.
    """
    relations = [*modelled_relations(), *measured_relations(runs)]
    statements = {fact.x: fact.value for fact in FACTS["observation"]}
    shown = [
        {
            "": relation.claim,
            "observation": statements[relation.claim],
            "number": relation.expected.partition(": ")[0],
            "layer": SCALES[relation.layer],
            "found": f"{relation.value:.2f} ({relation.low:.2f} to {relation.high:.2f})",
            "expected": relation.expected.partition(": ")[2],
            "verdict": relation.verdict,
        }
        for relation in relations
    ]
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
    names = ("claim", "layer", "value", "low", "high", "expected", "verdict")
    return drawn, [{name: getattr(relation, name) for name in names} for relation in relations]


def modelled_relations() -> list[Relation]:
    """Returns the four observations as ratios of modelled throughput, with intervals from the
    posterior.
    """
    pairs = {
        "III.1": (TENSOR_PLANS[1], TENSOR_PLANS[8], "TP 8 over TP 1: below 1"),
        "III.2": (COUNT_PLANS[8], COUNT_PLANS[128], "128 micro-batches over 8: above 1"),
        "III.3": (FIXED_PLANS[8], FIXED_PLANS[16], "16 stages over 8, same batch: below 1"),
        "III.4": (SCALED_PLANS[8], SCALED_PLANS[16], "16 stages over 8, same m/p: at least 0.9"),
    }
    spec = ModelSpec.preset(MODEL)
    return [
        _relation(
            claim,
            "modelled",
            ratio_interval(relative_rates(layouts_of(spec, [old, new]))[:, 1]),
            expected,
        )
        for claim, (old, new, expected) in pairs.items()
    ]


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
    return Relation(
        claim=claim,
        layer=layer,
        value=middle,
        low=low,
        high=high,
        expected=expected,
        within=BOUNDS[expected.partition(": ")[2]],
    )
