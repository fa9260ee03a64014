"""Ownership of a run: every user may read a run directory, and only its owner may write to it.

The owner of a run is the owner of its folder, whatever the permissions of the folder allow.
Commands that write, submit, send signals or leave requests call `refuse_other_owner` once, at their
beginning. Classes of objects that hold a run directory derive from `Owned`. Standard library only.
"""

from pathlib import Path

from cluster.files import other_owner
from cluster.state import JobError


def refuse_other_owner(run_dir: Path, what: str) -> None:
    """Raises JobError if a run directory, or a folder of runs, belongs to another user. `what`
    completes "you may not" in the message.

    The kit only reads a folder of another user, even if the permissions of the folder allow
    writing.
    """
    if owner := other_owner(run_dir):
        raise JobError(
            f"{run_dir}: you may not {what}: it belongs to {owner}. Ask {owner}, or do it as"
            f" {owner}."
        )


class Owned:
    """Base class of objects that represent the run in one directory, such as `Job`. Says who owns
    the run.
    """

    @property
    def owned_folder(self) -> Path:
        """Run directory of the object. Its owner is the owner of the run."""
        raise NotImplementedError

    @property
    def other_owner(self) -> str | None:
        """Login name of the owner of the run, or None if this user is the owner."""
        return other_owner(self.owned_folder)

    @property
    def is_writable(self) -> bool:
        """Whether the run belongs to this user. Results about another user's run are stored outside
        of its run directory.
        """
        return self.other_owner is None

    def check_writable(self, what: str) -> None:
        """Raises JobError if the run belongs to another user. `what` completes "you may not" in the
        message.
        """
        refuse_other_owner(self.owned_folder, what)
