"""Whose a run is: everybody may read a run directory, and only its owner writes.

The owner of the folder decides, whatever its modes allow. Commands that write, submit, signal or
ask call `refuse_other_owner` once, where they begin. Objects that hold a run directory answer for
it: see `Owned`. Standard library only.
"""

from pathlib import Path

from cluster.files import other_owner
from cluster.state import JobError


def refuse_other_owner(run_dir: Path, what: str) -> None:
    """Raises JobError if a run directory, or a folder of runs, belongs to another user. Such a
    folder is only read, whatever its modes allow.
    """
    if owner := other_owner(run_dir):
        raise JobError(
            f"{run_dir}: you may not {what}: it belongs to {owner}. Ask {owner}, or do it as"
            f" {owner}."
        )


class Owned:
    """Base class of objects that hold a run directory."""

    @property
    def owned_folder(self) -> Path:
        """The run directory."""
        raise NotImplementedError

    @property
    def other_owner(self) -> str | None:
        """Name of the user to whom the run belongs, or None if that is this user."""
        return other_owner(self.owned_folder)

    @property
    def is_writable(self) -> bool:
        """Whether the run is this user's. Of a run of another user, results are kept elsewhere."""
        return self.other_owner is None

    def check_writable(self, what: str) -> None:
        """Raises JobError if the run belongs to another user. `what` completes "you may not"."""
        refuse_other_owner(self.owned_folder, what)
