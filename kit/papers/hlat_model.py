"""The planner's model of step times behind HLAT's cost figure. It is fitted to AWS's benchmarks of
Trainium and to runs of other A100 clusters.

The fit uses no number of the paper's cost figure. On Trainium, the paper's own layouts are used.
The layouts of the paper's GPU baseline are unknown, so the fastest layout that the planner finds is
used for the baseline.
"""

import dataclasses
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.estimate.choose.search import search
from kit.estimate.fit import published
from kit.estimate.fit.calibrate import Calibration, left_out_ratios, published_calibration
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.activations import MEGATRON
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.memory import memory
from kit.estimate.theory.out_of_memory import RESERVE
from kit.papers.facts import Facts

FACTS = Facts.load("hlat")
"""Published numbers of the HLAT paper."""
MODELS = {"7B": "hlat-7b", "70B": "hlat-70b"}
"""Maps the paper's name of each model to the name of its `ModelSpec` preset."""
TRN1 = "trn1.32xlarge"
P4D = "p4d.24xlarge"
NODES = (4, 8, 16, 32, 64)
"""Numbers of nodes at which costs are modelled in the cost figure."""
BATCH = 1024
"""Number of sequences per training step. In total, these sequences have 4.2 million tokens."""
MAX_RISK = 0.05
"""Largest accepted probability that a layout runs out of memory."""
NEMO = {
    "tensor_parallel": (1, 2, 4, 8),
    "virtual_stages": (1, 2, 4, 5),
    "schedule": ("1f1b", "interleaved"),
    "zero_stage": (0, 1),
    "micro_batch_size": (1, 2, 4),
}
"""Values of plan fields that NeMo offered when the paper was written. The search for the GPU
baseline is limited to them."""


@lru_cache(maxsize=2)
def machine_calibration(machine: str) -> Calibration:
    """Returns the planner's model of step times for the machine TRN1 or P4D, fitted to published
    runs. Its field `misfit` is the standard deviation, on the log scale, of the error of the
    formula.

    For TRN1, the misfit is computed from the errors on AWS's benchmarks, where each benchmark is
    predicted by a fit to all other benchmarks. The model for P4D is fitted to runs of Selene, which
    has the same GPU. Its misfit combines the misfit of this fit with the error on other A100
    systems.
    """
    if machine == TRN1:
        return dataclasses.replace(
            published_calibration(Site.load(TRN1)), misfit=_rms(left_out_errors().values())
        )
    found = published_calibration(Site.load("selene"))
    misfit = float(np.hypot(found.misfit, _rms(other_a100_errors().values())))
    return dataclasses.replace(found, hardware=Hardware.of(Site.load(P4D)), misfit=misfit)


def benchmarks() -> tuple[PublishedRun, ...]:
    """Returns AWS's own benchmarks of Trainium. The planner's model for TRN1 is fitted to them."""
    return published.load(system=TRN1)


@lru_cache(maxsize=1)
def left_out_errors() -> dict[str, float]:
    """Returns ln(predicted / measured step time) of each AWS benchmark. Each benchmark is predicted
    by a fit to all other benchmarks.

    Keys are the names of the benchmarks, such as `7B, SDK 2.20`.
    """
    errors = np.log(left_out_ratios(benchmarks(), Site.load(TRN1)))
    return dict(zip(map(benchmark_name, benchmarks()), errors.tolist(), strict=True))


def benchmark_name(run: PublishedRun) -> str:
    """Returns the model and SDK version of a benchmark, such as `7B, SDK 2.20`."""
    model = run.spec.name.removeprefix("Llama-").removeprefix("2-")
    return f"{model}, {run.source[run.source.index('SDK') : -1]}"


@lru_cache(maxsize=1)
def other_a100_errors() -> dict[str, float]:
    """Returns the median ln(predicted / measured step time) on each published A100 system except
    Selene.

    The planner's model is fitted to Selene's runs only. Keys have the form `SYSTEM: PUBLICATION`.
    """
    found = published_calibration(Site.load("selene"))
    groups: dict[str, list[PublishedRun]] = {}
    for run in published.load():
        measured = run.kind == "measured" and run.status in ("read", "mixed")
        other = run.device.startswith("A100") and run.system != "Selene"
        if measured and other and run.precision in ("bf16", "fp16"):
            groups.setdefault(f"{run.system}: {run.source.split(' (')[0]}", []).append(run)
    errors = {}
    for name, runs in groups.items():
        sites = [run.site() for run in runs]
        hardware = Hardware.joined([Hardware.of(site) for site in sites if site])
        predicted = found.predict(published.layouts(runs), hardware).total_s
        errors[name] = float(np.median(np.log(predicted / published.measured_step_seconds(runs))))
    return errors


def trn1_error() -> str:
    """Returns a phrase with the error of the planner's model of Trainium on measured runs."""
    off = np.abs(np.expm1(list(left_out_errors().values())))
    return (
        f"estimator of trn1, fitted to {len(off)} benchmarks of AWS on 16 and 32 nodes and to no"
        f" number of the paper. Error on benchmarks that were left out of the fit: mean"
        f" {off.mean():.0%}, worst {off.max():.0%}. Intervals: 90 %"
    )


def model_error() -> str:
    """Returns a phrase that states the planner's errors on measured runs of A100 machines and of
    trn1.
    """
    num_runs = machine_calibration(P4D).num_runs
    others = other_a100_errors().values()
    return (
        f"estimator of p4d, fitted to {num_runs} runs on Selene, which has the same GPU with"
        f" twice the memory and four times the network. Root mean square error on {len(others)}"
        f" other publications about A100: {np.expm1(_rms(others)):.0%}. And"
        f" {trn1_error()}"
    )


@lru_cache(maxsize=32)
def plan_on_nodes(machine: str, model: str, nodes: int) -> Plan | None:
    """Returns the layout of the model `7B` or `70B` on a number of nodes of a machine. Returns None
    if no layout fits in memory.
    """
    if machine == TRN1:
        plan = trn1_plan(model, nodes)
        _, risk = trn1_risk(model, plan)
        return plan if risk <= MAX_RISK else None
    try:
        return search(
            ModelSpec.preset(MODELS[model]),
            Site.load(P4D),
            nodes * Site.load(P4D).devices_per_node,
            BATCH,
            max_risk=MAX_RISK,
            only=NEMO,
            calibration=machine_calibration(P4D),
            kernels=MEGATRON,
        ).best
    except ConfigError as error:
        if "fits in memory" not in str(error):
            raise
        return None


def hlat_layouts(machine: str, model: str, plans: list[Plan]) -> Layouts:
    """Returns a `Layouts` object (the planner's arrays) with one element per plan of a model, with
    the attention kernels that NxD (on Trainium) and NeMo (on GPUs) use.

    On Trainium, attention scores are written to memory. On GPUs, attention is fused
    (FlashAttention).
    """
    flash_attention = 0 if machine == TRN1 else 2
    spec = ModelSpec.preset(MODELS[model])
    return Layouts.of(spec, plans, flash_attention=flash_attention, native=False)


def trn1_plan(model: str, nodes: int, **changes: Any) -> Plan:
    """Returns HLAT's layout on a number of Trainium nodes. `changes` replace fields of the plan.

    If the nodes have fewer cores than one replica needs, the number of pipeline stages is reduced.
    ZeRO 1 with an fp32 optimizer is used for the 7B model too, although HLAT trained it at ZeRO
    stage 0 in bf16. AWS's benchmarks, to which the planner's model is fitted, use ZeRO 1. With
    HLAT's settings, modelled steps of 7B are 0.4 to 2.7 % longer. HLAT chose bf16 for speed, but
    the model's optimizer has fp32 states.
    """
    cores = nodes * Site.load(TRN1).devices_per_node
    tensor = int(FACTS.value("recipe_tensor_parallel", model))
    pipeline = min(int(FACTS.value("recipe_pipeline_parallel", model)), cores // tensor)
    return Plan(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=cores // (tensor * pipeline),
        zero_stage=1,
        sequence_parallel=True,
        recompute="selective",
        precision="bf16",
        global_batch_size=BATCH,
    ).replace(**changes)


def trn1_risk(model: str, plan: Plan) -> tuple[float, float]:
    """Returns (bytes used on the core that uses most memory, probability that this core runs out of
    memory) for a layout on Trainium.

    Each core needs at least one key/value head. At tensor parallel 32, each of the 8 key/value
    heads of 70B is therefore stored on 4 cores.
    """
    spec = ModelSpec.preset(MODELS[model])
    spec = spec.replace(num_kv_heads=max(spec.num_kv_heads, plan.tensor_parallel))
    held = memory(Layouts.of(spec, [plan], flash_attention=0), kernels=MEGATRON, reserve=RESERVE)
    capacity = float(machine_calibration(TRN1).hardware.memory_bytes)
    return float(held.used_bytes.max()), float(held.out_of_memory_probability(capacity).max())


def quantile_interval(draws: Array) -> tuple[Array, Array, Array]:
    """Returns (median, low, high), where low and high are the ends of the 90 % interval. The random
    draws are on the first axis of `draws`.
    """
    low, middle, high = np.quantile(draws, (0.05, 0.5, 0.95), axis=0)
    return middle, low, high


def _rms(values: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square([*values]))))
