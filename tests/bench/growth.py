"""Growth of the kit's costs with size. Each kind of work is measured at four sizes, and the
exponent of a power law is fitted.

An exponent of 1 is linear growth. Time is CPU time: the minimum over some repeats, after one
warm-up at the smallest size. Some work is simulated without other ranks: sharding of one rank on
torch's fake process group, rank 0's part of planning a save, and the reads of each rank at a
resume.
"""

import json
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.recipe import DataSource, Recipe
from kit.config.spec import ModelSpec
from kit.data import Dataset, build_dataset, training_samples
from kit.estimate.choose.search import search
from kit.monitor.runs import runs_table
from kit.run.checkpoint import Checkpoints, Manifest
from kit.run.checkpoint_reader import CheckpointTensors
from kit.show.results import Row, format_value, row
from tests.bench import data_order, scale, storage
from tests.bench.alone import alone
from tests.bench.contestants import llama
from tests.support.recorded_runs import recorded_run

MOST = 1.15
"""Largest exponent that still counts as linear growth."""
LEAST_REPEATS, MOST_REPEATS, REPEATED_S = 2, 5, 0.5
"""Least and most repeats of a measurement, and its total time in seconds. Repeats end when their
total reaches `REPEATED_S`."""
RUN_STEPS = 20
DOCUMENT_BYTES = 200
METADATA_READ = "reading of the checkpoint's metadata by one rank at a resume"
Costs = tuple[int, dict[str, float]]
"""Size of the work, and its CPU seconds by kind of work."""


def start(folder: Path, ranks: int, data: Path) -> Costs:
    """Measures how the last rank of a job creates its device mesh and its part of the model."""
    from kit.parallel.simulate import view_rank

    plan = Plan(
        tensor_parallel=8,
        pipeline_parallel=8,
        data_parallel=ranks // 64,
        zero_stage=1,
        global_batch_size=ranks,
    )
    spec = ModelSpec.preset("gpt-22b")
    return ranks, {"start of one rank": cpu_s(lambda: view_rank(spec, plan, ranks - 1))}


def checkpoint(folder: Path, ranks: int, data: Path) -> Costs:
    """Measures save and resume of a model with one block per pipeline stage. The number of tensors
    therefore grows with the number of ranks.
    """
    stages = ranks // 16
    spec = llama("tiny").replace(num_layers=stages, num_heads=8, num_kv_heads=8)
    plan = Plan(
        tensor_parallel=8,
        pipeline_parallel=stages,
        data_parallel=2,
        zero_stage=1,
        global_batch_size=2 * stages,
    )
    planned = storage.saves(folder, stages, spec, plan)
    checkpoints, files = Checkpoints(folder), planned["files"]
    path = checkpoints.path(2)
    for name, size in files.items():
        with (path / name).open("ab") as stream:
            stream.truncate(size)  # sparse files take the place of tensor files
    facts: dict[str, Any] = {"step": 2, "attempt": 1, "samples": 0, "tokens": 0, "seed": 0}
    manifest = Manifest(spec=spec, plan=plan, time=0.0, files=files, **facts)
    checkpoints.complete(path, manifest)

    def opened() -> None:
        CheckpointTensors(checkpoints, checkpoints.describe(2), spec)

    first, later = planned["seconds"]
    names = "first save on rank 0", "later saves on rank 0", METADATA_READ
    return ranks, dict(zip(names, (first, later, cpu_s(opened)), strict=True))


def steps(folder: Path, count: int, data: Path) -> Costs:
    """Measures the time to read the metrics of a run with `count` steps."""
    return count, {"reading of the metrics": cpu_s(scale.metrics(folder, count))}


def documents(folder: Path, count: int, data: Path) -> Costs:
    """Measures building a dataset from the text of `count` documents."""
    texts = [each.text for each in Dataset.open(data).validation_documents()]
    text = "".join(texts)[: 1 << 20]
    folder.mkdir(parents=True)
    with (folder / "text.jsonl").open("w") as stream:
        for i in range(count):
            begin = i * DOCUMENT_BYTES % (len(text) - DOCUMENT_BYTES)
            told = {"text": f"{i} {text[begin : begin + DOCUMENT_BYTES]}"}
            stream.write(json.dumps(told) + "\n")
    asked = {"tokenizer": data / "tokenizer.json", "progress": False, "workers": 1}
    folders = (folder / f"data-{number}" for number in range(MOST_REPEATS))

    def build() -> None:
        build_dataset(next(folders), [folder / "text.jsonl"], **asked)

    return count, {"build of a data set": cpu_s(build)}


def order(folder: Path, count: int, data: Path) -> Costs:
    """Measures the time to the first batch from a token file of `count` documents."""
    folder.mkdir(parents=True)
    data_order.write_sparse(folder / "one", 1000 * count, count)
    recipe = Recipe(data=str(data), num_steps=1, sources=(DataSource(paths=(f"{folder}/one",)),))

    def first_batch() -> None:
        training_samples(recipe, data_order.SEQUENCE_LENGTH).batch(0, data_order.SEQUENCES)

    return count, {"first batch from a token file": cpu_s(first_batch)}


def layouts(folder: Path, batch: int, data: Path) -> Costs:
    """Measures the planner's search for layouts. A larger batch has more possible layouts."""
    site, found = Site.load("dgx-h100"), []
    seconds = cpu_s(lambda: found.append(search(scale.TRILLION, site, 512, batch)))
    return len(found[-1].layouts), {"search for layouts": seconds}


def runs(folder: Path, count: int, data: Path) -> Costs:
    """Measures listing all runs below a folder, as `kit runs` does."""
    for number in range(count):
        recorded_run(folder / f"run-{number:05d}", steps=RUN_STEPS)
    return count, {"list of runs": cpu_s(lambda: runs_table(folder))}


def items(folder: Path, count: int, data: Path) -> Costs:
    """Measures the scoring of `count` PIQA items by a tiny model. The items are artificial and as
    long as real items.
    """
    import pyarrow
    import pyarrow.parquet
    import torch

    from kit.evaluate.benchmarks import BENCHMARKS, Options
    from kit.evaluate.harness import score_task
    from kit.evaluate.loading import decoder_lm
    from kit.evaluate.tasks import load_task
    from kit.model import build_decoder

    torch.set_num_threads(1)
    known = BENCHMARKS["piqa"]
    file = folder / known.repository / known.configs[0] / f"{known.files[0].split}.parquet"
    file.parent.mkdir(parents=True)
    made = [
        {"goal": f"How to do thing {i}?", "sol1": 20 * f"so {i} ", "sol2": 20 * "not ", "label": 0}
        for i in range(count)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), file)
    tokenizer = Dataset.open(data).tokenizer()
    decoder = build_decoder(llama("tiny").replace(sequence_length=256)).eval()
    lm = decoder_lm(decoder, tokenizer, 256, Options(), "cpu")
    task = load_task("piqa", task_data=folder)
    return count, {"scoring of items": cpu_s(lambda: score_task(lm, task))}


class Kind(NamedTuple):
    """Name of the growing quantity, its sizes, and the function that measures the costs at one
    size.
    """

    what: str
    sizes: tuple[int, ...]
    costs: Callable[[Path, int, Path], Costs]


RANKS = (64, 512, 2048, 8192)
KINDS = {
    "start": Kind("ranks", RANKS, start),
    "checkpoint": Kind("ranks", RANKS, checkpoint),
    "steps": Kind("steps", (10_000, 50_000, 250_000, 1_000_000), steps),
    "documents": Kind("documents", (1_000, 5_000, 25_000, 100_000), documents),
    "order": Kind("documents", (10**6, 10**7, 10**8, 10**9), order),
    "layouts": Kind("layouts", (8, 64, 512, 12_288), layouts),  # sizes: sequences of a batch
    "runs": Kind("runs", (30, 100, 300, 1_000), runs),
    "items": Kind("items", (30, 100, 300, 1_000), items),
}


def measure(
    workplace: Path, dataset: Dataset, sizes: Mapping[str, Sequence[int]] | None = None
) -> list[Row]:
    """Returns rows with the exponent of each kind of work. `sizes` replaces the default sizes."""
    asked = {name: kind.sizes for name, kind in KINDS.items()} | dict(sizes or {})
    found = alone(grown, workplace, asked, dataset.directory.resolve()).found
    return [
        exponent_row(work, KINDS[name].what, {size: costs[work] for size, costs in points})
        for name, points in found.items()
        for work in points[0][1]
    ]


def grown(folder: Path, sizes: Mapping[str, Sequence[int]], data: Path) -> dict[str, list[Costs]]:
    """Returns a dict from each kind of work to its costs at all sizes."""
    found = {}
    for name, asked in sizes.items():
        costs = KINDS[name].costs
        costs(folder / name / "warm", asked[0], data)
        found[name] = [costs(folder / name / str(size), size, data) for size in asked]
    return found


def exponent_row(work: str, what: str, points: Mapping[int, float]) -> Row:
    """Returns a row with the least-squares slope of log time over log size. The note says "steeper
    than linear" for a slope above MOST.

    `what` is the growing quantity. `points` maps its sizes to CPU seconds of the work.
    """
    slope = float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])
    times = ", ".join(format_value(seconds, "") for seconds in points.values())
    note = f"CPU time {times} s at {', '.join(f'{size:,}' for size in points)} {what}"
    told = f"steeper than linear: {note}" if slope > MOST else note
    return row(f"{work}, by number of {what}", slope, at_most=MOST, note=told)


def cpu_s(work: Callable[[], object]) -> float:
    """Returns the minimum CPU seconds over some repeats of `work`. Child processes are included."""
    took = []
    while len(took) < LEAST_REPEATS or (len(took) < MOST_REPEATS and sum(took) < REPEATED_S):
        start = _used_s()
        work()
        took.append(_used_s() - start)
    return min(took)


def _used_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
