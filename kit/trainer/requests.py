"""Requests to a running job, to stop or to save a checkpoint, from users or the supervisor. The
background thread reads them, and training acts on them between two steps.
"""

from pathlib import Path
from typing import get_args

from cluster.state import Request, record_request_step, take_request

REQUESTS: tuple[Request, ...] = get_args(Request)


class Requests:
    """The requests that rank 0 finds as files in the run directory.

    The background thread calls `read_requests`, which accesses the disk. The training thread calls
    `take`, which does not.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found = set[Request]()
        """Requests that were found and on which training has not acted yet."""
        self.taken = dict[Request, int]()
        """Maps each request that `take` has returned to the step after which training acts on it.
        `read_requests` removes a request when it has written the step to disk."""

    def read_requests(self) -> None:
        """Reads new requests from the run directory. For each request that `take` has returned,
        also writes to disk the step after which training acts on it.

        Raises:
            OSError: A file could not be read or written. The next call tries again.
        """
        for request in REQUESTS:
            if request in self.taken:
                record_request_step(self.directory, request, self.taken[request])
                del self.taken[request]
            # No new request of this kind is read before the step of the earlier request is
            # recorded. Otherwise this step could be recorded for the new request.
            if request in self.found or request in self.taken:
                continue
            if take_request(self.directory, request):
                self.found.add(request)

    def take(self, request: Request, step: int) -> bool:
        """Returns whether a request of this kind was found. If so, the caller must act on it after
        `step`.
        """
        if request not in self.found:
            return False
        # The step is stored before the request is removed from `found`. `read_requests`, which runs
        # in another thread, then finds the request in at least one of the two containers.
        self.taken[request] = step
        self.found.discard(request)
        return True
