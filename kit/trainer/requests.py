"""Requests of users and of the supervisor. The background thread finds them, and training acts on
them between two steps.
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
        """Step after which training acted on each request, until `look` has recorded the step."""

    def look(self) -> None:
        """Finds new requests, and records the steps at which training acted on earlier requests.

        Raises:
            OSError: A file could not be read or written. The next call tries again.
        """
        for request in REQUESTS:
            if request in self.taken:
                note_step(self.directory, request, self.taken[request])
                del self.taken[request]
            # The record of one request must not be mistaken for the next request's record.
            if request in self.found or request in self.taken:
                continue
            if take_request(self.directory, request):
                self.found.add(request)

    def take(self, request: Request, step: int) -> bool:
        """Returns whether there is a request of this kind. The caller acts on the request after
        `step`.
        """
        if request not in self.found:
            return False
        self.taken[request] = step  # Set first, so that `look` always finds the request.
        self.found.discard(request)
        return True
