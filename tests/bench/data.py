"""Speed of data loading and tokenisation on this machine per CPU-second: plain slices, the kit's
samples, and text to tokens.

Plain slices start at random positions of the token file. The positions are drawn in advance, as in
a training loop without epochs. The kit's samples read each window once per epoch, in a computed
order. Both ways make equal read requests.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kit.data import Dataset
from kit.show.results import Row, row
from tests.bench.turns import median_row, ratio_row, take_turns

SEQUENCE_LENGTH, BATCH_SIZE = 2048, 64
ROUNDS, ROUND_S = 5, 0.5
TEXT_BYTES = 16_000_000


def measure(workplace: Path, dataset: Dataset, *, text_bytes: int = TEXT_BYTES) -> list[Row]:
    """Returns tokens per CPU-second of plain slices and of the kit's samples, and MB/s of the
    tokenizer.
    """
    length = min(SEQUENCE_LENGTH, dataset.train.num_tokens // 4)
    samples, file = dataset.samples("train", length, seed=1), dataset.train
    starts = np.random.default_rng(1).integers(0, file.num_tokens - length, (10_000, BATCH_SIZE))

    def flat(batch: int) -> np.ndarray:
        found = np.empty((BATCH_SIZE, length + 1), np.int64)
        for i, start in enumerate(starts[batch % len(starts)].tolist()):
            found[i] = file.read(start, length + 1)
        return found

    def ordered(batch: int) -> np.ndarray:
        return samples.batch(batch * BATCH_SIZE, BATCH_SIZE)

    seconds = take_turns(
        {"flat": lambda _: _seconds(flat), "ordered": lambda _: _seconds(ordered)}, ROUNDS
    )
    tokens = BATCH_SIZE * length / 1e6
    rates = {way: [tokens / each for each in times] for way, times in seconds.items()}
    each = dataset.train.num_tokens / dataset.train.num_documents
    note = f"windows of {length:,} tokens, documents of {each:,.0f} tokens on average"
    shape = {"at_least": 100.0, "note": note}
    per_cpu_s = "tokens read per CPU-second"
    both = "speed of plain slices / speed of the kit's samples"
    return [
        median_row(f"plain slices, {per_cpu_s}", rates["flat"], "M tokens", **shape),
        median_row(f"the kit's samples, {per_cpu_s}", rates["ordered"], "M tokens", **shape),
        ratio_row(both, seconds["ordered"], seconds["flat"], at_most=2.0),
        _tokenisation(dataset, text_bytes),
    ]


def _seconds(read: Callable[[int], np.ndarray]) -> float:
    """Returns the CPU-seconds per batch of the function `read`, which is called with the batch
    numbers 0, 1, 2, ...
    """
    read(0)
    batch, start = 0, time.process_time()
    while (spent := time.process_time() - start) < ROUND_S:
        read(batch)
        batch += 1
    return spent / batch


def _tokenisation(dataset: Dataset, text_bytes: int) -> Row:
    tokenizer, texts, size = dataset.tokenizer(), [], 0
    held_out = list(dataset.validation_documents())
    while size < text_bytes:
        document = held_out[len(texts) % len(held_out)]
        texts.append(document.text)
        size += document.num_bytes
    cpu, wall = time.process_time(), time.perf_counter()
    num_tokens = sum(map(len, tokenizer.encode_batch(texts)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    note = f"{size / wall / 1e6:.1f} MB/s on all cores; {size / num_tokens:.2f} bytes per token"
    return row("tokenisation, text per CPU-second", size / cpu / 1e6, "MB", at_least=1.0, note=note)
