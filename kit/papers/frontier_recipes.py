"""Frontier: the recipes of the three sizes, and what training 1T parameters on 20T tokens takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.site import Site
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.memory import memory
from kit.estimate.theory.out_of_memory import RESERVE
from kit.papers.frontier_demo import run_hfu_percent
from kit.papers.frontier_model import (
    FACTS,
    MODELS,
    calibration,
    compared,
    layouts_of,
    model_error,
    recipe_plan,
    throughput_layer,
)
from kit.papers.frontier_scaling import STRONG_BATCH
from kit.papers.layers import Layer, Rows, Runs, by_scale, on_clusters
from kit.papers.panels import facts_table, legend_above, picture, recipe_of
from kit.run import Run
from kit.spec import FlopBasis, ModelSpec

TOKENS = 20e12
COST_REPLICAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DAY = 86_400.0


def recipes_figure(runs: Runs = (), *, labels: Mapping[str, str]) -> tuple[Any, Rows]:
    """Returns the recipes as the authors' scripts have them, with what the model says of each, as a
    table; `labels` are of the rows that were read, by their series.
    """
    layers = [
        Layer.published(FACTS["throughput_percent"], label="throughput"),
        Layer.published(FACTS["recipe_pipeline_parallel"], label="layouts"),
        Layer.modelled("recipes", error=model_error()),
        *on_clusters(runs, x=lambda run: 0.0, y=lambda run: run.metrics().tokens_per_s),
    ]
    return facts_table(
        FACTS,
        labels,
        {model: _modelled(model) for model in MODELS},
        [(run, _own_recipe(run, labels)) for run in by_scale(runs)["cluster"]],
        layers,
        "Layouts of the authors' launch scripts, and what the model says of them.",
        "Which of them made the headline numbers is not proven.",
        note="The 1T script exists in two versions (TP 8, PP 64 in 2023; TP 4, PP 128 later); the"
        " older is shown.",
        kind="modelled",
    )


def _modelled(model: str) -> dict[str, str]:
    """Returns what the model says of a recipe."""
    spec, plan = ModelSpec.preset(MODELS[model]), recipe_plan(model)
    layouts = layouts_of(spec, [plan])
    held = memory(layouts, kernels=MEGATRON, reserve=RESERVE)
    size = Site.load("frontier").device.memory_bytes
    assert size
    m, p = plan.num_microbatches, plan.pipeline_parallel
    rate = throughput_layer("", [0], [(spec, layouts)])
    return {
        "replicas": str(plan.data_parallel),
        "micro-batches per replica": str(m),
        "bubble (p-1)/(m+p-1)": f"{(p - 1) / (m + p - 1):.1%}",
        "GiB on the fullest GCD, modelled": f"{float(held.used_bytes.max()) / 2**30:.0f}",
        "risk of out of memory, modelled": (
            f"{float(held.out_of_memory_probability(size.value).max()):.1%}"
        ),
        "% of peak, modelled (HFU)": f"{rate.y[0]:.1f} ({rate.low[0]:.1f} to {rate.high[0]:.1f})",
    }


def _own_recipe(run: Run, labels: Mapping[str, str]) -> dict[str, str]:
    """Returns the same rows of a run of a cluster; what only scripts have stays empty."""
    return recipe_of(run, labels) | {
        "GCDs of the script": str(run.plan.num_devices),
        "% of peak, abstract": f"{np.nanmedian(run_hfu_percent(run)):.1f} (measured)",
    }


def cost_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns days and device-hours of 1T parameters on 20T tokens against the number of GCDs,
    and the table.
    """
    days, read = days_layer(), Layer.published([_published_days()], label="from the paper's rate")
    spent, hours = (layer.times(layer.x * 24 / 1e6) for layer in (read, days))
    own = on_clusters(runs, x=lambda run: run.plan.num_devices, y=_days_of_run)
    log = {"xscale": "log", "xlabel": "GCDs", "ticks": (512, 3072, 24576)}
    at = int(np.flatnonzero(days.x == 3072)[0])
    taken = days.y[at]
    return picture(
        {"days": [read, days, *own], "million GCD-hours": [spent, hours]},
        [
            log | {"yscale": "log", "title": "(a) days for 20T tokens"},
            log | {"title": "(b) million GCD-hours", "ylim": (0, 1.35 * float(hours.high.max()))},
        ],
        f"1T parameters on 20T tokens by GCDs, {STRONG_BATCH:,} sequences a step, no restarts.",
        f"On 3,072 GCDs {taken:,.0f} days ({days.low[at]:,.0f} to {days.high[at]:,.0f}), "
        f"{taken * 3072 * 24 / 8e6:.1f} million node-hours.",
        " ".join(filter(None, compared(read, days))),
        notes=_cost_notes(days, taken),
        also=lambda figure: legend_above(figure, 3),
        height=4.2,
    )


def days_layer() -> Layer:
    """Returns modelled days of 1T on 20T tokens, the authors' layout on 1 to 64 replicas at one
    batch.
    """
    spec = ModelSpec.preset(MODELS["1T"])
    plans = [
        recipe_plan("1T", data_parallel=n, global_batch_size=STRONG_BATCH) for n in COST_REPLICAS
    ]
    layouts = layouts_of(spec, plans)
    found = calibration().predict(layouts)
    steps = TOKENS / (STRONG_BATCH * spec.sequence_length)
    days = [steps * seconds / DAY for seconds in (found.total_s, found.low_s, found.high_s)]
    return Layer.modelled("1T, TP 8, PP 64", layouts.num_devices, *days, error=model_error())


def _cost_notes(days: Layer, on_3072: float) -> list[str]:
    """Returns on how many GCDs it would be done within a year, what that costs, and the paper's
    count of FLOPs.
    """
    exaflop = FACTS.value("training_exaflop", "1T on 20T tokens")
    own = ModelSpec.preset(MODELS["1T"]).flops_per_token(FlopBasis.SIX_N) * TOKENS / 1e18
    fewer = f"{on_3072 * 3072 / 365:,.0f} GCDs would have to work at that rate"
    return [
        (
            f"Within a year, {fewer}; at this batch {int(days.x[-1]):,} of them, most of Frontier,"
            f" take {days.y[-1]:,.0f} days."
        ),
        "Without energy, at 1 USD a GCD-hour (b) reads as million USD; Frontier has no list price.",
        (
            f"6 x parameters x tokens is {own / 1e6:.0f} million exaFLOP, as in the abstract"
            f" ({exaflop / 1e6:.0f})."
        ),
        "Runs of your own are scaled to this work by their model FLOP/s.",
    ]


def _published_days() -> Any:
    """Returns days on 3,072 GCDs at the paper's 61.2 TFLOP/s per GCD, which count recomputation."""
    spec = ModelSpec.preset(MODELS["1T"])
    rate = FACTS.only("throughput_tflops", "1T")
    tokens_per_s = rate.number * 1e12 * 3072 / spec.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE)
    return rate.replace(x="3072", value=str(TOKENS / tokens_per_s / DAY), unit="days")


def _days_of_run(run: Run) -> np.ndarray:
    """Returns days that 1T on 20T tokens would take at the model FLOP/s of each step of a run."""
    rate = run.metrics().tokens_per_s * run.spec.flops_per_token()
    return ModelSpec.preset(MODELS["1T"]).flops_per_token() * TOKENS / rate / DAY
