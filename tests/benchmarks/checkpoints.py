"""Checkpoints of a 26M model on this machine: save and load in MB/s, beside a plain write of as
many bytes.

    python -m tests.benchmarks.checkpoints FOLDER PAUSE_S     in a process of its own: a process
    group changes its state

The stall is what `save` keeps training waiting for: the copy. Writing goes on behind it, and how
much that slows the steps is in the table of recording.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from kit.show.results import Row, row
from kit.spec import ModelSpec
from tests.benchmarks.alone import alone

SPEC = ModelSpec.llama(
    name="checkpoint-26m",
    num_layers=6,
    hidden_size=512,
    num_heads=8,
    ffn_hidden_size=1536,
    vocab_size=8192,
    sequence_length=256,
)
REPEATS = 5
PAUSE_S = 3.0
"""Before each write: a virtual machine gives freed memory back to its host in between, as
between real checkpoints."""


def measure(workplace: Path, spec: ModelSpec = SPEC, *, pause_s: float = PAUSE_S) -> list[Row]:
    """Returns MB/s of saving, loading and of a plain write, and the stall.

    Args:
        workplace: an empty folder.
        spec: of the model whose checkpoint it is.
        pause_s: before each write.

    Raises:
        RuntimeError: the process failed; with its last words.
    """
    found = alone("checkpoints", workplace, pause_s, given=spec.to_json())
    size = found.pop("bytes") / 1e6
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    note = f"{size:,.0f} MB, median of {REPEATS}"
    ratios = [save / plain for save, plain in zip(found["save_s"], found["plain_s"], strict=True)]
    return [
        row("save, to the disk", size / middle["save_s"], "MB/s", note=note),
        row(
            "plain write of as many bytes",
            size / middle["plain_s"],
            "MB/s",
            note="one file, synchronised",
        ),
        row("save / plain write, in time", statistics.median(ratios), "x", at_most=1.5),
        row(
            "load into the engine",
            size / middle["load_s"],
            "MB/s",
            at_least=500.0,
            note="files still in memory",
        ),
        row(
            "stall of training by a save",
            1e3 * middle["stall_s"],
            "ms",
            note=f"{size / middle['stall_s']:,.0f} MB/s",
        ),
    ]


def times(folder: Path, spec: ModelSpec, pause_s: float) -> dict:
    """Returns bytes of a checkpoint, and seconds of each repeat of saving, its stall, loading
    and a plain write.
    """
    import torch
    import torch.distributed as dist

    from kit.engines import PortableEngine, build_engine
    from kit.engines.process_group import keep_freed_memory
    from kit.plan import Plan
    from kit.recipe import Recipe
    from kit.run.checkpoint import Checkpoints
    from kit.run.checkpoint_reader import CheckpointTensors
    from kit.run.checkpoint_writer import CheckpointWriter

    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    plan = Plan(global_batch_size=2)
    engine = build_engine(spec, plan, Recipe(data="none", num_steps=1), torch.device("cpu"))
    assert isinstance(engine, PortableEngine)
    engine.train_step(
        torch.zeros((2, spec.sequence_length + 1), dtype=torch.long), 1e-4
    )  # makes the moments
    checkpoints = Checkpoints(folder / "checkpoints")
    writer = CheckpointWriter(checkpoints, attempt=1, keep_last=1, keep_every=None)
    found: dict = {"save_s": [], "stall_s": [], "load_s": [], "plain_s": []}
    for step in range(REPEATS + 1):
        time.sleep(pause_s)
        facts = {
            "step": step,
            "samples": step,
            "tokens": step,
            "seed": 1,
            "spec": spec,
            "plan": plan,
        }
        start = time.perf_counter()
        writer.start(engine.state_dict(), facts)
        # at most so long: in training a forward and a backward pass come before
        writer.wait_for_copies()
        found["stall_s"].append(time.perf_counter() - start)
        writer.finish()
        found["save_s"].append(time.perf_counter() - start)
        start = time.perf_counter()
        described = checkpoints.describe(step)
        CheckpointTensors(checkpoints, described, spec).fill_all(engine.state_dict())
        found["load_s"].append(time.perf_counter() - start)
        found["bytes"] = sum(file.stat().st_size for file in checkpoints.path(step).iterdir())
        time.sleep(pause_s)
        found["plain_s"].append(_plain_write(folder / f"plain-{step}", found["bytes"]))
        (folder / f"plain-{step - 1}").unlink(missing_ok=True)
    dist.destroy_process_group()
    return {
        name: value[1:] if isinstance(value, list) else value for name, value in found.items()
    }  # 0 warms up


def _plain_write(file: Path, size: int) -> float:
    """Returns the seconds that a new file takes, made beside the one before, as a checkpoint is."""
    content = memoryview(bytearray(os.urandom(1 << 20)) * (size // (1 << 20)))
    start = time.perf_counter()
    with file.open("wb") as stream:
        stream.write(content)
        os.fsync(stream.fileno())
    return time.perf_counter() - start


if __name__ == "__main__":
    print(
        json.dumps(
            times(Path(sys.argv[1]), ModelSpec.from_json(sys.stdin.read()), float(sys.argv[2]))
        )
    )
