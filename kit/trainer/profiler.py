"""Records with torch's profiler the steps in `recipe.profile_steps` on the ranks in
`recipe.profile_ranks`.

Each of these ranks writes `rank_00000.trace.json.gz` into RUN/profile/step_N/ (Chrome's trace
format, for ui.perfetto.dev). On a GPU it also writes `rank_00000.memory.pickle` (for
pytorch.org/memory_viz). The number in the file name is the rank, and N is the first recorded step.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from kit.run import Run
from kit.torch_private import record_memory, write_memory
from kit.trainer.callback import Callback
from kit.trainer.watchdog import Watchdog

MEMORY_EVENTS = 200_000
"""Number of the newest memory allocations and releases that a memory snapshot contains."""


class Profiler(Callback):
    """The profiler of one rank.

    All ranks begin and end recording together, including those that record nothing. Otherwise ranks
    would wait within a recorded step for a rank that still writes its profile.
    """

    def __init__(
        self, run: Run, group: dist.ProcessGroup, device: torch.device, watchdog: Watchdog
    ) -> None:
        self.run = run
        self.group = group
        self.device = device
        self.rank = dist.get_rank()
        self.watchdog = watchdog
        # The numbers of steps begin at 1, so (0, 0) means that no step is recorded.
        self.first, self.last = run.recipe.profile_steps or (0, 0)
        self.is_on = False
        self.recording: torch.profiler.profile | None = None

    def needs_finished_steps(self, step: int) -> bool:
        """Returns whether recording must begin or end before `step`. All earlier steps must then be
        finished, so that the profile contains no part of them. A run that resumes in the middle of
        `recipe.profile_steps` begins recording there.
        """
        return self.is_on != (self.first <= step <= self.last)

    def before_step(self, step: int) -> None:
        """Begins recording, or ends it and writes the profile, if `needs_finished_steps` returns
        True.
        """
        if self.needs_finished_steps(step):
            with self.watchdog.paused():
                if self.is_on:
                    self._end()
                else:
                    self._begin(step)

    def on_end(self) -> None:
        """Writes the profile if the run ends while steps are recorded."""
        if self.is_on:
            with self.watchdog.paused():
                self._end()

    def _begin(self, step: int) -> None:
        self.is_on = True
        if self.rank not in self.run.recipe.profile_ranks:
            return
        self.folder = self.run.directory / "profile" / f"step_{step}"
        if self.device.type == "cuda":
            record_memory(MEMORY_EVENTS)
        # This records the CPU and, if there is one, the GPU. `acc_events` has no effect on a single
        # recording: it only suppresses a warning of torch 2.10 to 2.12.
        self.recording = torch.profiler.profile(record_shapes=True, acc_events=True)
        self.recording.start()

    def _end(self) -> None:
        self.is_on = False
        try:
            self._write()
        except (OSError, RuntimeError) as error:  # A full disk must not end training.
            print(f"rank {self.rank}: its profile was not written: {error}", flush=True)
        dist.barrier(self.group)

    def _write(self) -> None:
        if self.recording is None:
            return
        self.recording.stop()
        # No `parents=True`: if the run directory has been deleted, it must not be created again.
        self.folder.parent.mkdir(exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        name = f"rank_{self.rank:05d}"
        self._replace(f"{name}.trace.json.gz", self.recording.export_chrome_trace)
        if self.device.type == "cuda":
            self._replace(f"{name}.memory.pickle", lambda file: write_memory(Path(file)))

    def _replace(self, name: str, write: Callable[[str], object]) -> None:
        """Replaces the file `name` of the profile. `write` is a function that writes the content to
        a given path.

        The content is first written to a file with a random name, which is then renamed. Another
        user may have made a symbolic link under `name`. The renaming replaces the link and does not
        change the file to which the link points.
        """
        part = self.folder / f".{os.urandom(4).hex()}.{name}"
        try:
            write(str(part))
            os.replace(part, self.folder / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
