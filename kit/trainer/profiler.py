"""Records the steps `recipe.profile_steps` of the ranks `profile_ranks`.

A rank leaves `rank_00000.trace.json.gz` in RUN/profile/step_N/ (Chrome's trace format, for
ui.perfetto.dev) and, on a GPU, `rank_00000.memory.pickle` (for pytorch.org/memory_viz); N is the
first step that was recorded.
"""

import os

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
        self.is_on = False
        self.recording: torch.profiler.profile | None = None

    def is_to_turn(self, step: int, *, ends: bool) -> bool:
        """Returns whether recording is to begin or to end before `step`, the next, or because
        training ends; a run may resume among the steps to record.
        """
        return self.is_on != (self.first <= step <= self.last and not ends)

    def turn(self, step: int) -> None:
        """Begins to record at `step`, or writes what was recorded until then; called by all ranks,
        after their devices have finished.
        """
        self.is_on = not self.is_on
        if self.is_on and self.rank in self.run.recipe.profile_ranks:
            self.folder = self.run.directory / "profile" / f"step_{step}"
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                record_memory(MEMORY_EVENTS)
            self.recording = torch.profiler.profile(activities=activities, record_shapes=True)
            self.recording.start()
        if not self.is_on:
            try:
                self._write()
            except (OSError, RuntimeError) as error:  # a full disk, which must not end training
                print(f"rank {self.rank}: its profile was not written: {error}", flush=True)
            dist.barrier(self.group)

    def _write(self) -> None:
        if self.recording is None:
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
