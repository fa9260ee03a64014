"""The planner's model of step times behind the Frontier figures. It is fitted to runs of another
machine, so it contains no number of the paper.

LUMI has the same GPU, MI250X, and its runs used the same code base, Megatron-DeepSpeed. The
efficiencies that were fitted to LUMI's published runs are used unchanged. Nothing is adjusted to a
figure of the paper.
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
"""Published numbers of the Frontier paper."""
MODELS = {"22B": "gpt-22b", "175B": "gpt-175b", "1T": "gpt-1t"}
"""Maps the paper's name of each model to the name of its `ModelSpec` preset."""
LUMI = ModelSpec.gpt(
    name="LUMI 176B",
    num_layers=70,
    hidden_size=14336,
    num_heads=112,
    vocab_size=51_200,
    sequence_length=2048,
)
"""Language model that was trained in the logs of the repository spyysalo/lumi-llm-scaling,
2023-06."""
AUTHORS_LOG = "log 405287"
"""Name of the authors' log of a training of the 175B model on 128 GCDs. The log is in the
repository sajal-vt/Megatron-DeepSpeed-ORNL, commit ef4161a."""


@lru_cache(maxsize=1)
def frontier_calibration() -> Calibration:
    """Returns the planner's model with coefficients that are fitted to LUMI's published runs, and
    with the hardware numbers of Frontier. The fit starts from a prior that contains no run of the
    paper (`kit.estimate.validation.validate.PAPER`).
    """
    return dataclasses.replace(
        published_calibration(Site.load("lumi")), hardware=Hardware.of(Site.load("frontier"))
    )


@lru_cache(maxsize=1)
def model_error() -> str:
    """Returns a phrase with the error of the planner's model on LUMI's measured runs. Each run is
    predicted by a fit without this run.
    """
    errors = np.abs([*left_out_errors().values()])
    num_runs = frontier_calibration().num_runs
    return (
        f"estimator of step times, fitted to {num_runs} runs on LUMI (same MI250X and code base)"
        f" and to no run of the paper. Error on LUMI runs that were left out of the fit: mean"
        f" {errors.mean():.0%}, worst {errors.max():.0%}. Intervals: 90 %"
    )


@lru_cache(maxsize=1)
def left_out_errors() -> dict[str, float]:
    """Returns the relative error of the predicted step time of each LUMI run. Each run is predicted
    by a fit to all other runs.

    The error is predicted / measured step time, minus 1. Keys give model, number of devices and a
    running number.
    """
    runs = lumi_runs()
    names = [f"{run.spec.name} on {run.num_devices} GCDs (run {i})" for i, run in enumerate(runs)]
    return dict(zip(names, (left_out_ratios(runs, Site.load("lumi")) - 1).tolist(), strict=True))


def verdicts() -> list[dict[str, str]]:
    """Returns one row for each log of a 175B training. A sentence in the row says whether the steps
    were as fast as predicted.

    `kit status --why` prints the same kind of sentence. Each run of LUMI is compared with a fit to
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
    """Returns the published runs of LUMI to which the planner's model is fitted."""
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
    """Returns the plan of LUMI's logged runs of the 176B model, for this number of replicas."""
    return paper_plan(
        tensor_parallel=8,
        pipeline_parallel=8,
        data_parallel=replicas,
        micro_batch_size=2,
        global_batch_size=1024,
    )


def recipe_plan(model: str, replicas: int = 0, **changes: Any) -> Plan:
    """Returns the plan of the authors' launch script for the model `22B`, `175B` or `1T`.

    If `replicas` is 0, the number of replicas in the script is used. With another number, the batch
    per replica stays as in the script, so the global batch changes. `changes` replace fields of the
    plan.
    """
    fields = FACTS.fields(Plan, model)
    held = fields["tensor_parallel"] * fields["pipeline_parallel"]
    of_script = int(FACTS.value("recipe_devices", model)) // held
    number = replicas or of_script
    batch = fields["global_batch_size"] * number // of_script
    own = {"precision": "bf16", "data_parallel": number, "global_batch_size": batch}
    return paper_plan(**fields | own | changes)


def frontier_layouts(spec: ModelSpec, plans: Sequence[Plan], **kernels: Any) -> Layouts:
    """Returns a `Layouts` object (the planner's arrays) with one element per plan of a model, for
    the kernels that the paper used.

    The kernels are Megatron's with FlashAttention-2. Gradients are fp16, as in the authors'
    DeepSpeed configurations. `kernels` replaces these settings of `Layouts.of`.
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
    """Returns a figure layer (curve or points) with the modelled throughput of each layout in % of
    peak, and its 90 % interval.

    By default, FLOPs include recomputation, as in the authors' code, so the result is HFU. With
    `FlopBasis.MODEL` the result is MFU.

    Args:
        label: name in the legend.
        x: coordinate of each layout on the x axis.
        cases: (model, its layouts) for each model. All layouts together are in the order of `x`.
        basis: rule by which the FLOPs of a token are counted.
        names: names of the categories, such as models, if x has only the numbers of categories.
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
    """Returns the throughput per device of each layout, divided by the throughput per device of the
    first layout, as an array [300, number of layouts]. The 300 rows belong to random draws of the
    coefficients.

    The coefficients of the planner's model are drawn from their posterior. Errors that a layout
    shares with the first layout cancel in the ratio. `ratio_interval` computes an interval from the
    draws.
    """
    rate = layouts.global_batch_size / (frontier_calibration().draws(layouts) * layouts.num_devices)
    return rate / rate[:, :1]


def ratio_interval(ratios: Array) -> tuple[Array, Array, Array]:
    """Returns (median, low, high) of ratios between layouts of one model, where low and high are
    the ends of the 90 % interval. The random draws are on the first axis of `ratios`.

    The draws only vary the coefficients. In addition, the formula of the planner's model may be
    wrong about one layout and right about the other. The interval is therefore widened by the
    standard deviation of such errors, which `ratio_misfit` estimates.
    """
    wrong = np.random.default_rng(1).normal(0, ratio_misfit(), size=np.shape(ratios))
    low, high = np.quantile(ratios * np.exp(wrong), (0.05, 0.95), axis=0)
    return np.median(ratios, axis=0), low, high


@lru_cache(maxsize=1)
def ratio_misfit() -> float:
    """Returns the standard deviation, on the log scale, of the error of modelled ratios between two
    layouts.

    It is estimated from the errors on LUMI's runs of the 176B model. Each run is predicted by a fit
    without this run.
    """
    errors = [error for name, error in left_out_errors().items() if name.startswith("GPT-175B")]
    return float(np.sqrt(2) * np.std(np.log1p(errors), ddof=1))


def compared(published_layer: FigureLayer, modelled: FigureLayer) -> tuple[str, str]:
    """Returns two sentences, (inside, missed). `inside` names the published points that lie within
    the model's interval. `missed` names all other published points, with the published and the
    modelled number.

    A sentence is "" if it would name no point.
    """
    names = published_layer.names or [f"{x:,.0f} GCDs" for x in published_layer.x]
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
        inside_sentence = f"Published number in the interval: {', '.join(inside)}."
    missed_sentence = ""
    if missed:
        missed_sentence = f"MISSED: {'; '.join(missed)}."
    return inside_sentence, missed_sentence
