"""Frontier, section V: throughput of the three sizes, and weak and strong scaling to 1,024 and
3,072 GCDs.
"""

import dataclasses
from typing import Any

import numpy as np

from kit.estimate.theory.layouts import Array, Layouts
from kit.papers.frontier_demo import MICROBATCHES, run_hfu_percent, select, tokens_per_s_and_device
from kit.papers.frontier_model import (
    FACTS,
    LUMI,
    MODELS,
    compared,
    layouts_of,
    model_error,
    paper_plan,
    ratio_interval,
    recipe_plan,
    relative_rates,
    throughput_layer,
)
from kit.papers.layers import Layer, Rows, Runs, measured, on_clusters, scale_of
from kit.papers.panels import pairs, picture
from kit.run import Run
from kit.spec import FlopBasis, ModelSpec

REPLICAS = {"175B": (1, 2, 4, 8, 16), "1T": (1, 2, 3, 4, 6)}
STRONG_BATCH = 8064
"""Sequences. The paper's 8,000 is remembered only; this is the next number that 6 and 16
replicas divide."""
BATCHES = (1008, 1536, 2016, 4032, STRONG_BATCH, 16128)


def throughput_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns HFU and MFU of the three sizes beside the paper's headline numbers, and the table."""
    names = list(MODELS)
    specs = [ModelSpec.preset(preset) for preset in MODELS.values()]
    cases = [
        (spec, layouts_of(spec, [recipe_plan(name)]))
        for spec, name in zip(specs, names, strict=True)
    ]
    published = Layer.published(FACTS["throughput_percent"], label="paper's headline")
    derived = Layer.published(FACTS["throughput_mfu_percent"], label="paper, as MFU (derived)")
    hfu = throughput_layer("HFU", range(3), cases, names=names)
    mfu = throughput_layer("MFU", range(3), cases, basis=FlopBasis.MODEL, names=names)
    sizes = np.log([spec.num_params for spec in specs])
    own = on_clusters(
        runs,  # between the three sizes, by the logarithm of their parameters
        x=lambda run: float(np.interp(np.log(run.spec.num_params), sizes, np.arange(3.0))),
        y=run_hfu_percent,
    )
    style = {
        "ticks": dict(enumerate(names)),
        "xlim": (-0.4, 2.6),
        "ylim": (0, 50),
        "title": "% of the peak of a GCD (191.5 TFLOP/s)",
        "legend": {"ncols": 2, "loc": "lower left"},
    }
    return picture(
        [published, derived, hfu, mfu, *own],
        [style],
        "Per cent of peak: HFU counts the recomputed forward pass, MFU does not.",
        *compared(published, hfu),
        notes=[
            "The headline is taken as HFU, since the authors' code prints that.",
            "Layouts and batches of the authors' launch scripts. Your runs: HFU.",
        ],
        height=4.6,
    )


def scaling_figure(runs: Runs = (), *, kind: str) -> tuple[Any, Rows]:
    """Returns throughput per GCD relative to one replica, the batch growing with the replicas
    (`weak`), or constant, with LUMI's logged runs beside (`strong`); and the table.
    """
    known = [fact.replace(x=fact.x.split()[-1]) for fact in FACTS[f"{kind}_scaling_percent"]]
    published = Layer.published(known, label="paper: 175B on 1,024, 1T on 3,072")
    lines = [efficiency_layer(model, kind) for model in REPLICAS]
    panels = {"paper": [published, *lines]}
    if kind == "strong":
        panels["paper"] += lumi_layers()
        levels = [
            Layer.published([fact], label=f"paper: {fact.number:.0f}", level=True) for fact in known
        ]
        panels["batch"] = [*levels, *map(batch_layer, REPLICAS)]
    panels |= _own_panels(runs, kind)
    mosaic = pairs(len(panels) - 1, under_one=True)
    heights = [4, *[3] * mosaic.count(";")]
    caption, notes = _told(kind, published, lines)
    return picture(
        panels,
        [_dress(name, kind, layers) for name, layers in panels.items()],
        *caption,
        notes=notes,
        mosaic=mosaic,
        height=0.9 * sum(heights) + 0.8,
        height_ratios=heights,
    )


def efficiency_layer(model: str, kind: str) -> Layer:
    """Returns modelled scaling efficiency, %, of `175B` or `1T`: throughput per GCD over that of
    one replica.

    It is the authors' layout, with their batch per replica (`weak`) or one batch (`strong`).
    """
    script = recipe_plan(model)
    share = script.global_batch_size // script.data_parallel
    plans = [
        recipe_plan(
            model, data_parallel=n, global_batch_size=n * share if kind == "weak" else STRONG_BATCH
        )
        for n in REPLICAS[model]
    ]
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
    plans = [
        paper_plan(
            tensor_parallel=8,
            pipeline_parallel=8,
            data_parallel=int(fact.x) // 64,
            micro_batch_size=2,
            global_batch_size=1024,
        )
        for fact in steps
    ]
    layouts = Layouts.of(LUMI, plans, flash_attention=0, native=False)
    log = Layer.published(relative, label="LUMI 176B, logs")
    return [log, Layer.modelled("LUMI 176B", log.x, *_efficiency(layouts), error=model_error())]


def batch_layer(model: str) -> Layer:
    """Returns modelled efficiency on all replicas against the batch: what the unknown batch of
    the paper decides.
    """
    spec, most = ModelSpec.preset(MODELS[model]), REPLICAS[model][-1]
    batches = [batch for batch in BATCHES if batch % most == 0]
    ends = []
    for batch in batches:
        plans = [recipe_plan(model, data_parallel=n, global_batch_size=batch) for n in (1, most)]
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
    """Returns a panel for this machine and one for clusters: a line for runs that differ in
    nothing but their size.
    """
    groups: dict[tuple, list[Run]] = {}
    kept = "num_microbatches" if kind == "weak" else "global_batch_size"
    fields = {"tensor_parallel": 1, "pipeline_parallel": 1, "micro_batch_size": 1}
    for run in select(runs, **fields, **{kept: MICROBATCHES}):
        batch = run.plan.global_batch_size / (run.plan.data_parallel if kind == "weak" else 1)
        shape = (run.spec.num_layers, run.spec.hidden_size, run.spec.sequence_length)
        groups.setdefault((scale_of(run), shape, batch), []).append(run)
    panels: dict[str, list[Layer]] = {}
    for (scale, _, batch), group in groups.items():
        size, each = group[0].spec.num_params / 1e9, " a replica" if kind == "weak" else ""
        for layer in measured(
            group,
            x=lambda run: run.plan.num_devices,
            y=tokens_per_s_and_device,
            line=True,
            label=f"{size:.3g}B, batch {batch:,.0f}{each}",
        ):
            if len(set(layer.x)) > 1:
                panels.setdefault(scale, []).append(layer)
    return panels


def _dress(name: str, kind: str, layers: list[Layer]) -> dict[str, Any]:
    """Returns scale, ticks and title of a panel."""
    places = sorted({int(x) for layer in layers for x in layer.x})
    top = 1.25 * max(float(layer.high.max()) for layer in layers)
    own = {"ylim": (0, top), "ticks": places}
    legend: dict[str, Any] = {"loc": "lower left"}
    share = {"ylim": (0, 119), "xscale": "log", "legend": legend}
    return {
        "paper": share
        | {
            "title": f"{kind.capitalize()} scaling, % of one replica",
            "xlabel": "GCDs",
            "ticks": (64, 128, 256, 512, 1024, 3072),
            "legend": legend | {"ncols": 2},
        },
        "batch": share
        | {
            "title": "the same by batch",
            "xlabel": "sequences a step",
            "ticks": (1008, 4032, 16128),
        },
        "demo": own | {"title": "here: tokens/s per core", "xlabel": "processes"},
        "cluster": own
        | {"title": "your runs: tokens/s per device", "xlabel": "devices", "legend": legend},
    }[name]


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
    met = int(np.sum((line.low <= log.y) & (log.y <= line.high)))
    batches = [
        float(np.interp(y, layer.y, layer.x))
        for y, layer in zip(published.y, map(batch_layer, REPLICAS), strict=True)
    ]
    caption = (
        f"Throughput per GCD at a fixed batch ({STRONG_BATCH:,} sequences), % of one replica.",
        f"{met} of LUMI's {len(log.y)} logged points, whose batch is known, lie in the interval.",
        f"{inside} {missed}".strip(),
    )
    return caption, [
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
