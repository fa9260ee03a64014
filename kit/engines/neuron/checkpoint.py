"""Checkpoints of the Neuron engine: NxD's own files, sharded and written in the background, under
the kit's manifest.

`checkpoints/step_00000100/` is a tag of NxD: `model/` and `optim/` with one file per rank, `done`
when whole. The kit adds its `manifest.json`, without which a checkpoint does not count, with a
checksum of each file. HLAT saved with `use_xser`; these are the same tensors in plain files.
`kit.interop.weights.neuron` reads both on any machine.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cluster.directory_handle import retry_disk
from cluster.record import counted
from kit.config.plan import Plan
from kit.engines.neuron.engine import NeuronEngine
from kit.errors import CheckpointError
from kit.parallel.groups import cpu_group, from_rank_0, raised_on_all
from kit.run import Run
from kit.run.checkpoint import Manifest, checksum

SETTLE_STEPS = 10
"""NxD tells nobody that its files are written; so, that many steps later, all ranks wait for
those that are not."""


class NxdCheckpoints:
    """Writes and reads the checkpoints of engine neuron. Other engines use
    `kit.trainer.checkpoints.PortableCheckpoints`.
    """

    def __init__(self, run: Run, engine: NeuronEngine, *, attempt: int) -> None:
        self.checkpoints = run.checkpoints
        self.spec = run.spec
        self.engine = engine
        self.attempt = attempt
        self.recipe = run.recipe
        self.pending: dict[str, Any] | None = None  # facts of what NxD writes
        self.steps_to_settle = 0
        self.completing: Future[None] | None = None
        # To look at files behind training.
        self.thread = ThreadPoolExecutor(1)
        self.group = cpu_group("checkpoint")

    def save(self, facts: dict[str, Any]) -> None:
        """Begins to write a checkpoint; returns as soon as training may go on."""
        self.finish()
        folder = self.checkpoints.path(facts["step"])
        if dist.get_rank() == 0:
            self.checkpoints.check_space(facts["spec"])
            # NxD writes over an older attempt's files of the same step, which must not count until
            # they are whole.
            (folder / "manifest.json").unlink(missing_ok=True)
        self.engine.nxd.save(
            folder=str(folder.parent),
            tag=folder.name,
            model=self.engine.model,
            optimizer=self.engine.optimizer,
            is_sharded=self.engine.plan.zero_stage == 1,
            content={name: facts[name] for name in ("step", "samples", "tokens", "seed")},
        )
        self.pending = facts
        self.steps_to_settle = SETTLE_STEPS

    def poll(self) -> None:
        """Begins to complete the pending checkpoint once it has had time enough.

        Call it once a step.
        """
        if self.pending is not None:
            self.steps_to_settle -= 1
            if self.steps_to_settle == 0:
                self._begin_to_complete(self.pending)
        elif self.completing is not None and self.completing.done():
            self.finish()

    def take_stall_s(self) -> float:
        """Returns 0, since training waits for NxD within `save` only."""
        return 0.0

    def finish(self) -> None:
        """Waits until the pending checkpoint, if any, is complete."""
        if self.pending is not None:
            self._begin_to_complete(self.pending)
        if self.completing is not None:
            completing = self.completing
            self.completing = None
            completing.result()

    def _begin_to_complete(self, facts: dict[str, Any]) -> None:
        self.pending = None
        self.engine.nxd.finish_saving()
        self.completing = self.thread.submit(self._complete, facts)

    def _complete(self, facts: dict[str, Any]) -> None:
        folder = self.checkpoints.path(facts["step"])
        files, checksums = self._files(folder)
        if dist.get_rank() == 0:
            manifest = Manifest(
                attempt=self.attempt, time=time.time(), files=files, checksums=checksums, **facts
            )
            # All tensors are written: an error of the file system that passes must not lose them.
            retry_disk(lambda: self.checkpoints.complete(folder, manifest))
            self.checkpoints.prune(
                keep_last=self.recipe.keep_last, keep_every=self.recipe.keep_every
            )

    def _files(self, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
        """Returns sizes and, on rank 0, checksums of what NxD has written, which each rank reads
        its share of.
        """
        files = from_rank_0(lambda: _sizes(folder), self.group)
        mine = {name: checksum(folder / name) for name in _share(files)}
        told: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, told, dst=0, group=self.group)
        return files, {name: value for part in told or [] for name, value in part.items()}

    def load(self, step: int) -> Manifest:
        """Fills the engine from the checkpoint at `step` and returns its manifest.

        With another number of replicas than it was written by, the weights alone are read where the
        optimizer is sharded over the replicas: master weights start from them and AdamW's moments
        from zero, as HLAT resumed.

        Raises:
            DamagedCheckpointError: its files are not as they were written.
            CheckpointError: it was written by another engine or model, or on other tensor and
                pipeline degrees.
        """
        manifest = from_rank_0(lambda: self.checkpoints.manifest(step), self.group)
        self.checkpoints.check_model(manifest, self.spec)
        with raised_on_all(self.group):
            self.checkpoints.verify(manifest, _share(manifest.files))
        now = self.engine.plan
        folder = self.checkpoints.path(step)
        _check_layout(manifest.plan, now, folder)
        fits = now.zero_stage == 0 or manifest.plan.data_parallel == now.data_parallel
        optimizer = self.engine.optimizer if fits else None
        self.engine.nxd.load(
            folder=str(folder.parent),
            tag=folder.name,
            model=self.engine.model,
            optimizer=optimizer,
        )
        if not fits:
            self.engine.nxd.restart_master_weights(optimizer=self.engine.optimizer)
            if dist.get_rank() == 0:
                held = counted(manifest.plan.data_parallel, "replica")
                print(
                    f"AdamW's moments start from zero: they were cut for {held}, now "
                    f"there are {now.data_parallel}",
                    flush=True,
                )
        return manifest


def _check_layout(saved: Plan, now: Plan, path: Path) -> None:
    advice = (
        "Resume with the plan that wrote it, or take its weights elsewhere: `kit export RUN"
        " --format hf`."
    )
    if saved.engine != "neuron":
        raise CheckpointError(
            f"{path} was written by engine {saved.engine!r}; NxD reads its own only. {advice}"
        )
    for name in ("tensor_parallel", "pipeline_parallel", "zero_stage"):
        if getattr(saved, name) != getattr(now, name):
            raise CheckpointError(
                f"{path} was written with plan.{name} {getattr(saved, name)}, now it is"
                f" {getattr(now, name)}: NxD reads a checkpoint on the degrees that wrote it; only"
                f" data_parallel may change. {advice}"
            )


def _share(files: dict[str, int]) -> list[str]:
    """Returns the files that this rank looks at, so that all have about as many bytes."""
    return sorted(files, key=lambda name: (-files[name], name))[
        dist.get_rank() :: dist.get_world_size()
    ]


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(
        file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"
    )
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
