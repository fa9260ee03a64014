"""Reads published runs from a CSV file. Each row is one run with a measured step time or an
out-of-memory label, and with its source.

The module reads any CSV file with the columns of `data/README.md`. Rows that contradict themselves
or physics are refused, and the reason is stated. A wrong batch size or FLOP count in a publication
is more common than a bad prediction. This module does not import torch.
"""

import csv
import itertools
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cluster.record import ConfigError, counted, suggestion
from kit.config.plan import Plan
from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.fit.published_run import (
    SYSTEMS,
    TORCH_CODE_BASES,
    Basis,
    PublishedRun,
    layouts,
    measured_step_seconds,
)
from kit.estimate.theory.layouts import RECOMPUTE

__all__ = [
    "SYSTEMS",
    "Basis",
    "PublishedRun",
    "layouts",
    "load",
    "read_runs",
    "measured_step_seconds",
]

FILE = Path(__file__).parent / "data" / "published_runs.csv"
"""Path of the CSV file with published runs that the kit contains."""
REQUIRED = ("source", "system", "gpu", "model", "precision")
"""Columns of text that a CSV file of runs must have."""
LAYOUT = ("gpus", "layers", "hidden", "heads", "seq", "tp", "pp", "global_batch")
"""Columns of numbers that a CSV file of runs must have. A row in which one of these columns is
empty is not used."""
TIMELESS = "no seconds_per_iter, mfu or tflops_per_gpu (with its basis), nor kind oom"
"""Text shown to the user as the reason why a row without a step time is not used."""
NUMBERS = (
    *LAYOUT,
    "peak_tflops_bf16",
    "ffn_hidden",
    "kv_heads",
    "vocab",
    "virtual_stages",
    "cp",
    "dp",
    "zero_stage",
    "micro_batch",
    "flash_attention",
    "gradient_bytes",
    "offloaded_layers",
    "seconds_per_iter",
    "tflops_per_gpu",
    "mfu",
    "hfu",
    "memory_gb",
)
"""All columns of a CSV file of runs that contain numbers."""
FLAGS = ("fused_norm", "fused_softmax", "sequence_parallel", "compiled")
"""Columns of a CSV file of runs that contain `yes`, `no` or nothing."""
MAY_BE_ZERO = ("zero_stage", "flash_attention", "offloaded_layers")
"""Columns of numbers in which 0 is allowed. All other numbers must be above 0."""
WORDS = {
    "kind": ("measured", "oom"),
    "status": ("read", "mixed", "derived", "recalled", "secondary"),
    "basis": tuple(basis.value for basis in Basis),
    "recompute": RECOMPUTE,
    "overlap": ("yes", "no", "data", "tensor"),
    "code_base": tuple(TORCH_CODE_BASES),
    **dict.fromkeys(FLAGS, ("yes", "no")),
}
"""Maps each column of a CSV file of runs that contains a fixed word to its allowed words."""
MAY_BE_OPEN = {
    "recompute": "recompute",
    "flash_attention": "flash_attention",
    "micro_batch": "micro_batch_size",
}
"""Maps each column that may be empty to the name that is then listed in `PublishedRun.assumed`. For
an empty column, a usual value is assumed."""
SPEEDUP = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 6.0}
"""Maps a format narrower than bf16 to the largest ratio of its peak FLOP/s to the bf16 peak (NVIDIA
Blackwell data sheets). For nvfp4 the ratio is 4 on GB200 and 6 on GB300."""
NEVER_SEEN = 0.92
"""Largest share of the peak FLOP/s, 0 to 1, that a published large matrix product reached. Runs
with a higher rate are refused. If the site file states a measured rate of matrix products, that
rate is the limit instead."""
Lines = list[tuple[int, str]]
"""Rows of a CSV file that are not used, as a list of (line number, reason why the row is not
used)."""
FLOP_BASIS = {Basis.MODEL: FlopBasis.MODEL, Basis.HARDWARE: FlopBasis.MEGATRON_RECOMPUTE}
"""Maps the way in which a publication counts FLOPs (without or with recomputation) to the counting
method of the kit. Published FLOP/s can be converted into a step time only if FLOPs were counted in
one of these ways."""


def load(
    file: str | os.PathLike[str] | None = None, *, system: str | None = None
) -> tuple[PublishedRun, ...]:
    """Returns the runs of a CSV file. By default this is the file of the kit,
    `published_runs.csv`. Other files need equal columns. If `system` is given, only the runs of
    this machine are returned.

    Rows without a complete layout or without a time are left out.

    Raises:
        ConfigError: The file cannot be read, columns are missing, or rows contradict themselves or
            physics. The error names up to ten wrong rows.
    """
    runs, refused, _ = read_runs(FILE if file is None else file)
    if refused:
        lines = "\n".join(f"  line {line}: {reason}" for line, reason in refused[:10])
        more = f"\n  and {len(refused) - 10} more" if len(refused) > 10 else ""
        raise ConfigError(
            f"{file or FILE.name}: {counted(len(refused), 'row')} cannot be right:\n{lines}{more}"
        )
    return tuple(run for run in runs if system is None or run.system == system)


def run_on_line(line: int) -> PublishedRun:
    """Returns one run of the kit's CSV file. `line` is the number of its row, where the row below
    the header has number 2.
    """
    with FILE.open(newline="", encoding="utf-8-sig") as stream:
        rows = csv.reader(stream)
        header = next(rows)
        row = next(itertools.islice(rows, line - 2, None))
    run = run_of_row(dict(zip(header, row, strict=True)))
    assert isinstance(run, PublishedRun)
    return run


def of_site(name: str) -> tuple[PublishedRun, ...]:
    """Returns the published, measured runs of a machine. `name` is the name of a site file that the
    kit contains. Runs whose numbers are second-hand or were corrected by hand are left out.
    """
    return tuple(
        run
        for run in _packaged_runs()
        if run.kind == "measured"
        and run.status in ("read", "mixed")
        and (at := run.site())
        and at.name == name
    )


@cache
def _packaged_runs() -> tuple[PublishedRun, ...]:
    return load()


def read_runs(file: str | os.PathLike[str]) -> tuple[tuple[PublishedRun, ...], Lines, Lines]:
    """Returns (runs, refused rows, left-out rows) of a CSV file.

    Refused rows contradict themselves or physics. Left-out rows have no complete layout, or neither
    a time nor an out-of-memory label. Both are lists of (line number, reason).

    Raises:
        ConfigError: The file cannot be read as CSV, or a column is missing.
    """
    path = Path(file)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV ({error}).") from error
    present = set(rows[0]) if rows else set()
    missing = [column for column in (*REQUIRED, *LAYOUT) if column not in present]
    if missing:
        raise ConfigError(
            f"{path}: columns {', '.join(missing)} are missing. Needed:"
            f" {', '.join((*REQUIRED, *LAYOUT))}."
        )
    runs = []
    refused = []
    left_out = []
    for line, row in enumerate(rows, start=2):
        try:
            run = run_of_row(row)
        except ConfigError as error:
            refused.append((line, str(error)))
        else:
            left_out.append((line, run)) if isinstance(run, str) else runs.append(run)
    return tuple(runs), refused, left_out


def run_of_row(row: dict[str, str]) -> PublishedRun | str:
    """Returns the run that one CSV row describes. If the layout is incomplete or the row states no
    step time, returns a text that names the missing columns.
    """
    x: dict[str, Any] = (
        row
        | {name: _number(row, name) for name in NUMBERS}
        | {name: _word(row, name) for name in WORDS}
    )
    if lacking := [name for name in ("source", "gpu", *LAYOUT) if x[name] in (None, "")]:
        return f"no {', '.join(lacking)}"
    kind = x["kind"] or "measured"
    spec = _spec(x)
    seconds = (x["seconds_per_iter"] or _derived_seconds(spec, x)) if kind == "measured" else None
    if kind == "measured" and seconds is None:
        return TIMELESS
    run = PublishedRun(
        source=x["source"],
        system=x["system"],
        device=x["gpu"],
        # The software stack is identified by the source, without page or version, and the machine.
        stack=f"{x['source'].split('(')[0].split(' arXiv')[0].strip()}, {x['system']}",
        kind=kind,
        status=x["status"] or "read",
        basis=Basis(x["basis"] or "unknown"),
        precision=x["precision"] or "bf16",
        peak_flops_per_s=_times(x["peak_tflops_bf16"], 1e12),
        spec=spec,
        plan=_plan(x),
        **_kernels(x),
        step_time_s=seconds,
        memory_bytes=_times(x["memory_gb"], 1e9),
        note=x.get("note") or "",
        is_derived=_is_derived(x),
        assumed=tuple(field for column, field in MAY_BE_OPEN.items() if x[column] is None),
    )
    _check(run, x)
    return run


def _is_derived(x: dict[str, Any]) -> bool:
    """Returns whether the step time of a row was computed from several statements of its source. A
    time that was read from the source is not derived.
    """
    computed = x["seconds_per_iter"] is None or "seconds" in (x.get("derived") or "")
    return x["status"] == "derived" or (x["status"] == "mixed" and computed)


def _plan(x: dict[str, Any]) -> Plan:
    tp, pp, cp, gpus = (int(x[name] or 1) for name in ("tp", "pp", "cp", "gpus"))
    dp, left = divmod(gpus, tp * pp * cp)
    if left:
        raise ConfigError(
            f"gpus: {gpus} is no multiple of tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}."
        )
    if x["dp"] not in (None, dp):
        raise ConfigError(
            f"dp: {x['dp']:.0f} x tp {tp} x pp {pp} x cp {cp} is not {gpus} gpus. Expected {dp}."
        )
    stages = int(x["virtual_stages"] or 1)
    return Plan(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        data_parallel=dp,
        virtual_stages=stages,
        schedule="interleaved" if stages > 1 else "1f1b",
        zero_stage=int(x["zero_stage"] or 0),
        sequence_parallel=tp > 1 and x["sequence_parallel"] == "yes",
        recompute=x["recompute"] or "none",
        micro_batch_size=int(x["micro_batch"] or 1),
        global_batch_size=int(x["global_batch"]),
        precision="bf16",
    )


def _spec(x: dict[str, Any]) -> ModelSpec:
    hidden = int(x["hidden"])
    ffn = int(x["ffn_hidden"] or 4 * x["hidden"])
    family = ModelSpec.llama if _is_llama(x) or ffn != 4 * hidden else ModelSpec.gpt
    return family(
        name=x["model"],
        num_layers=int(x["layers"]),
        hidden_size=hidden,
        num_heads=int(x["heads"]),
        num_kv_heads=int(x["kv_heads"] or x["heads"]),
        ffn_hidden_size=ffn,
        vocab_size=int(x["vocab"] or 51_200),
        sequence_length=int(x["seq"]),
    )


def _is_llama(x: dict[str, Any]) -> bool:
    return "llama" in x["model"].lower()


def _code_base(x: dict[str, Any]) -> str:
    """Returns the name of the plain torch code that a run used, one of TORCH_CODE_BASES. If the row
    does not state it, the name is searched in the source. Returns "" for other code.
    """
    source = x["source"].lower()
    found = [name for name in TORCH_CODE_BASES if name in source]
    return x["code_base"] or (found[0] if found else "")


def _kernels(x: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of PublishedRun that describe kernels, as a dict from field name to value.
    If the source does not state a kernel, the most likely kernel is assumed.
    """
    flash = x["flash_attention"]
    if flash is None:
        # Runs of GPT-style models used recomputation to save the memory of attention scores. Fused
        # attention writes no scores to memory, so a run with recomputation did not use fused
        # attention. On Trainium scores are always written to memory.
        recomputes = x["recompute"] not in (None, "none")
        saves = recomputes and not _is_llama(x) and x["zero_stage"] != 3
        flash = 0 if saves or x["gpu"].startswith("Trainium") else 2
    code_base = _code_base(x)
    return dict(
        flash_attention=int(flash),
        fused_norm=x["fused_norm"] != "no",
        fused_softmax=x["fused_softmax"] != "no",
        # FSDP2 has no contiguous buffers of gradients, of which this column is about. What it
        # overlaps follows from the code base.
        data_overlap=x["overlap"] in ("yes", "data") and not code_base,
        tensor_overlap=x["overlap"] in ("yes", "tensor"),
        offloaded_layers=int(x["offloaded_layers"] or 0),
        code_base=code_base,
        compiled=code_base != "" and x["compiled"] != "no",
        # Megatron accumulates gradients in fp32 (4 bytes) in bf16 training, and in fp16 (2 bytes)
        # in fp16 training.
        gradient_bytes=float(x["gradient_bytes"] or (2 if x["precision"] == "fp16" else 4)),
    )


def _derived_seconds(spec: ModelSpec, x: dict[str, Any]) -> float | None:
    """Returns the seconds per step that follow from a published MFU, or from published FLOP/s and
    the FLOP count that the source states. Returns None if the row has neither MFU nor FLOP/s, or if
    the FLOP count is unknown.
    """
    basis = FlopBasis.MODEL if x["mfu"] else FLOP_BASIS.get(Basis(x["basis"] or "unknown"))
    rate = (
        x["mfu"] * (_times(x["peak_tflops_bf16"], 1e12) or 0)
        if x["mfu"]
        else _times(x["tflops_per_gpu"], 1e12)
    )
    if not rate or basis is None:
        return None
    tokens = int(x["global_batch"]) * spec.sequence_length
    return tokens * spec.flops_per_token(basis) / (rate * int(x["gpus"]))


def _check(run: PublishedRun, x: dict[str, Any]) -> None:
    """Raises ConfigError if a run has more stages than layers allow, a utilisation above 1, or a
    rate in FLOP/s above the highest rate of a matrix product.
    """
    # The number of stages may exceed the number of layers by 2, since the embedding and the loss
    # may each be a separate stage.
    if run.spec.num_layers + 2 < run.plan.num_stages:
        raise ConfigError(
            f"pp: {run.plan.pipeline_parallel} x {run.plan.virtual_stages} stages of"
            f" {run.spec.num_layers} layers."
        )
    for name in ("mfu", "hfu"):
        value = x[name]
        if value is not None and not 0 < value <= 1:
            raise ConfigError(
                f"{name}: {value} is not a fraction from 0 to 1. 38 % is 0.38; above 1 is"
                " impossible."
            )
    rates = [run.flops_per_s(), x["tflops_per_gpu"] and x["tflops_per_gpu"] * 1e12]
    # Under full recomputation, the device also executes the FLOPs of the recomputed operations.
    if run.plan.recompute == "full":
        rates.append(run.flops_per_s(FlopBasis.MEGATRON_RECOMPUTE) if not run.spec.gated else None)
    ceiling, where = _ceiling(run)
    for rate in rates:
        if rate and ceiling and rate > ceiling:
            raise ConfigError(
                f"{rate / 1e12:.1f} TFLOP/s per device is above {ceiling / 1e12:.1f}, {where}."
                " Check the samples processed per step (global_batch"
                f" {run.plan.global_batch_size}: does micro_batch x gradient accumulation x dp of"
                " the engine's own configuration agree?), the FLOP basis"
                f" ({run.basis.value}), and the unit."
            )


def _ceiling(run: PublishedRun) -> tuple[float | None, str]:
    """Returns (highest plausible FLOP/s of one device, text with the reason for this limit). The
    rate is None if no peak of the device is known.
    """
    site = run.site()
    speedup = SPEEDUP.get(run.precision, 1.0)
    matmul = site.device.matmul_flops_per_s.get("bf16") if site else None
    if matmul and site:
        return (
            matmul.value * speedup,
            f"the highest rate a matrix product was seen to reach on {site.name}",
        )
    peak = (site.peak_flops_per_s("bf16") if site else None) or run.peak_flops_per_s
    if peak is None:
        return None, ""
    return (
        peak * speedup * NEVER_SEEN,
        f"{NEVER_SEEN:.0%} of the peak, which no published matrix product passes",
    )


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _word(row: dict[str, str], column: str) -> str | None:
    word = (row.get(column) or "").strip()
    if word and word not in WORDS[column]:
        raise ConfigError(
            f"{column}: {word!r} is not known. {suggestion(word, WORDS[column])} Or leave it empty."
        )
    return word or None


def _number(row: dict[str, str], column: str) -> float | None:
    text = (row.get(column) or "").strip()
    if not text or text == "-":
        return None
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{column}: {text!r} is not a number.") from None
    if not np.isfinite(value) or value < 0 or (value == 0 and column not in MAY_BE_ZERO):
        raise ConfigError(
            f"{column}: {text} is not allowed. Give a finite number above 0, or leave it empty."
        )
    return value
