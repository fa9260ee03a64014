"""Sends a job to where its site says: this machine, Slurm or Kubernetes. Standard library only."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from cluster.attempts import Files
from cluster.job import Job, JobSpec
from cluster.poll import backend
from cluster.site import Site
from cluster.state import refuse_other_owner


def submit(job: JobSpec, site: Site, files: Files | None = None) -> Job:
    """Starts a job on its site and returns its handle; Ctrl-C waits until that is done.

    `files` of whoever submits are written into the run directory when nothing but a scheduler can
    refuse any more.

    Raises:
        ConfigError: the job cannot run there.
        JobError: a job is live in this run directory, or it is somebody else's, or the scheduler
            refuses, with its words.
        In each case the run directory is as it was before.
    """
    refuse_other_owner(Path(job.run_dir), "start a job in it")
    with uninterrupted():
        if site.login:
            return backend("login.submit").submit(job, site, files)
        if site.scheduler == "local":
            return backend("local").submit(job, files)
        return backend(site.scheduler).submit(job, site, files)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets Ctrl-C wait for the end of the block: of a job that is half submitted nobody could
    say whether it runs.
    """
    # Only there does Python look at signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
