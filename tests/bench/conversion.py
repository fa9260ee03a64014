"""Export of a 70B model to a Hugging Face folder: peak memory of the process, and time.

The checkpoint lists all layers in fp32, but all layers share the bytes of the first layer in its
file. Each finished weight file is replaced by a sparse file of its size. Therefore 6 GB of disk
plus one weight file are enough to read 276 GB and to write 138 GB.
"""

import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.interop.weights.hugging_face import export_hugging_face, run_weights
from kit.interop.weights.weights import Weights, parameter_shapes
from kit.run import Run
from kit.run.checkpoint import Checkpoints, Manifest
from kit.show.results import Row, row
from tests.bench.alone import alone
from tests.support.workers import local_run

SPEC = ModelSpec.preset("hlat-70b")
SHARD_BYTES = 5 * 10**9


def measure(workplace: Path, spec: ModelSpec = SPEC, shard_bytes: int = SHARD_BYTES) -> list[Row]:
    """Returns peak memory and time of an export in bf16. Needs 25 GB of disk."""
    alone(make_run, workplace / "run", spec)
    (seconds, files), peak_bytes, _ = alone(export, workplace, spec, shard_bytes)
    size = 4e-9 * spec.num_params
    note = f"{size:,.1f} GB of fp32 weights are exported to {files} files"
    speed = f"{size / seconds:.2f} GB of fp32 weights per second"
    name = f"export of {spec.name}"
    return [
        row(f"peak memory of the {name}", peak_bytes / 1e9, "GB", at_most=12.0, note=note),
        row(f"time of the {name}", seconds, "s", note=speed),
    ]


def export(folder: Path, spec: ModelSpec, shard_bytes: int) -> tuple[float, int]:
    """Exports the run `folder`/run to a Hugging Face folder. Returns (seconds, number of weight
    files).
    """
    weights = run_weights(Run.open(folder / "run"))

    def fill(targets: Any) -> None:
        for file in sorted(folder.glob(".out.*/folder/model-*")):
            if (size := file.stat()).st_blocks:
                os.truncate(file, 0)
                os.truncate(file, size.st_size)
        weights.fill(targets)

    start = time.perf_counter()
    out = export_hugging_face(
        Weights(spec, fill), folder / "out", precision="bfloat16", max_shard_bytes=shard_bytes
    )
    seconds = time.perf_counter() - start
    written = [file.stat().st_size for file in out.glob("*.safetensors")]
    assert sum(written) >= 2 * spec.num_params
    return seconds, len(written)


def make_run(directory: Path, spec: ModelSpec) -> None:
    """Writes a run directory whose checkpoint repeats the weights of the first layer in all
    layers.
    """
    plan, shapes = Plan(), parameter_shapes(spec)
    run = local_run(directory, spec, plan, Recipe(data="none", num_steps=1))
    folder = run.checkpoints.path(1)
    kept = {name: _kept(name) for name in shapes}
    state = {
        f"model.{name}": torch.empty(shapes[name]).uniform_(-0.1, 0.1)
        for name in dict.fromkeys(kept.values())
    }
    state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    places = {index.fqn: (index, info) for index, info in metadata.storage_data.items()}
    for name, like in kept.items():
        metadata.state_dict_metadata[f"model.{name}"] = metadata.state_dict_metadata[
            f"model.{like}"
        ]
        index, info = places[f"model.{like}"]
        metadata.storage_data[replace(index, fqn=f"model.{name}")] = info
    file.write_bytes(pickle.dumps(metadata))
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    counts: dict[str, Any] = {"step": 1, "attempt": 1, "samples": 1, "tokens": 1, "seed": 0}
    manifest = Manifest(spec=spec, plan=plan, files=files, time=0.0, **counts)
    Checkpoints(folder.parent).complete(folder, manifest)


def _kept(name: str) -> str:
    """Returns the name of the first layer's parameter whose bytes are also used for parameter
    `name`.
    """
    return f"layers.0.{name.split('.', 2)[-1]}" if name.startswith("layers.") else name
