"""Records the steps `recipe.profile_steps` of the ranks `profile_ranks`.

A rank leaves `rank_00000.trace.json.gz` in RUN/profile/step_N/ (Chrome's trace format, for
ui.perfetto.dev) and, on a GPU, `rank_00000.memory.pickle` (for pytorch.org/memory_viz); N is the
first step that was recorded.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from kit.run import Run
from kit.torch_private import record_memory, write_memory

MEMORY_EVENTS = 200_000
"""Allocations and releases that a memory snapshot keeps, the newest."""


class Profiler:
    """The profiler of one rank.

    All ranks begin and end together, so that none waits in mid-step.
    """

    def __init__(self, run: Run, group: dist.ProcessGroup, device: torch.device) -> None:
        self.run, self.group, self.device, self.rank = run, group, device, dist.get_rank()
        self.first, self.last = run.recipe.profile_steps or (0, 0)  # no step has the number 0
        self.folder: Path | None = None
        self.recording = None

    def begins(self, step: int) -> bool:
        """Returns whether `step`, the next, is the first to record: a run may resume among them."""
        return self.folder is None and self.first <= step <= self.last

    def begin(self, step: int) -> None:
        """Records from `step` on; called by all ranks."""
        self.folder = self.run.directory / "profile" / f"step_{step}"
        if self.rank not in self.run.recipe.profile_ranks:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            record_memory(MEMORY_EVENTS)
        self.recording = torch.profiler.profile(activities=activities, record_shapes=True)
        self.recording.start()

    def is_over(self, step: int, *, ends: bool) -> bool:
        """Returns whether the last step to record was `step`, also because training ends there."""
        return self.folder is not None and (ends or step >= self.last)

    def end(self) -> None:
        """Writes what was recorded; called by all ranks, after their devices have finished."""
        try:
            self._write()
        except (OSError, RuntimeError) as error:  # a full disk, say, which must not end training
            print(f"rank {self.rank}: its profile was not written: {error}", flush=True)
        self.folder = self.recording = None
        dist.barrier(self.group)

    def _write(self) -> None:
        if self.recording is None or self.folder is None:
            return
        self.recording.stop()
        self.folder.parent.mkdir(exist_ok=True)  # no parents: a run that is gone is not made again
        self.folder.mkdir(exist_ok=True)
        name = f"rank_{self.rank:05d}"
        part = self.folder / f".{name}.trace.json.gz"
        self.recording.export_chrome_trace(str(part))
        os.replace(part, self.folder / f"{name}.trace.json.gz")
        if self.device.type == "cuda":
            write_memory(self.folder / f"{name}.memory.pickle")
