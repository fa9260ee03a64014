"""One model on one GPU: tokens/s, MFU and memory of the kit, beside a compiled loop, Trainer,
DeepSpeed and torchtitan.

Each has the device to itself, one after the other. Without a GPU the same program compares one CPU
thread each, in fp32, compiled and by turns; there processor time counts, which other work on the
machine disturbs less than the wall.
"""

import re
from pathlib import Path
from typing import Any

import torch

from cluster.site import Site
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import memory
from kit.measure.gemm import measure_gemm_flops_per_s
from kit.plan import Recompute
from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.contestants import DEMO, LARGER, Setup, llama
from tests.benchmarks.train_speed import Answers, Entrant, speeds, take_answers

KIT, SELECTIVE, PLAIN = "kit", "kit, selective recomputation", "plain compiled loop"
ENTRANTS = {
    KIT: Entrant("kit"),
    SELECTIVE: Entrant("kit_selective"),
    PLAIN: Entrant("plain"),
    "Trainer": Entrant("transformers"),
    "DeepSpeed ZeRO 1": Entrant("deepspeed_zero1"),
    "torchtitan": Entrant("torchtitan"),
}
RECOMPUTED: dict[str, Recompute] = {KIT: "none", SELECTIVE: "selective"}
DATASHEETS = {"H100": "dgx-h100", "H200": "dgx-h100", "A100": "selene"}
"""Site whose device has the same peak, by a part of the name that CUDA gives. Source: NVIDIA's
data sheets."""
MFU_WANTED = {"gpt-1.4b": 0.55, "llama3-8b-8-layers": 0.55}
ON_CPU_WANTED = 0.98
LIMIT_S = 450.0
"""Of all contestants of one model, so that a command takes less than eight minutes."""


def models(has_gpu: bool | None = None) -> dict[str, tuple[Setup, int]]:
    """Returns setup and steps of a turn by name, for the device at hand.

    On a GPU 8,192 tokens a step, in one pass.
    """
    if not (torch.cuda.is_available() if has_gpu is None else has_gpu):
        return {
            "demo": (DEMO.replace(batch_size=8), 3),
            "llama-100m": (LARGER, 1),
            "tiny": (Setup(spec=llama("tiny"), batch_size=2), 3),
        }
    eight_layers = ModelSpec.preset("llama3-8b").replace(
        name="llama3-8b-8-layers", num_layers=8, sequence_length=2048
    )
    specs = (
        ModelSpec.preset("gpt-1.4b").replace(sequence_length=2048),
        llama("llama-1b"),
        eight_layers,
    )
    return {
        spec.name: (Setup(spec=spec, batch_size=4, device="cuda", precision="bf16"), 5)
        for spec in specs
    }


def measure(
    workplace: Path, *, model: str | None = None, rounds: int = 5, compiled: bool = True
) -> list[Row]:
    """Returns the rows of one model, by default the first for this machine's device; `workplace` is
    an empty folder.

    Raises:
        KeyError: no such model for this device.
        RuntimeError: the kit itself failed.
    """
    setup, steps = models()[model or next(iter(models()))]
    setup, has_gpu = setup.replace(compile=compiled), setup.device == "cuda"
    gemm = measure_gemm_flops_per_s(setup.precision)
    name = "one thread of a CPU: it says nothing of a GPU"
    name = torch.cuda.get_device_name() if has_gpu else name
    answers = take_answers(
        ENTRANTS,
        workplace,
        rounds=rounds,
        steps=steps,
        setup=setup,
        together=not has_gpu,
        limit_s=LIMIT_S,
    )
    product = row(f"matrix product, {setup.precision}", gemm / 1e12, "TFLOP/s", note=name)
    return [product, *judged(answers, gemm, datasheet_peak(name) if has_gpu else None)]


def results_name(model: str) -> str:
    """Returns the name of a model's results: `gpu_gpt_1_4b`, or `compiled_demo` on a CPU."""
    return re.sub(r"\W", "_", f"{'gpu' if torch.cuda.is_available() else 'compiled'}_{model}")


def datasheet_peak(device: str) -> float | None:
    """Returns the dense bf16 peak of a GPU in FLOP/s, None for one that no site file knows."""
    site = next((site for part, site in DATASHEETS.items() if part in device), None)
    return Site.load(site).peak_flops_per_s("bf16") if site else None


def judged(answers: Answers, gemm: float, peak: float | None) -> list[Row]:
    """Returns tokens/s of all, the kit's ratio to each rival that trains the same model, and its
    MFU and memory.
    """
    setup, has_gpu = answers.setup, answers.setup.device == "cuda"
    model = setup.spec.name
    wanted: dict[str, float | None] = {
        name: 1.0 if has_gpu else None for name in ENTRANTS if name not in RECOMPUTED
    }
    if not has_gpu and model != "tiny":
        wanted[PLAIN] = ON_CPU_WANTED
    rows = speeds(answers, model, wanted, clock="step_s" if has_gpu else "step_cpu_s")
    flops = rows[0].value * setup.spec.flops_per_token()
    rows.append(row(f"MFU against this run's matrix product, {model}", flops / gemm, "fraction"))
    if peak is not None:
        sheet, least = f"MFU against the data sheet, {model}", MFU_WANTED.get(model)
        rows.append(row(sheet, flops / peak, "fraction", at_least=least))
    measured = [name for name in RECOMPUTED if name in answers.given] if has_gpu else []
    return rows + [_memory(setup, name, answers.given[name]) for name in measured]


def _memory(setup: Setup, name: str, answers: list[dict[str, Any]]) -> Row:
    """Returns how far the estimate is from what was allocated; what the allocator reserved for
    it is told beside it.
    """
    allocated, reserved = (
        max(each[f"{kind}_bytes"] for each in answers[1:]) for kind in ("allocated", "reserved")
    )
    plan = setup.plan.replace(recompute=RECOMPUTED[name])
    layouts = Layouts.of(setup.spec, [plan], flash_attention=2)
    expected = float(memory(layouts).stages[1].total.item())
    told = (
        f"{allocated / 2**30:.1f} GiB allocated, {expected / 2**30:.1f} estimated;"
        f" {reserved / 2**30:.1f} reserved"
    )
    subject = f"{name}, {setup.spec.name}: error of the estimated memory"
    return row(subject, abs(expected / allocated - 1), "fraction", at_most=0.05, note=told)
