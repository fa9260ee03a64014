"""Frontier, section V: throughput, weak and strong scaling, and the time to train 1T parameters on
20T tokens.

Throughput is shown for the three model sizes (22B, 175B, 1T). Scaling goes up to 1,024 GCDs for
175B and up to 3,072 GCDs for 1T.
"""

import dataclasses

import numpy as np

from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.theory.layouts import Array, Layouts
from kit.papers.facts import PaperFact
from kit.papers.frontier_demo import run_hfu_percent, tokens_per_s_per_device
from kit.papers.frontier_model import (
    FACTS,
    LUMI,
    MODELS,
    compared,
    frontier_calibration,
    frontier_layouts,
    lumi_plan,
    model_error,
    ratio_interval,
    recipe_plan,
    relative_rates,
    throughput_layer,
)
from kit.papers.layers import FigureLayer, Runs, by_scale, measured_layers, measured_on_clusters
from kit.papers.panels import FigureContent
from kit.run import Run
from kit.show.results import parameters_text

REPLICAS = {"175B": (1, 2, 4, 8, 16), "1T": (1, 2, 3, 4, 6)}
"""Maps each model to the numbers of replicas in the figures of weak and strong scaling."""
STRONG_BATCH = 8064
"""Global batch size in the figure of strong scaling, in sequences. The number 8,000 is attributed
to the paper but was found in no source that could be checked. 8,064 is the next number that is
divisible by all numbers of replicas in `REPLICAS` and `COST_REPLICAS`."""
BATCHES = (1008, 1536, 2016, 4032, STRONG_BATCH, 16128)
"""Global batch sizes, in sequences, at which the scaling efficiency is modelled to show its
dependence on the batch."""
SPEC_1T = ModelSpec.preset(MODELS["1T"])
TOKENS = 20e12
"""Number of tokens on which the 1T model is trained in the figure of training years."""
YEAR = 365.25 * 86_400
"""Seconds in a year."""
COST_REPLICAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of replicas of the 1T model in the figure of training years and device-hours."""


def throughput_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of HFU and MFU in %, as modelled for the three model sizes, beside numbers
    from the paper's abstract.
    """
    names = [*MODELS]
    specs = [ModelSpec.preset(preset) for preset in MODELS.values()]
    cases = [
        (spec, frontier_layouts(spec, [recipe_plan(name)]))
        for spec, name in zip(specs, names, strict=True)
    ]
    places = range(len(names))
    hfu = throughput_layer("modelled", places, cases, names=names)
    mfu = throughput_layer("modelled", places, cases, basis=FlopBasis.MODEL, names=names)
    published_hfu = FigureLayer.published(FACTS["throughput_percent"], label="paper")
    published_mfu = FigureLayer.published(FACTS["throughput_mfu_percent"], label="paper")
    inside, missed = compared(published_hfu, hfu)
    log_sizes = np.log([spec.num_params for spec in specs])
    own = measured_on_clusters(
        # The three model sizes have x = 0, 1 and 2. The x of a user's run is interpolated between
        # them by the logarithm of its number of parameters.
        runs,
        x=lambda run: float(np.interp(np.log(run.spec.num_params), log_sizes, np.arange(3.0))),
        y=run_hfu_percent,
    )
    ticks = dict(enumerate(names))
    spec_175b = ModelSpec.preset(MODELS["175B"])
    executed = spec_175b.hardware_flops_per_token("full", whole=False)
    executed_ratio = executed / spec_175b.flops_per_token()
    return FigureContent(
        panels={"HFU": [published_hfu, hfu, *own], "MFU": [published_mfu, mfu]},
        values={"inside": inside, "missed": missed, "executed_ratio": f"{executed_ratio:.2f}"},
        ticks={"HFU": ticks, "MFU": ticks},
    )


def scaling_content(runs: Runs = (), *, kind: str) -> FigureContent:
    """Returns the figure of weak or strong scaling: throughput per GCD in % of the throughput per
    GCD with one replica.

    `kind` is `weak`, where the batch grows with the replicas, or `strong`, where the batch is
    constant. The figure of strong scaling also shows LUMI's logged runs, and has a panel of
    efficiency against the batch.
    """
    facts = [fact.replace(x=fact.x.split()[-1]) for fact in FACTS[f"{kind}_scaling_percent"]]
    published = FigureLayer.published(facts, label="paper")
    lines = [efficiency_layer(model, kind) for model in REPLICAS]
    last_points = [(line.x[-1], line.y[-1], line.low[-1], line.high[-1]) for line in lines]
    at_most_replicas = FigureLayer.modelled("", *np.transpose(last_points), error=model_error())
    inside, missed = compared(
        dataclasses.replace(published, names=tuple(REPLICAS)), at_most_replicas
    )
    panels = {"paper": [published, *lines]}
    values = {"inside": inside, "missed": missed, "batch": f"{STRONG_BATCH:,}"}
    if kind == "strong":
        # The batch is remembered, so a number outside the interval is not missed.
        values["missed"] = missed.replace("MISSED:", "Not in:")
        log, lumi = lumi_layers()
        panels["paper"] += [log, lumi]
        levels = [
            FigureLayer.published([fact], label=f"paper: {fact.number:.0f}", level=True)
            for fact in facts
        ]
        by_batch = [batch_layer(model) for model in REPLICAS]
        panels["batch"] = [*levels, *by_batch]
        values["lumi_points"] = str(len(log.y))
        values["lumi_met"] = str(np.sum((lumi.low <= log.y) & (log.y <= lumi.high)))
        for model, y, layer in zip(REPLICAS, published.y, by_batch, strict=True):
            values[f"batch_{model}"] = f"{np.interp(y, layer.y, layer.x):,.0f}"
    own = _own_scaling(runs, kind)
    if own:
        panels["cluster"] = own
        values["own_percent"] = f"{own[-1].y[-1]:.0f}"
    return FigureContent(panels=panels, values=values)


def efficiency_layer(model: str, kind: str) -> FigureLayer:
    """Returns a curve (figure layer) of the modelled scaling efficiency in % of the model `175B` or
    `1T`, against the number of GCDs. The efficiency is the throughput per GCD, relative to one
    replica.

    The layout is the authors' layout. If `kind` is `weak`, each replica has the authors' batch per
    replica. If `kind` is `strong`, the global batch is constant.
    """
    batch = {} if kind == "weak" else {"global_batch_size": STRONG_BATCH}
    plans = [recipe_plan(model, replicas, **batch) for replicas in REPLICAS[model]]
    layouts = frontier_layouts(ModelSpec.preset(MODELS[model]), plans)
    return FigureLayer.modelled(
        model, layouts.num_devices, *_efficiency(layouts), error=model_error()
    )


def lumi_layers() -> list[FigureLayer]:
    """Returns two figure layers with the strong scaling efficiency of LUMI's 176B model, in %. The
    first is computed from the published logs, the second is modelled.

    The planner's model is fitted to runs of LUMI that include these runs.
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
    log = FigureLayer.published(relative, label="LUMI 176B, logs")
    plans = [lumi_plan(int(devices) // 64) for devices in log.x]
    ends = _efficiency(Layouts.of(LUMI, plans, flash_attention=0, native=False))
    return [log, FigureLayer.modelled("LUMI 176B", log.x, *ends, error=model_error())]


def batch_layer(model: str) -> FigureLayer:
    """Returns a curve (figure layer) of the modelled scaling efficiency of a model in %, against
    the global batch size. The number of replicas is the largest in `REPLICAS`.

    The curve shows how strongly the efficiency depends on the batch, since the batch of the paper
    is unknown.
    """
    spec = ModelSpec.preset(MODELS[model])
    most = REPLICAS[model][-1]
    batches = [batch for batch in BATCHES if batch % most == 0]
    ends = []
    for batch in batches:
        plans = [recipe_plan(model, n, global_batch_size=batch) for n in (1, most)]
        ends.append([column[1] for column in _efficiency(frontier_layouts(spec, plans))])
    label = f"{model}, {most} replicas"
    return FigureLayer.modelled(label, batches, *np.transpose(ends), error=model_error())


def _efficiency(layouts: Layouts) -> tuple[Array, Array, Array]:
    """Returns (median, low, high) of throughput per device, in % of the first layout. The first
    layout has exactly 100 %, without an interval.
    """
    middle, low, high = ratio_interval(100 * relative_rates(layouts))
    low[0] = high[0] = 100.0
    return middle, low, high


def _own_scaling(runs: Runs, kind: str) -> list[FigureLayer]:
    """Returns one curve (figure layer) for each scaling series among the user's cluster runs. y is
    the measured throughput per device, in % of the run with the fewest devices.

    Runs belong to one series if their models have equal shapes. For strong scaling, their global
    batches must be equal too. For weak scaling, their batches per replica must be equal.
    """
    is_weak = kind == "weak"
    groups: dict[tuple, list[Run]] = {}
    for run in by_scale(runs)["cluster"]:
        batch = run.plan.global_batch_size
        if is_weak:
            batch /= run.plan.data_parallel
        shape = (run.spec.num_layers, run.spec.hidden_size, run.spec.sequence_length)
        groups.setdefault((shape, batch), []).append(run)
    lines = []
    for (_, batch), group in groups.items():
        label = f"{parameters_text(group[0].spec.num_params)}, batch {batch:,.0f}"
        if is_weak:
            label += " a replica"
        for line in measured_layers(
            group,
            x=lambda run: run.plan.num_devices,
            y=tokens_per_s_per_device,
            line=True,
            label=label,
        ):
            if len(set(line.x)) > 1:
                lines.append(line.times(100 / line.y[0]))
    return lines


# 1T parameters on 20T tokens ----------------------------------------------------------------------


def years_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of the time to train 1T parameters on 20T tokens, in years and in million
    device-hours, against the number of GCDs.
    """
    years = years_layer()
    published = FigureLayer.published([_published_years()], label="from the paper's rate")
    published_hours = published.times(published.x * YEAR / 3600e6)
    hours = years.times(years.x * YEAR / 3600e6)
    own = measured_on_clusters(runs, x=lambda run: run.plan.num_devices, y=_years_of_run)
    [place] = np.flatnonzero(years.x == 3072)
    exaflop = FACTS.value("training_exaflop", "1T on 20T tokens")
    own_exaflop = SPEC_1T.flops_per_token(FlopBasis.SIX_N) * TOKENS / 1e18
    inside, missed = compared(published, years)
    return FigureContent(
        panels={
            "years": [published, years, *own],
            "million GCD-hours": [published_hours, hours],
        },
        values={
            "batch": f"{STRONG_BATCH:,}",
            "years": f"{years.y[place]:.0f}",
            "low": f"{years.low[place]:.0f}",
            "high": f"{years.high[place]:.0f}",
            "hours": f"{hours.y[place]:,.0f}",
            "inside": inside,
            "missed": missed,
            "gcds_for_a_year": f"{years.y[place] * 3072:,.0f}",
            "most_gcds": f"{int(years.x[-1]):,}",
            "least_years": f"{years.y[-1]:.1f}",
            "million_exaflop": f"{own_exaflop / 1e6:.0f}",
            "stated_exaflop": f"{exaflop / 1e6:.0f}",
        },
    )


def years_layer() -> FigureLayer:
    """Returns a curve (figure layer) of the modelled years to train the 1T model on 20T tokens,
    against the number of GCDs.

    The authors' layout is used on 1 to 128 replicas, with a constant global batch.
    """
    plans = [recipe_plan("1T", n, global_batch_size=STRONG_BATCH) for n in COST_REPLICAS]
    layouts = frontier_layouts(SPEC_1T, plans)
    found = frontier_calibration().predict(layouts)
    steps = TOKENS / (STRONG_BATCH * SPEC_1T.sequence_length)
    years = [steps * seconds / YEAR for seconds in (found.total_s, found.low_s, found.high_s)]
    return FigureLayer.modelled("1T, TP 8, PP 64", layouts.num_devices, *years, error=model_error())


def _published_years() -> PaperFact:
    """Returns the years to train on 3,072 GCDs, derived from the paper's 61.2 TFLOP/s per GCD.
    These FLOPs include recomputation.
    """
    rate = FACTS.only("throughput_tflops", "1T")
    flops = SPEC_1T.flops_per_token(FlopBasis.MEGATRON_RECOMPUTE)
    tokens_per_s = rate.number * 1e12 * 3072 / flops
    return rate.replace(x="3072", value=str(TOKENS / tokens_per_s / YEAR), unit="years")


def _years_of_run(run: Run) -> np.ndarray:
    """Returns, for each step of a run, the years to train 1T on 20T tokens at the model FLOP/s of
    this step.
    """
    rate = run.metrics().tokens_per_s * run.spec.flops_per_token()
    return SPEC_1T.flops_per_token() * TOKENS / rate / YEAR
