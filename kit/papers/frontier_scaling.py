"""Frontier, section V: throughput of the three sizes, and weak and strong scaling to 1,024 and
3,072 GCDs.
"""

import dataclasses
from typing import Any

import numpy as np

from kit.estimate.theory.layouts import Array, Layouts
from kit.papers.frontier_demo import MICROBATCHES, select
from kit.papers.frontier_model import (
    LUMI,
    MODELS,
    compared,
    facts,
    layouts_of,
    model_error,
    paper_plan,
    ratio_interval,
    step_draws,
    throughput_layer,
)
from kit.papers.layers import (
    Layer,
    Runs,
    hfu_percent,
    measured,
    on_clusters,
    scale_of,
    tokens_per_s_and_device,
)
from kit.papers.panels import draw, finish, pairs
from kit.plan import Plan
from kit.run import Run
from kit.show.style import Rows, new_figure
from kit.show.theme import GREY
from kit.spec import FlopBasis, ModelSpec

REPLICAS = {"175B": (1, 2, 4, 8, 16), "1T": (1, 2, 3, 4, 6)}
STRONG_BATCH = 8064
"""Sequences. The paper's 8,000 is remembered only; this is the next number that 6 and 16
replicas divide."""
BATCHES = (1008, 1536, 2016, 4032, STRONG_BATCH, 16128)


def recipe_plan(model: str, **changes: Any) -> Plan:
    """Returns the plan of the authors' own launch script for `22B`, `175B` or `1T`, with some
    changes.

    Without `data_parallel` among them, it follows from the script's number of GCDs.
    """
    known = facts()
    names = (
        "tensor_parallel",
        "pipeline_parallel",
        "micro_batch_size",
        "zero_stage",
        "global_batch_size",
    )
    fields = {name: int(known.value(f"recipe_{name}", model)) for name in names}
    held = fields["tensor_parallel"] * fields["pipeline_parallel"]
    return paper_plan(
        **fields | {"data_parallel": int(known.value("recipe_devices", model)) // held} | changes
    )


def throughput_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns HFU and MFU of the three sizes beside the paper's headline numbers, and the table."""
    known = facts()
    published = [
        Layer.published(known["throughput_percent"], label="paper's headline"),
        Layer.published(known["throughput_mfu_percent"], label="paper, as MFU (derived)"),
    ]
    modelled = [_by_size("HFU", FlopBasis.MEGATRON_RECOMPUTE), _by_size("MFU", FlopBasis.MODEL)]
    layers = [*published, *modelled, *on_clusters(runs, x=_size_place, y=hfu_percent)]
    with new_figure(height=4.6) as (figure, axis):
        draw(axis, layers)
        axis.set_xticks(range(len(MODELS)), list(MODELS))
        axis.set(xlim=(-0.4, 2.6), ylim=(0, 50), title="% of the peak of a GCD (191.5 TFLOP/s)")
        axis.legend(ncols=2, loc="lower left")
        return finish(
            figure,
            layers,
            "Per cent of peak: HFU counts the recomputed forward pass, MFU does not.",
            *compared(published[0], modelled[0]),
            notes=[
                "The headline is taken as HFU, since the authors' code prints that.",
                "Layouts and batches of the authors' launch scripts. Your runs: HFU.",
            ],
        )


def weak_scaling_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns throughput per GCD with the batch growing with the replicas, relative to one
    replica; and the table.
    """
    return _scaling(runs, "weak", {"micro_batch_size": 1, "num_microbatches": MICROBATCHES})


def strong_scaling_figure(runs: Runs = ()) -> tuple[Any, Rows]:
    """Returns the same at a constant batch, with LUMI's logged runs beside; and the table."""
    return _scaling(runs, "strong", {"micro_batch_size": 1, "global_batch_size": MICROBATCHES})


def efficiency_layer(model: str, kind: str) -> Layer:
    """Returns modelled scaling efficiency, %, of `175B` or `1T`: throughput per GCD over that of
    one replica.
    """
    layouts = layouts_of(ModelSpec.preset(MODELS[model]), scaling_plans(model, kind))
    return Layer.modelled(model, layouts.num_devices, *_efficiency(layouts), error=model_error())


def scaling_plans(model: str, kind: str) -> list[Plan]:
    """Returns the authors' layout on 1, 2, ... replicas: their batch per replica (`weak`) or one
    batch (`strong`).
    """
    each = recipe_plan(model)
    share = each.global_batch_size // each.data_parallel
    return [
        recipe_plan(
            model, data_parallel=n, global_batch_size=n * share if kind == "weak" else STRONG_BATCH
        )
        for n in REPLICAS[model]
    ]


def lumi_layers() -> list[Layer]:
    """Returns LUMI's logged strong scaling of 176B, %, and the model's (fitted to these runs
    among others).
    """
    steps = facts()["lumi_step_s"]
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
    pairs = [
        _efficiency(
            layouts_of(
                spec, [recipe_plan(model, data_parallel=n, global_batch_size=b) for n in (1, most)]
            )
        )
        for b in batches
    ]
    middle, low, high = (np.array([pair[i][1] for pair in pairs]) for i in range(3))
    return Layer.modelled(
        f"{model}, {most} replicas", batches, middle, low, high, error=model_error()
    )


def _efficiency(layouts: Layouts) -> tuple[Array, Array, Array]:
    """Returns (median, low, high) of throughput per device over that of the first layout, %,
    which is 100 exactly.
    """
    rate = layouts.global_batch_size / (step_draws(layouts) * layouts.num_devices)
    middle, low, high = ratio_interval(100 * rate / rate[:, :1])
    low[0] = high[0] = 100.0
    return middle, low, high


def _by_size(label: str, basis: FlopBasis) -> Layer:
    specs = {model: ModelSpec.preset(preset) for model, preset in MODELS.items()}
    cases = [(spec, layouts_of(spec, [recipe_plan(model)])) for model, spec in specs.items()]
    return throughput_layer(label, range(3), cases, basis=basis, names=list(MODELS))


def _size_place(run: Run) -> float:
    """Returns where a run stands between the three sizes, by the logarithm of its parameters."""
    sizes = np.log([ModelSpec.preset(preset).num_params for preset in MODELS.values()])
    return float(np.interp(np.log(run.spec.num_params), sizes, np.arange(3.0)))


def _published_efficiency(kind: str) -> Layer:
    known = [fact.replace(x=fact.x.split()[-1]) for fact in facts()[f"{kind}_scaling_percent"]]
    return Layer.published(known, label="paper: 175B on 1,024, 1T on 3,072")


def _scaling(runs: Runs, kind: str, demo_fields: dict[str, Any]) -> tuple[Any, Rows]:
    published, lines = (
        _published_efficiency(kind),
        [efficiency_layer(model, kind) for model in REPLICAS],
    )
    panels = {"paper": [published, *lines]}
    if kind == "strong":
        panels["paper"] += lumi_layers()
        panels["batch"] = [batch_layer(model) for model in REPLICAS]
    panels |= _own_panels(runs, kind, demo_fields)
    mosaic = pairs(len(panels) - 1, under_one=True)
    heights = [4, *[3] * mosaic.count(";")]
    with new_figure(mosaic, height=0.9 * sum(heights) + 0.8, height_ratios=heights) as (
        figure,
        axes,
    ):
        for axis, (name, layers) in zip(axes, panels.items(), strict=True):
            draw(axis, layers)
            _label(axis, name, kind, layers, published)
        caption, notes = _scaling_caption(kind, published, lines), _scaling_notes(kind, published)
        return finish(figure, panels, *caption, notes=notes)


def _own_panels(runs: Runs, kind: str, demo_fields: dict[str, Any]) -> dict[str, list[Layer]]:
    """Returns a panel for this machine and one for clusters: a line for runs that differ in
    nothing but their size.
    """
    chosen = select(runs, tensor_parallel=1, pipeline_parallel=1, **demo_fields)
    groups: dict[tuple, list[Run]] = {}
    for run in chosen:
        batch = run.plan.global_batch_size / (run.plan.data_parallel if kind == "weak" else 1)
        shape = (run.spec.num_layers, run.spec.hidden_size, run.spec.sequence_length)
        groups.setdefault((scale_of(run), shape, batch), []).append(run)
    panels: dict[str, list[Layer]] = {}
    for (scale, _, batch), group in groups.items():
        label = f"{group[0].spec.num_params / 1e9:.3g}B, batch {batch:,.0f}" + (
            " a replica" if kind == "weak" else ""
        )
        found = measured(
            group,
            x=lambda run: run.plan.num_devices,
            y=tokens_per_s_and_device,
            line=True,
            label=label,
        )
        panels.setdefault(scale, []).extend(layer for layer in found if len(set(layer.x)) > 1)
    return {scale: layers for scale, layers in panels.items() if layers}


def _label(axis: Any, name: str, kind: str, layers: list[Layer], published: Layer) -> None:
    """Gives a panel its scale, ticks and title."""
    places = sorted({int(x) for layer in layers for x in layer.x})
    if name in ("paper", "batch"):
        places = (64, 128, 256, 512, 1024, 3072) if name == "paper" else (1008, 4032, 16128)
        axis.set(xscale="log", ylim=(0, 119))
        axis.legend(loc="lower left", ncols=2 if name == "paper" else 1)
    else:
        axis.set_ylim(0, 1.25 * max(float(layer.high.max()) for layer in layers))
    if name == "cluster":
        axis.legend(loc="lower left")
    axis.set_xticks(places, [f"{place:,}" for place in places])
    axis.minorticks_off()
    titles = {
        "paper": (f"{kind.capitalize()} scaling, % of one replica", "GCDs"),
        "batch": ("the same by batch", "sequences a step"),
        "demo": ("here: tokens/s per core", "processes"),
        "cluster": ("your runs: tokens/s per device", "devices"),
    }
    axis.set(title=titles[name][0], xlabel=titles[name][1])
    if name == "batch":
        for y in published.y:
            axis.axhline(y, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        text = "paper: " + " and ".join(f"{y:.0f}" for y in published.y)
        axis.annotate(
            text,
            (0.98, min(published.y) - 3),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="top",
            color=GREY,
        )


def _scaling_caption(kind: str, published: Layer, lines: list[Layer]) -> tuple[str, str, str]:
    last = [
        [float(getattr(line, name)[-1]) for line in lines] for name in ("x", "y", "low", "high")
    ]
    ends = Layer.modelled("ends", *last, error=model_error())
    inside, missed = compared(dataclasses.replace(published, names=tuple(REPLICAS)), ends)
    if kind == "weak":
        return (
            "Throughput per GCD as the batch grows with the replicas, % of one replica.",
            inside,
            missed,
        )
    log, line = lumi_layers()
    met = int(np.sum((line.low <= log.y) & (log.y <= line.high)))
    return (
        f"Throughput per GCD at a fixed batch ({STRONG_BATCH:,} sequences), % of one replica.",
        f"{met} of LUMI's {len(log.y)} logged points, whose batch is known, lie in the interval."
        f" {inside}".strip(),
        missed,
    )


def _scaling_notes(kind: str, published: Layer) -> list[str]:
    if kind == "weak":
        return ["Batches per replica of the authors' scripts (320 and 512 sequences)."]
    batches = [
        float(np.interp(y, layer.y, layer.x))
        for y, layer in zip(published.y, map(batch_layer, REPLICAS), strict=True)
    ]
    return [
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
