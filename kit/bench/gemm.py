"""The rate at which this machine multiplies matrices: the measured peak behind MFU where no datasheet has one."""

import time

from cluster.site import Site

SIZE = 1024
"""Edge of the square matrices on a CPU: large enough for its full rate, small enough for many runs a second."""


def measure_gemm_flops_per_s(dtype: str, *, seconds: float = 1.0) -> float:
    """Returns the best rate of a square matrix product on one CPU core, or on the current accelerator, in FLOP/s.

    The best of many short runs on a single thread: a peak is what the device can do when nothing disturbs it, and
    threads that wait for each other on a busy machine would make it look low and MFU high.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZE if device.type == "cpu" else 8 * SIZE
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(size, size, device=device, dtype=kind), torch.randn(size, size, device=device, dtype=kind)
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.matmul(a, b)
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / best


def measured_site(site: Site, dtype: str = "fp32") -> Site:
    """Returns a local site with the peak of one device set to this machine's measured matrix-product rate."""
    source = f"measured on this machine: best {SIZE} x {SIZE} {dtype} matrix product on one core"
    return site.with_measured_peak(dtype, measure_gemm_flops_per_s(dtype), source)
