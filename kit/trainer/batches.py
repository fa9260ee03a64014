"""Batches read ahead by a thread, so that no step waits for the data."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

AHEAD = 2


class Batches:
    """The batches that `read` returns by their first sample, the next `AHEAD` of them read while
    one is trained on.

    For a GPU they lie in pinned memory, from which it fetches them without a wait.
    """

    def __init__(self, read: Callable[[int], Tensor], device: torch.device) -> None:
        start = (
            {"initializer": torch.cuda.set_device, "initargs": (device,)}
            if device.type == "cuda"
            else {}
        )
        self.thread = ThreadPoolExecutor(1, "batches", **start)
        self.read = (lambda first: read(first).pin_memory()) if device.type == "cuda" else read
        self.coming: dict[int, Future[Tensor]] = {}

    def at(self, first: int, size: int) -> Tensor:
        """Returns the batch from sample `first` on, of `size` samples, or raises what went wrong
        in reading it.
        """
        firsts = range(first, first + (1 + AHEAD) * size, size)
        self.coming = {i: self.coming.get(i) or self.thread.submit(self.read, i) for i in firsts}
        return self.coming.pop(first).result()
