"""Measures memory, own work and speed of a rank without waiting for the rank's device. Also
controls when Python collects garbage.
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
"""Number of steps between two garbage collections. Rare collections are safe, since the model's
reference cycles hold no tensors. They must not be too rare: an uncompiled step with selective
recomputation leaves about 200 objects per layer and micro-batch, so a collection would have to
search millions. Saving a checkpoint also makes millions of objects, all of which stay alive."""
PROBE_EVERY_S = 60.0
"""Seconds between two speed probes of a GPU. A speed probe is a short measurement of matrix
products."""
PROBE_SIZE, PROBE_PRODUCTS, PROBE_PARTS = 4096, 12, 5
"""Size of a speed probe: rows of its square matrices, matrix products per timed part, and timed
parts per probe. The 5 x 12 products of 0.14 TFLOP take about 15 ms on an H100 and 50 ms on half an
MI250X."""


class Telemetry:
    """Adds memory use of this rank to the row of each step. On a CPU, also adds the seconds for
    which this rank waited for other ranks. On a GPU, measures the speed of matrix products.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self.probe = SpeedProbe(device) if device.type == "cuda" else None
        # On Trainium, reference cycles may hold tensors, so Python collects garbage by itself.
        self.collects = not plan.capabilities.runs_on_trainium

    def after_step(self, step: Step) -> None:
        """Adds memory and waiting time to `step.row`, sets `step.work_s`, and collects garbage if
        it is due.
        """
        step.row |= memory_row(self.device)
        if self.device.type == "cpu":
            # On a CPU this thread computes the step. `busy_s` does not contain the seconds in
            # which the thread waits for other ranks.
            step.work_s = step.data_s + step.busy_s
            step.row["waiting_s"] = round(max(0.0, step.launch_s - step.busy_s), 6)
        elif self.probe:
            step.work_s = self.probe.poll()
        if self.collects:
            collect_garbage(step.number)


def collect_garbage(step: int) -> None:
    """Collects recent garbage at certain steps, which are the same on all ranks. If ranks collected
    at different steps, each rank would wait for the pauses of all others. Older objects are not
    searched.
    """
    if step % COLLECT_EVERY == 1:
        # Loading a checkpoint enables automatic collection, so it is disabled each time.
        gc.disable()
        gc.collect(1)


def memory_row(device: torch.device) -> dict[str, Any]:
    """Returns the columns of metrics.jsonl about memory. `memory_bytes` is the peak in bytes on
    this rank's device or, on a CPU, of its process. On a GPU there are also the reserved peak and
    the number of allocation retries. On XLA, which does not report memory, the value is None.
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
    """Returns the seconds for which this thread has computed so far. On Linux, the seconds in which
    the thread waited for a CPU core are included.
    """
    try:
        told = os.pread(_schedule(threading.get_native_id()), 64, 0)
        return time.thread_time() + int(told.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return time.thread_time()


@functools.cache
def _schedule(thread: int) -> int:
    """Returns the descriptor of the open file schedstat of a thread. The file has two times in
    nanoseconds: on a CPU core, and waiting for a CPU core.

    The file stays open because each step reads it twice, and opening costs four times as much as
    reading.
    """
    return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)


class SpeedProbe:
    """Measures how long matrix products take on this rank's GPU, every PROBE_EVERY_S seconds. Step
    times do not show that one GPU is slow, since all ranks wait for the slowest rank.
    """

    def __init__(self, device: torch.device) -> None:
        # The matrices have random values. Products of zeros need less power, which would hide a GPU
        # that lowers its clock under load.
        own = torch.Generator(device).manual_seed(0)
        self.matrix = torch.randn(
            PROBE_SIZE, PROBE_SIZE, generator=own, dtype=torch.float16, device=device
        )
        self.out = torch.empty_like(self.matrix)
        self.marks: list[torch.cuda.Event] = []
        self.asked_at = float("-inf")
        self.seconds = None

    def poll(self) -> float | None:
        """Returns the seconds of the fastest part of the newest finished probe, or None if no probe
        has finished. Launches the next probe if it is due.
        """
        if self.marks and self.marks[-1].query():
            self.seconds = min(start.elapsed_time(end) for start, end in pairwise(self.marks)) / 1e3
            self.marks = []
        if not self.marks and time.monotonic() - self.asked_at > PROBE_EVERY_S:
            self.asked_at = time.monotonic()
            # The first part only warms up the GPU.
            self.marks = [self._part() for _ in range(1 + PROBE_PARTS)]
        return self.seconds

    def _part(self) -> torch.cuda.Event:
        for _ in range(PROBE_PRODUCTS):
            torch.mm(self.matrix, self.matrix, out=self.out)
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark
