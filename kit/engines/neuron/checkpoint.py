"""Checkpoints of the Neuron engine: NxD writes its own sharded files in the background, and the kit
adds a manifest.

`checkpoints/step_00000100/` is a tag of NxD, the folder of one checkpoint. It contains `model/` and
`optim/` with one file per rank, and `done` when NxD has finished. The kit adds `manifest.json` with
a checksum of each file. A checkpoint without a manifest is ignored. HLAT saved in NxD's format
`use_xser`, while the kit saves the same tensors in plain files. `kit.interop.weights.neuron` reads
both formats on any machine.
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
"""Number of steps between the start of a save and the step in which all ranks wait until the files
are complete. NxD does not report when its files are written."""


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
        # Manifest fields of the checkpoint that NxD is writing.
        self.pending: dict[str, Any] | None = None
        self.steps_to_settle = 0
        self.completing: Future[None] | None = None
        # Thread that computes checksums of the written files while training continues.
        self.thread = ThreadPoolExecutor(1)
        self.group = cpu_group("checkpoint")

    def save(self, facts: dict[str, Any]) -> None:
        """Starts writing a checkpoint. Returns as soon as training may continue. `facts` has fields
        of the manifest by name, among them `step`.
        """
        self.finish()
        folder = self.checkpoints.path(facts["step"])
        if dist.get_rank() == 0:
            self.checkpoints.check_space(facts["spec"])
            # NxD overwrites files that an older attempt has written for this step. The old manifest
            # is deleted first, so that readers ignore the checkpoint until NxD has written all
            # files.
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
        """Starts to complete the pending checkpoint SETTLE_STEPS steps after `save`: waits for its
        files, then computes checksums and writes the manifest in a thread.

        Must be called once per step.
        """
        if self.pending is not None:
            self.steps_to_settle -= 1
            if self.steps_to_settle == 0:
                self._begin_to_complete(self.pending)
        elif self.completing is not None and self.completing.done():
            self.finish()

    def take_stall_s(self) -> float:
        """Returns 0 seconds, since training waits for NxD only within the call of `save`."""
        return 0.0

    def finish(self) -> None:
        """Waits until the pending checkpoint, if there is one, has its manifest."""
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
            # All tensors are on disk already. A checkpoint without a manifest is useless, so
            # writing the manifest is retried after a temporary error of the file system.
            retry_disk(lambda: self.checkpoints.complete(folder, manifest))
            self.checkpoints.prune(
                keep_last=self.recipe.keep_last, keep_every=self.recipe.keep_every
            )

    def _files(self, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
        """Returns (sizes in bytes, checksums) of the files that NxD has written, each by file name.
        Each rank reads a part of the files. On ranks other than 0, the checksums are empty.
        """
        files = from_rank_0(lambda: _sizes(folder), self.group)
        mine = {name: checksum(folder / name) for name in _share(files)}
        told: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, told, dst=0, group=self.group)
        return files, {name: value for part in told or [] for name, value in part.items()}

    def load(self, step: int) -> Manifest:
        """Loads the checkpoint at `step` into the engine and returns its manifest.

        If the optimizer is sharded over the replicas and the number of replicas has changed, only
        the weights are read. The master weights are then set from the weights, and AdamW's moments
        start from zero, as in HLAT.

        Raises:
            DamagedCheckpointError: The files of the checkpoint have changed since they were
                written.
            CheckpointError: The checkpoint is of another engine or model, or its ZeRO stage or its
                tensor or pipeline parallel degree differs from the plan's.
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
    """Returns the names of the files that this rank reads. The files are distributed so that all
    ranks read about the same number of bytes.
    """
    return sorted(files, key=lambda name: (-files[name], name))[
        dist.get_rank() :: dist.get_world_size()
    ]


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(
        file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"
    )
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
