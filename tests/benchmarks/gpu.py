"""One GPU: tokens/s, MFU and memory of the kit in bf16, beside a plain compiled loop, Trainer and DeepSpeed ZeRO-1.

Without a GPU, a tiny model runs through the same code on the CPU, in fp32 and uncompiled, so that the program is known
to work; its rows say so and have no targets.
"""

import statistics
from pathlib import Path
from typing import Any

import torch

from cluster.site import Site
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import memory
from kit.measure.gemm import measure_gemm_flops_per_s
from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.contestants import Setup
from tests.benchmarks.train_speed import Entrant, take_answers

KIT = "kit"
ENTRANTS = {
    KIT: Entrant(name="kit", keep_freed_memory=False),
    "plain compiled loop": Entrant(name="plain", keep_freed_memory=False),
    "Trainer": Entrant(name="transformers", keep_freed_memory=False),
    "DeepSpeed ZeRO-1": Entrant(name="deepspeed_zero1", keep_freed_memory=False),
}
DATASHEETS = {"H100": "dgx-h100", "H200": "dgx-h100", "A100": "selene"}
"""Site whose device has the same peak, by a part of the name that CUDA gives. Source: NVIDIA's data sheets."""
MFU_WANTED = {"gpt-1.4b": 0.55}
ROUNDS, STEPS = 3, 5


def setups(has_gpu: bool) -> list[Setup]:
    """Returns what is trained: three models on a GPU, each in one pass of a few thousand tokens; else a tiny one."""
    if not has_gpu:
        tiny = ModelSpec.preset("demo").replace(name="tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4,
                                                ffn_hidden_size=128, sequence_length=64)  # fmt: skip
        return [Setup(spec=tiny, batch_size=2, recompute="selective")]
    llama_1b = ModelSpec.llama(
        name="llama-1b", num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, ffn_hidden_size=8192,
        vocab_size=32_000, sequence_length=2048,
    )  # fmt: skip
    eight_layers = ModelSpec.preset("llama3-8b").replace(name="llama3-8b, 8 layers", num_layers=8, sequence_length=2048)
    specs = (ModelSpec.preset("gpt-1.4b").replace(sequence_length=2048), llama_1b, eight_layers)
    given: dict[str, Any] = {"device": "cuda", "precision": "bf16", "compile": True, "recompute": "selective"}
    return [Setup(spec=spec, batch_size=4, **given) for spec in specs]


def measure(workplace: Path, *, rounds: int = ROUNDS, steps: int = STEPS) -> list[Row]:
    """Returns the rows of all models; `workplace` is an empty folder.

    Raises:
        RuntimeError: a process failed, or the loops do not train the same model.
    """
    has_gpu = torch.cuda.is_available()
    chosen = setups(has_gpu)
    gemm = measure_gemm_flops_per_s(chosen[0].precision)
    name = torch.cuda.get_device_name() if has_gpu else "CPU: this checks the program, it says nothing of a GPU"
    rows = [row(f"matrix product, {chosen[0].precision}", gemm / 1e12, "TFLOP/s", note=name)]
    for setup in chosen:
        answers = take_answers(ENTRANTS, workplace, threads=1, rounds=rounds, steps=steps, setup=setup)
        rows += _rows(setup, answers, gemm, datasheet_peak(name) if has_gpu else None)
    return rows


def datasheet_peak(device: str) -> float | None:
    """Returns the dense bf16 peak of a GPU in FLOP/s, None for one that no site file knows."""
    site = next((site for part, site in DATASHEETS.items() if part in device), None)
    return Site.load(site).peak_flops_per_s("bf16") if site else None


def _rows(setup: Setup, answers: dict[str, list[dict[str, float]]], gemm: float, peak: float | None) -> list[Row]:
    """Returns tokens/s of all, the kit's ratios, and its MFU and memory; targets are of a GPU alone."""
    model, on_gpu = setup.spec.name, setup.device == "cuda"
    tokens = setup.batch_size * setup.spec.sequence_length
    times = {name: [answer["step_s"] for answer in given] for name, given in answers.items()}
    rates = {name: tokens / statistics.median(given) for name, given in times.items()}
    rows = [row(f"{name}, {model}", rate, "tokens/s") for name, rate in rates.items()]
    for name in list(rates)[1:]:
        ratio = statistics.median(theirs / ours for ours, theirs in zip(times[KIT], times[name], strict=True))
        wanted = (1.3 if name == "Trainer" else 1.0) if on_gpu else None
        rows.append(row(f"{KIT} / {name}, {model}", ratio, "x", at_least=wanted))
    flops = rates[KIT] * setup.spec.flops_per_token()
    rows.append(row(f"MFU against this run's matrix product, {model}", flops / gemm, "fraction"))
    if peak is not None:
        wanted = MFU_WANTED.get(model)
        rows.append(row(f"MFU against the data sheet, {model}", flops / peak, "fraction", at_least=wanted))
    if used := max((answer.get("memory_bytes", 0.0) for answer in answers[KIT]), default=0.0):
        expected = float(memory(Layouts.of(setup.spec, [setup.plan], flash_attention=2)).last.total.item())
        error, note = abs(expected / used - 1), f"{used / 2**30:.1f} GiB used, {expected / 2**30:.1f} estimated"
        rows.append(row(f"memory: error of the estimate, {model}", error, "fraction", at_most=0.05, note=note))
    return rows
