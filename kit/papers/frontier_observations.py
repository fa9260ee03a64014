"""Frontier, section III: its four observations as relations, on the model with the interval and
on demo-scale runs.
"""

import math
from typing import Any

from kit.papers.frontier_demo import MICROBATCHES, median_rate
from kit.papers.frontier_model import (
    facts,
    hfu_percent,
    layouts_of,
    model_error,
    ratio_interval,
    step_draws,
)
from kit.papers.frontier_throughput import (
    ALONE,
    MODEL,
    STAGES,
    microbatch_plans,
    pipeline_plans,
    tensor_plans,
)
from kit.papers.layers import Layer, Runs, measured, opened, tokens_per_s_and_device
from kit.papers.panels import paper_table
from kit.papers.relations import Relation
from kit.show.style import Rows
from kit.spec import ModelSpec

SCALES = {"modelled": "modelled, paper's scale", "measured": "measured, demo scale"}


def observations_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the paper's four observations, checked on the model and on demo-scale runs, as a
    table.
    """
    relations = [*modelled_relations(), *measured_relations(runs)]
    found = [
        f"{relation.value:.2f} ({relation.low:.2f} to {relation.high:.2f})"
        for relation in relations
    ]
    statements = {fact.x: fact.value for fact in facts()["observation"]}
    shown = [
        {
            "": relation.claim,
            "observation": statements[relation.claim.split()[0]],
            "number": relation.expected.split(":")[0],
            "layer": SCALES[relation.layer],
            "found": value,
            "expected": relation.expected.split(": ")[1],
            "verdict": relation.verdict,
        }
        for relation, value in zip(relations, found, strict=True)
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
    return drawn, [relation.row() for relation in relations]


def modelled_relations() -> list[Relation]:
    """Returns the four observations as ratios of modelled throughput, with intervals from the
    posterior.
    """
    fixed, scaled = pipeline_plans()
    eight, sixteen = STAGES.index(8), STAGES.index(16)
    pairs = {
        "III.1": ([tensor_plans()[i] for i in (0, 3)], "TP 8 over TP 1"),
        "III.2": ([microbatch_plans()[i] for i in (3, 7)], "128 micro-batches over 8"),
        "III.3": ([fixed[eight], fixed[sixteen]], "16 stages over 8, same batch"),
        "III.4": ([scaled[eight], scaled[sixteen]], "16 stages over 8, same m/p"),
    }
    spec = ModelSpec.preset(MODEL)
    found = []
    for claim, (plans, what) in pairs.items():
        layouts = layouts_of(spec, plans)
        rate = hfu_percent(spec, layouts, step_draws(layouts))
        middle, low, high = ratio_interval(rate[:, 1] / rate[:, 0])
        found.append(_relation(claim, "modelled", (float(middle), float(low), float(high)), what))
    return found


def measured_relations(runs: Runs) -> list[Relation]:
    """Returns the same four from the demo-scale study, as far as its runs are given; intervals from
    quartiles.

    With one and two stages only, III.4 is that two lose less at constant micro-batches per stage
    than at one batch.
    """
    runs = opened(runs)
    one, two = (
        {"pipeline_parallel": 1, "tensor_parallel": 1},
        {"pipeline_parallel": 2, "tensor_parallel": 1},
    )
    alone, same = one | {"num_microbatches": MICROBATCHES}, {"num_microbatches": MICROBATCHES}
    pairs = {
        "III.1": (alone, alone | {"tensor_parallel": 2}, "TP 2 over TP 1"),
        "III.2": (
            two | {"num_microbatches": 1},
            two | {"num_microbatches": 8},
            "8 micro-batches over 1",
        ),
        "III.3": (alone, two | same, "2 stages over 1, same batch"),
        "III.4": (
            two | same,
            two | {"num_microbatches": 2 * MICROBATCHES},
            "2 stages, same m/p over same batch",
        ),
    }
    found = []
    for claim, (before, after, what) in pairs.items():
        old, new = (median_rate(runs, **ALONE, **fields) for fields in (before, after))
        if not math.isnan(old[0] + new[0]):
            value = (new[0] / old[0], new[1] / old[2], new[2] / old[1])
            found.append(_relation(claim, "measured", value, what))
    return found


def _relation(claim: str, layer: Any, value: tuple[float, float, float], what: str) -> Relation:
    bounds: dict[str, tuple[str, dict[str, float]]] = {
        "III.1": ("below 1", {"at_most": 1.0}),
        "III.2": ("above 1", {"at_least": 1.0}),
        "III.3": ("below 1", {"at_most": 1.0}),
        "III.4": ("at least 0.9", {"at_least": 0.9}),
    }
    text, limits = (
        ("above 1", {"at_least": 1.0}) if (claim, layer) == ("III.4", "measured") else bounds[claim]
    )
    return Relation(
        claim=claim,
        layer=layer,
        value=value[0],
        low=value[1],
        high=value[2],
        expected=f"{what}: {text}",
        **limits,
    )
