"""When the phases of a step ended, at no cost: by the host's clock, or by events of a GPU that
nobody waits for.
"""

import time
from itertools import pairwise
from typing import Any

import torch

PHASES = ("forward_backward_s", "reduction_s", "optimizer_s")
"""Columns of the metrics, of rank 0. Reduction is what is left of it after the backward pass, with
gradient norm and clipping."""


class Phases:
    """The clock of one step, which begins now; `mark` is called at the end of each of PHASES."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Ends a phase, where the GPU gets to it."""
        if self.is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the phases that are over, by name; to be asked after the step's
        result was read.
        """
        over = [mark for mark in self.marks if not self.is_gpu or mark.query()]
        took = (a.elapsed_time(b) / 1e3 if self.is_gpu else b - a for a, b in pairwise(over))
        return {name: round(seconds, 6) for name, seconds in zip(PHASES, took, strict=False)}
