"""HLAT, section VII: cost of training on four million tokens against the number of nodes, on
Trainium and on A100 (Figure 5).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.theory.layouts import Array
from kit.monitor.goodput import usd_per_hour
from kit.papers.facts import PaperFact, Relation
from kit.papers.hlat_model import (
    BATCH,
    FACTS,
    MAX_RISK,
    MODELS,
    NODES,
    P4D,
    TRN1,
    benchmark_name,
    benchmarks,
    hlat_layouts,
    left_out_errors,
    machine_calibration,
    model_error,
    plan_on_nodes,
    quantile_interval,
    trn1_error,
    trn1_plan,
    trn1_risk,
)
from kit.papers.layers import FigureLayer, Runs, measured_on_clusters, open_runs
from kit.papers.panels import FigureContent, label_line_ends
from kit.run import Run
from kit.show.theme import GRID

SHORT = {TRN1: "trn1", P4D: "p4d"}
"""Short name of each machine, for legends."""
RATIOS = {
    "trn1 over p4d": {model: ((TRN1, model), (P4D, model)) for model in MODELS},
    "70B over 7B": {short: ((machine, "70B"), (machine, "7B")) for machine, short in SHORT.items()},
}
"""Ratios of two training costs that the paper states in words. Maps the name of a ratio to its
curves. A curve maps its label to two pairs (machine, model): the numerator and the denominator.
Both costs are for an equal number of nodes."""
LARGE = 20e9
"""Smallest number of parameters of a user's run that is drawn in the panel of the 70B model.
Smaller runs are drawn in the panel of the 7B model."""
ABOUT = 0.05
"""Tolerance for a number that the paper states as "about", as a fraction of the number."""
TOKENS = 4e6
"""Number of training tokens whose cost is shown. HLAT trains on about as many tokens per step."""


def cost_by_nodes_content(runs: Runs = ()) -> FigureContent:
    """Returns Figure 5: cost per 4 million tokens against the number of nodes, and the two ratios
    of costs that the paper states in words.
    """
    panels = {model: [cost_layer(machine, model) for machine in SHORT] for model in MODELS}
    for run in open_runs(runs):
        model = "7B" if run.spec.num_params < LARGE else "70B"
        panels[model] += measured_on_clusters([run], x=_nodes, y=cost_percent)
    for name, fact in _stated_ratios().items():
        level = FigureLayer.published([fact], label=f"paper: about {fact.value}", level=True)
        panels[name] = [level, *ratio_layers(name)]
    panels["70B over 7B"].insert(1, _benchmark_ratio())
    checked = relations()
    failed = [relation for relation in checked if relation.verdict == "fails"]
    stated = {name: fact.number for name, fact in _stated_ratios().items()}
    contained = [
        relation
        for relation in checked
        if relation.low <= stated[relation.claim.partition(",")[0]] <= relation.high
    ]
    plan = trn1_plan("70B", 4)
    used_bytes, risk = trn1_risk("70B", plan)
    return FigureContent(
        panels=panels,
        values={
            "ratios": str(len(checked)),
            "contained": str(len(contained)),
            "met": str(len(checked) - len(failed)),
            "missed": _missed_ratios(failed),
            "reference_usd": f"{np.median(_reference()):.2f}",
            "batch": f"{BATCH:,}",
            "max_risk": f"{MAX_RISK:.0%}",
            "tensor_parallel": str(plan.tensor_parallel),
            "pipeline_parallel": str(plan.pipeline_parallel),
            "used_gb": f"{used_bytes / 1e9:.1f}",
            "risk": f"{risk:.0%}",
        },
        annotate=_label_lines_and_gaps,
    )


def _missed_ratios(failed: Sequence[Relation]) -> str:
    """Returns a sentence that names the cost ratios (trn1 over p4d) for which the planner
    contradicts the paper. It has the numbers of nodes of the failed checks of each ratio, and the
    smallest and the largest of the planner's values on these nodes. `failed` are the failed checks.
    If `failed` is empty, the sentence is "".
    """
    if not failed:
        return ""
    by_ratio: dict[str, list[Relation]] = {}
    for relation in failed:
        by_ratio.setdefault(relation.claim.rpartition(",")[0], []).append(relation)
    ranges = []
    for ratio, checks in by_ratio.items():
        nodes = [check.claim.rpartition(", ")[2].removesuffix(" nodes") for check in checks]
        values = [check.value for check in checks]
        ends = dict.fromkeys([f"{min(values):.2f}", f"{max(values):.2f}"])
        ranges.append(f"{ratio} on {_enumeration(nodes)} nodes (modelled {' to '.join(ends)})")
    return f"MISSED: {'; '.join(ranges)}."


def _enumeration(words: Sequence[str]) -> str:
    """Returns words in one text, separated by commas, with `and` before the last word."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def trainium_rates_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of tokens per second per node: AWS's benchmarks, and the planner's
    prediction of each benchmark.

    Each benchmark is predicted by a fit to all other benchmarks.
    """
    rates = _benchmark_rates()
    names = [rate.x for rate in rates]
    errors = left_out_errors()
    centre = np.array([rate.number / math.exp(errors[rate.x]) for rate in rates])
    factor = math.exp(1.645 * machine_calibration(TRN1).misfit)
    predicted = FigureLayer.modelled(
        "estimate from the others",
        range(len(names)),
        centre,
        centre / factor,
        centre * factor,
        error=trn1_error(),
        names=names,
    )
    own = measured_on_clusters(
        runs,
        x=lambda run: len(names),
        y=lambda run: run.metrics().tokens_per_s / _nodes(run),
    )
    ticks = [name.removeprefix("3.1-").replace(", SDK ", "\n") for name in names]
    return FigureContent(
        panels={"": [FigureLayer.published(rates, label="AWS benchmarks"), predicted, *own]},
        ticks={"": dict(enumerate(ticks))},
    )


def cost_layer(machine: str, model: str) -> FigureLayer:
    """Returns a curve (figure layer) of the modelled cost per 4 million tokens against the number
    of nodes. The cost is in % of the cost of the 7B model on 4 p4d nodes.

    Numbers of nodes at which the model does not fit in memory are left out.
    """
    nodes, draws = cost_draws(machine, model)
    percent = quantile_interval(100 * draws / _reference())
    return FigureLayer.modelled(SHORT[machine], nodes, *percent, error=model_error())


def ratio_layers(name: str) -> list[FigureLayer]:
    """Returns one curve (figure layer) of modelled ratios against the number of nodes for each
    curve of an entry of RATIOS. A point is missing if numerator or denominator does not fit in
    memory on this number of nodes.
    """
    layers = []
    for label, (over, under) in RATIOS[name].items():
        (nodes, cost), (others, other_cost) = cost_draws(*over), cost_draws(*under)
        common, first, second = np.intersect1d(nodes, others, return_indices=True)
        ratio = quantile_interval(cost[:, first] / other_cost[:, second])
        layers.append(FigureLayer.modelled(label, common, *ratio, error=model_error()))
    return layers


@lru_cache(maxsize=4)
def cost_draws(machine: str, model: str) -> tuple[Array, Array]:
    """Returns (numbers of nodes, costs) for a model on a machine. The costs are 300 random draws of
    USD per 4 million tokens, [300, nodes]. Numbers of nodes at which the model does not fit in
    memory are left out.

    The draws represent two uncertainties: the fitted coefficients of the planner's model, and the
    error of the model's formula, which differs between layouts.
    """
    plans: dict[int, Plan] = {}
    for nodes in NODES:
        plan = plan_on_nodes(machine, model, nodes)
        if plan is not None:
            plans[nodes] = plan
    found = machine_calibration(machine)
    seed = (TRN1, P4D).index(machine)
    seconds = found.draws(hlat_layouts(machine, model, list(plans.values())), seed=seed)
    wrong = np.random.default_rng(10 + seed).normal(0, found.misfit, size=seconds.shape)
    hourly = [usd_per_hour(plan, Site.load(machine)) for plan in plans.values()]
    tokens = BATCH * ModelSpec.preset(MODELS[model]).sequence_length
    rates = tokens / (seconds * np.exp(wrong))
    return np.array([*plans], float), cost_per_tokens(np.array(hourly, float), rates)


def cost_per_tokens(price_per_hour: Any, tokens_per_s: Any) -> Any:
    """Returns USD per 4 million tokens, C / (T x 3600) x 4e6, as in the paper.

    C (`price_per_hour`) is the price of all nodes in USD per hour. T (`tokens_per_s`) is the rate
    of all nodes in tokens per second.
    """
    return price_per_hour / (tokens_per_s * 3600) * TOKENS


def relations() -> list[Relation]:
    """Returns one check for each ratio of costs that the paper states and each number of nodes. A
    check compares the modelled ratio, with its interval, with the paper's number.
    """
    found = []
    for name, fact in _stated_ratios().items():
        for layer in ratio_layers(name):
            for i, nodes in enumerate(layer.x):
                relation = Relation(
                    claim=f"{name}, {layer.label}, {nodes:.0f} nodes",
                    layer="modelled",
                    value=float(layer.y[i]),
                    low=float(layer.low[i]),
                    high=float(layer.high[i]),
                    expected=f"about {fact.number:g}: within {ABOUT:.0%}",
                    within=(fact.number * (1 - ABOUT), fact.number * (1 + ABOUT)),
                )
                found.append(relation)
    return found


def _stated_ratios() -> dict[str, PaperFact]:
    """Returns a dict from the name of each ratio in RATIOS to the number that the paper states for
    this ratio.
    """
    return {fact.x: fact for fact in (*FACTS["cost_ratio"], *FACTS["cost_size_ratio"])}


def cost_percent(run: Run) -> Array:
    """Returns the cost per 4 million tokens of each step of a run, in % of the cost of 7B on 4 p4d
    nodes. NaN if the site of the run has no price.

    A resumed run may have changed its nodes. The price of a step is therefore the price of the
    nodes on which its attempt (start of the run) ran.
    """
    metrics = run.metrics()
    numbers, index = np.unique(metrics["attempt"], return_inverse=True)
    hourly = [
        usd_per_hour(metrics.plans.get(n, run.plan), metrics.other_sites.get(n, run.site))
        for n in map(int, numbers)
    ]
    usd = np.array(hourly, dtype=float)[index]  # None becomes NaN.
    return 100 * cost_per_tokens(usd, metrics.tokens_per_s) / float(np.median(_reference()))


def _reference() -> Array:
    """Returns random draws of the cost that is defined as 100 %: 7B on 4 nodes of p4d, in USD per 4
    million tokens, [300, 1].
    """
    return cost_draws(P4D, "7B")[1][:, :1]


def _nodes(run: Run) -> float:
    return run.plan.num_devices / run.site.devices_per_node


def _benchmark_rates() -> list[PaperFact]:
    """Returns the tokens per second per node of each AWS benchmark, derived from its published
    sequences per second.
    """
    per_node = Site.load(TRN1).devices_per_node
    return [
        PaperFact(
            series="trn1_tokens_per_s",
            x=benchmark_name(run),
            value=str(run.tokens_per_step / run.step_time_s * per_node / run.num_devices),
            known="derived",
            source="AWS Neuron documentation, training benchmarks, SDK 2.16 to 2.24",
            unit="tokens/s and node",
            note="from sequences/s",
        )
        for run in benchmarks()
        if run.step_time_s
    ]


def _benchmark_ratio() -> FigureLayer:
    """Returns a figure layer (set of points) with the cost of 70B on 32 nodes divided by the cost
    of 7B on 16 nodes, computed from AWS's benchmarks.

    There is one point per version of the Neuron SDK.
    """
    rates = {fact.x: fact for fact in _benchmark_rates()}
    ratios = [
        small.replace(x="32", value=str(small.number / rates[f"70B{name[2:]}"].number))
        for name, small in rates.items()
        if name.startswith("7B") and f"70B{name[2:]}" in rates
    ]
    return FigureLayer.published(ratios, label="AWS")


def _label_lines_and_gaps(figure: Any) -> None:
    """Labels the lines of all panels. In the panel of 70B, hatches the node counts at which the
    model does not fit on one of the machines.
    """
    for axis in figure.axes:
        label_line_ends(axis)
    axis = figure.axes[1]
    for nodes in NODES:
        full = [
            short
            for machine, short in SHORT.items()
            if plan_on_nodes(machine, "70B", nodes) is None
        ]
        if full:
            axis.axvspan(nodes / 1.3, nodes * 1.3, hatch="///", facecolor="none", edgecolor=GRID)
            style = {"rotation": 90, "ha": "center", "va": "center"}
            place = axis.get_xaxis_transform()
            axis.text(nodes, 0.5, f"{' and '.join(full)}: does not fit", transform=place, **style)
