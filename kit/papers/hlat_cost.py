"""HLAT, section VII: cost per four million tokens on Trainium and on A100 against the number of
nodes (Figure 5).
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.theory.layouts import Array
from kit.monitor.goodput import usd_per_hour
from kit.papers.facts import Fact, Relation
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
    calibration,
    interval,
    layouts_of,
    left_out,
    model_error,
    plan_of,
    trn1_error,
    trn1_plan,
    trn1_risk,
)
from kit.papers.layers import Drawn, Layer, Runs, on_clusters, opened
from kit.papers.panels import legend_above, name_lines, picture
from kit.run import Run
from kit.show.theme import GRID

SHORT = {TRN1: "trn1", P4D: "p4d"}
RATIOS = {
    "trn1 over p4d": {model: ((TRN1, model), (P4D, model)) for model in MODELS},
    "70B over 7B": {short: ((machine, "70B"), (machine, "7B")) for machine, short in SHORT.items()},
}
"""What the paper states in words: ratios of cost between machines and models, on the same nodes."""
LARGE = 20e9
"""Parameters from which a run of the reader's stands beside the 70B, not the 7B."""
ABOUT = 0.05
"""Share by which a number that the paper gives as "about" may be off."""
TOKENS = 4e6
"""That a cost is of: about one step."""


def cost_figure(runs: Runs = (), *, dress: Sequence[Mapping[str, Any]]) -> Drawn:
    """Returns Figure 5: cost per 4M tokens against nodes, and the two ratios of it that the
    paper states; the table. `dress` as `picture` takes it, without what all panels share.
    """
    panels = {model: [cost_layer(machine, model) for machine in SHORT] for model in MODELS}
    for run in opened(runs):
        panels["7B" if run.spec.num_params < LARGE else "70B"] += on_clusters(
            [run], x=_nodes, y=cost_percent
        )
    for name, fact in _stated().items():
        about = Layer.published([fact], label=f"paper: about {fact.value}", level=True)
        panels[name] = [about, *ratio_layers(name)]
    panels["70B over 7B"].insert(1, _benchmark_ratio())
    caption, notes = _cost_texts()
    common = {"xscale": "log", "xlim": (3, 135), "ticks": NODES}
    ends = [1.05 * max(_top(layer) for layer in layers) for layers in panels.values()]
    return picture(
        panels,
        [{**common, "ylim": (0, end), **style} for end, style in zip(ends, dress, strict=True)],
        *caption,
        notes=notes,
        also=_name_lines_and_gaps,
        mosaic="ab;cd",
        height=7.0,
    )


def _top(layer: Layer) -> float:
    """Returns the highest number that a layer needs room for."""
    return float(np.nanmax([layer.y, layer.high]))


def throughput_figure(runs: Runs = (), *, dress: Sequence[Mapping[str, Any]]) -> Drawn:
    """Returns tokens/s and node of AWS's benchmarks beside the model's, fitted to the others
    each time; the table. `dress` as `picture` takes it, without the ticks.
    """
    rates = _benchmark_rates()
    factor = math.exp(1.645 * calibration(TRN1).misfit)
    names = [rate.x for rate in rates]
    centre = np.array([rate.number / math.exp(left_out()[rate.x]) for rate in rates])
    ticks = [name.removeprefix("3.1-").replace(", SDK ", "\n") for name in names]
    return picture(
        [
            Layer.published(rates, label="AWS benchmarks"),
            Layer.modelled(
                "model, fitted to the others",
                range(len(names)),
                centre,
                centre / factor,
                centre * factor,
                error=trn1_error(),
                names=names,
            ),
            *on_clusters(
                runs,
                x=lambda run: len(names),
                y=lambda run: run.metrics().tokens_per_s / _nodes(run),
            ),
        ],
        [{"ticks": dict(enumerate(ticks)), **dress[0]}],
        "AWS's own tables of Trainium, on which the cost figure rests.",
        "Modelled: each is predicted from the others, with a 90 % interval.",
        "Not modelled: one layout differs by a sixth between versions of the SDK.",
        notes=["The paper's own numbers were not found. SDK 2.24: Llama 3.1, the others Llama 2."],
        also=lambda figure: legend_above(figure, 3),
        height=4.6,
    )


def cost_layer(machine: str, model: str) -> Layer:
    """Returns modelled cost per 4M tokens, per cent of that of 7B on 4 p4d nodes; only nodes on
    which it fits.
    """
    nodes, draws = cost_draws(machine, model)
    percent = interval(100 * draws / _reference())
    return Layer.modelled(SHORT[machine], nodes, *percent, error=model_error())


def ratio_layers(name: str) -> list[Layer]:
    """Returns one of RATIOS as modelled, on the nodes that both sides fit on."""
    layers = []
    for label, (over, under) in RATIOS[name].items():
        (nodes, cost), (others, other_cost) = cost_draws(*over), cost_draws(*under)
        common, first, second = np.intersect1d(nodes, others, return_indices=True)
        ratio = interval(cost[:, first] / other_cost[:, second])
        layers.append(Layer.modelled(label, common, *ratio, error=model_error()))
    return layers


@lru_cache(maxsize=4)
def cost_draws(machine: str, model: str) -> tuple[Array, Array]:
    """Returns (nodes on which it fits, draws of USD per 4M tokens [300, nodes]).

    They are of what is not known: the coefficients, and the formula's misfit of each layout.
    """
    plans: dict[int, Plan] = {n: plan for n in NODES if (plan := plan_of(machine, model, n))}
    found = calibration(machine)
    seed = (TRN1, P4D).index(machine)
    seconds = found.draws(layouts_of(machine, model, list(plans.values())), seed=seed)
    wrong = np.random.default_rng(10 + seed).normal(0, found.misfit, size=seconds.shape)
    hourly = [usd_per_hour(plan, Site.load(machine)) for plan in plans.values()]
    tokens = BATCH * ModelSpec.preset(MODELS[model]).sequence_length
    rates = tokens / (seconds * np.exp(wrong))
    return np.array([*plans], float), cost_per_tokens(np.array(hourly, float), rates)


def cost_per_tokens(price_per_hour: Any, tokens_per_s: Any) -> Any:
    """Returns USD per 4M tokens: C / (T x 3600) x 4e6, as in the paper; C per hour of all nodes,
    T tokens/s.
    """
    return price_per_hour / (tokens_per_s * 3600) * TOKENS


def relations() -> list[Relation]:
    """Returns what the paper says in words of the costs, each on the model's output with its
    interval.
    """
    return [
        Relation(
            claim=f"{name}, {layer.label}, {nodes:.0f} nodes",
            layer="modelled",
            value=float(layer.y[i]),
            low=float(layer.low[i]),
            high=float(layer.high[i]),
            expected=f"about {fact.number:g}: within {ABOUT:.0%}",
            within=(fact.number * (1 - ABOUT), fact.number * (1 + ABOUT)),
        )
        for name, fact in _stated().items()
        for layer in ratio_layers(name)
        for i, nodes in enumerate(layer.x)
    ]


def _stated() -> dict[str, Fact]:
    """Returns what the paper says of each of RATIOS."""
    return {fact.x: fact for fact in (*FACTS["cost_ratio"], *FACTS["cost_size_ratio"])}


def _cost_texts() -> tuple[tuple[str, str, str], list[str]]:
    """Returns the caption, with how many of the paper's ratios the model meets and misses; and the
    notes: prices, what does not fit, and whose layouts are drawn.
    """
    checked = relations()
    failed = [relation for relation in checked if relation.verdict == "fails"]
    missed: dict[str, list[Relation]] = {}
    for relation in failed:
        missed.setdefault(relation.claim.rpartition(",")[0], []).append(relation)
    told = "; ".join(
        f"{claim} {' to '.join(dict.fromkeys(f'{r.value:.2f}' for r in (found[0], found[-1])))}"
        for claim, found in missed.items()
    )
    plan = trn1_plan("70B", 4)
    used, risk = trn1_risk("70B", plan)
    return (
        "Modelled cost of 4M tokens; 100 %: 7B on 4 nodes of p4d. Dashed: paper.",
        f"{len(checked) - len(failed)} of {len(checked)} modelled ratios have the paper's in their"
        " interval.",
        f"MISSED: {told}." if told else "",
    ), [
        (
            f"7B on 4 nodes of p4d is modelled at {np.median(_reference()):.2f} USD; 21.50 and"
            f" 32.77 USD a node-hour, steps of {BATCH:,} sequences."
        ),
        (
            f"Out of memory is a risk above {MAX_RISK:.0%}. 70B on 4 nodes: trn1 at TP"
            f" {plan.tensor_parallel}, PP {plan.pipeline_parallel} would use {used / 1e9:.1f} of"
            f" 17.2 GB (risk {risk:.0%}; HLAT's PP 8 needs 8 nodes), p4d has no layout that fits."
        ),
        (
            "trn1 in HLAT's layouts, p4d in the fastest that the estimator finds, which may be"
            " better than what NeMo 23.08 did."
        ),
        (
            "The points of the paper's curves could not be read; it says about 60 %, about 10"
            " times, flat."
        ),
        "Each ratio with its interval and tolerance is in the sheet of the paper's claims.",
    ]


def cost_percent(run: Run) -> Array:
    """Returns cost per 4M tokens of each step of a run, in per cent of the reference; NaN where its
    site has no price.

    Each attempt costs what its own nodes do: `usd_per_hour`.
    """
    metrics = run.metrics()
    numbers, index = np.unique(metrics["attempt"], return_inverse=True)
    hourly = [
        usd_per_hour(metrics.plans.get(n, run.plan), metrics.other_sites.get(n, run.site))
        for n in map(int, numbers)
    ]
    usd = np.array(hourly, dtype=float)[index]  # None is NaN
    return 100 * cost_per_tokens(usd, metrics.tokens_per_s) / float(np.median(_reference()))


def _reference() -> Array:
    """Returns draws of the cost that counts as 100 %: 7B on 4 nodes of p4d, [300, 1]."""
    return cost_draws(P4D, "7B")[1][:, :1]


def _nodes(run: Run) -> float:
    return run.plan.num_devices / run.site.devices_per_node


def _benchmark_rates() -> list[Fact]:
    """Returns tokens/s and node of AWS's benchmarks."""
    per_node = Site.load(TRN1).devices_per_node
    return [
        Fact(
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


def _benchmark_ratio() -> Layer:
    """Returns cost of 70B on 32 nodes over 7B on 16, from AWS's benchmarks, one point a version."""
    rates = {fact.x: fact for fact in _benchmark_rates()}
    ratios = [
        small.replace(x="32", value=str(small.number / rates[f"70B{name[2:]}"].number))
        for name, small in rates.items()
        if name.startswith("7B") and f"70B{name[2:]}" in rates
    ]
    return Layer.published(ratios, label="AWS")


def _name_lines_and_gaps(figure: Any) -> None:
    """Names the lines of all panels, and hatches the nodes on which 70B fits on no layout of some
    machine.
    """
    for axis in figure.axes:
        name_lines(axis)
    axis = figure.axes[1]
    for nodes in NODES:
        full = [short for machine, short in SHORT.items() if plan_of(machine, "70B", nodes) is None]
        if full:
            axis.axvspan(nodes / 1.3, nodes * 1.3, hatch="///", facecolor="none", edgecolor=GRID)
            style = {"rotation": 90, "ha": "center", "va": "center"}
            place = axis.get_xaxis_transform()
            axis.text(nodes, 0.5, f"{' and '.join(full)}: does not fit", transform=place, **style)
