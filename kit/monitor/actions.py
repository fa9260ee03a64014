"""Actions: what the dashboard's buttons do to a run, and what became of it: asked at, done at.

Each is also a file or a command: `kit checkpoint DIR`, `kit stop DIR`, `kit stop --now DIR`, `kit
resume DIR`.
"""

import dataclasses
import threading
import time
from typing import Any, Literal, get_args

from cluster.files import other_owner
from cluster.job import JobStatus
from cluster.state import JobError, read_asked, read_history, read_state, read_taken
from kit.errors import CheckpointError, ConfigError, DataError, RunError
from kit.run import Run

Name = Literal["checkpoint", "stop", "cancel", "resume"]
NAMES: tuple[Name, ...] = get_args(Name)


@dataclasses.dataclass
class Progress:
    """One request: unix times, the step after which the trainer acts on it, and how it went."""

    asked_at: float
    attempt: int
    checkpoint: int | None
    taken_at: float | None = None
    step: int | None = None
    done_at: float | None = None
    note: str = ""


class Actions:
    """Carries out requests without waiting for them, and follows each to its end."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._progress: dict[Name, Progress] = {}

    def start(self, name: str, status: JobStatus) -> None:
        """Asks for one of NAMES, given the status of now; returns at once.

        Where it is refused, `report` says why.
        """
        if name not in NAMES:
            return
        progress = self._progress[name] = self._new(status)
        # A resume reads the data set, and a scheduler may take seconds to answer: neither may hold
        # up the kernel.
        threading.Thread(
            target=self._carry_out, args=(name, progress), name=f"kit-{name}", daemon=True
        ).start()

    def allowed(self, status: JobStatus) -> list[str]:
        """Returns the actions that make sense for a job in this state."""
        # Its trainer, or its owner, asks for nothing here.
        if self.run.is_imported or other_owner(self.run.directory):
            return []
        if not status.state.is_final:
            return ["checkpoint", "stop", "cancel"]
        finished = max(self.run.checkpoints.steps(), default=0) >= self.run.recipe.num_steps
        return [] if finished else ["resume"]

    def report(self, status: JobStatus) -> dict[str, dict[str, Any]]:
        """Returns by name what was asked, also by others through the run directory, and what
        became of it.
        """
        for name in ("checkpoint", "stop"):
            folder = self.run.directory
            waiting, taken = read_asked(folder, name), read_taken(folder, name)
            known = self._progress.get(name)
            if waiting is not None and (known is None or known.done_at):
                self._progress[name] = self._new(status, waiting.asked_at)
            elif taken and (
                known is None or taken.taken_at > max(known.asked_at, known.done_at or 0.0)
            ):
                # Taken between two looks, or before this viewer came: the trainer's note knows.
                if known is None or known.done_at:
                    known = self._progress[name] = self._new(status, taken.asked_at)
                known.taken_at, known.step = taken.taken_at, taken.step
        for name, progress in self._progress.items():
            if progress.done_at is None and (outcome := self._outcome(name, progress, status)):
                when, progress.note = outcome
                progress.done_at = max(when, progress.taken_at or progress.asked_at)
        return {name: dataclasses.asdict(progress) for name, progress in self._progress.items()}

    def _new(self, status: JobStatus, when: float | None = None) -> Progress:
        newest = max(self.run.checkpoints.steps(), default=None)
        return Progress(asked_at=when or time.time(), attempt=status.attempt, checkpoint=newest)

    def _carry_out(self, name: Name, progress: Progress) -> None:
        try:
            if name == "resume":
                from kit.launcher import resume

                resume(self.run.directory)
            else:
                getattr(self.run.job, name)()
        except (JobError, RunError, CheckpointError, ConfigError, DataError, OSError) as error:
            progress.done_at, progress.note = time.time(), f"refused: {error}"

    def _outcome(
        self, name: Name, progress: Progress, status: JobStatus
    ) -> tuple[float, str] | None:
        """Returns when and how an action has ended, or None while it goes on."""
        if name == "resume":
            started = status.attempt > progress.attempt
            return (
                (self._turned(progress), f"attempt {status.attempt} started") if started else None
            )
        steps, due = self.run.checkpoints.steps(), progress.step
        if (
            name == "checkpoint"
            and steps
            and steps[-1] >= ((progress.checkpoint or -1) + 1 if due is None else due)
        ):
            saved = steps[-1] if due is None else due
            # A newer one has taken its place.
            when = self.run.checkpoints.saved_at(saved) if saved in steps else 0.0
            return when, f"saved at step {saved:,}"
        if status.state.is_final or status.attempt > progress.attempt:
            return self._turned(progress), (
                "the job has ended" if name != "checkpoint" else "the job ended first"
            )
        return None

    def _turned(self, progress: Progress) -> float:
        """Returns when the attempt of a request was over or the next had begun; of one that was
        lost its last word.
        """
        for event in read_history(self.run.directory):
            if event.attempt > progress.attempt or (
                event.attempt == progress.attempt and event.state.is_final
            ):
                return event.time
        state = read_state(self.run.directory)
        return (state and state.heartbeat) or 0.0
