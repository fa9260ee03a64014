"""Data that one replica reads: its part of each batch, read in advance so that no step waits for
data, and sequences of the validation set.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from kit.data import Dataset, training_samples
from kit.engines.engine import Engine
from kit.run import Run

AHEAD = 2
"""Number of batches that are read in advance."""


class Batches:
    """Reads one replica's part of a run's batches. The next AHEAD batches are read while the
    replica trains on one batch.

    For a GPU the batches are in pinned memory, from which the GPU copies them without a wait of the
    host.
    """

    def __init__(self, run: Run, dataset: Dataset, data_rank: int, device: torch.device) -> None:
        self.recipe = run.recipe
        self.plan = run.plan
        self.length = run.spec.sequence_length
        self.dataset = dataset
        self.data_rank = data_rank
        self.samples = training_samples(run.recipe, self.length)
        self.is_pinned = device.type == "cuda"
        if self.is_pinned:
            self.thread = ThreadPoolExecutor(1, "batches", torch.cuda.set_device, (device,))
        else:
            self.thread = ThreadPoolExecutor(1, "batches")
        self.coming: dict[int, Future[Tensor]] = {}

    def at(self, first: int) -> Tensor:
        """Returns this replica's part of the global batch that starts at sample `first`, as S
        sequences [S, T + 1].

        Raises the error with which reading has failed.
        """
        size = self.plan.global_batch_size
        firsts = range(first, first + (1 + AHEAD) * size, size)
        self.coming = {i: self.coming.get(i) or self.thread.submit(self._read, i) for i in firsts}
        return self.coming.pop(first).result()

    def _read(self, first: int) -> Tensor:
        share = self.plan.global_batch_size // self.plan.data_parallel
        batch = torch.from_numpy(self.samples.batch(first + self.data_rank * share, share))
        if self.is_pinned:
            batch = batch.pin_memory()
        return batch

    def validation_loss(self, engine: Engine) -> float:
        """Returns the mean loss, in nats per token, of the first sequences of the validation set.
        Each sequence counts once, whatever the layout and batch size.
        """
        plan = self.plan
        held_out = self.dataset.samples("validation", self.length, self.recipe.seed)
        count = min(self.recipe.validation_sequences, self.dataset.held_out_sequences(self.length))
        # Micro-batches are always full, since other shapes would be compiled again. Copies of
        # sequence 0 fill the last micro-batches, and their loss is subtracted below. NxD's pipeline
        # needs whole batches.
        unit = plan.data_parallel * plan.micro_batch_size
        if plan.capabilities.validates_whole_batches:
            unit = plan.global_batch_size
        filling = -count % unit

        def total(numbers: list[int]) -> float:
            share = len(numbers) // plan.data_parallel
            mine = numbers[self.data_rank * share :][:share]
            rows = np.concatenate([held_out.batch(number, 1) for number in mine])
            return len(numbers) * engine.validation_loss(torch.from_numpy(rows))

        numbers = [*range(count), *[0] * filling]
        parts = range(0, len(numbers), plan.global_batch_size)
        loss = sum(total(numbers[first : first + plan.global_batch_size]) for first in parts)
        if filling:
            loss -= filling / unit * total([0] * unit)
        return loss / count
