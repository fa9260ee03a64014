"""The word that all views of a run show for the state of its job."""

from cluster.state import JobState
from cluster.status import JobStatus

STOPPED = "stopped"
"""Word for a job that ended well before the last step of its run, because a user asked for it."""


def state_word(status: JobStatus, num_steps: int) -> str:
    """Returns the word for the state of a job: `stopped` if the job ended well before step
    `num_steps`, the last step of its run, and otherwise the name of the state.
    """
    is_done = status.state is JobState.DONE
    if is_done and status.step is not None and status.step < num_steps:
        return STOPPED
    return str(status.state)
