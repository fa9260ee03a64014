"""Frontier, section III: throughput against tensor parallelism, micro-batches and pipeline stages,
and what it says.

The paper's curves could not be read, so there are no published points here; its four observations
are checked as relations on the model, with the interval, and on demo-scale runs of this machine.
The layouts of all lines and relations are in `data/figures.toml` and `data/observations.toml`.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from kit.config.spec import ModelSpec
from kit.papers.facts import Relation, read_toml
from kit.papers.frontier_demo import median_rate, run_hfu_percent, select, tokens_per_s_and_device
from kit.papers.frontier_model import (
    FACTS,
    layouts_of,
    model_error,
    paper_plan,
    ratio_interval,
    relative_rates,
    throughput_layer,
)
from kit.papers.layers import Drawn, Layer, Runs, measured, on_clusters, opened, scale_of
from kit.papers.panels import paper_table, picture

SPEC = ModelSpec.preset("gpt-22b")
ALONE = {"data_parallel": 1, "micro_batch_size": 1}
"""Fields of the demo-scale runs that these figures show: one replica."""
SCALES = {"modelled": "modelled, paper's scale", "measured": "measured, demo scale"}


def sweep_figure(
    runs: Runs = (),
    *,
    field: str,
    lines: Mapping[str, Mapping[str, Any]],
    demo: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    shows: str,
    holds: str,
    xlabel: str,
    loc: str = "lower left",
    notes: Sequence[str] = (),
) -> Drawn:
    """Returns throughput against a field of the plan: one panel at the paper's scale, and beside
    it one at demo scale where such runs are given.

    `lines` are the modelled layouts and `demo` the fields of the runs of each line, by its label,
    as `rows_of` takes them; the other texts are of the caption, the notes, the axis of x and the
    place of the legend.
    """
    x = attrgetter(f"plan.{field}")
    paper = []
    here = []
    for label, columns in lines.items():
        plans = [paper_plan(**row) for row in rows_of(columns)]
        places = [getattr(plan, field) for plan in plans]
        paper.append(throughput_layer(label, places, [(SPEC, layouts_of(SPEC, plans))]))
    for label, columns in demo.items():
        chosen = [run for row in rows_of(columns) for run in select(runs, **ALONE, **row)]
        own = [run for run in chosen if scale_of(run) == "demo"]
        here += measured(own, x=x, y=tokens_per_s_and_device, label=label, line=True)
    common = {"xscale": "log", "xlabel": xlabel, "legend": {"loc": loc}}
    panels = {"paper's scale": [*paper, *on_clusters(runs, x=x, y=run_hfu_percent)]}
    dress = [common | _room(panels["paper's scale"], 1.08) | {"title": "% of peak per GCD (HFU)"}]
    if here:
        panels["demo scale"] = here
        dress.append(common | _room(here, 1.25) | {"title": "tokens/s per core"})
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
        width_ratios=[3, 2] if here else [1],
    )


def rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a table by columns, of which one may be a single value for all rows."""
    count = max(len(column) for column in [[0], *columns.values()] if isinstance(column, list))
    return [
        {name: it[i] if isinstance(it, list) else it for name, it in columns.items()}
        for i in range(count)
    ]


def _room(layers: Sequence[Layer], room: float) -> dict[str, Any]:
    """Returns the ends and ticks of a panel, with some room above its points."""
    own = [layer for layer in layers if layer.scale != "cluster"]
    places = sorted({int(place) for layer in own for place in layer.x})
    return {
        "xlim": (places[0] / 1.3, 1.3 * max(float(layer.x.max()) for layer in layers)),
        "ylim": (0, room * max(float(np.nanmax(layer.high)) for layer in layers)),
        "ticks": places if len(places) <= 6 else places[::2],
    }


# Observations -------------------------------------------------------------------------------------


def observations_figure(runs: Runs = ()) -> Drawn:
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

    def ratio(old: dict[str, int], new: dict[str, int]) -> tuple[Any, Any, Any]:
        layouts = layouts_of(SPEC, [paper_plan(**old), paper_plan(**new)])
        return ratio_interval(relative_rates(layouts)[:, 1])

    return _relations("modelled", ratio)


def measured_relations(runs: Runs) -> list[Relation]:
    """Returns the same four from the demo-scale study, as far as its runs are given; intervals from
    quartiles.
    """
    runs = opened(runs)

    def ratio(*sides: dict[str, int]) -> tuple[Any, Any, Any]:
        (old, *old_ends), (new, *new_ends) = (median_rate(runs, **ALONE, **side) for side in sides)
        return new / old, new_ends[0] / old_ends[1], new_ends[1] / old_ends[0]

    return [found for found in _relations("measured", ratio) if np.isfinite(found.value)]


def _relations(layer: Any, ratio: Callable[..., tuple[Any, Any, Any]]) -> list[Relation]:
    """Returns the observations on one layer, whose `ratio` of an old to a new layout is (value,
    low, high).
    """
    found = []
    for asked in read_toml("observations")[layer]:
        value, low, high = map(float, ratio(asked["old"], asked["new"]))
        stated = {name: asked[name] for name in ("claim", "expected", "within")}
        found.append(Relation(**stated, layer=layer, value=value, low=low, high=high))
    return found
