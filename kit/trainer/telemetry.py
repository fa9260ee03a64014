"""What a rank tells of itself beside its steps, without waiting for its device: its memory, its
own work and speed; and Python's garbage.
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
"""Steps. The model's cycles hold no tensors; an eager step with selective recomputation leaves some
200 objects a layer and micro-batch, so that later there would be millions. A save makes millions
too, all of which stay."""
PROBE_EVERY_S = 60.0
PROBE_SIZE, PROBE_PRODUCTS, PROBE_PARTS = 4096, 12, 5
"""5 x 12 products of 0.14 TFLOP: some 15 ms on an H100, 50 ms on half an MI250X."""


class Telemetry:
    """Adds to each row the memory of this rank and, on a CPU, how long it waited for others."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self.probe = SpeedProbe(device) if device.type == "cuda" else None
        self.collects = not plan.capabilities.runs_on_trainium  # whose cycles may hold tensors

    def after_step(self, step: Step) -> None:
        """Looks at memory and work, and collects garbage when it is time."""
        step.row |= memory_row(self.device)
        if self.device.type == "cpu":
            # This thread computes, and does not while it waits for other ranks.
            step.work_s = step.data_s + step.busy_s
            step.row["waiting_s"] = round(max(0.0, step.launch_s - step.busy_s), 6)
        elif self.probe:
            step.work_s = self.probe.look()
        if self.collects:
            collect_garbage(step.number)


def collect_garbage(step: int) -> None:
    """Collects new garbage at certain steps only, the same on all ranks, which else would wait for
    each other's pauses; what is older is not looked at.
    """
    if step % COLLECT_EVERY == 1:
        gc.disable()  # again: loading a checkpoint turns it on
        gc.collect(1)


def memory_row(device: torch.device) -> dict[str, Any]:
    """Returns the columns of the metrics about memory: peaks of the device of this rank, on a CPU
    the peak of its process. XLA does not report memory.
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
    """Returns the seconds in which this thread has computed or, where Linux tells, waited for a
    core to compute on.
    """
    try:
        told = os.pread(_schedule(threading.get_native_id()), 64, 0)
        return time.thread_time() + int(told.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return time.thread_time()


@functools.cache
def _schedule(thread: int) -> int:
    """Returns the open file that tells how long a thread of this process was on a core, and in its
    queue, in nanoseconds.

    Each step asks twice, and to open it costs four times as much as to read it.
    """
    return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)


class SpeedProbe:
    """Times matrix products on this rank's GPU now and then: steps tell nothing, as all ranks
    wait for the slowest.
    """

    def __init__(self, device: torch.device) -> None:
        # Of zeros a product takes less power, and hides a slow clock.
        own = torch.Generator(device).manual_seed(0)
        self.matrix = torch.randn(
            PROBE_SIZE, PROBE_SIZE, generator=own, dtype=torch.float16, device=device
        )
        self.out = torch.empty_like(self.matrix)
        self.marks: list[torch.cuda.Event] = []
        self.asked_at = float("-inf")
        self.seconds = None

    def look(self) -> float | None:
        """Returns the seconds of the best part of the newest probe that has ended; launches
        another if it is time.
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
