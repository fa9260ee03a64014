"""Requests of people and of the supervisor. They are found in the background, and training acts on
them at a step boundary.
"""

from pathlib import Path
from typing import get_args

from cluster.state import Request, note_step, take_request

REQUESTS: tuple[Request, ...] = get_args(Request)


class Requests:
    """The requests in a run directory, for rank 0.

    The background thread calls `look`, the training thread `take`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found = set[Request]()
        """Requests that training has not acted on yet."""
        self.taken = dict[Request, int]()
        """Step after which training acted on a request, until that is recorded."""

    def look(self) -> None:
        """Finds new requests, and records at which step training acted on earlier ones.

        Raises:
            OSError: a file could not be read or written. The next call tries again.
        """
        for request in REQUESTS:
            if request in self.taken:
                note_step(self.directory, request, self.taken[request])
                del self.taken[request]
            # The record of one request must not be mistaken for that of the next.
            if request in self.found or request in self.taken:
                continue
            if take_request(self.directory, request):
                self.found.add(request)

    def take(self, request: Request, step: int) -> bool:
        """Returns whether there is such a request. The caller acts on it after `step`."""
        if request not in self.found:
            return False
        self.taken[request] = step  # First, so that `look` never sees it in neither.
        self.found.discard(request)
        return True
