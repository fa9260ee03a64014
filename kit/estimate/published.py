"""Published runs: measured step times and out-of-memory labels, one typed row each with its source.

Any CSV of the same columns is read by the same code, and rows that contradict themselves or physics are refused with
the reason: in this field a wrong batch or FLOP count is more common than a bad model. No torch.
"""

import csv
import dataclasses
import os
import re
from pathlib import Path

import numpy as np

from cluster.record import ConfigError
from kit.estimate.layouts import RECOMPUTE
from kit.estimate.published_run import SYSTEMS, Basis, PublishedRun, layouts, step_times
from kit.spec import FlopBasis, ModelSpec

__all__ = ["SYSTEMS", "Basis", "PublishedRun", "layouts", "load", "read", "step_times"]

FILE = Path(__file__).parent / "data" / "published_runs.csv"
COLUMNS = (
    "source", "system", "gpu", "peak_tflops_bf16", "gpus", "model", "params_b", "layers", "hidden", "ffn_hidden",
    "heads", "kv_heads", "vocab", "seq", "tp", "pp", "virtual_stages", "cp", "dp", "zero_stage", "micro_batch",
    "global_batch", "recompute", "precision", "seconds_per_iter", "tflops_per_gpu", "mfu", "hfu", "note",
)  # fmt: skip
REQUIRED = ("source", "gpu", "gpus", "layers", "hidden", "heads", "seq", "global_batch")
SPEEDUP = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 6.0}
"""Most that a narrow format multiplies the bf16 peak by (NVIDIA Blackwell data sheets; 4 on GB200, 6 on GB300)."""
NEVER_SEEN = 0.92
"""Of the peak: no large matrix product is published above this; the fraction is refused where no ceiling is known."""
FLOP_BASIS = {Basis.MODEL: FlopBasis.MODEL, Basis.HARDWARE: FlopBasis.MEGATRON_RECOMPUTE}


def load(file: str | os.PathLike[str] | None = None, *, system: str | None = None) -> tuple[PublishedRun, ...]:
    """Returns the runs of a CSV with the columns of `published_runs.csv`; default: the file that comes with the kit.

    Rows whose layout the source does not give are left out.

    Args:
        file: the CSV.
        system: keep the rows of this machine only.

    Raises:
        ConfigError: no such file, columns missing, or rows that contradict themselves or physics (all named).
    """
    runs, refused = read(FILE if file is None else file)
    if refused:
        lines = "\n".join(f"  line {line}: {reason}" for line, reason in refused[:10])
        more = f"\n  and {len(refused) - 10} more" if len(refused) > 10 else ""
        raise ConfigError(f"{file or FILE.name}: {len(refused)} rows cannot be right:\n{lines}{more}")
    return tuple(run for run in runs if system is None or run.system == system)


def read(file: str | os.PathLike[str]) -> tuple[tuple[PublishedRun, ...], list[tuple[int, str]]]:
    """Returns (runs, refused), where refused are (line number, reason); rows without a layout are in neither.

    Raises:
        ConfigError: no such file, or a column is missing.
    """
    path = Path(file)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV ({error}).") from error
    present = set(rows[0]) if rows else set()
    missing = [column for column in COLUMNS if column not in present]
    if missing:
        raise ConfigError(f"{path}: columns {', '.join(missing)} are missing. Needed: {', '.join(COLUMNS)}.")
    runs, refused = [], []
    for line, row in enumerate(rows, start=2):
        try:
            run = _run(row)
        except ConfigError as error:
            refused.append((line, str(error)))
        else:
            if run is not None:
                runs.append(run)
    return tuple(runs), refused


def _run(row: dict[str, str]) -> PublishedRun | None:
    """Returns the typed run of one CSV row, None where the source leaves the layout open."""
    number = {column: _number(row, column) for column in COLUMNS[3:20] if column != "model"}
    number |= {column: _number(row, column) for column in ("micro_batch", "global_batch", *COLUMNS[24:28])}
    fields = dict(re.findall(r"(\w+)=([^|;]*)", row["note"] or ""))
    if any(not row[name] for name in REQUIRED) or number["tp"] is None or number["pp"] is None:
        return None
    basis = Basis(match[0]) if (match := re.match("|".join(b.value for b in Basis), fields.get("basis", ""))) else None
    flags, assumed = _kernels(row, fields)
    degrees = _degrees(number, assumed)
    run = PublishedRun(
        source=row["source"], system=row["system"], device=row["gpu"], stack=_stack(row),
        kind="oom" if fields.get("kind") == "oom" else "measured", status=fields.get("status", "read"),
        basis=basis or Basis.UNKNOWN, precision=row["precision"] or "bf16", spec=_spec(row, number),
        peak_flops_per_s=None if number["peak_tflops_bf16"] is None else number["peak_tflops_bf16"] * 1e12,
        memory_bytes=_memory(row["note"]), note=row["note"], **degrees, **flags, assumed=tuple(assumed),
    )  # fmt: skip
    if run.kind == "measured":
        seconds = number["seconds_per_iter"] or _derived_seconds(run, number)
        if seconds is None:
            return None
        run = dataclasses.replace(run, step_time_s=seconds)
    _check(run, number)
    return run


def _degrees(number: dict[str, float | None], assumed: list[str]) -> dict[str, int]:
    tp, pp, cp = (int(number[name] or 1) for name in ("tp", "pp", "cp"))
    gpus = int(number["gpus"] or 0)
    if gpus % (tp * pp * cp):
        raise ConfigError(f"gpus: {gpus} is no multiple of tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}.")
    dp = gpus // (tp * pp * cp)
    if number["dp"] is not None and number["dp"] != dp:
        raise ConfigError(f"dp: {number['dp']:.0f} x tp {tp} x pp {pp} x cp {cp} is not {gpus} gpus. Expected {dp}.")
    if number["micro_batch"] is None:
        assumed.append("micro_batch_size")
    return dict(
        tensor_parallel=tp, pipeline_parallel=pp, context_parallel=cp, data_parallel=dp,
        virtual_stages=int(number["virtual_stages"] or 1), zero_stage=int(number["zero_stage"] or 0),
        micro_batch_size=int(number["micro_batch"] or 1), global_batch_size=int(number["global_batch"] or 0),
    )  # fmt: skip


def _spec(row: dict[str, str], number: dict[str, float | None]) -> ModelSpec:
    hidden, heads = int(number["hidden"] or 0), int(number["heads"] or 0)
    ffn = int(number["ffn_hidden"] or 4 * hidden)
    llama = "llama" in row["model"].lower() or ffn != 4 * hidden
    shapes = dict(
        name=row["model"], num_layers=int(number["layers"] or 0), hidden_size=hidden, num_heads=heads,
        num_kv_heads=int(number["kv_heads"] or heads), ffn_hidden_size=ffn, vocab_size=int(number["vocab"] or 51_200),
        sequence_length=int(number["seq"] or 0),
    )  # fmt: skip
    return ModelSpec.llama(**shapes) if llama else ModelSpec.gpt(**shapes)


def _kernels(row: dict[str, str], fields: dict[str, str]) -> tuple[dict, list[str]]:
    """Returns (which kernels ran, names of what had to be assumed)."""
    assumed, note = [], row["note"] or ""
    kernel, recompute = fields.get("kernel", "").strip(), row["recompute"].split("-")[0]
    if recompute not in RECOMPUTE:
        recompute = "none"
        assumed.append("recompute")
    gated = "llama" in row["model"].lower()
    if kernel:
        flash = 0 if kernel in ("torch", "fused") else 1 if "v1" in kernel or kernel == "flash_attention" else 2
    elif "FA1" in note or "FA2" in note or "Dash" in row["source"]:
        flash = 1 if "FA1" in note else 2
    else:  # scores were written out as long as recomputation was the way to save their memory
        flash = 0 if recompute != "none" and not gated and row["zero_stage"] != "3" else 2
        assumed.append("flash_attention")
    if row["gpu"].startswith("Trainium"):
        flash = 0
    sequence_parallel = fields.get("sequence_parallel", "").strip().startswith("True") or "sequence parallelism" in note
    sequence_parallel = sequence_parallel and "no sequence parallel" not in note
    values = dict(
        recompute=recompute, flash_attention=flash, sequence_parallel=sequence_parallel,
        fused_norm="RMS" in kernel if kernel else True, fused_softmax=kernel != "torch",
        overlap="TP overlap" in note,
        # Megatron sums bf16 gradients in fp32; GPT-NeoX reduces them as they are (22B on 2 GCDs would not fit else).
        gradient_bytes=2 if row["precision"] == "fp16" or "NeoX" in note else 4,
    )  # fmt: skip
    return values, assumed


def _derived_seconds(run: PublishedRun, number: dict[str, float | None]) -> float | None:
    """Returns seconds per step from MFU or FLOP/s, in the basis the source states."""
    if number["mfu"]:
        rate, basis = number["mfu"] * (run.peak_flops_per_s or 0), FlopBasis.MODEL
    elif number["tflops_per_gpu"] and run.basis in FLOP_BASIS:
        rate, basis = number["tflops_per_gpu"] * 1e12, FLOP_BASIS[run.basis]
    else:
        return None
    return run.tokens_per_step * run.spec.flops_per_token(basis) / (rate * run.num_devices) if rate else None


def _check(run: PublishedRun, number: dict[str, float | None]) -> None:
    """Refuses batches that do not divide, utilisations above 1, and rates above what any matrix product reached."""
    sequences = run.micro_batch_size * run.data_parallel
    if run.global_batch_size % sequences:
        raise ConfigError(
            f"global_batch: {run.global_batch_size} is no multiple of micro_batch {run.micro_batch_size} x dp "
            f"{run.data_parallel} = {sequences}, so gradient accumulation cannot be a whole number."
        )
    if run.spec.num_layers + 2 < run.pipeline_parallel * run.virtual_stages:  # embedding and loss may have a stage
        raise ConfigError(f"pp: {run.pipeline_parallel} x {run.virtual_stages} stages of {run.spec.num_layers} layers.")
    for name in ("mfu", "hfu"):
        value = number[name]
        if value is not None and not 0 < value <= 1:
            raise ConfigError(f"{name}: {value} is not a fraction from 0 to 1. 38 % is 0.38; above 1 is impossible.")
    rates = [run.flops_per_s(), number["tflops_per_gpu"] and number["tflops_per_gpu"] * 1e12]
    if run.recompute == "full":  # what the device executes, where the source has no FLOP/s of its own
        rates.append(run.flops_per_s(FlopBasis.MEGATRON_RECOMPUTE) if not run.spec.gated else None)
    ceiling, where = _ceiling(run)
    for rate in rates:
        if rate and ceiling and rate > ceiling:
            raise ConfigError(
                f"{rate / 1e12:.1f} TFLOP/s per device is above {ceiling / 1e12:.1f}, {where}. Check the samples "
                f"processed per step (global_batch {run.global_batch_size}: does micro_batch x gradient accumulation "
                f"x dp of the engine's own configuration agree?), the FLOP basis ({run.basis.value}), and the unit."
            )


def _ceiling(run: PublishedRun) -> tuple[float | None, str]:
    """Returns the highest FLOP/s that one device can be believed to do, and why."""
    site, speedup = run.site(), SPEEDUP.get(run.precision, 1.0)
    matmul = site.device.matmul_flops_per_s.get("bf16") if site else None
    if matmul and site:
        return matmul.value * speedup, f"the highest rate a matrix product was seen to reach on {site.name}"
    peak = (site.peak_flops_per_s("bf16") if site else None) or run.peak_flops_per_s
    if peak is None:
        return None, ""
    return peak * speedup * NEVER_SEEN, f"{NEVER_SEEN:.0%} of the peak, which no published matrix product passes"


def _stack(row: dict[str, str]) -> str:
    """Returns source and machine, without page or version: rows that share one software stack."""
    return f"{row['source'].split('(')[0].split(' arXiv')[0].strip()}, {row['system']}"


def _memory(note: str | None) -> float | None:
    match = re.search(r"\bmem (\d+) ?GB", note or "")
    return float(match[1]) * 1e9 if match else None


def _number(row: dict[str, str], column: str) -> float | None:
    text = (row[column] or "").strip()
    if not text or text == "-":
        return None
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{column}: {text!r} is not a number.") from None
    if not np.isfinite(value) or value < 0 or (value == 0 and column != "zero_stage"):
        raise ConfigError(f"{column}: {text} is not allowed. Give a finite number above 0, or leave it empty.")
    return value
