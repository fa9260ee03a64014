"""Writes the checkpoints of a run in the background, in the format of torch's distributed
checkpoint. The plan of the first save is used for all saves.
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
    """Writes the checkpoints of one attempt in the background, one at a time. Every rank has one
    writer.

    Background writes have a separate process group, so that their collectives do not mix with those
    of training. The group is created at the first write. Manifest, rename and the deletion of old
    checkpoints are done in the background too.

    Attributes:
        group: process group of background writes.
        stager: object that copies the state to host memory, which is reused at each save.
        pending: (future, `facts` of `start`) of the checkpoint that is being written.
        copies: future that is done once the newest state is copied.
    """

    def __init__(
        self, checkpoints: Checkpoints, *, attempt: int, keep_last: int, keep_every: int | None
    ) -> None:
        self.checkpoints = checkpoints
        self.attempt = attempt
        self.keep_last = keep_last
        self.keep_every = keep_every
        # The handle stays open. If another directory replaces the run directory, nothing is
        # written into that directory.
        self.run_directory = os.open(checkpoints.directory.parent, os.O_RDONLY | os.O_DIRECTORY)
        self.group: Any = None
        self.stager: DefaultStager | None = None
        self.planner = SteadyPlanner()
        self.pending: tuple[Any, dict] | None = None
        self.copies: Any = None
        self.stall_s = 0.0
        """Seconds for which training has waited for copies since `take_stall_s` was called."""

    def start(self, state: dict[str, Tensor], facts: dict) -> None:
        """Starts to copy `state` and to write the copy. The caller must not change a tensor of
        `state` before `wait_for_copies` has returned.

        Args:
            state: result of `engine.state_dict()`.
            facts: fields of the manifest except attempt, time, files and checksums.

        Raises:
            CheckpointError: The previous write failed, or the disk has no room for this checkpoint.
                Older checkpoints are intact.
            StaleAttemptError: The run belongs to a newer attempt.
        """
        self.finish()
        self.group = self.group or cpu_group("checkpoint")
        if dist.get_rank() == 0:
            self.checkpoints.check_space(facts["spec"])
        # The folder exists already, or the run was removed. The write reports a removed run.
        with contextlib.suppress(OSError):
            os.mkdir(self.checkpoints.directory.name, dir_fd=self.run_directory)
        partial = self.checkpoints.path(facts["step"]).with_suffix(f".partial-{self.attempt}")
        writer = Writer(partial, self.planner, functools.partial(self._complete, partial, facts))
        if self.stager is None:
            gpu = any(tensor.is_cuda for tensor in state.values())
            # On a GPU, copies go to pinned memory, on a separate CUDA stream.
            self.stager = reusable_stager(StagingOptions(gpu, False, True, gpu))
        if torch.accelerator.is_available():
            # The separate stream does not wait for the last update of the weights.
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
        """Waits until the state of `start` is copied, so that training may change its tensors. If
        the copy has failed, `finish` raises the error.
        """
        if self.copies is None or self.copies.done():
            return
        start = time.perf_counter()
        wait([self.copies])
        self.stall_s += time.perf_counter() - start

    def take_stall_s(self) -> float:
        """Returns the seconds for which training has waited for copies since the last call."""
        stall_s = self.stall_s
        self.stall_s = 0.0
        return stall_s

    def poll(self) -> None:
        """Raises the errors of `finish` if the pending checkpoint has failed. Never waits.

        It is called once per step.
        """
        if self.pending is not None and self.pending[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits until the pending checkpoint, if any, is complete.

        Raises:
            CheckpointError: The checkpoint could not be written. Older checkpoints are intact.
            StaleAttemptError: The run belongs to a newer attempt.
        """
        if self.pending is None:
            return
        (future, facts), self.pending = self.pending, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException.
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
        """Makes a written checkpoint complete, and then deletes old checkpoints. Runs on the
        coordinator, in the background.
        """
        manifest = Manifest(
            attempt=self.attempt, time=time.time(), files=files, checksums=checksums, **facts
        )
        # All tensors are written. A temporary error of the file system must not lose them.
        retry_disk(functools.partial(self._commit, partial, manifest))
        self.checkpoints.prune(keep_last=self.keep_last, keep_every=self.keep_every)

    def _commit(self, partial: Path, manifest: Manifest) -> None:
        """Makes a checkpoint complete and renames its folder to the final name. May be called again
        after an error.
        """
        final = self.checkpoints.path(manifest.step)
        if not os.path.lexists(partial) and (final / MANIFEST).exists():
            return  # An earlier call renamed it before it failed.
        self.checkpoints.complete(partial, manifest)
        if final.exists():
            # The new checkpoint is complete already, so a kill between the two renames loses
            # neither checkpoint.
            # `prune` deletes the old one.
            final.rename(final.with_suffix(f".replaced-{self.attempt}"))
        partial.rename(final)


class SteadyPlanner(DefaultSavePlanner):
    """Planner that plans the first save and uses this plan for all later saves, whose tensors have
    the same names and shapes. The ranks then do not exchange their plans again (torch PR 147343).
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.description: Metadata | None = None
        # Torch's cache belongs to the class, so each planner needs a separate key.
        self._cached_plans_key = f"{type(self).__name__} {id(self)}"

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns (plans of all ranks, empty description). The real description stays on the
        coordinator, since torch would send it to all ranks.

        The first plan gets the names of all tensors. Torch searches for each name in one plan after
        the other. At 8,192 ranks this search would take most of the time of the first save.
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
    """Writes the file of this rank. Once the files of all ranks are written, it calls `complete` on
    the coordinator with (size by file, checksum by file).
    """

    def __init__(
        self, path: Path, planner: SteadyPlanner, complete: Callable[[dict, dict], None]
    ) -> None:
        super().__init__(path)
        self.planner = planner
        self.complete = complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the folder of the checkpoint, but no parent folder. Torch's own method would
        create the parents too, and write into a removed run directory.
        """
        Path(self.path).mkdir(exist_ok=True)
        return super().prepare_local_plan(plan)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the description and makes the checkpoint complete. Torch calls it on the
        coordinator.
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
