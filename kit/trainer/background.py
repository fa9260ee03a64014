"""Reads and writes the monitoring files of one rank in a background thread, for which training does
not wait.

Monitoring files are those by which users and the supervisor watch a run: metrics, heartbeats,
alerts, the state of the job and the requests to the job. If the training thread wrote them, a slow
file system would slow every step, and a temporary error of the file system would end the attempt.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from cluster.directory_handle import RunDirectory

PASS_EVERY_S = 0.25
"""Seconds between two passes, in each of which the due functions are called. A reader of the files
sees a step with at most this delay."""
RETRY_EVERY_S = 0.5
"""Seconds between two attempts to write all files at the end of training."""

Work = Callable[[], None]


class Background:
    """Calls the registered work functions repeatedly in one thread.

    An OSError in a work function does not affect training. The errors are counted, and only the
    first is reported. The function is called again later. Any other error, such as the loss of the
    run directory, stops the thread. `check` then raises this error in the training thread.

    Args:
        home: handle of the run directory.
        report: function that is called once, in the background thread, with a sentence about the
            first OSError.
    """

    def __init__(self, home: RunDirectory, report: Callable[[str], None]) -> None:
        self.home = home
        self.report = report
        self.works: list[tuple[Work, float]] = []
        self.called_at: dict[Work, float] = {}
        """Time of the last call of each work function, in seconds of `time.monotonic`."""
        self.thread: threading.Thread | None = None
        self.changed = threading.Condition()
        """Condition that protects `wanted`, `finished`, `failure` and `is_ended`, and is notified
        when one of them changes."""
        self.wanted = 0
        """Number of passes that `wake` or `flush` have requested so far."""
        self.finished = 0
        """Value of `wanted` when the last finished pass began. One pass serves all requests that
        were made before it began."""
        self.failure: Exception | None = None
        self.is_ended = False
        self.num_errors = 0
        self.has_failed = False
        """Whether a work function raised an OSError in the last pass."""

    def add(self, work: Work, every_s: float = 0.0) -> None:
        """Registers a work function. Must be called before `start`. The function is called every
        `every_s` seconds, or in each pass if `every_s` is shorter than PASS_EVERY_S. It must do
        nothing if there is nothing to write.
        """
        self.works.append((work, every_s))

    def start(self) -> None:
        """Starts the thread if a work function is registered."""
        if self.works and self.thread is None:
            self.thread = threading.Thread(target=self._run, name="monitoring", daemon=True)
            self.thread.start()

    def check(self) -> None:
        """Raises the error that stopped the thread, if there is one. Never waits."""
        if self.failure is not None:
            raise self.failure

    def wake(self) -> None:
        """Requests a pass at once and does not wait for it."""
        with self.changed:
            self.wanted += 1
            self.changed.notify_all()

    def flush(self, limit_s: float) -> bool:
        """Calls all work functions once more and waits for the end of this pass, for at most
        `limit_s` seconds. Returns whether all of them succeeded within this time.
        """
        if self.thread is None:
            return True
        with self.changed:
            self.wanted += 1
            number = self.wanted
            self.changed.notify_all()
            is_over = self.changed.wait_for(
                lambda: self.finished >= number or self.failure is not None, limit_s
            )
        return is_over and self.failure is None and not self.has_failed

    def finish(self, limit_s: float) -> bool:
        """Calls all work functions until all of them succeed, for at most `limit_s` seconds, and
        then stops the thread. Returns whether all of them succeeded.

        If a work function hangs in the file system, this method does not wait for the thread. The
        thread ends with the process.
        """
        deadline = time.monotonic() + limit_s
        is_done = self.flush(limit_s)
        while not is_done and self.failure is None and time.monotonic() < deadline:
            time.sleep(RETRY_EVERY_S)
            is_done = self.flush(max(0.0, deadline - time.monotonic()))
        with self.changed:
            self.is_ended = True
            self.changed.notify_all()
        if self.thread is not None and is_done:
            self.thread.join()
        if self.num_errors:
            with suppress(OSError):
                print(
                    f"{self.num_errors} reads or writes of monitoring files failed in this attempt",
                    file=sys.stderr,
                    flush=True,
                )
        return is_done

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: self.is_ended or self.wanted > self.finished, PASS_EVERY_S
                )
                if self.is_ended:
                    return
                number = self.wanted
                is_asked_for = number > self.finished
            failure = self._pass(calls_all=is_asked_for)
            with self.changed:
                self.finished = number
                self.failure = failure
                self.changed.notify_all()
            if failure is not None:
                return

    def _pass(self, *, calls_all: bool) -> Exception | None:
        """Calls the work functions that are due, or all of them if `calls_all` is True. Returns the
        error that must stop the thread, or None.
        """
        has_failed = False
        try:
            if self.has_failed:
                # After an OSError, the work functions open their files again. Meanwhile another
                # directory may have taken the path of the run directory, so it is checked first.
                self.home.check()
            for work, every_s in self.works:
                now = time.monotonic()
                if not calls_all and now - self.called_at.get(work, float("-inf")) < every_s:
                    continue
                self.called_at[work] = now
                try:
                    work()
                except OSError as error:
                    has_failed = True
                    self._count(error)
        except Exception as error:
            return error
        self.has_failed = has_failed
        return None

    def _count(self, error: OSError) -> None:
        self.num_errors += 1
        if self.num_errors == 1:
            self.report(
                f"a monitoring file cannot be read or written: {error}. Training continues. Each"
                " file is tried again, and later errors of this attempt are only counted."
            )
