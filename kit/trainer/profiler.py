"""Records some steps of some ranks when somebody asks (`kit profile`); until then it costs a look for a file."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster.state import read_record
from kit.run.profile import Profile, ProfileRequest, request_file, trace_file

MEMORY_EVENTS = 200_000
"""Allocations and releases that a memory snapshot keeps, the newest."""


class Profiler:
    """The profiler of one rank. All ranks begin and end together, so that none waits for another in mid-step."""

    def __init__(self, run_dir: Path, group: dist.ProcessGroup, device: torch.device) -> None:
        self.run_dir, self.group, self.device, self.rank = run_dir, group, device, dist.get_rank()
        self.request: ProfileRequest | None = None
        self.first_step, self.recording = 0, None

    def is_asked(self) -> bool:
        """Returns whether a request waits, and none is being answered. For rank 0, which tells the others."""
        return self.request is None and request_file(self.run_dir).exists()

    def begin(self, step: int) -> None:
        """Takes the request and records from the step after `step` on; called by all ranks."""
        asked: list[Any] = [None]
        if self.rank == 0:
            asked[0] = read_record(ProfileRequest, request_file(self.run_dir))  # None: damaged, and dropped
            request_file(self.run_dir).unlink(missing_ok=True)
        dist.broadcast_object_list(asked, src=0, group=self.group)
        self.request, self.first_step = asked[0], step + 1
        if self.request is None or self.rank not in self.request.ranks:
            return
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CPU]
        if self.device.type == "cuda":
            activities.append(activity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self.recording = torch.profiler.profile(activities=activities, record_shapes=True)
        self.recording.start()

    def is_over(self, step: int, *, ends: bool) -> bool:
        """Returns whether the last step to record was `step`, also because training ends there."""
        return self.request is not None and (ends or step >= self.first_step + self.request.num_steps - 1)

    def end(self, step: int) -> None:
        """Writes what was recorded; called by all ranks, after their devices have finished `step`."""
        request, self.request = self.request, None
        assert request is not None
        folder = self.run_dir / "profile" / f"step_{self.first_step}"
        try:
            if self.rank == 0 or self.recording:
                folder.parent.mkdir(exist_ok=True)  # no parents: where the run directory is gone, nothing is made again
                folder.mkdir(exist_ok=True)
            self._write(folder)
        except (OSError, RuntimeError) as error:  # a full disk, say, which must not end training
            print(f"rank {self.rank}: its profile was not written: {error}", flush=True)
        dist.barrier(self.group)
        if self.rank == 0:
            found = Profile(
                asked_at=request.asked_at, ranks=request.ranks, num_steps=step - self.first_step + 1,
                first_step=self.first_step,
            )  # fmt: skip
            with contextlib.suppress(OSError):
                found.write(folder / "profile.json")

    def _write(self, folder: Path) -> None:
        recording, self.recording = self.recording, None
        if recording is None:
            return
        recording.stop()
        trace = trace_file(folder, self.rank)
        recording.export_chrome_trace(str(part := trace.with_name(f".{trace.name}")))
        os.replace(part, trace)
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"rank_{self.rank:05d}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
