"""Writes the checkpoints of a run in the background, in the format of torch's distributed
checkpoint. The ranks plan only the first save (which rank writes which tensor), and use this plan
for all saves.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from cluster.directory_handle import retry_disk
from cluster.state import StaleAttemptError
from kit.errors import CheckpointError
from kit.parallel.groups import cpu_group
from kit.run.checkpoint import DESCRIPTION, MANIFEST, Checkpoints, Manifest, cause, checksum
from kit.torch_private import reusable_stager


class CheckpointWriter:
    """Writes the checkpoints of one attempt in the background, one at a time. Every rank has a
    CheckpointWriter.

    Background writes use a separate process group, so that their collectives do not mix with those
    of training. The group is created at the first write. The manifest, the renaming and the
    deletion of old checkpoints are also done in the background.

    Attributes:
        group: process group of background writes.
        stager: object that copies the state to host memory. All saves use the same object and its
            memory.
        pending: (future of the write, `facts` of `start`) for the checkpoint that is being written.
            None if there is none.
        copies: future that is done once the newest state is copied.
    """

    def __init__(
        self, checkpoints: Checkpoints, *, attempt: int, keep_last: int, keep_every: int | None
    ) -> None:
        self.checkpoints = checkpoints
        self.attempt = attempt
        self.keep_last = keep_last
        self.keep_every = keep_every
        # The handle stays open for the whole attempt. If another directory replaces the run
        # directory, nothing is created in the other directory.
        self.run_directory = os.open(checkpoints.directory.parent, os.O_RDONLY | os.O_DIRECTORY)
        self.group: Any = None
        self.stager: DefaultStager | None = None
        self.planner = SteadyPlanner()
        self.pending: tuple[Any, dict] | None = None
        self.copies: Any = None
        self.stall_s = 0.0
        """Seconds for which training has waited for copies since the last call of
        `take_stall_s`."""

    def start(self, state: dict[str, Tensor], facts: dict) -> None:
        """Starts to copy `state` and to write the copy. The caller must not change the tensors in
        `state` before `wait_for_copies` has returned.

        Args:
            state: result of `engine.state_dict()`.
            facts: fields of the manifest except attempt, time, files and checksums.

        Raises:
            CheckpointError: The previous write failed, or the disk has no space for this
                checkpoint. Older checkpoints are intact.
            StaleAttemptError: The run belongs to a newer attempt.
        """
        self.finish()
        self.group = self.group or cpu_group("checkpoint")
        if dist.get_rank() == 0:
            self.checkpoints.check_space(facts["spec"])
        # An error means that the folder exists already, or that the run directory was deleted. The
        # write below reports a deleted run directory.
        with contextlib.suppress(OSError):
            os.mkdir(self.checkpoints.directory.name, dir_fd=self.run_directory)
        partial = self.checkpoints.path(facts["step"]).with_suffix(f".partial-{self.attempt}")
        writer = Writer(partial, self.planner, functools.partial(self._complete, partial, facts))
        if self.stager is None:
            gpu = any(tensor.is_cuda for tensor in state.values())
            # On a GPU, copies go to pinned memory, on a separate CUDA stream.
            self.stager = reusable_stager(StagingOptions(gpu, False, True, gpu))
        if torch.accelerator.is_available():
            # The stream for copies does not wait for the last update of the weights, so the host
            # waits for the device.
            torch.accelerator.synchronize()
        saved: Any = async_save(
            state,
            storage_writer=writer,
            planner=self.planner,
            process_group=self.group,
            async_stager=self.stager,
        )
        self.copies = saved.staging_completion
        self.pending = (saved.upload_completion, facts)

    def wait_for_copies(self) -> None:
        """Waits until the state that `start` received is copied, so that training may change its
        tensors. If the copy has failed, `finish` raises the error.
        """
        if self.copies is None or self.copies.done():
            return
        start = time.perf_counter()
        wait([self.copies])
        self.stall_s += time.perf_counter() - start

    def take_stall_s(self) -> float:
        """Returns the seconds for which training has waited for copies since the last call of this
        method.
        """
        stall_s = self.stall_s
        self.stall_s = 0.0
        return stall_s

    def poll(self) -> None:
        """Raises the errors of `finish` if the write of the pending checkpoint has failed. Never
        waits.

        Must be called once per step.
        """
        if self.pending is not None and self.pending[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits until the pending checkpoint, if there is one, is complete.

        Raises:
            CheckpointError: The checkpoint could not be written. Older checkpoints are intact.
            StaleAttemptError: The run belongs to a newer attempt.
        """
        if self.pending is None:
            return
        (future, facts), self.pending = self.pending, None
        try:
            future.result()
        # CheckpointException is not a subclass of Exception.
        except (Exception, CheckpointException) as error:
            for found, _ in getattr(error, "failures", {}).values():
                if isinstance(found, StaleAttemptError):
                    raise found from error
            newest = max(self.checkpoints.steps(), default=None)
            kept = "There is no older checkpoint."
            if newest:
                kept = f"The checkpoint of step {newest} is intact."
            raise CheckpointError(
                f"The checkpoint of step {facts['step']} could not be written: {cause(error)}"
                f" {kept}"
            ) from error

    def _complete(
        self, partial: Path, facts: dict, files: dict[str, int], checksums: dict[str, int]
    ) -> None:
        """Makes a written checkpoint complete, and then deletes old checkpoints. Torch calls it in
        the background, on the coordinator (the rank that finishes a checkpoint).
        """
        manifest = Manifest(
            attempt=self.attempt, time=time.time(), files=files, checksums=checksums, **facts
        )
        # All tensors are already written. A temporary error of the file system must not make the
        # checkpoint useless, so this is retried.
        retry_disk(functools.partial(self._commit, partial, manifest))
        self.checkpoints.prune(keep_last=self.keep_last, keep_every=self.keep_every)

    def _commit(self, partial: Path, manifest: Manifest) -> None:
        """Makes a checkpoint complete and renames its folder to the final name. May be called again
        after an error.
        """
        final = self.checkpoints.path(manifest.step)
        if not os.path.lexists(partial) and (final / MANIFEST).exists():
            return  # An earlier call renamed the folder before it failed.
        self.checkpoints.complete(partial, manifest)
        if final.exists():
            # The new checkpoint is complete already. A kill between the two renames therefore loses
            # neither checkpoint. `prune` later deletes the old checkpoint.
            final.rename(final.with_suffix(f".replaced-{self.attempt}"))
        partial.rename(final)


class SteadyPlanner(DefaultSavePlanner):
    """Torch's save planner, changed so that the plan of the first save is used for all later saves,
    whose tensors have the same names and shapes. The ranks then need not exchange their plans again
    (torch PR 147343).
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.description: Metadata | None = None
        # Torch's cache of plans belongs to the class, so each planner needs its own key.
        self._cached_plans_key = f"{type(self).__name__} {id(self)}"

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns (plans of all ranks, empty description of the checkpoint). Torch sends the
        returned description to all ranks. The actual description is needed only on the coordinator,
        in `self.description`.

        Torch searches the name of each tensor in one rank's plan after another. At 8,192 ranks this
        search would take most of the time of the first save. Therefore the names of all tensors are
        put into the first plan.
        """
        if all(plan.usable for plan in all_plans):
            names: dict[str, Any] = {}
            for plan in reversed(all_plans):
                names |= plan.planner_data
            first = dataclasses.replace(all_plans[0], planner_data=names)
            others = [dataclasses.replace(plan, planner_data={}) for plan in all_plans[1:]]
            all_plans = [first, *others]
        plans, self.description = super().create_global_plan(all_plans)
        return plans, Metadata({})


class Writer(FileSystemWriter):
    """Writes this rank's file of a checkpoint. Once the files of all ranks are written, it calls
    `complete` on the coordinator. The arguments are two dicts: sizes in bytes by file name, and
    checksums by file name.
    """

    def __init__(
        self, path: Path, planner: SteadyPlanner, complete: Callable[[dict, dict], None]
    ) -> None:
        super().__init__(path)
        self.planner = planner
        self.complete = complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder of the checkpoint, but no parent folders. Torch's own method would
        also create missing parents, and so write into a run directory that was deleted.
        """
        Path(self.path).mkdir(exist_ok=True)
        return super().prepare_local_plan(plan)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the description of the tensors, and makes the checkpoint complete. Torch calls it
        on the coordinator.
        """
        assert self.planner.description is not None
        super().finish(dataclasses.replace(self.planner.description), results)
        file = Path(self.path) / DESCRIPTION
        sizes = {}
        for part in results:
            for result in part:
                place = result.storage_data
                end = place.offset + place.length
                sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), end)
        self.complete(sizes | {DESCRIPTION: file.stat().st_size}, {DESCRIPTION: checksum(file)})
