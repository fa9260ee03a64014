"""Batches read ahead by a thread, so that no step waits for the data."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

AHEAD = 2


class Batches:
    """The batches of a run, of which the next `AHEAD` are read while the current one is trained on.

    Args:
        read: returns the batch that starts at a sample of the run, [S, T + 1].
        device: that trains; for a GPU batches lie in pinned memory, from which it fetches them without a wait.
    """

    def __init__(self, read: Callable[[int], Tensor], device: torch.device) -> None:
        self.read, self.is_pinned = read, device.type == "cuda"
        start = {"initializer": torch.cuda.set_device, "initargs": (device,)} if self.is_pinned else {}
        self.thread = ThreadPoolExecutor(1, "batches", **start)
        self.coming: dict[int, Future[Tensor]] = {}

    def at(self, first: int, size: int) -> Tensor:
        """Returns the batch that starts at sample `first`; those that follow have `size` samples each.

        What goes wrong in reading it is raised here, not before.
        """
        firsts = [first + i * size for i in range(1 + AHEAD)]
        self.coming = {i: self.coming.get(i) or self.thread.submit(self._read, i) for i in firsts}
        return self.coming.pop(first).result()

    def _read(self, first: int) -> Tensor:
        batch = self.read(first)
        return batch.pin_memory() if self.is_pinned else batch
