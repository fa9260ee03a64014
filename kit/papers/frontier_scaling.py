"""Frontier, section V: throughput of the three sizes, weak and strong scaling to 1,024 and 3,072
GCDs, and what training 1T parameters on 20T tokens takes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.theory.layouts import Array, Layouts
from kit.papers.facts import Fact
from kit.papers.frontier_demo import run_hfu_percent, tokens_per_s_and_device
from kit.papers.frontier_model import (
    FACTS,
    LUMI,
    MODELS,
    calibration,
    compared,
    layouts_of,
    lumi_plan,
    model_error,
    ratio_interval,
    recipe_plan,
    relative_rates,
    throughput_layer,
)
from kit.papers.layers import Drawn, Layer, Runs, by_scale, measured, on_clusters, scale_of
from kit.papers.panels import legend_above, pairs, picture
from kit.run import Run

REPLICAS = {"175B": (1, 2, 4, 8, 16), "1T": (1, 2, 3, 4, 6)}
STRONG_BATCH = 8064
"""Sequences. The paper's 8,000 is remembered only; this is the next number that 6 and 16
replicas divide."""
BATCHES = (1008, 1536, 2016, 4032, STRONG_BATCH, 16128)
SPEC_1T = ModelSpec.preset(MODELS["1T"])
TOKENS = 20e12
YEAR = 365.25 * 86_400
COST_REPLICAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def throughput_figure(runs: Runs = (), *, dress: Sequence[Mapping[str, Any]]) -> Drawn:
    """Returns HFU and MFU of the three sizes beside the paper's headline numbers, and the table;
    `dress` as `picture` takes it.
    """
    names = list(MODELS)
    specs = [ModelSpec.preset(preset) for preset in MODELS.values()]
    cases = [
        (spec, layouts_of(spec, [recipe_plan(name)]))
        for spec, name in zip(specs, names, strict=True)
    ]
    sizes = np.log([spec.num_params for spec in specs])
    panels = {
        basis: [
            Layer.published(FACTS[series], label="paper"),
            throughput_layer("modelled", range(3), cases, basis=counted, names=names),
        ]
        for basis, series, counted in (
            ("HFU", "throughput_percent", FlopBasis.MEGATRON_RECOMPUTE),
            ("MFU", "throughput_mfu_percent", FlopBasis.MODEL),
        )
    }
    told = compared(*panels["HFU"])
    panels["HFU"] += on_clusters(
        runs,  # between the three sizes, by the logarithm of their parameters
        x=lambda run: float(np.interp(np.log(run.spec.num_params), sizes, np.arange(3.0))),
        y=run_hfu_percent,
    )
    return picture(
        panels,
        [{"ticks": dict(enumerate(names)), **style} for style in dress],
        "Per cent of peak: HFU counts the recomputed forward pass, MFU does not.",
        *told,
        notes=[
            (
                "The headline is taken as HFU, since the authors' code prints that; as MFU it is"
                " derived."
            ),
            (
                "Layouts and batches of the authors' launch scripts; the peak of a GCD is 191.5"
                " TFLOP/s; bars are 90 % intervals. Your runs: HFU."
            ),
        ],
        also=lambda figure: legend_above(figure, 3),
        height=4.4,
    )


def scaling_figure(runs: Runs = (), *, kind: str, dress: Mapping[str, Mapping[str, Any]]) -> Drawn:
    """Returns throughput per GCD relative to one replica, the batch growing with the replicas
    (`weak`), or constant, with LUMI's logged runs beside (`strong`); and the table.

    `dress` is that of each panel, as `picture` takes it, without what own runs decide.
    """
    known = [fact.replace(x=fact.x.split()[-1]) for fact in FACTS[f"{kind}_scaling_percent"]]
    published = Layer.published(known, label="paper")
    lines = [efficiency_layer(model, kind) for model in REPLICAS]
    panels = {"paper": [published, *lines]}
    if kind == "strong":
        panels["paper"] += lumi_layers()
        levels = [
            Layer.published([fact], label=f"paper: {fact.number:.0f}", level=True) for fact in known
        ]
        panels["batch"] = [*levels, *map(batch_layer, REPLICAS)]
    own = _own_panels(runs, kind)
    panels |= own
    beside = kind == "weak" and len(panels) == 2
    mosaic = "aab" if beside else pairs(len(panels) - 1, under_one=True)
    heights = [4, *[3] * mosaic.count(";")]
    caption, notes = _told(kind, published, lines)
    return picture(
        panels,
        [dress[name] if name not in own else _ends(own[name], **dress[name]) for name in panels],
        *caption,
        notes=notes,
        also=lambda figure: legend_above(figure, 3),
        mosaic=mosaic,
        height=0.9 * sum(heights) + 1.0,
        height_ratios=heights,
    )


def efficiency_layer(model: str, kind: str) -> Layer:
    """Returns modelled scaling efficiency, %, of `175B` or `1T`: throughput per GCD over that of
    one replica.

    It is the authors' layout, with their batch per replica (`weak`) or one batch (`strong`).
    """
    batch = {} if kind == "weak" else {"global_batch_size": STRONG_BATCH}
    plans = [recipe_plan(model, replicas, **batch) for replicas in REPLICAS[model]]
    layouts = layouts_of(ModelSpec.preset(MODELS[model]), plans)
    return Layer.modelled(model, layouts.num_devices, *_efficiency(layouts), error=model_error())


def lumi_layers() -> list[Layer]:
    """Returns LUMI's logged strong scaling of 176B, %, and the model's (fitted to these runs
    among others).
    """
    steps = FACTS["lumi_step_s"]
    first = min(steps, key=lambda fact: float(fact.x))
    relative = [
        fact.replace(
            value=str(100 * first.number * float(first.x) / (fact.number * float(fact.x))),
            known="derived",
        )
        for fact in steps
    ]
    log = Layer.published(relative, label="LUMI 176B, logs")
    plans = [lumi_plan(int(devices) // 64) for devices in log.x]
    ends = _efficiency(Layouts.of(LUMI, plans, flash_attention=0, native=False))
    return [log, Layer.modelled("LUMI 176B", log.x, *ends, error=model_error())]


def batch_layer(model: str) -> Layer:
    """Returns modelled efficiency on all replicas against the batch: what the unknown batch of
    the paper decides.
    """
    spec = ModelSpec.preset(MODELS[model])
    most = REPLICAS[model][-1]
    batches = [batch for batch in BATCHES if batch % most == 0]
    ends = []
    for batch in batches:
        plans = [recipe_plan(model, n, global_batch_size=batch) for n in (1, most)]
        ends.append([column[1] for column in _efficiency(layouts_of(spec, plans))])
    label = f"{model}, {most} replicas"
    return Layer.modelled(label, batches, *np.transpose(ends), error=model_error())


def _efficiency(layouts: Layouts) -> tuple[Array, Array, Array]:
    """Returns (median, low, high) of throughput per device over that of the first layout, %,
    which is 100 exactly.
    """
    middle, low, high = ratio_interval(100 * relative_rates(layouts))
    low[0] = high[0] = 100.0
    return middle, low, high


def _own_panels(runs: Runs, kind: str) -> dict[str, list[Layer]]:
    """Returns a panel for runs of clusters: a line for runs that differ in nothing but their size,
    tokens/s and device in % of the smallest.
    """
    weak = kind == "weak"
    groups: dict[tuple, list[Run]] = {}
    for run in by_scale(runs)["cluster"]:
        batch = run.plan.global_batch_size / (run.plan.data_parallel if weak else 1)
        shape = (run.spec.num_layers, run.spec.hidden_size, run.spec.sequence_length)
        groups.setdefault((scale_of(run), shape, batch), []).append(run)
    panels: dict[str, list[Layer]] = {}
    for (scale, _, batch), group in groups.items():
        size = group[0].spec.num_params / 1e9
        each = " a replica" if weak else ""
        lines = measured(
            group,
            x=lambda run: run.plan.num_devices,
            y=tokens_per_s_and_device,
            line=True,
            label=f"{size:.3g}B, batch {batch:,.0f}{each}",
        )
        found = [line.times(100 / line.y[0]) for line in lines if len(set(line.x)) > 1]
        if found:
            panels.setdefault(scale, []).extend(found)
    return panels


def _ends(layers: list[Layer], title: str, **shown: Any) -> dict[str, Any]:
    """Returns how a panel of own runs is dressed: its title has the last line's last point."""
    places = sorted({int(x) for layer in layers for x in layer.x})
    return {
        **shown,
        "title": f"{title}: {layers[-1].y[-1]:.0f} %",
        "ylim": (0, 1.1 * max(float(layer.high.max()) for layer in layers)),
        "xlim": (places[0] / 1.3, places[-1] * 1.3),
        "ticks": places,
    }


def _told(
    kind: str, published: Layer, lines: list[Layer]
) -> tuple[tuple[str, str, str], list[str]]:
    """Returns the caption and the notes."""
    last = [(line.x[-1], line.y[-1], line.low[-1], line.high[-1]) for line in lines]
    ends = Layer.modelled("ends", *np.transpose(last), error=model_error())
    inside, missed = compared(dataclasses.replace(published, names=tuple(REPLICAS)), ends)
    if kind == "weak":
        shows = "Throughput per GCD as the batch grows with the replicas, % of one replica."
        note = "Batches per replica of the authors' scripts (320 and 512 sequences)."
        return (shows, inside, missed), [note]
    log, line = lumi_layers()
    met = np.sum((line.low <= log.y) & (log.y <= line.high))
    batches = [
        float(np.interp(y, layer.y, layer.x))
        for y, layer in zip(published.y, map(batch_layer, REPLICAS), strict=True)
    ]
    return (
        f"Throughput per GCD at a fixed batch ({STRONG_BATCH:,} sequences), % of one replica.",
        f"{met} of LUMI's {len(log.y)} logged points, whose batch is known, lie in the interval.",
        f"{inside} {missed}".strip(),
    ), [
        (
            "The paper's batch of 8,000 is remembered, not read, as is where its curve starts; here"
            " at one replica."
        ),
        (
            f"The model gives the paper's numbers at {batches[0]:,.0f} and {batches[1]:,.0f}"
            " sequences a step."
        ),
        "LUMI, whose runs the model knows: 1,024 sequences, from 128 GCDs.",
    ]


# 1T parameters on 20T tokens ----------------------------------------------------------------------


def cost_figure(runs: Runs = (), *, dress: Sequence[Mapping[str, Any]]) -> Drawn:
    """Returns years and device-hours of 1T parameters on 20T tokens against the number of GCDs,
    and the table; `dress` as `picture` takes it, without the ends of y.
    """
    years = years_layer()
    read = Layer.published([_published_years()], label="from the paper's rate")
    spent, hours = (layer.times(layer.x * YEAR / 3600e6) for layer in (read, years))
    at = int(np.flatnonzero(years.x == 3072)[0])
    own = on_clusters(runs, x=lambda run: run.plan.num_devices, y=_years_of_run)
    return picture(
        {"years": [read, years, *own], "million GCD-hours": [spent, hours]},
        [dress[0], {**dress[1], "ylim": (0, 1.1 * float(hours.high.max()))}],
        f"1T parameters on 20T tokens by GCDs, {STRONG_BATCH:,} sequences a step, no restarts.",
        f"On 3,072 GCDs {years.y[at]:.0f} years ({years.low[at]:.0f} to {years.high[at]:.0f}),"
        f" {hours.y[at]:,.0f} million GCD-hours.",
        " ".join(filter(None, compared(read, years))),
        notes=_cost_notes(years, float(years.y[at])),
        also=lambda figure: legend_above(figure, 3),
        height=4.2,
    )


def years_layer() -> Layer:
    """Returns modelled years of 1T on 20T tokens, the authors' layout on 1 to 64 replicas at one
    batch.
    """
    plans = [recipe_plan("1T", n, global_batch_size=STRONG_BATCH) for n in COST_REPLICAS]
    layouts = layouts_of(SPEC_1T, plans)
    found = calibration().predict(layouts)
    steps = TOKENS / (STRONG_BATCH * SPEC_1T.sequence_length)
    years = [steps * seconds / YEAR for seconds in (found.total_s, found.low_s, found.high_s)]
    return Layer.modelled("1T, TP 8, PP 64", layouts.num_devices, *years, error=model_error())


def _cost_notes(years: Layer, on_3072: float) -> list[str]:
    """Returns on how many GCDs it would be done within a year, what that costs, and the paper's
    count of FLOPs.
    """
    exaflop = FACTS.value("training_exaflop", "1T on 20T tokens")
    own = SPEC_1T.flops_per_token(FlopBasis.SIX_N) * TOKENS / 1e18
    return [
        (
            f"Within a year, {on_3072 * 3072:,.0f} GCDs would have to work at that rate; at"
            f" this batch {int(years.x[-1]):,} of them, most of Frontier, take"
            f" {years.y[-1]:.1f} years. A node has 8 GCDs."
        ),
        "Without energy, at 1 USD a GCD-hour (b) reads as million USD; Frontier has no list price.",
        (
            f"6 x parameters x tokens is {own / 1e6:.0f} million exaFLOP, as in the abstract"
            f" ({exaflop / 1e6:.0f})."
        ),
        "Runs of your own are scaled to this work by their model FLOP/s.",
    ]


def _published_years() -> Fact:
    """Returns years on 3,072 GCDs at the paper's 61.2 TFLOP/s per GCD, which count
    recomputation.
    """
    rate = FACTS.only("throughput_tflops", "1T")
    flops = SPEC_1T.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE)
    tokens_per_s = rate.number * 1e12 * 3072 / flops
    return rate.replace(x="3072", value=str(TOKENS / tokens_per_s / YEAR), unit="years")


def _years_of_run(run: Run) -> np.ndarray:
    """Returns years that 1T on 20T tokens would take at the model FLOP/s of each step of a run."""
    rate = run.metrics().tokens_per_s * run.spec.flops_per_token()
    return SPEC_1T.flops_per_token() * TOKENS / rate / YEAR
