"""Rate at which this machine multiplies matrices: the measured peak for MFU if no data sheet has
one.
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
"""Edge of the square matrices on a CPU: large enough for its full rate, small enough to lie in a
core's own cache."""
ROUND_S = 0.2
"""Time of a round in seconds."""
ROUNDS = 15
"""Largest number of rounds."""
CHILD_LIMIT_S = 120.0
"""Time limit in seconds of a measurement on a GPU, including the import of torch and the start of
the device."""
AGREE = 0.03
"""Relative difference up to which two rounds have measured the same."""


def measure_gemm_flops_per_s(
    dtype: str,
    *,
    device: str | None = None,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the best rate of a square matrix product on one CPU core or GPU, in FLOP/s; by
    default a GPU if there is.

    The best of many short runs on a single thread, as many as fit into `seconds` on the wall, each
    timed by `clock`: a peak is what the device can do when nothing disturbs it.
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
    """Returns the matrix-product rate that the two best of several rounds agree on, as the peak of
    one device.

    On a CPU a product is timed by its thread's own clock, which stands still while other processes
    have the core. What they take beyond that (caches, the core's other half, its clock rate) shows
    as rounds that differ: after `ROUNDS` of them the machine was too busy, `is_settled` is False,
    and the source says so.

    A GPU is measured by a child process: a process that has used a GPU keeps about 0.9 GB of its
    memory, and a notebook may live for days.

    Raises:
        RunError: the child process failed on the GPU.
    """
    if device != "cpu":
        return _peak_by_child(dtype, device)
    return peak_here(dtype, device)


def peak_here(dtype: str, device: str) -> Fact:
    """Returns the result of `measure_peak`, measured by this process on any device."""
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
    """Returns the peak that a child process measures."""
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
    """Returns whether the rounds of a measured peak agree."""
    return peak.error is not None and peak.error <= AGREE


def measured_site(site: Site, dtype: str = "fp32") -> Site:
    """Returns a local site with the peak of one device set to the matrix-product rate that it
    reaches here.
    """
    peak = measure_peak(dtype, device=torch_device(site))
    return site.with_measured_peak(dtype, peak.value, peak.source, peak.error)


def _spread(rates: list[float]) -> float:
    """Returns by how much the second best rate is below the best, as a fraction."""
    second, best = sorted(rates)[-2:]
    return 1 - second / best


if __name__ == "__main__":
    print(json.dumps(peak_here(*sys.argv[1:]).to_dict()))
