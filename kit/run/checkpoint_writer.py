"""Writes a run's checkpoints in the background, by torch's distributed checkpoint; planned once."""

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
    """Writes checkpoints of one attempt in the background, one at a time; every rank has one.

    The process group of background writes is its own, so that they never mix with training's
    collectives; it is made at the first of them. All that a checkpoint needs to count is done in
    the background too, then older ones go.
    """

    def __init__(
        self, checkpoints: Checkpoints, *, attempt: int, keep_last: int, keep_every: int | None
    ) -> None:
        self.checkpoints = checkpoints
        self.attempt = attempt
        self.keep_last = keep_last
        self.keep_every = keep_every
        # Kept open: what takes the place of a run directory is another one.
        self.run_directory = os.open(checkpoints.directory.parent, os.O_RDONLY | os.O_DIRECTORY)
        self.group: Any = None
        self.stager: DefaultStager | None = None  # its copies lie in the same memory at each save
        self.planner = SteadyPlanner()
        self.pending: tuple[Any, dict] | None = None
        self.copies: Any = None  # a future: done once the newest state is copied
        self.stall_s = 0.0
        """Seconds for which training has waited for copies since `take_stall_s` was called."""

    def start(self, state: dict[str, Tensor], facts: dict) -> None:
        """Begins to copy `state` and then to write it. Change no tensor of it before
        `wait_for_copies` has returned.

        `state` is as `engine.state_dict()` gives it, `facts` the manifest's fields other than
        attempt, time and files.

        Raises:
            CheckpointError: this or the previous write failed; older checkpoints are intact.
        """
        self.finish()
        self.group = self.group or cpu_group("checkpoint")
        if dist.get_rank() == 0:
            self.checkpoints.check_space(facts["spec"])
        with contextlib.suppress(OSError):  # it is there; or the run is gone, as the write will say
            os.mkdir(self.checkpoints.directory.name, dir_fd=self.run_directory)
        partial = self.checkpoints.path(facts["step"]).with_suffix(f".partial-{self.attempt}")
        writer = Writer(partial, self.planner, functools.partial(self._complete, partial, facts))
        if self.stager is None:
            gpu = any(tensor.is_cuda for tensor in state.values())
            # Pinned memory, a stream of its own.
            self.stager = reusable_stager(StagingOptions(gpu, False, True, gpu))
        if torch.accelerator.is_available():
            # that stream does not wait for the last update by itself
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
        """Returns once training may change the tensors that `start` was given; that copying failed
        is told by `finish`.
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
        """Raises as `finish` once the pending checkpoint has failed; never waits.

        Call it once a step.
        """
        if self.pending is not None and self.pending[0].done():
            self.finish()

    def finish(self) -> None:
        """Waits until the pending checkpoint, if any, is complete.

        Raises:
            CheckpointError: it could not be written; older ones are intact.
            StaleAttemptError: the run belongs to a newer attempt.
        """
        if self.pending is None:
            return
        (future, facts), self.pending = self.pending, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # torch's derives from BaseException
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
        manifest = Manifest(
            attempt=self.attempt, time=time.time(), files=files, checksums=checksums, **facts
        )
        # All tensors are written: an error of the file system that passes must not lose them.
        retry_disk(functools.partial(self._commit, partial, manifest))
        self.checkpoints.prune(keep_last=self.keep_last, keep_every=self.keep_every)

    def _commit(self, partial: Path, manifest: Manifest) -> None:
        """Makes a checkpoint complete and gives it its name. May be called again after an error."""
        final = self.checkpoints.path(manifest.step)
        if not os.path.lexists(partial) and (final / MANIFEST).exists():
            return  # An earlier call renamed it before it failed.
        self.checkpoints.complete(partial, manifest)
        if final.exists():
            # The new checkpoint is complete already, so a kill between the two renames loses none.
            # `prune` deletes the old one.
            final.rename(final.with_suffix(f".replaced-{self.attempt}"))
        partial.rename(final)


class SteadyPlanner(DefaultSavePlanner):
    """Plans the first save; later ones are alike, and no rank tells another again what it knows
    (torch PR 147343).
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.description: Metadata | None = None
        self._cached_plans_key = (  # the cache is the class's, for all planners
            f"{type(self).__name__} {id(self)}"
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns all ranks' plans, and in place of the description nothing: torch would send it
        to all of them.

        The names of tensors are all in the first plan: torch looks for each in one plan after the
        other, which at 8,192 ranks is most of the first save.
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
    """Writes this rank's file; calls `complete`, on the coordinator, with size and checksum by
    file once all are.
    """

    def __init__(
        self, path: Path, planner: SteadyPlanner, complete: Callable[[dict, dict], None]
    ) -> None:
        super().__init__(path)
        self.planner = planner
        self.complete = complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the checkpoint's folder, but none above it, as torch's own call would: nothing is
        written into what has taken a run directory's place.
        """
        Path(self.path).mkdir(exist_ok=True)
        return super().prepare_local_plan(plan)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the description, on the coordinator, and makes the checkpoint complete."""
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
