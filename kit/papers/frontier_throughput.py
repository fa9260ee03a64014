"""Frontier, section III: throughput against tensor parallelism, micro-batches and pipeline stages.
Four observations of the paper about throughput are checked too.

The numbers of the paper's curves could not be read off its figures, so the kit's figures have no
published points. Each observation is checked twice: with the planner's model, with an interval, and
with runs of this machine (demo scale). The layouts of all curves and checks are in
`data/figures.toml` and `data/observations.toml`.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from kit.config.spec import ModelSpec
from kit.papers.facts import Relation, read_paper_toml
from kit.papers.frontier_demo import (
    median_rate,
    run_hfu_percent,
    select_runs,
    tokens_per_s_per_device,
)
from kit.papers.frontier_model import (
    FACTS,
    frontier_layouts,
    model_error,
    paper_plan,
    ratio_interval,
    relative_rates,
    throughput_layer,
)
from kit.papers.layers import (
    FigureLayer,
    Runs,
    measured_layers,
    measured_on_clusters,
    open_runs,
    scale_of,
)
from kit.papers.panels import FigureContent, TableContent

SPEC = ModelSpec.preset("gpt-22b")
"""Shape of the language model in all modelled curves and checks."""
ONE_REPLICA = {"data_parallel": 1, "micro_batch_size": 1}
"""Fields of the plan by which runs of this machine are selected. The figures and checks of this
module use only runs with one replica and micro-batch size 1."""
SCALES = {"modelled": "modelled, paper's scale", "measured": "measured, demo scale"}


def sweep_content(
    runs: Runs = (),
    *,
    field: str,
    lines: Mapping[str, Mapping[str, Any]],
    demo: Mapping[str, Any] | None = None,
) -> FigureContent:
    """Returns a figure of throughput against one field of the plan: the planner's model at the
    paper's scale and, in a second panel, runs of this machine.

    Args:
        runs: the user's own runs.
        field: name of a field of `Plan`, which is the x axis.
        lines: curves to model. Maps the label of a curve to the fields of its plans. A list has one
            value per plan. A value that is not a list is used in all plans of the curve.
        demo: values that the plans of runs of this machine must have to be drawn. None: no run of
            this machine is drawn.
    """
    x = attrgetter(f"plan.{field}")
    panels = {"paper's scale": [_modelled_line(label, lines[label], field) for label in lines]}
    panels["paper's scale"] += measured_on_clusters(runs, x=x, y=run_hfu_percent)
    if demo is not None:
        chosen = select_runs(runs, **ONE_REPLICA, **demo)
        demo_runs = [run for run in chosen if scale_of(run) == "demo"]
        demo_layers = measured_layers(
            demo_runs, x=x, y=tokens_per_s_per_device, label="this machine", line=True
        )
        if demo_layers:
            panels["demo scale"] = demo_layers
    return FigureContent(panels=panels)


def _modelled_line(label: str, fields: Mapping[str, Any], field: str) -> FigureLayer:
    """Returns a curve (figure layer) of the modelled HFU of several plans in %, against the plan
    field that is named `field`.

    `fields` maps names of plan fields to values. A list has one value per plan. A value that is not
    a list is used in all plans.
    """
    count = max(len(values) for values in fields.values() if isinstance(values, list))
    plans = []
    for i in range(count):
        row = dict(fields)
        for name, values in fields.items():
            if isinstance(values, list):
                row[name] = values[i]
        plans.append(paper_plan(**row))
    places = [getattr(plan, field) for plan in plans]
    return throughput_layer(label, places, [(SPEC, frontier_layouts(SPEC, plans))])


# Observations -------------------------------------------------------------------------------------


def observations_content(runs: Runs = ()) -> TableContent:
    """Returns the table of the paper's four observations about throughput. Each observation is
    checked with the planner's model and with runs of this machine.
    """
    relations = [*modelled_relations(), *measured_relations(runs)]
    statements = {fact.x: fact.value for fact in FACTS["observation"]}
    cells = []
    for relation in relations:
        number, _, expected = relation.expected.partition(": ")
        cells.append(
            {
                "": relation.claim,
                "observation": statements[relation.claim],
                "throughput ratio": number,
                "kind": SCALES[relation.layer],
                "found": f"{relation.value:.2f} ({relation.low:.2f} to {relation.high:.2f})",
                "expected": expected,
                "verdict": relation.verdict,
            }
        )
    own = measured_layers(
        runs, x=lambda run: 0.0, y=tokens_per_s_per_device, label="runs at demo scale"
    )
    names = ("claim", "layer", "value", "low", "high", "expected", "verdict")
    return TableContent(
        cells=cells,
        rows=[{name: getattr(relation, name) for name in names} for relation in relations],
        layers=[FigureLayer.modelled("22B", error=model_error()), *own],
        runs=[name for layer in own for name in layer.runs],
    )


def modelled_relations() -> list[Relation]:
    """Returns the checks of the paper's four observations about throughput with the planner's
    model. Each observation is a statement about a ratio of two throughputs. The intervals come from
    the posterior of the coefficients.
    """

    def ratio(old: dict[str, int], new: dict[str, int]) -> tuple[Any, Any, Any]:
        layouts = frontier_layouts(SPEC, [paper_plan(**old), paper_plan(**new)])
        return ratio_interval(relative_rates(layouts)[:, 1])

    return _relations("modelled", ratio)


def measured_relations(runs: Runs) -> list[Relation]:
    """Returns the checks of the paper's four observations about throughput with runs of this
    machine. Each observation is a statement about a ratio of two throughputs. The interval of a
    ratio comes from the quartiles of both throughputs over training steps.

    An observation is left out if its runs are not among `runs`.
    """
    runs = open_runs(runs)

    def ratio(old: dict[str, int], new: dict[str, int]) -> tuple[Any, Any, Any]:
        old_rate, old_low, old_high = median_rate(runs, **ONE_REPLICA, **old)
        new_rate, new_low, new_high = median_rate(runs, **ONE_REPLICA, **new)
        return new_rate / old_rate, new_low / old_high, new_high / old_low

    return [found for found in _relations("measured", ratio) if np.isfinite(found.value)]


def _relations(layer: Any, ratio: Callable[..., tuple[Any, Any, Any]]) -> list[Relation]:
    """Returns the checks of the paper's four observations about throughput. `layer` says whether
    the ratios are "modelled" or "measured".

    `ratio` is a function that returns (value, low, high) for an old and a new layout: the
    throughput of the new layout divided by that of the old layout, with its interval.
    """
    found = []
    for observation in read_paper_toml("observations")[layer]:
        value, low, high = map(float, ratio(observation["old"], observation["new"]))
        stated = {name: observation[name] for name in ("claim", "expected", "within")}
        found.append(Relation(**stated, layer=layer, value=value, low=low, high=high))
    return found
