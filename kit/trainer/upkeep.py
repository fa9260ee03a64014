"""What a rank does beside its steps on a GPU, without waiting for it: Python's garbage, its memory, its own speed."""

import gc
import resource
import time
from typing import Any

import torch

from kit.trainer.watchdog import Watchdog

COLLECT_EVERY = 20
"""Steps. The model's cycles hold no tensors; an eager step with selective recomputation leaves some 200 objects a layer
and micro-batch, so that later there would be millions."""
PROBE_EVERY_S = 60.0
PROBE_SIZE, PROBE_PRODUCTS, PROBE_PARTS = 4096, 12, 5
"""5 x 12 products of 0.14 TFLOP: some 15 ms on an H100, 50 ms on half an MI250X."""


def collect_garbage(step: int) -> None:
    """Collects garbage at certain steps only, the same on all ranks, which else would wait for each other's pauses."""
    if step % COLLECT_EVERY == 1:
        gc.disable()  # again: a save turns it on
        gc.collect(1)


def memory_row(device: torch.device) -> dict[str, Any]:
    """Returns what the metrics say of memory: the peak of this rank, and of a GPU's allocator what it holds in reserve.

    On a CPU the peak is that of the process; XLA does not tell.
    """
    if device.type == "xla":
        return {"memory_bytes": None}
    if device.type == "cpu":
        return {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    stats = torch.cuda.memory_stats(device)
    return {
        "memory_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "allocation_retries": stats["num_alloc_retries"],
    }


def tell_of_compilation(watchdog: Watchdog) -> None:
    """Lets a watchdog know when torch compiles."""
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(watchdog.compile_begins)
    on_compile_end(watchdog.compile_ends)


class SpeedProbe:
    """Times matrix products on this rank's GPU now and then: steps tell nothing, as all ranks wait for the slowest."""

    def __init__(self, device: torch.device) -> None:
        own = torch.Generator(device).manual_seed(0)  # of zeros a product takes less power, and hides a slow clock
        self.matrix = torch.randn(PROBE_SIZE, PROBE_SIZE, generator=own, dtype=torch.float16, device=device)
        self.out = torch.empty_like(self.matrix)
        self.marks: list[torch.cuda.Event] = []
        self.asked_at = float("-inf")
        self.seconds: float | None = None

    def look(self) -> float | None:
        """Returns the seconds of the best part of the newest probe that has ended; launches another if it is time."""
        if self.marks and self.marks[-1].query():
            pairs = zip(self.marks, self.marks[1:], strict=False)
            self.seconds = min(start.elapsed_time(end) for start, end in pairs) / 1e3
            self.marks = []
        if not self.marks and time.monotonic() - self.asked_at > PROBE_EVERY_S:
            self.asked_at = time.monotonic()
            self.marks = [self._mark()]
            for _ in range(PROBE_PARTS):
                for _ in range(PROBE_PRODUCTS):
                    torch.mm(self.matrix, self.matrix, out=self.out)
                self.marks.append(self._mark())
        return self.seconds

    def _mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark
