"""The memory model compared with measurements: memory readings, out-of-memory labels, allocator
logs, a paper, and counted bytes in steps of the kit's engines.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.capabilities import EngineName
from kit.errors import ConfigError
from kit.estimate.fit import published
from kit.estimate.fit.fitting import minimise
from kit.estimate.fit.published import PublishedRun
from kit.estimate.theory.activations import MEGATRON, Kernels, engine_kernels
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.theory.memory import memory, memory_by_stage
from kit.estimate.theory.out_of_memory import RESERVE, Reserve
from kit.estimate.validation.validate_rows import memory_error_rows, memory_layouts, without_group
from kit.papers.frontier_memory import frontier_stages, lumi_bytes
from kit.papers.frontier_model import FACTS
from kit.show.results import Row, row

ALEPH_ALPHA = Kernels(
    dropout=False,
    fused_gate=False,
    selective="attention",
    gathered_inputs=True,
    gathered_logits=True,
    logit_bytes=19.1,
    score_bytes=7.7,
)
"""Kernels that the code of arXiv 2311.05610 used. The values of `gathered_logits`, `logit_bytes`
and `score_bytes` follow from its out-of-memory labels."""

MIB, GIB = 2.0**20, 2.0**30
MISSED = "out-of-memory runs that were predicted to fit"
FALSE_ALARMS = "runs that fitted, but were predicted to run out of memory"
A100_BYTES = 80 * GIB

# Standard deviation, on the log scale, of the prior of each fitted number around its start.
RESERVE_SPREAD = {"factor": 0.15, "extra_bytes": 0.4, "sharpness": 0.3}
KERNEL_SPREAD = {"logit_bytes": 0.25, "score_bytes": 0.7}
# Figure 1 of arXiv 2205.05198, memory in GiB per device, with sequence parallelism and selective
# recomputation. Each row is (model, heads, layers, hidden size, TP, PP, virtual stages, micro-batch
# size, batch size, weights and optimizer as a mean over devices, activations of the first device).
KORTHIKANTI = (
    ("22B", 64, 48, 6144, 8, 1, 1, 4, 4, 45.56, 9.56),
    ("175B", 96, 96, 12288, 8, 8, 3, 1, 64, 45.56, 12.35),
    ("530B", 128, 105, 20480, 8, 35, 3, 1, 280, 31.64, 23.08),
    ("1T", 160, 128, 25600, 8, 64, 1, 1, 512, 32.96, 26.56),
)


def memory_exam() -> list[Row]:
    """Returns the errors of the memory model, one or more rows per kind of measurement."""
    runs = published.load()
    read = [run for run in runs if run.memory_bytes]
    labelled = [run for run in runs if run.source.startswith("Aleph Alpha")]
    return [
        *memory_error_rows(read),
        *labels(labelled),
        *allocator_logs(),
        *korthikanti(),
        *counted_steps(),
    ]


def labels(runs: Sequence[PublishedRun]) -> list[Row]:
    """Returns the accuracy on out-of-memory labels: with each model size left out of the fit in
    turn, and without a fit, with the numbers of ALEPH_ALPHA and RESERVE.
    """
    layouts, out = memory_layouts(runs), np.array([run.kind == "oom" for run in runs])
    size = np.array([run.spec.name for run in runs])
    start = {"kernels": ALEPH_ALPHA, "reserve": RESERVE}
    shipped = memory(layouts, **start).used_bytes > A100_BYTES

    def predicted(train: Array) -> Array:
        known = layouts.select(train), out[train], A100_BYTES
        reserve, kernels = fit_out_of_memory(*known, **start, source="")
        return memory(layouts, kernels=kernels, reserve=reserve).used_bytes > A100_BYTES

    held_out, count = without_group(size, predicted) > 0, len(runs)
    whole = f"Out of memory ({count} runs), model size left out"
    sizes = {name: float((out == held_out)[size == name].mean()) for name in sorted(set(size))}
    as_shipped = f"Out of memory ({count} runs), default constants of the planner"
    return [
        *_accuracy(whole, out, held_out, "5 numbers fitted"),
        *(
            row(f"Out of memory, {name} left out: accuracy", right, "fraction")
            for name, right in sizes.items()
        ),
        *_accuracy(as_shipped, out, shipped, "nothing fitted"),
    ]


def fit_out_of_memory(
    layouts: Layouts,
    is_out_of_memory: Array,
    device_bytes: float,
    *,
    kernels: Kernels,
    reserve: Reserve,
    source: str,
) -> tuple[Reserve, Kernels]:
    """Returns (reserve, kernels) that maximise the likelihood of the out-of-memory labels. Five
    numbers are fitted.

    Three numbers are fields of the reserve. The other two are the bytes saved per logit and per
    attention score. The bytes per score are fitted only if some layout writes attention scores to
    memory. A log-normal prior around the start values has the spreads RESERVE_SPREAD and
    KERNEL_SPREAD. Boolean fields of `kernels` stay unchanged.
    """
    labels = np.asarray(is_out_of_memory, dtype=bool)
    if labels.all() or not labels.any():
        raise ConfigError(
            "fit_out_of_memory: all labels are alike. Give runs that fitted and runs that did not."
        )
    spread = RESERVE_SPREAD | KERNEL_SPREAD
    if not np.any(layouts.flash_attention == 0):
        spread = {name: width for name, width in spread.items() if name != "score_bytes"}
    given = {name: reserve if name in RESERVE_SPREAD else kernels for name in spread}
    start = np.array([getattr(each, name) for name, each in given.items()])
    width = np.array(list(spread.values()))

    def model(values: Array) -> tuple[Reserve, Kernels]:
        fitted = dict(zip(spread, map(float, values), strict=True))
        part = {name: value for name, value in fitted.items() if name in RESERVE_SPREAD}
        rest = {name: value for name, value in fitted.items() if name in KERNEL_SPREAD}
        part["factor"] = min(3.0, max(0.5, part["factor"]))
        return reserve.replace(**part, source=source), kernels.replace(**rest)

    def loss(values: Array) -> float:
        fitted, flavour = model(values)
        used = memory(layouts, kernels=flavour, reserve=fitted).used_bytes
        odds = fitted.sharpness * np.log(used / device_bytes)
        prior = 0.5 * np.sum((np.log(values / start) / width) ** 2)
        return float(np.sum(np.logaddexp(0, np.where(labels, -odds, odds))) + prior)

    return model(minimise(loss, start))


COMPLETED = "two terms of the formula were added after this log had been read"


def allocator_logs() -> list[Row]:
    """Returns the memory model's error on two logs of allocated memory. No number is fitted to
    them, but the formula of the Frontier rows was completed after its log had been read.
    """
    replicas, measured = _logged("lumi_allocated_mib")
    modelled = np.array([lumi_bytes(int(count)) for count in replicas]) / MIB
    worst = float(np.max(np.abs(modelled / measured - 1)))
    after, peak = frontier_stages()
    after_error = (after.state_bytes + after.buffers) / MIB / _logged("stage_allocated_mib")[1] - 1
    logged_peak = _logged("stage_peak_mib")[1]
    peak_error = peak.total_bytes / MIB / logged_peak - 1
    step = float(-np.diff(peak.activations).mean() / MIB)
    logged_step = float(-np.diff(logged_peak[1:-1]).mean())
    ends = [0, 1, -1]

    def stages(error: Array) -> tuple[float, float, str]:
        places = f"errors of {_signed(error[ends])} on the first, second and last stage"
        return float(np.abs(error).max()), 0.02, f"{places}; {COMPLETED}"

    lumi = f"modelled {_line(replicas, modelled)}, measured {_line(replicas, measured)}"
    each = f"modelled {step:.1f} MiB, measured {logged_step:.0f} MiB; {COMPLETED}"
    step_name = "Frontier 175B, decrease of memory from one stage to the next, error"
    rows = {
        "LUMI 176B with five numbers of replicas (DP), worst error": (worst, 0.03, lumi),
        step_name: (abs(step / logged_step - 1), 0.03, each),
        "Frontier 175B, memory of 16 stages after a skipped step, worst error": stages(after_error),
        "Frontier 175B, peak memory of 16 stages, worst error": stages(peak_error),
    }
    return [
        row(f"Memory: {name}", error, "fraction", at_most=most, note=f"{note}; nothing fitted")
        for name, (error, most, note) in rows.items()
    ]


def _logged(series: str) -> tuple[Array, Array]:
    """Returns (x values, memory in MiB) of one series of numbers in the Frontier paper."""
    x, y = zip(*((float(fact.x), fact.number) for fact in FACTS[series]), strict=True)
    return np.array(x), np.array(y)


def _line(replicas: Array, allocated_mib: Array) -> str:
    """Returns the formula of a line fitted to the memory on LUMI: a constant number of MiB that
    each device holds, and MiB that are divided among the replicas.
    """
    slope, constant = np.polyfit(1 / replicas, allocated_mib, 1)
    return f"{constant:,.0f} + {slope:,.0f} / DP MiB"


def korthikanti() -> list[Row]:
    """Returns the memory model's mean error on figure 1 of Korthikanti et al. (arXiv 2205.05198).
    Nothing is fitted.
    """
    state, activations = [], []
    for name, *shape, gib_state, gib_activations in KORTHIKANTI:
        heads, layers, hidden, t, p, v, micro, batch = shape
        sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads}
        spec = ModelSpec.gpt(name=name, **sizes, vocab_size=51_200, sequence_length=2048)
        plan = Plan(
            tensor_parallel=t,
            pipeline_parallel=p,
            virtual_stages=v,
            schedule="interleaved" if v > 1 else "1f1b",
            sequence_parallel=True,
            recompute="selective",
            micro_batch_size=micro,
            global_batch_size=batch,
        )
        stage = memory_by_stage(Layouts.of(spec, [plan], flash_attention=0), kernels=MEGATRON)
        held = (stage.activations + stage.embedding_logits)[0]
        state.append(stage.state_bytes.mean() / GIB / gib_state - 1)
        activations.append(held / GIB / gib_activations - 1)
    models = ", ".join(name for name, *_ in KORTHIKANTI)
    under_way = "; the model also counts messages in transfer between stages, the figure does not"
    return [
        row(
            f"Memory: figure 1 of Korthikanti et al., {what}, mean error",
            float(np.mean(np.abs(errors))),
            "fraction",
            at_most=0.05,
            note=f"errors of {_signed(errors)} for {models}{more}",
        )
        for what, errors, more in (
            ("weights and optimizer", state, ""),
            ("activations", activations, under_way),
        )
    ]


def counted_steps() -> list[Row]:
    """Returns the median error of the memory model for each of two engines. The memory model
    predicts the peak memory of a training step. Nothing is fitted.

    The predictions are compared with peaks that were counted on CPUs: the live bytes after each
    operation of the third step of small bf16 models without fused kernels. The native engine ran
    with torch 2.13 in a process group that sends nothing. DeepSpeed 0.19.8 ran on two processes.
    """
    with (Path(__file__).parent / "counted_steps.csv").open(encoding="utf-8") as stream:
        rows = [
            {name: int(x) if x.isdigit() else x for name, x in each.items()}
            for each in csv.DictReader(stream)
        ]
    table = []
    for engine in ("native", "deepspeed"):
        error = np.array([_counted_error(engine, row) for row in rows if row["engine"] == engine])
        median, most = np.quantile(error, (0.5, 0.9))
        note = (
            f"peaks of live bytes counted on CPUs; 90 % of the errors up to {most:.1%}, worst"
            f" {error.max():.0%}; nothing fitted"
        )
        name = (
            f"Memory: {engine} engine, peak of a training step, median error over {len(error)}"
            " pairs of model and plan"
        )
        table.append(row(name, float(median), "fraction", at_most=0.02, note=note))
    return table


def _counted_error(engine: EngineName, x: dict[str, Any]) -> float:
    names = {"num_layers": "layers", "hidden_size": "hidden", "vocab_size": "vocab"}
    sizes = {name: x[column] for name, column in names.items()}
    shape = dict(name="counted", **sizes, num_heads=4, sequence_length=x["seq"])
    spec = ModelSpec.gpt(**shape)
    if x["family"] != "gpt":
        ffn, kv = x["hidden"] * 11 // 4, 2 if x["family"] == "grouped" else 4
        spec = ModelSpec.llama(**shape, ffn_hidden_size=ffn, num_kv_heads=kv)
    plan = Plan(
        tensor_parallel=x["tp"],
        data_parallel=x["dp"],
        zero_stage=x["zero_stage"],
        micro_batch_size=x["micro_batch"],
        global_batch_size=x["dp"] * x["micro_batches"] * x["micro_batch"],
        recompute=x["recompute"],
        engine=engine,
    )
    found = memory(Layouts.of(spec, [plan], fused_norm=False), kernels=engine_kernels(engine))
    return abs(found.stages[0].total_bytes.item() / x["peak_bytes"] - 1)


def _accuracy(name: str, out: Array, predicted: Array, note: str) -> list[Row]:
    missed, false = int((out & ~predicted).sum()), int((predicted & ~out).sum())
    right = float((out == predicted).mean())
    return [
        row(f"{name}: accuracy", right, "fraction", at_least=0.94, note=note),
        row(f"{name}: {MISSED}", missed, note=f"of {int(out.sum())} runs that ran out of memory"),
        row(f"{name}: {FALSE_ALARMS}", false, note=f"of {int((~out).sum())} runs that fitted"),
    ]


def _signed(errors: Iterable[float]) -> str:
    return ", ".join(f"{100 * error:+.1f}" for error in errors) + " %"
