"""What a step gives, and when its phases ended, at no cost: by the host's clock, or by events of a
GPU that nobody waits for.
"""

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PHASES = ("forward_backward_s", "reduction_s", "optimizer_s")
"""Columns of the metrics, of rank 0. Reduction is what is left of it after the backward pass, with
gradient norm and clipping."""


class StepResult:
    """Loss and gradient norm of a step that begins now, on their way into memory; an accelerator is
    waited for when they are read.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Ends one of PHASES, where the GPU gets to it; called at the end of each."""
        self.marks.append(self._now())

    def take(self, loss: Tensor, norm: Tensor) -> None:
        """Sends both on their way."""
        self.values = torch.stack((loss, norm)).to("cpu", non_blocking=True)  # from a GPU: pinned
        self.arrived = self._now()

    def read(self) -> tuple[float, float]:
        """Returns loss and norm once they are there."""
        if self.is_gpu:
            self.arrived.synchronize()
        loss, norm = self.values.tolist()
        return loss, norm

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the phases that are over, by name; to be asked after `read`."""
        over = [mark for mark in self.marks if not self.is_gpu or mark.query()]
        took = (a.elapsed_time(b) / 1e3 if self.is_gpu else b - a for a, b in pairwise(over))
        return {name: round(seconds, 6) for name, seconds in zip(PHASES, took, strict=False)}

    def _now(self) -> Any:
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
