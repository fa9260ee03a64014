"""The model behind the Frontier figures. It is fitted to runs of another machine, so no number of
the paper is in it.

LUMI has the same GPU, MI250X, and its runs used the same code base, Megatron-DeepSpeed. The
efficiencies fitted to LUMI's published runs are used unchanged. Nothing is adjusted to any figure
of the paper.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.fit import published
from kit.estimate.fit.calibrate import (
    Calibration,
    calibrate,
    left_out_ratios,
    published_calibration,
)
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layouts import Array, Layouts
from kit.monitor.speed import comparison_sentence
from kit.papers.facts import Facts, plain_number
from kit.papers.layers import FigureLayer

FACTS = Facts.load("frontier")
"""Facts of the Frontier paper."""
MODELS = {"22B": "gpt-22b", "175B": "gpt-175b", "1T": "gpt-1t"}
"""Preset with the shape of each model of the paper, by the paper's name of the model."""
LUMI = ModelSpec.gpt(
    name="LUMI 176B",
    num_layers=70,
    hidden_size=14336,
    num_heads=112,
    vocab_size=51_200,
    sequence_length=2048,
)
"""Model of the logs in spyysalo/lumi-llm-scaling, 2023-06."""
AUTHORS_LOG = "log 405287"
"""Name of the log of 175B on 128 GCDs in the repository sajal-vt/Megatron-DeepSpeed-ORNL, commit
ef4161a."""


@lru_cache(maxsize=1)
def frontier_calibration() -> Calibration:
    """Returns the coefficients that are fitted to LUMI's published runs, with the numbers of
    Frontier's hardware.
    """
    return dataclasses.replace(
        published_calibration(Site.load("lumi")), hardware=Hardware.of(Site.load("frontier"))
    )


@lru_cache(maxsize=1)
def model_error() -> str:
    """Returns a sentence with the model's error on LUMI's measured runs. Each run is predicted by a
    fit without that run.
    """
    errors = np.abs([*left_out_errors().values()])
    num_runs = frontier_calibration().num_runs
    return (
        f"step times fitted to {num_runs} runs on LUMI (same MI250X and code base),"
        f" none of the paper's; mean error {errors.mean():.0%}, worst {errors.max():.0%} on those"
        " runs, each left out; band: 90 % interval"
    )


@lru_cache(maxsize=1)
def left_out_errors() -> dict[str, float]:
    """Returns the relative error of the predicted step time of each LUMI run, when only the other
    runs are fitted.

    The error is predicted over measured step time, minus 1. Keys are model, devices and the run's
    number.
    """
    runs = lumi_runs()
    names = [f"{run.spec.name} on {run.num_devices} ({i})" for i, run in enumerate(runs)]
    return dict(zip(names, (left_out_ratios(runs, Site.load("lumi")) - 1).tolist(), strict=True))


def verdicts() -> list[dict[str, str]]:
    """Returns a row for each log of 175B that says whether its steps were as fast as predicted.

    The sentence is the sentence of `kit status --why`. Each run of LUMI is compared with a fit to
    the other runs. The authors' own log of Frontier is compared with a fit to all runs of LUMI.
    """
    runs = lumi_runs()
    site = Site.load("lumi")
    cases = []
    for run in runs:
        if run.spec.name.startswith("GPT-175B"):
            others = [other for other in runs if other is not run]
            cases.append((run, calibrate(others, site)))
    for run in published.load(system="Frontier"):
        if AUTHORS_LOG in run.source:
            cases.append((run, frontier_calibration()))
    rows = []
    for run, found in cases:
        predicted = found.predict(run.layouts())
        ends = (predicted.total_s, predicted.low_s, predicted.high_s)
        centre, low, high = (float(np.ravel(end)[0]) for end in ends)
        assert run.step_time_s is not None, "only measured runs are here"
        sentence = comparison_sentence(run.step_time_s, centre, low, high, found.label)
        rows.append(
            {
                "log": f"{run.system}, {run.num_devices:,} GCDs",
                "is it as fast as it should be?": sentence,
            }
        )
    return rows


def lumi_runs() -> list[PublishedRun]:
    """Returns the published runs of LUMI to which the model is fitted."""
    return [
        run
        for run in published.load(system="LUMI")
        if run.kind == "measured" and run.status in ("read", "mixed")
    ]


def paper_plan(**degrees: Any) -> Plan:
    """Returns a plan with the paper's settings: ZeRO 1, micro-batch size 1, full recomputation,
    half precision.

    `degrees` are further fields of the plan, or replace these settings.
    """
    return Plan(**{"zero_stage": 1, "recompute": "full", "precision": "bf16"} | degrees)


def lumi_plan(replicas: int) -> Plan:
    """Returns the plan of LUMI's logged runs of 176B, on this number of replicas."""
    return paper_plan(
        tensor_parallel=8,
        pipeline_parallel=8,
        data_parallel=replicas,
        micro_batch_size=2,
        global_batch_size=1024,
    )


def recipe_plan(model: str, replicas: int = 0, **changes: Any) -> Plan:
    """Returns the plan of the authors' launch script for `22B`, `175B` or `1T`.

    If `replicas` is not 0 and differs from the script's number, each replica keeps its share of the
    batch. `changes` replace fields of the plan.
    """
    fields = FACTS.fields(Plan, model)
    held = fields["tensor_parallel"] * fields["pipeline_parallel"]
    of_script = int(FACTS.value("recipe_devices", model)) // held
    number = replicas or of_script
    batch = fields["global_batch_size"] * number // of_script
    own = {"precision": "bf16", "data_parallel": number, "global_batch_size": batch}
    return paper_plan(**fields | own | changes)


def frontier_layouts(spec: ModelSpec, plans: Sequence[Plan], **kernels: Any) -> Layouts:
    """Returns layouts of plans of one model with the paper's kernels.

    The kernels are Megatron's with FlashAttention-2. Gradients are fp16, as the authors' DeepSpeed
    configurations say. `kernels` replaces these settings.
    """
    return Layouts.of(spec, plans, **{"gradient_bytes": 2.0, "native": False} | kernels)


def throughput_layer(
    label: str,
    x: Sequence[float],
    cases: Sequence[tuple[ModelSpec, Layouts]],
    *,
    basis: FlopBasis = FlopBasis.MEGATRON_RECOMPUTE,
    names: Sequence[str] = (),
) -> FigureLayer:
    """Returns the modelled throughput of layouts in % of peak, with a 90 % interval.

    FLOPs include recomputation, as in the authors' code, so the result is HFU. With
    `FlopBasis.MODEL` it is MFU.

    Args:
        label: name in the legend.
        x: x of each layout.
        cases: (model, its layouts) of all models, in the order of `x`.
        basis: FLOPs that are counted.
        names: names of the points, if x only numbers categories.
    """
    columns = []
    for spec, layouts in cases:
        found = frontier_calibration().predict(layouts)
        seconds = np.stack([found.total_s, found.high_s, found.low_s])
        tokens = layouts.global_batch_size * layouts.sequence_length
        peak = layouts.num_devices * float(frontier_calibration().hardware.peak_flops_per_s)
        columns.append(100 * spec.flops_per_token(basis) * tokens / (seconds * peak))
    return FigureLayer.modelled(
        label, x, *np.concatenate(columns, axis=1), error=model_error(), names=names
    )


def relative_rates(layouts: Layouts) -> Array:
    """Returns throughput per device relative to the first layout, for 300 draws of the
    coefficients: [300, layouts].

    The coefficients are drawn from their posterior. Errors that two layouts have in common cancel
    in the ratio. `ratio_interval` turns the draws into an interval.
    """
    rate = layouts.global_batch_size / (frontier_calibration().draws(layouts) * layouts.num_devices)
    return rate / rate[:, :1]


def ratio_interval(ratios: Array) -> tuple[Array, Array, Array]:
    """Returns (median, low, high) of a 90 % interval of ratios between layouts of one model. Draws
    are on the first axis.

    The draws only vary the coefficients. The formula may also be wrong about one layout and right
    about the other, so the interval is widened by `ratio_misfit`.
    """
    wrong = np.random.default_rng(1).normal(0, ratio_misfit(), size=np.shape(ratios))
    low, high = np.quantile(ratios * np.exp(wrong), (0.05, 0.95), axis=0)
    return np.median(ratios, axis=0), low, high


@lru_cache(maxsize=1)
def ratio_misfit() -> float:
    """Returns the standard deviation, on the log scale, of the error of modelled ratios between two
    layouts.

    It is estimated from the errors of LUMI's runs of 176B, each predicted by a fit without that
    run.
    """
    errors = [error for name, error in left_out_errors().items() if name.startswith("GPT-175B")]
    return float(np.sqrt(2) * np.std(np.log1p(errors), ddof=1))


def compared(published_layer: FigureLayer, modelled: FigureLayer) -> tuple[str, str]:
    """Returns (sentence with the published points inside the model's interval, sentence with the
    other points).

    A sentence is "" if it has no points.
    """
    names = published_layer.names or [f"{x:,.0f}" for x in published_layer.x]
    inside = []
    missed = []
    for name, x, y in zip(names, published_layer.x, published_layer.y, strict=True):
        place = int(np.argmin(np.abs(modelled.x - x)))
        if modelled.low[place] <= y <= modelled.high[place]:
            inside.append(name)
        else:
            missed.append(
                f"{name} (paper {plain_number(y)}, model {plain_number(modelled.y[place])})"
            )
    inside_sentence = ""
    if inside:
        inside_sentence = f"Inside the model's interval: {', '.join(inside)}."
    missed_sentence = ""
    if missed:
        missed_sentence = f"MISSED: {'; '.join(missed)}."
    return inside_sentence, missed_sentence
