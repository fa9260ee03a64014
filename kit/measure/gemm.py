"""Measures the rate of matrix products on this machine in FLOP/s. If no data sheet states a peak,
MFU is computed with this rate.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from cluster.interpreter import source_command
from cluster.site import Fact, Site
from kit.errors import RunError
from kit.measure.device import torch_device

SIZE = 512
"""Number of rows and columns of the square matrices that a CPU core multiplies. The matrices are
large enough for the full rate of a core, and small enough for its private cache."""
ROUND_S = 0.2
"""Seconds for which matrix products are repeated in one round of a measurement."""
ROUNDS = 15
"""Largest number of rounds in which the peak of one device and dtype is measured."""
CHILD_LIMIT_S = 120.0
"""Time limit, in seconds, of the child process that measures a GPU. It includes the import of torch
and the initialisation of the device."""
AGREE = 0.03
"""Largest relative difference between the rates of the two best rounds at which a measured peak is
accepted."""


def measure_gemm_flops_per_s(
    dtype: str,
    *,
    device: str | None = None,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the highest rate in FLOP/s of a square matrix product on one CPU core or one GPU. The
    default device is a GPU, or the CPU if no GPU is available.

    Matrix products run on a single thread until `seconds` of wall time have passed. Each is timed
    by `clock`. The rate of the fastest product is returned, since a peak is the rate of a device
    without disturbance by other programs.
    """
    import torch

    from kit.measure.timing import best_within

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZE if device == "cpu" else 16 * SIZE
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    return 2 * size**3 / best_within(seconds, lambda: torch.matmul(a, b), clock)


def measure_peak(dtype: str, device: str = "cpu") -> Fact:
    """Returns the peak of one device in FLOP/s, with its source and error. It is the highest rate
    of matrix products in several rounds. The rounds end when the relative difference of the two
    best rates is at most `AGREE`.

    On a CPU, a product is timed by the CPU time of its thread. This clock stops while other
    processes use the core. Other processes still slow the product, through shared caches, the
    second hardware thread of the core and its clock rate. The rates of the rounds then differ. If
    no two rounds agree after `ROUNDS` rounds, the machine was too busy. For such a peak
    `is_settled` returns False, and the source of the peak says that the machine was too busy.

    A GPU is measured by a child process. A process that has used a GPU occupies about 0.9 GB of the
    GPU's memory until the process ends, and a notebook may run for days.

    Raises:
        RunError: The child process failed on the GPU or exceeded its time limit.
    """
    if device != "cpu":
        return _peak_by_child(dtype, device)
    return peak_here(dtype, device)


def peak_here(dtype: str, device: str) -> Fact:
    """Returns the peak of one device in FLOP/s, measured as `measure_peak` describes. A GPU is
    measured in this process too, not in a child process.
    """
    clock = time.thread_time if device == "cpu" else time.perf_counter
    measure = partial(measure_gemm_flops_per_s, dtype, device=device, seconds=ROUND_S, clock=clock)
    rates = [measure(), measure()]
    while len(rates) < ROUNDS and _spread(rates) > AGREE:
        rates.append(measure())
    source = (
        f"measured on this machine: best {dtype} matrix product on one device, {len(rates)} rounds"
    )
    if _spread(rates) > AGREE:
        source += ", no two agree: it was too busy"
    return Fact(value=max(rates), source=source, error=min(1.0, _spread(rates)))


def _peak_by_child(dtype: str, device: str) -> Fact:
    """Returns the peak of one GPU in FLOP/s, measured by a child process that runs this module."""
    try:
        done = subprocess.run(
            source_command("kit.measure.gemm", dtype, device),
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHILD_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"device {device!r}: matrix products in {dtype} were not measured within"
            f" {CHILD_LIMIT_S:.0f} s. The device or its driver hangs: check it with `kit doctor`."
        ) from error
    if done.returncode:
        words = done.stderr.strip().splitlines()
        reason = words[-1] if words else f"exit code {done.returncode}"
        raise RunError(
            f"device {device!r}: matrix products in {dtype} could not be measured: {reason}. Check"
            " with `kit doctor`; if another process fills its memory, end that process."
        )
    return Fact.from_json(done.stdout.splitlines()[-1])


def is_settled(peak: Fact) -> bool:
    """Returns whether a measured peak is reliable. The rates of its two best rounds then differ by
    at most `AGREE`.
    """
    return peak.error is not None and peak.error <= AGREE


def measured_site(site: Site, dtype: str = "fp32") -> Site:
    """Measures the rate of matrix products in `dtype` on one device of this machine. Returns a copy
    of the local site with this rate as the peak for `dtype`.
    """
    peak = measure_peak(dtype, device=torch_device(site))
    return site.with_measured_peak(dtype, peak.value, peak.source, peak.error)


def _spread(rates: list[float]) -> float:
    """Returns the difference between the two highest rates, as a fraction of the highest rate."""
    second, best = sorted(rates)[-2:]
    return 1 - second / best


if __name__ == "__main__":
    print(json.dumps(peak_here(*sys.argv[1:]).to_dict()))
