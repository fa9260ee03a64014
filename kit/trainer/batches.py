"""Data that one data-parallel replica reads: its part of each training batch, read in advance so
that no step waits for data, and sequences of the validation set.
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
    """Reads one replica's part of a run's batches. While the replica trains on one batch, a thread
    reads the next AHEAD batches.

    For a GPU the batches are in pinned memory, from which the GPU copies them without making the
    host wait.
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

    def local_batch(self, first: int) -> Tensor:
        """Returns this replica's part of the global batch that begins with sample number `first` of
        the run. Its shape is [S, T + 1]: S sequences of T tokens, and one more token each as the
        last target.

        If reading has failed, raises the error of the reading thread.
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
        """Returns the mean loss, in nats per token, over the first sequences of the validation set.
        Each sequence counts once, for every layout and batch size.
        """
        plan = self.plan
        sequences = self.dataset.samples("validation", self.length, self.recipe.seed)
        count = min(
            self.recipe.validation_sequences, self.dataset.num_validation_sequences(self.length)
        )
        # Micro-batches must be full, since another shape would be compiled again. Copies of
        # sequence 0 fill the last micro-batches, and their loss is subtracted below. NxD's pipeline
        # even needs full global batches.
        unit = plan.data_parallel * plan.micro_batch_size
        if plan.capabilities.validates_whole_batches:
            unit = plan.global_batch_size
        filling = -count % unit

        def total(numbers: list[int]) -> float:
            share = len(numbers) // plan.data_parallel
            mine = numbers[self.data_rank * share :][:share]
            rows = np.concatenate([sequences.batch(number, 1) for number in mine])
            return len(numbers) * engine.validation_loss(torch.from_numpy(rows))

        numbers = [*range(count), *[0] * filling]
        parts = range(0, len(numbers), plan.global_batch_size)
        loss = sum(total(numbers[first : first + plan.global_batch_size]) for first in parts)
        if filling:
            loss -= filling / unit * total([0] * unit)
        return loss / count
