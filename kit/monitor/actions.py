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
from cluster.state import (
    JobError,
    Request,
    TakenRequest,
    read_asked,
    read_history,
    read_state,
    read_taken,
)
from kit.errors import CheckpointError, ConfigError, DataError, RunError
from kit.run import Run

Name = Literal["checkpoint", "stop", "cancel", "resume"]
NAMES: tuple[Name, ...] = get_args(Name)


@dataclasses.dataclass
class ActionProgress:
    """One request: unix times, the step after which the trainer acts on it, and how it went."""

    asked_at: float
    attempt: int
    taken_at: float | None = None
    step: int | None = None
    done_at: float | None = None
    note: str = ""


class Actions:
    """Carries out requests without waiting for them, and follows each to its end.

    The run directory records checkpoints and stops, whoever requested them. Other requests are
    only known to the viewer that made them. `earlier` are the actions of this viewer on the same
    run before it changed. Their requests are taken over.
    """

    def __init__(self, run: Run, *, earlier: "Actions | None" = None) -> None:
        self.run = run
        self._own: dict[Name, ActionProgress] = earlier._own if earlier else {}
        self._taken_before: dict[Name, TakenRequest | None] = (
            earlier._taken_before if earlier else {}
        )
        """Last request of each name that the trainer had taken when this viewer sent its own. A
        newer request differs from it in content. Times are not compared with the clock of this
        machine, since the trainer's clock may differ."""

    def start(self, name: str, status: JobStatus) -> None:
        """Asks for one of NAMES, given the status of now; returns at once.

        Where it is refused, `report` says why.
        """
        if name not in NAMES:
            return
        progress = self._own[name] = ActionProgress(asked_at=time.time(), attempt=status.attempt)
        if name in ("checkpoint", "stop"):
            self._taken_before[name] = read_taken(self.run.directory, name)
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
        told = dict(self._own)
        for name in ("checkpoint", "stop"):
            found, own = self._found(name, status.attempt), self._own.get(name)
            if found and (own is None or self._is_newer(name, found)):
                self._own.pop(name, None)
                told[name] = found
        for name, progress in told.items():
            if progress.done_at is None and (outcome := self._outcome(name, progress, status)):
                when, progress.note = outcome
                progress.done_at = max(when, progress.taken_at or progress.asked_at)
        return {name: dataclasses.asdict(progress) for name, progress in told.items()}

    def _is_newer(self, name: Request, found: ActionProgress) -> bool:
        """Returns whether the trainer took a request after this viewer sent its own."""
        before = self._taken_before.get(name)
        return before is None or (found.asked_at, found.taken_at) != (
            before.asked_at,
            before.taken_at,
        )

    def _found(self, name: Request, attempt: int) -> ActionProgress | None:
        """Returns the newest request of a name that the run directory holds."""
        folder = self.run.directory
        if waiting := read_asked(folder, name):
            return ActionProgress(asked_at=waiting.asked_at, attempt=attempt)
        if taken := read_taken(folder, name):
            return ActionProgress(
                asked_at=taken.asked_at, attempt=attempt, taken_at=taken.taken_at, step=taken.step
            )
        return None

    def _carry_out(self, name: Name, progress: ActionProgress) -> None:
        try:
            if name == "resume":
                from kit.launcher import resume

                resume(self.run.directory)
            else:
                getattr(self.run.job, name)()
        except (JobError, RunError, CheckpointError, ConfigError, DataError, OSError) as error:
            progress.done_at, progress.note = time.time(), f"refused: {error}"

    def _outcome(
        self, name: Name, progress: ActionProgress, status: JobStatus
    ) -> tuple[float, str] | None:
        """Returns when and how an action has ended, or None while it goes on."""
        if name == "resume":
            started = status.attempt > progress.attempt
            return (
                (self._turned(progress), f"attempt {status.attempt} started") if started else None
            )
        steps, due = self.run.checkpoints.steps(), progress.step
        if name == "checkpoint" and due is not None and steps and steps[-1] >= due:
            # A newer one has taken its place.
            when = self.run.checkpoints.saved_at(due) if due in steps else 0.0
            return when, f"saved at step {due:,}"
        if status.state.is_final or status.attempt > progress.attempt:
            return self._turned(progress), (
                "the job has ended" if name != "checkpoint" else "the job ended first"
            )
        return None

    def _turned(self, progress: ActionProgress) -> float:
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
