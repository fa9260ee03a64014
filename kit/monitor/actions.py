"""Actions: what the buttons of the dashboard do (checkpoint, stop, cancel, resume), and the
progress of each request.

Each action is also a command: `kit checkpoint DIR`, `kit stop DIR`, `kit stop --now DIR` (cancel),
`kit resume DIR`.
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
    read_history,
    read_pending_request,
    read_state,
    read_taken_request,
)
from kit.errors import CheckpointError, ConfigError, DataError, RunError
from kit.run import Run

ActionName = Literal["checkpoint", "stop", "cancel", "resume"]
ACTION_NAMES: tuple[ActionName, ...] = get_args(ActionName)


@dataclasses.dataclass
class ActionProgress:
    """Progress and result of one request for an action. All times are unix times in seconds."""

    asked_at: float
    """Unix time at which the user made the request."""
    attempt: int
    """Number of the run's attempt when the request was made."""
    taken_at: float | None = None
    """Unix time at which the trainer accepted the request. None if the trainer has not accepted it
    yet."""
    step: int | None = None
    """Training step after which the trainer carries out the request. None if it is unknown."""
    done_at: float | None = None
    """Unix time at which the request was finished or refused. None while it is in progress."""
    note: str = ""
    """Result of the request in words, or the reason why it was refused. Empty while it is in
    progress."""


class Actions:
    """Carries out the requests of one viewer in threads, and tracks each request until its end.

    All requests for a checkpoint or a stop are recorded in the run directory, so requests of other
    viewers are shown too. Requests to cancel or resume are known only to the viewer that made them.

    Args:
        run: the run.
        earlier: `Actions` of this viewer before the plan or site of the run changed. Its requests
            are taken over.
    """

    def __init__(self, run: Run, *, earlier: "Actions | None" = None) -> None:
        self.run = run
        self._requests: dict[ActionName, ActionProgress] = earlier._requests if earlier else {}
        self._taken_before: dict[ActionName, TakenRequest | None] = (
            earlier._taken_before if earlier else {}
        )
        """For each action name, the last request that the trainer had accepted when this viewer
        sent its own. An accepted request with other content is newer. Times are not compared, since
        the clock of the trainer's machine may differ from the clock of this machine."""

    def start(self, name: str, status: JobStatus) -> None:
        """Starts an action, one of ACTION_NAMES, in a thread, and returns at once. If the action is
        refused, `report` gives the reason. `status` is the present status of the job.
        """
        if name not in ACTION_NAMES:
            return
        progress = ActionProgress(asked_at=time.time(), attempt=status.attempt)
        self._requests[name] = progress
        if name in ("checkpoint", "stop"):
            self._taken_before[name] = read_taken_request(self.run.directory, name)
        # A resume reads the data set, and the scheduler may need seconds to answer. The notebook
        # kernel must not wait for either.
        threading.Thread(
            target=self._carry_out, args=(name, progress), name=f"kit-{name}", daemon=True
        ).start()

    def allowed(self, status: JobStatus) -> list[str]:
        """Returns the names of the actions that are possible for a job with this status. Returns []
        for an imported run and for another user's run.
        """
        # Only the owner of a run may act on it, and an imported run has no job.
        if self.run.is_imported or not self.run.is_writable:
            return []
        if not status.state.is_final:
            return ["checkpoint", "stop", "cancel"]
        finished = max(self.run.checkpoints.steps(), default=0) >= self.run.recipe.num_steps
        return [] if finished else ["resume"]

    def report(self, status: JobStatus) -> dict[str, dict[str, Any]]:
        """Returns the progress of all requests as dictionaries, by name of the action. Requests of
        other viewers are included if they are recorded in the run directory.
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
        """Returns whether `found`, a request that the run directory records, is newer than the last
        request of this viewer.
        """
        before = self._taken_before.get(name)
        return before is None or (found.asked_at, found.taken_at) != (
            before.asked_at,
            before.taken_at,
        )

    def _recorded_request(self, name: Request, attempt: int) -> ActionProgress | None:
        """Returns the newest request for an action that is recorded in the run directory,
        or None.
        """
        folder = self.run.directory
        if waiting := read_pending_request(folder, name):
            return ActionProgress(asked_at=waiting.asked_at, attempt=attempt)
        if taken := read_taken_request(folder, name):
            return ActionProgress(
                asked_at=taken.asked_at, attempt=attempt, taken_at=taken.taken_at, step=taken.step
            )
        return None

    def _carry_out(self, name: ActionName, progress: ActionProgress) -> None:
        """Carries out an action. If it is refused, stores the reason in `progress.note`."""
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
        """Returns (unix time at which an action ended, result in words). Returns None while the
        action is in progress.
        """
        if name == "resume":
            if status.attempt <= progress.attempt:
                return None
            return self._attempt_end(progress), f"attempt {status.attempt} started"
        steps = self.run.checkpoints.steps()
        due = progress.step
        if name == "checkpoint" and due is not None and steps and steps[-1] >= due:
            # The checkpoint of the request may have been removed after a newer one was saved. Its
            # time is then unknown.
            when = self.run.checkpoints.saved_at(due) if due in steps else 0.0
            return when, f"saved at step {due:,}"
        if status.state.is_final or status.attempt > progress.attempt:
            note = "the job ended first" if name == "checkpoint" else "the job has ended"
            return self._attempt_end(progress), note
        return None

    def _attempt_end(self, progress: ActionProgress) -> float:
        """Returns the unix time at which the attempt of a request ended or the next attempt began.
        If neither is recorded, returns the time of the last heartbeat, or 0 without a heartbeat.
        """
        for event in read_history(self.run.directory):
            if event.attempt > progress.attempt or (
                event.attempt == progress.attempt and event.state.is_final
            ):
                return event.time
        state = read_state(self.run.directory)
        return (state and state.heartbeat) or 0.0
