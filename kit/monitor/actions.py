"""Actions: the operations behind the dashboard's buttons, and the progress of each request.

Each action is also a command: `kit checkpoint DIR`, `kit stop DIR`, `kit stop --now DIR`, `kit
resume DIR`.
"""

import dataclasses
import threading
import time
from typing import Any, Literal, get_args

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

ActionName = Literal["checkpoint", "stop", "cancel", "resume"]
ACTION_NAMES: tuple[ActionName, ...] = get_args(ActionName)


@dataclasses.dataclass
class ActionProgress:
    """Progress and result of one request. Times are unix times in seconds."""

    asked_at: float
    """Time of the request."""
    attempt: int
    """Attempt of the run at the time of the request."""
    taken_at: float | None = None
    """Time at which the trainer accepted the request. None before that."""
    step: int | None = None
    """Step after which the trainer carries out the request. None if it is unknown."""
    done_at: float | None = None
    """Time at which the request was finished or refused. None before that."""
    note: str = ""
    """Result in words."""


class Actions:
    """Carries out requests in threads, and tracks each request until its end.

    The run directory records all requests for a checkpoint or a stop, also those of other viewers.
    Other requests are known only to the viewer that made them.

    Args:
        run: the run.
        earlier: actions of this viewer on the same run before the run changed. Their requests are
            taken over.
    """

    def __init__(self, run: Run, *, earlier: "Actions | None" = None) -> None:
        self.run = run
        self._requests: dict[ActionName, ActionProgress] = earlier._requests if earlier else {}
        self._taken_before: dict[ActionName, TakenRequest | None] = (
            earlier._taken_before if earlier else {}
        )
        """Last request that the trainer had accepted when this viewer sent a request, by name. A
        newer request of the trainer differs in content. Times are not compared with the clock of
        this machine, since the trainer's clock may differ."""

    def start(self, name: str, status: JobStatus) -> None:
        """Starts one of ACTION_NAMES in a thread, and returns at once. If the action is refused,
        `report` says why. `status` is the present status of the job.
        """
        if name not in ACTION_NAMES:
            return
        progress = ActionProgress(asked_at=time.time(), attempt=status.attempt)
        self._requests[name] = progress
        if name in ("checkpoint", "stop"):
            self._taken_before[name] = read_taken(self.run.directory, name)
        # A resume reads the data set, and a scheduler may need seconds to answer. The kernel must
        # not wait for either.
        threading.Thread(
            target=self._carry_out, args=(name, progress), name=f"kit-{name}", daemon=True
        ).start()

    def allowed(self, status: JobStatus) -> list[str]:
        """Returns the names of the actions that are possible for a job with this status. Empty for
        an imported run and for another user's run.
        """
        # Only its owner may act on a run, and an imported run has no job.
        if self.run.is_imported or not self.run.is_writable:
            return []
        if not status.state.is_final:
            return ["checkpoint", "stop", "cancel"]
        finished = max(self.run.checkpoints.steps(), default=0) >= self.run.recipe.num_steps
        return [] if finished else ["resume"]

    def report(self, status: JobStatus) -> dict[str, dict[str, Any]]:
        """Returns the progress of all requests as dictionaries, by name of the action. Requests of
        other viewers are included if the run directory records them.
        """
        requests = dict(self._requests)
        for name in ("checkpoint", "stop"):
            found = self._recorded_request(name, status.attempt)
            own = self._requests.get(name)
            if found and (own is None or self._is_newer(name, found)):
                self._requests.pop(name, None)
                requests[name] = found
        for name, progress in requests.items():
            if progress.done_at is None and (outcome := self._outcome_of(name, progress, status)):
                when, progress.note = outcome
                progress.done_at = max(when, progress.taken_at or progress.asked_at)
        return {name: dataclasses.asdict(progress) for name, progress in requests.items()}

    def _is_newer(self, name: Request, found: ActionProgress) -> bool:
        """Returns whether the trainer has accepted the request `found` after this viewer sent its
        last request.
        """
        before = self._taken_before.get(name)
        return before is None or (found.asked_at, found.taken_at) != (
            before.asked_at,
            before.taken_at,
        )

    def _recorded_request(self, name: Request, attempt: int) -> ActionProgress | None:
        """Returns the newest request of a name that the run directory records, or None."""
        folder = self.run.directory
        if waiting := read_asked(folder, name):
            return ActionProgress(asked_at=waiting.asked_at, attempt=attempt)
        if taken := read_taken(folder, name):
            return ActionProgress(
                asked_at=taken.asked_at, attempt=attempt, taken_at=taken.taken_at, step=taken.step
            )
        return None

    def _carry_out(self, name: ActionName, progress: ActionProgress) -> None:
        """Carries out an action. If it is refused, the reason becomes the note of its progress."""
        try:
            if name == "resume":
                from kit.launcher import resume

                resume(self.run.directory)
            else:
                getattr(self.run.job, name)()
        except (JobError, RunError, CheckpointError, ConfigError, DataError, OSError) as error:
            progress.done_at = time.time()
            progress.note = f"refused: {error}"

    def _outcome_of(
        self, name: ActionName, progress: ActionProgress, status: JobStatus
    ) -> tuple[float, str] | None:
        """Returns (unix time of the end of an action, result in words), or None while the action is
        in progress.
        """
        if name == "resume":
            if status.attempt <= progress.attempt:
                return None
            return self._attempt_end(progress), f"attempt {status.attempt} started"
        steps = self.run.checkpoints.steps()
        due = progress.step
        if name == "checkpoint" and due is not None and steps and steps[-1] >= due:
            # A removed checkpoint has no time. A newer checkpoint has taken its place.
            when = self.run.checkpoints.saved_at(due) if due in steps else 0.0
            return when, f"saved at step {due:,}"
        if status.state.is_final or status.attempt > progress.attempt:
            note = "the job ended first" if name == "checkpoint" else "the job has ended"
            return self._attempt_end(progress), note
        return None

    def _attempt_end(self, progress: ActionProgress) -> float:
        """Returns the unix time at which the attempt of a request ended or the next attempt began.
        If neither time is recorded, returns the time of the last heartbeat, or 0.
        """
        for event in read_history(self.run.directory):
            if event.attempt > progress.attempt or (
                event.attempt == progress.attempt and event.state.is_final
            ):
                return event.time
        state = read_state(self.run.directory)
        return (state and state.heartbeat) or 0.0
