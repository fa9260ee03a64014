"""Published runs: measured step times and out-of-memory labels from a CSV file, one typed run with
its source per row.

The module reads any CSV file with the columns of `data/README.md`. Rows that contradict themselves
or physics are refused with the reason, since a wrong batch size or FLOP count in a publication is
more common than a bad prediction. No torch.
"""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np

from cluster.record import ConfigError, counted, suggestion
from kit.config.plan import Plan
from kit.config.spec import FlopBasis, ModelSpec
from kit.estimate.fit.published_run import SYSTEMS, Basis, PublishedRun, layouts, step_times
from kit.estimate.theory.layouts import RECOMPUTE

__all__ = ["SYSTEMS", "Basis", "PublishedRun", "layouts", "load", "read_runs", "step_times"]

FILE = Path(__file__).parent / "data" / "published_runs.csv"
"""CSV file with the published runs of the kit."""
REQUIRED = ("source", "system", "gpu", "model", "precision")
"""Columns of text that a CSV file must have."""
LAYOUT = ("gpus", "layers", "hidden", "heads", "seq", "tp", "pp", "global_batch")
"""Columns of numbers that a CSV file must have. A row with one of them empty is left out."""
TIMELESS = "no seconds_per_iter, mfu or tflops_per_gpu (with its basis), nor kind oom"
"""Reason why a row without a step time is left out."""
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
"""All columns of numbers."""
FLAGS = ("fused_norm", "fused_softmax", "sequence_parallel")
"""Columns with `yes` or `no`."""
MAY_BE_ZERO = ("zero_stage", "flash_attention", "offloaded_layers")
"""Columns of numbers in which 0 is allowed."""
WORDS = {
    "kind": ("measured", "oom"),
    "status": ("read", "mixed", "derived", "recalled", "secondary"),
    "basis": tuple(basis.value for basis in Basis),
    "recompute": RECOMPUTE,
    "overlap": ("yes", "no", "data", "tensor"),
    **dict.fromkeys(FLAGS, ("yes", "no")),
}
"""Allowed words of each column with words."""
MAY_BE_OPEN = {
    "recompute": "recompute",
    "flash_attention": "flash_attention",
    "micro_batch": "micro_batch_size",
}
"""Columns for which a usual value is assumed if they are empty, each with its name in
`PublishedRun.assumed`."""
SPEEDUP = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 6.0}
"""Largest ratio of the peak in a narrow format to the bf16 peak (NVIDIA Blackwell data sheets). For
nvfp4 it is 4 on GB200 and 6 on GB300."""
NEVER_SEEN = 0.92
"""Share of the peak FLOP/s that no published large matrix product exceeds. Rows above it are
refused if the machine has no measured rate."""
Lines = list[tuple[int, str]]
"""(line number, reason) of rows that are not used."""
FLOP_BASIS = {Basis.MODEL: FlopBasis.MODEL, Basis.HARDWARE: FlopBasis.MEGATRON_RECOMPUTE}
"""FLOP count of each basis with which a rate can be converted into a step time."""


def load(
    file: str | os.PathLike[str] | None = None, *, system: str | None = None
) -> tuple[PublishedRun, ...]:
    """Returns the runs of a CSV file with the columns of `published_runs.csv`, which is the default
    file. With `system` only the runs of this machine are returned.

    Rows without a complete layout are left out.

    Raises:
        ConfigError: The file cannot be read, columns are missing, or rows contradict themselves or
            physics. The error names up to ten of these rows.
    """
    runs, refused, _ = read_runs(FILE if file is None else file)
    if refused:
        lines = "\n".join(f"  line {line}: {reason}" for line, reason in refused[:10])
        more = f"\n  and {len(refused) - 10} more" if len(refused) > 10 else ""
        raise ConfigError(
            f"{file or FILE.name}: {counted(len(refused), 'row')} cannot be right:\n{lines}{more}"
        )
    return tuple(run for run in runs if system is None or run.system == system)


def of_site(name: str) -> tuple[PublishedRun, ...]:
    """Returns the measured runs of a packaged site's machine. Second-hand numbers and rows that
    were corrected by hand are left out.
    """
    return tuple(
        run
        for run in load()
        if run.kind == "measured"
        and run.status in ("read", "mixed")
        and (at := run.site())
        and at.name == name
    )


def read_runs(file: str | os.PathLike[str]) -> tuple[tuple[PublishedRun, ...], Lines, Lines]:
    """Returns (runs, refused rows, left-out rows) of a CSV file.

    Refused rows contradict themselves or physics. Left-out rows have no complete layout or no time.
    Both are lists of (line number, reason).

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
            run = _run(row)
        except ConfigError as error:
            refused.append((line, str(error)))
        else:
            left_out.append((line, run)) if isinstance(run, str) else runs.append(run)
    return tuple(runs), refused, left_out


def _run(row: dict[str, str]) -> PublishedRun | str:
    """Returns the typed run of one CSV row. If required columns are empty, returns a text that
    names them.
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
        # The stack is named by the source without page or version.
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
    """Returns whether a row combines several statements of its source, so that its time was
    computed and not read.
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


def _kernels(x: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of PublishedRun on kernels, by name. If the source does not state a
    kernel, the likely one is assumed.
    """
    flash = x["flash_attention"]
    if flash is None:
        # Runs that recompute GPT-style models did so to save the memory of attention scores, which
        # fused attention does not write. On Trainium scores are always written to memory.
        recomputes = x["recompute"] not in (None, "none")
        saves = recomputes and not _is_llama(x) and x["zero_stage"] != 3
        flash = 0 if saves or x["gpu"].startswith("Trainium") else 2
    return dict(
        flash_attention=int(flash),
        fused_norm=x["fused_norm"] != "no",
        fused_softmax=x["fused_softmax"] != "no",
        data_overlap=x["overlap"] in ("yes", "data"),
        tensor_overlap=x["overlap"] in ("yes", "tensor"),
        offloaded_layers=int(x["offloaded_layers"] or 0),
        # Megatron sums bf16 gradients in fp32, and fp16 gradients in fp16.
        gradient_bytes=float(x["gradient_bytes"] or (2 if x["precision"] == "fp16" else 4)),
    )


def _derived_seconds(spec: ModelSpec, x: dict[str, Any]) -> float | None:
    """Returns seconds per step, computed from MFU or from FLOP/s with the basis that the source
    states. None if the row has neither, or if the basis is unknown.
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
    """Raises ConfigError if a run has too many stages, a utilisation above 1, or a rate above the
    highest rate of a matrix product.
    """
    # Embedding and loss may have one stage each, in addition to the layers.
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
    # Under full recomputation the device also executes the recomputed FLOPs.
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
    """Returns (highest plausible FLOP/s of one device, reason). The rate is None if no peak is
    known.
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
