"""Export of a 70B model to a Hugging Face folder: peak memory of the process, and how fast.

    python -m tests.benchmarks.conversion FOLDER SHARD_BYTES     in a process of its own: its memory
    is its own

The checkpoint says that it has all layers, in fp32, but all of them lie in the same bytes of its
file; a finished shard is replaced by a hole of its size. So 6 GB of disk and one shard do for 276
GB read and 138 GB written.
"""

import json
import multiprocessing
import os
import pickle
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.alone import alone

SPEC = ModelSpec.preset("hlat-70b")
SHARD_BYTES = 5 * 10**9


def measure(workplace: Path, spec: ModelSpec = SPEC, shard_bytes: int = SHARD_BYTES) -> list[Row]:
    """Returns peak memory and speed of an export in bf16.

    Args:
        workplace: an empty folder, on a disk with 25 GB free.
        spec: of the model.
        shard_bytes: of one of its weight files.

    Raises:
        RuntimeError: the process failed; with its last words.
    """
    found = alone("conversion", workplace, shard_bytes, given=spec.to_json())
    size = 4e-9 * spec.num_params
    note = (
        f"{size:,.1f} GB in fp32 to {found['files']} files; before, both copies were whole:"
        f" {1.5 * size:,.0f} GB"
    )
    return [
        row(
            f"peak memory, export of {spec.name}",
            found["peak_bytes"] / 1e9,
            "GB",
            at_most=12.0,
            note=note,
        ),
        row(
            f"export of {spec.name}",
            found["seconds"],
            "s",
            note=f"{size / found['seconds']:.2f} GB/s of fp32",
        ),
    ]


def export(folder: Path, spec: ModelSpec, shard_bytes: int) -> dict[str, Any]:
    """Returns seconds and peak memory of the export of a made checkpoint."""
    from kit.convert import run_weights
    from kit.convert.hugging_face import export_hugging_face
    from kit.convert.weights import Weights
    from kit.run import Run

    making = multiprocessing.get_context("fork").Process(
        target=make_run, args=(folder / "run", spec)
    )
    making.start()  # whose memory is not counted
    making.join()
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
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "files": len(written), "peak_bytes": peak}


def make_run(directory: Path, spec: ModelSpec) -> None:
    """Makes a run whose checkpoint has the weights of the first layer in all layers."""
    import torch
    from torch.distributed.checkpoint import state_dict_saver

    from cluster.site import Site
    from kit.convert.weights import parameter_shapes
    from kit.plan import Plan
    from kit.recipe import Recipe
    from kit.run import Run
    from kit.run.checkpoint import Checkpoints, Manifest

    plan, recipe, names = Plan(), Recipe(data="none", num_steps=1), parameter_shapes(spec)
    run = Run.create(directory, spec=spec, plan=plan, recipe=recipe, site=Site.load("laptop"))
    folder = run.checkpoints.path(1)
    first = {
        f"model.{n}": shape
        for n, shape in names.items()
        if not n.startswith("layers.") or ".0." in n[:9]
    }
    state = {name: torch.empty(shape).uniform_(-0.1, 0.1) for name, shape in first.items()}
    state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for name in names:
        like = (
            f"model.layers.0.{name.split('.', 2)[-1]}"
            if name.startswith("layers.")
            else f"model.{name}"
        )
        metadata.state_dict_metadata[f"model.{name}"] = metadata.state_dict_metadata[like]
        (index,) = (index for index in metadata.storage_data if index.fqn == like)
        metadata.storage_data[replace(index, fqn=f"model.{name}")] = metadata.storage_data[index]
    file.write_bytes(pickle.dumps(metadata))
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    facts: dict[str, Any] = {
        "step": 1,
        "attempt": 1,
        "samples": 1,
        "tokens": 1,
        "seed": 0,
        "time": 0.0,
    }
    manifest = Manifest(spec=spec, plan=plan, files=files, **facts)
    Checkpoints(folder.parent).complete(folder, manifest)


if __name__ == "__main__":
    print(
        json.dumps(
            export(Path(sys.argv[1]), ModelSpec.from_json(sys.stdin.read()), int(sys.argv[2]))
        )
    )
