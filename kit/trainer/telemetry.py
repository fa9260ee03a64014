"""Measurements of a rank beside its steps, made without waiting for its device: its memory, own
work and speed. Also controls Python's garbage collection.
"""

import functools
import gc
import os
import resource
import threading
import time
from itertools import pairwise
from typing import Any

import torch

from kit.config.plan import Plan
from kit.trainer.callback import Step

COLLECT_EVERY = 20
"""Steps between two garbage collections. The model's reference cycles hold no tensors. An eager
step with selective recomputation leaves some 200 objects per layer and micro-batch, so that rare
collections would find millions. A save also makes millions of objects, which all stay."""
PROBE_EVERY_S = 60.0
"""Seconds between two speed probes of a GPU."""
PROBE_SIZE, PROBE_PRODUCTS, PROBE_PARTS = 4096, 12, 5
"""Rows of a probe's square matrices, products per timed part, and timed parts per probe. The 5 x 12
products of 0.14 TFLOP take some 15 ms on an H100 and 50 ms on half an MI250X."""


class Telemetry:
    """Adds the memory of this rank to each row and, on a CPU, the seconds for which this rank
    waited for others. On a GPU it measures the speed of matrix products.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self.probe = SpeedProbe(device) if device.type == "cuda" else None
        self.collects = (
            not plan.capabilities.runs_on_trainium
        )  # On Trainium cycles may hold tensors.

    def after_step(self, step: Step) -> None:
        """Adds memory and waiting time to the row, sets the step's own work, and collects garbage
        when it is due.
        """
        step.row |= memory_row(self.device)
        if self.device.type == "cpu":
            # On a CPU this thread computes the step, except while it waits for other ranks.
            step.work_s = step.data_s + step.busy_s
            step.row["waiting_s"] = round(max(0.0, step.launch_s - step.busy_s), 6)
        elif self.probe:
            step.work_s = self.probe.look()
        if self.collects:
            collect_garbage(step.number)


def collect_garbage(step: int) -> None:
    """Collects recent garbage at certain steps, which are equal on all ranks. If ranks collected at
    different steps, they would wait for each other's pauses. Older objects are not searched.
    """
    if step % COLLECT_EVERY == 1:
        gc.disable()  # Repeated, since loading a checkpoint enables collection.
        gc.collect(1)


def memory_row(device: torch.device) -> dict[str, Any]:
    """Returns the metrics columns about memory: peaks in bytes on this rank's device or, on a CPU,
    of its process. On a GPU also counts allocation retries. XLA does not report memory.
    """
    if device.type == "xla":
        return {"memory_bytes": None}
    if device.type != "cuda":
        return {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    names = {
        "memory_bytes": "allocated_bytes.all.peak",
        "reserved_bytes": "reserved_bytes.all.peak",
        "allocation_retries": "num_alloc_retries",
    }
    stats = torch.cuda.memory_stats(device)
    return {name: stats[its] for name, its in names.items()}


def busy_s() -> float:
    """Returns the seconds for which this thread has computed or, where Linux reports it, waited for
    a core.
    """
    try:
        told = os.pread(_schedule(threading.get_native_id()), 64, 0)
        return time.thread_time() + int(told.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return time.thread_time()


@functools.cache
def _schedule(thread: int) -> int:
    """Returns the descriptor of the open file with two times of a thread, in nanoseconds: on a
    core, and in the queue of a core.

    Each step reads the file twice. Opening costs four times as much as reading.
    """
    return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)


class SpeedProbe:
    """Measures the seconds of matrix products on this rank's GPU, every PROBE_EVERY_S. Step times
    do not show the speed of one GPU, since all ranks wait for the slowest rank.
    """

    def __init__(self, device: torch.device) -> None:
        # Random values: a product of zeros needs less power, which would hide a slow clock.
        own = torch.Generator(device).manual_seed(0)
        self.matrix = torch.randn(
            PROBE_SIZE, PROBE_SIZE, generator=own, dtype=torch.float16, device=device
        )
        self.out = torch.empty_like(self.matrix)
        self.marks: list[torch.cuda.Event] = []
        self.asked_at = float("-inf")
        self.seconds = None

    def look(self) -> float | None:
        """Returns the seconds of the fastest part of the newest finished probe, or None before the
        first. Launches the next probe when it is due.
        """
        if self.marks and self.marks[-1].query():
            self.seconds = min(start.elapsed_time(end) for start, end in pairwise(self.marks)) / 1e3
            self.marks = []
        if not self.marks and time.monotonic() - self.asked_at > PROBE_EVERY_S:
            self.asked_at = time.monotonic()
            self.marks = [self._part() for _ in range(1 + PROBE_PARTS)]  # the first warms up
        return self.seconds

    def _part(self) -> torch.cuda.Event:
        for _ in range(PROBE_PRODUCTS):
            torch.mm(self.matrix, self.matrix, out=self.out)
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark
