"""Data order of one rank over 1.5e9 documents and 1.8e12 tokens: memory, start time, time per
batch, and randomness of the order.

The token files are sparse: they have the right sizes and contain only zeros. The times therefore
include no disk reads. Half of the tokens are in one file, half in 300 shards. The weights of the
data sources change at 1.4e12 tokens, as in HLAT's Table III.
"""

import math
import statistics
import struct
import time
from pathlib import Path

import numpy as np

from kit.config.recipe import DataPhase, DataSource, Recipe
from kit.data import Dataset, resolve_paths, training_samples
from kit.data.samples import permuted
from kit.data.token_file import HEADER, MAGIC, VERSION
from kit.show.results import Row, row
from tests.bench.alone import alone
from tests.data.orders import quality

DOCUMENTS, TOKENS, SHARDS = 1_500_000_000, 1_800_000_000_000, 300
SEQUENCE_LENGTH, SEQUENCES, BATCHES = 4096, 4, 200
DRAWS, EPOCHS, WHOLE = 100_000, 40, 10_000_000


def measure(
    workplace: Path,
    dataset: Dataset,
    *,
    draws: int = DRAWS,
    epochs: int = EPOCHS,
    whole: int = WHOLE,
) -> list[Row]:
    """Returns memory and times of one rank, and the difference between the kit's order of windows
    and NumPy's random permutation.

    `draws` is the number of windows drawn from each of `epochs` epochs. `whole` is the number of
    windows of an epoch that is read completely. The sparse files are terabytes long and occupy a
    few hundred disk blocks.
    """
    write_sources(workplace)
    took = alone(rank, str(dataset.directory), workplace)
    memory, (first_s, batch_s) = took.peak_bytes - took.bare_bytes, took.found
    worst, name = compare(draws, epochs)
    size = f"{DOCUMENTS:.2g} documents, {TOKENS:.2g} tokens in {SHARDS + 1} sparse files"
    batch = f"{SEQUENCES} windows of {SEQUENCE_LENGTH:,} tokens, median of {BATCHES} batches from"
    batch += " the whole run; no disk is read"
    noise = f"first {draws:,} windows of each of {epochs} epochs with"
    noise += f" {TOKENS // 2 // SEQUENCE_LENGTH:,} windows; of all statistics, `{name}` deviates"
    noise += " most"
    memory_row = "memory of the rank beyond the memory of a bare Python interpreter"
    distance = "largest deviation of a statistic of the kit's order from NumPy's random order"
    share, drawn = met_once(whole), f"an epoch of {whole:,} windows was read completely"
    once = "share of the windows that an epoch reads exactly once"
    return [
        row(memory_row, memory / 1e6, "MB", at_most=100),
        row("time from opening the files to the first batch", first_s, "s", at_most=1, note=size),
        row("time of a later batch", 1e3 * batch_s, "ms", at_most=5.0, note=batch),
        row(distance, worst, "standard errors", at_most=4.0, note=noise),
        row(once, share, "fraction", at_least=1.0, note=drawn),
    ]


def write_sources(folder: Path) -> None:
    """Writes the sparse token files: the file `one` and the shards `part_*`."""
    write_sparse(folder / "one", TOKENS // 2, DOCUMENTS // 2)
    for i in range(SHARDS):
        write_sparse(folder / f"part_{i:03d}", TOKENS // 2 // SHARDS, DOCUMENTS // 2 // SHARDS)


def write_sparse(prefix: Path, tokens: int, documents: int) -> None:
    """Writes a Megatron token file of zeros. Its index has only the end of the last document."""
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * tokens)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        stream.seek(HEADER.size + 12 * documents - 8)
        stream.write(struct.pack("<q", 2 * tokens))  # end of the last document, which is empty
        stream.truncate(HEADER.size + 12 * documents + 8 * (documents + 1))


def rank(dataset: str, folder: Path) -> tuple[float, float]:
    """Returns (seconds to the first batch, median seconds of a later batch)."""
    sources = (
        DataSource(paths=(f"{folder}/one",), weight=0.4),
        DataSource(paths=(f"{folder}/part_*",), weight=0.6),
    )
    phases = (DataPhase(until_tokens=1.4e12, weights=(0.7, 0.3)),)
    recipe = resolve_paths(Recipe(data=dataset, num_steps=1, sources=sources, phases=phases))
    start = time.perf_counter()
    samples = training_samples(recipe, SEQUENCE_LENGTH)
    samples.batch(0, SEQUENCES)
    first_s, times = time.perf_counter() - start, []
    for i in range(BATCHES):
        start = time.perf_counter()
        samples.batch(i * (TOKENS // SEQUENCE_LENGTH // BATCHES), SEQUENCES)
        times.append(time.perf_counter() - start)
    return first_s, statistics.median(times)


def compare(draws: int, epochs: int) -> tuple[float, str]:
    """Returns (distance, name) of the statistic that differs most between the kit's orders and
    NumPy's random orders. The distance between the two means is in standard errors.

    A NumPy permutation of so many windows does not fit in memory. The random orders are therefore
    drawn with replacement, which repeats only a few windows.
    """
    count = TOKENS // 2 // SEQUENCE_LENGTH
    ours, theirs = [], []
    for epoch in range(epochs):
        ours.append(quality(permuted(np.arange(draws), count, (1, 0, epoch)), count))
        theirs.append(quality(np.random.RandomState(epoch).randint(0, count, draws), count))
    far = {}
    for name in ours[0]:
        mine, other = (np.array([row[name] for row in rows]) for rows in (ours, theirs))
        error = math.hypot(mine.std(), other.std()) / math.sqrt(epochs)
        far[name] = abs(mine.mean() - other.mean()) / error
    name = max(far, key=far.__getitem__)
    return float(far[name]), name


def met_once(whole: int) -> float:
    """Returns the share of windows that an epoch of `whole` windows reads exactly once."""
    times, part = np.zeros(whole, np.uint8), 1 << 18
    for first in range(0, whole, part):
        times[permuted(np.arange(first, min(first + part, whole)), whole, (1, 0, 0))] += 1
    return float((times == 1).mean())
