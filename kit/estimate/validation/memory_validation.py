"""The memory model against published measurements: readings in GB, out-of-memory labels, allocator logs, a paper."""

import csv
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kit.estimate.fit import published
from kit.estimate.fit.memory_fit import fit_out_of_memory, fit_reserve
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.activations import ALEPH_ALPHA, MEGATRON, MEGATRON_DEEPSPEED, engine_kernels
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.memory import CONVENTIONS, DYNAMIC, STATE, StageMemory, memory, memory_by_stage
from kit.estimate.theory.out_of_memory import MONITOR_RESERVE, RESERVE
from kit.plan import EngineName, Plan
from kit.show.results import Row, row
from kit.spec import ModelSpec

MIB, GIB = 2.0**20, 2.0**30
A100_BYTES = 80 * GIB

# Bytes allocated after a step on the last of 8 pipeline devices (TP 8, micro-batch 2, 7 layers there), MiB by replicas.
# Source: logs of spyysalo/lumi-llm-scaling, 2023-06, MI250X, bf16.
LUMI = ModelSpec.gpt(name="LUMI 176B", num_layers=70, hidden_size=14336, num_heads=112, vocab_size=51_200,
                     sequence_length=2048)  # fmt: skip
LUMI_ALLOCATED_MIB = {2: 30_719, 4: 24_284, 8: 21_064, 16: 19_454, 32: 18_641}
# MiB allocated after the first step, which was skipped, and most within it, on 16 pipeline devices; peaks fall by 300
# from the second to the last but one. Source: log 405287 of the Frontier paper's authors (DeepSpeed 0.10.0, fp16;
# sajal-vt/Megatron-DeepSpeed-ORNL, commit ef4161a), GPT 175B, TP 4, PP 16, micro-batch 1, full recomputation.
FRONTIER_STEP_MIB = 300
FRONTIER_AFTER_MIB = (25_142, *[23_361] * 14, 25_468)
FRONTIER_PEAK_MIB = (33_902, *range(31_435, 27_534, -FRONTIER_STEP_MIB), 29_138)
# Figure 1 of arXiv 2205.05198, GiB per device: (model, heads, layers, hidden, TP, PP, v, micro-batch, batch,
# weights and optimizer averaged over devices, activations of the first), sequence parallel, selective recomputation.
KORTHIKANTI = (
    ("22B", 64, 48, 6144, 8, 1, 1, 4, 4, 45.56, 9.56),
    ("175B", 96, 96, 12288, 8, 8, 3, 1, 64, 45.56, 12.35),
    ("530B", 128, 105, 20480, 8, 35, 3, 1, 280, 31.64, 23.08),
    ("1T", 160, 128, 25600, 8, 64, 1, 1, 512, 32.96, 26.56),
)


def memory_validation(runs: Iterable[PublishedRun] | None = None) -> list[Row]:
    """Returns the error table of the memory model, one row per kind of measurement.

    Of runs other than those that come with the kit, only rows that they have data for.
    """
    kept = tuple(published.load() if runs is None else runs)
    table = readings([run for run in kept if run.memory_bytes]) + labels([run for run in kept if is_labelled(run)])
    return table if runs is not None else table + allocator_logs() + korthikanti() + counted_steps()


def is_labelled(run: PublishedRun) -> bool:
    """Returns whether a run belongs to a set in which those that ran out of memory are listed too."""
    return run.source.startswith("Aleph Alpha")


def readings(runs: Sequence[PublishedRun]) -> list[Row]:
    """Returns the error of measured bytes per device, two numbers fitted with a model shape held out."""
    if len(runs) < 3:
        return []
    layouts, measured = _layouts(runs), np.array([run.memory_bytes for run in runs])
    terms = memory(layouts, kernels=MEGATRON, reserve=MONITOR_RESERVE).terms()
    state, dynamic = (np.sum([terms[name] for name in names], axis=0) for names in (STATE, DYNAMIC))
    shape = np.array([f"{run.spec.num_layers} x {run.spec.hidden_size}" for run in runs])

    def used(train: Array) -> Array:
        fitted = fit_reserve(state[train], dynamic[train], measured[train], start=MONITOR_RESERVE, source="")
        return fitted.used_bytes(state, dynamic)

    error = np.abs(_held_out(shape, used) / measured - 1)
    everywhere = float(np.mean(np.abs(used(np.ones(len(runs), bool)) / measured - 1)))
    median, most = np.quantile(error, (0.5, 0.9))
    note = f"median {median:.1%}, 90 % within {most:.1%}, worst {error.max():.0%}; 2 numbers fitted"
    name = f"Memory: readings, a shape held out ({len(runs)})"
    return [
        row(name, float(error.mean()), "fraction", at_most=0.05, note=note),
        row("Memory: readings, fitted on all", everywhere, "fraction", note="floor of the 2 numbers"),
    ]


def labels(runs: Sequence[PublishedRun]) -> list[Row]:
    """Returns how well out-of-memory labels are predicted: a model size held out, and by the numbers shipped.

    A file with one model size only is predicted by the numbers shipped alone.
    """
    if not runs:
        return []
    layouts, out = _layouts(runs), np.array([run.kind == "oom" for run in runs])
    size = np.array([run.spec.name for run in runs])
    shipped = memory(layouts, kernels=ALEPH_ALPHA, reserve=RESERVE).used_bytes > A100_BYTES

    def predicted(train: Array) -> Array:
        reserve, kernels = fit_out_of_memory(
            layouts.select(train), out[train], A100_BYTES, kernels=ALEPH_ALPHA, reserve=RESERVE, source=""
        )
        return memory(layouts, kernels=kernels, reserve=reserve).used_bytes > A100_BYTES

    table = []
    if len(set(size)) > 1:
        held_out = _held_out(size, predicted) > 0
        table = _accuracy(f"Out of memory, a model size held out ({len(runs)})", out, held_out, "5 numbers fitted")
        table += [
            row(f"Out of memory, {name} held out", float((out == held_out)[size == name].mean()), "fraction")
            for name in sorted(set(size))
        ]
    return table + _accuracy(f"Out of memory, numbers as shipped ({len(runs)})", out, shipped, "nothing fitted here")


def allocator_logs() -> list[Row]:
    """Returns the error on two logs of what the allocator held, nothing fitted."""
    modelled = [lumi_bytes(replicas) / MIB for replicas in LUMI_ALLOCATED_MIB]
    measured = list(LUMI_ALLOCATED_MIB.values())
    after, peak = frontier_stages()
    step = float(-np.diff(peak.activations).mean() / MIB)
    after_error = (after.state + after.buffers) / MIB / FRONTIER_AFTER_MIB - 1
    peak_error = peak.total / MIB / FRONTIER_PEAK_MIB - 1
    ends = [0, 1, -1]
    worst = float(np.max(np.abs(np.array(modelled) / measured - 1)))
    return [
        row("Memory: LUMI 176B, five replica counts, worst error",
            worst, "fraction", at_most=0.03,
            note=f"{_by_replicas(modelled)}; measured {_by_replicas(measured)}; nothing fitted"),
        row("Memory: Frontier 175B, MiB from stage to stage, error", abs(step / FRONTIER_STEP_MIB - 1),
            "fraction", at_most=0.03, note=f"{step:.1f} MiB; measured {FRONTIER_STEP_MIB}; nothing fitted"),
        row("Memory: Frontier 175B, 16 stages after a skipped step, worst error", float(np.abs(after_error).max()),
            "fraction", at_most=0.02, note=f"{_signed(after_error[ends])} on first, second, last; nothing fitted"),
        row("Memory: Frontier 175B, 16 stages at their peak, worst error", float(np.abs(peak_error).max()),
            "fraction", at_most=0.02, note=f"{_signed(peak_error[ends])} on first, second, last; nothing fitted"),
    ]  # fmt: skip


def frontier_stages() -> tuple[StageMemory, StageMemory]:
    """Returns the modelled memory of the run of FRONTIER_AFTER_MIB: after its skipped first step, and within it."""
    plan = Plan(
        tensor_parallel=4, pipeline_parallel=16, data_parallel=2, zero_stage=1, recompute="full", global_batch_size=320
    )
    layouts = Layouts.of(ModelSpec.preset("gpt-175b"), [plan], flash_attention=1, gradient_bytes=2.0)
    skipped = CONVENTIONS["deepspeed_fp16_skipped"]
    return (
        memory_by_stage(layouts, kernels=MEGATRON_DEEPSPEED, convention=skipped),
        memory_by_stage(layouts, kernels=MEGATRON_DEEPSPEED),
    )


def lumi_bytes(replicas: int) -> float:
    """Returns the modelled bytes between steps on LUMI's last pipeline device, as in LUMI_ALLOCATED_MIB."""
    plan = Plan(
        tensor_parallel=8, pipeline_parallel=8, data_parallel=replicas, zero_stage=1, recompute="full",
        micro_batch_size=2, global_batch_size=1024,
    )  # fmt: skip
    stage = memory_by_stage(
        Layouts.of(LUMI, [plan], flash_attention=0), layers=np.array([9] * 7 + [7]), kernels=MEGATRON,
        convention=CONVENTIONS["deepspeed_bf16"],
    )  # fmt: skip
    return float((stage.state + stage.buffers)[-1])


def _by_replicas(allocated_mib: Sequence[float]) -> str:
    """Returns the line through LUMI's five bytes as text: what every device holds, and what the replicas share."""
    slope, constant = np.polyfit(1 / np.array(list(LUMI_ALLOCATED_MIB)), allocated_mib, 1)
    return f"{constant:,.0f} + {slope:,.0f} / DP MiB"


def korthikanti() -> list[Row]:
    """Returns the mean error against figure 1 of Korthikanti et al., nothing fitted."""
    state, activations = [], []
    for name, heads, layers, hidden, t, p, v, micro, batch, gib_state, gib_activations in KORTHIKANTI:
        spec = ModelSpec.gpt(name=name, num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=51_200,
                             sequence_length=2048)  # fmt: skip
        plan = Plan(
            tensor_parallel=t, pipeline_parallel=p, virtual_stages=v, schedule="interleaved" if v > 1 else "1f1b",
            sequence_parallel=True, recompute="selective", micro_batch_size=micro, global_batch_size=batch,
        )  # fmt: skip
        stage = memory_by_stage(Layouts.of(spec, [plan], flash_attention=0), kernels=MEGATRON)
        state.append(stage.state.mean() / GIB / gib_state - 1)
        activations.append((stage.activations + stage.embedding_logits)[0] / GIB / gib_activations - 1)
    return [
        row("Memory: Korthikanti figure 1, weights and optimizer, mean error", float(np.mean(np.abs(state))),
            "fraction", at_most=0.05, note=_signed(state)),
        row("Memory: Korthikanti figure 1, activations, mean error", float(np.mean(np.abs(activations))), "fraction",
            at_most=0.05, note=_signed(activations) + "; messages under way are counted here, not there"),
    ]  # fmt: skip


def counted_steps() -> list[Row]:
    """Returns the error on most bytes alive in a step of the kit's own engines, counted on CPUs; nothing fitted."""
    with (published.FILE.parent / "counted_steps.csv").open(encoding="utf-8") as stream:
        rows = [{name: int(x) if x.isdigit() else x for name, x in each.items()} for each in csv.DictReader(stream)]
    table = []
    for engine in ("native", "deepspeed"):
        error = np.array([_counted_error(engine, row) for row in rows if row["engine"] == engine])
        median, most = np.quantile(error, (0.5, 0.9))
        note = f"90 % within {most:.1%}, worst {error.max():.0%}; nothing fitted"
        name = f"Memory: {engine} engine, steps as counted ({len(error)}), median error"
        table.append(row(name, float(median), "fraction", at_most=0.02, note=note))
    return table


def _counted_error(engine: EngineName, x: dict[str, Any]) -> float:
    shape = dict(name="counted", num_layers=x["layers"], hidden_size=x["hidden"], num_heads=4, vocab_size=x["vocab"],
                 sequence_length=x["seq"])  # fmt: skip
    spec = ModelSpec.gpt(**shape)
    if x["family"] != "gpt":
        ffn, kv = x["hidden"] * 11 // 4, 2 if x["family"] == "grouped" else 4
        spec = ModelSpec.llama(**shape, ffn_hidden_size=ffn, num_kv_heads=kv)
    plan = Plan(
        tensor_parallel=x["tp"], data_parallel=x["dp"], zero_stage=x["zero_stage"], micro_batch_size=x["micro_batch"],
        global_batch_size=x["dp"] * x["micro_batches"] * x["micro_batch"], recompute=x["recompute"], engine=engine,
    )  # fmt: skip
    found = memory(Layouts.of(spec, [plan], fused_norm=False), kernels=engine_kernels(engine))
    return abs(found.first.total.item() / x["peak_bytes"] - 1)


def _layouts(runs: Sequence[PublishedRun]) -> Layouts:
    """Returns the runs with the width of gradients that their code keeps.

    BigScience ran Megatron-DeepSpeed: fp16 gradients with fp16, but a bf16 gradient and its fp32 sum with bf16.
    """
    layouts = published.layouts(runs)
    wide = [6.0 if run.precision == "bf16" and run.source.startswith("bigscience") else 2.0 for run in runs]
    return dataclasses.replace(layouts, gradient_bytes=np.array(wide))


def _held_out(group: Array, predict: Callable[[Array], Array]) -> Array:
    """Returns predictions for each row by a fit on the rows of all other groups."""
    result = np.empty(len(group))
    for name in sorted(set(group)):
        result[group == name] = predict(group != name)[group == name]
    return result


def _accuracy(name: str, out: Array, predicted: Array, note: str) -> list[Row]:
    missed, false = int((out & ~predicted).sum()), int((predicted & ~out).sum())
    return [
        row(f"{name}: accuracy", float((out == predicted).mean()), "fraction", at_least=0.94, note=note),
        row(f"{name}: missed", missed, note=f"of {int(out.sum())} that ran out"),
        row(f"{name}: false alarms", false, note=f"of {int((~out).sum())} that ran"),
    ]


def _signed(errors: Iterable[float]) -> str:
    return ", ".join(f"{100 * error:+.1f}" for error in errors) + " %"
