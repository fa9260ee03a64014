"""Sends a job to where its site says: this machine, Slurm or Kubernetes. Standard library only."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from cluster.attempts import Files, claimed, hand_over
from cluster.job import Job, JobSpec
from cluster.poll import backend
from cluster.render import check_submittable, scripts
from cluster.site import Site
from cluster.state import JobError, refuse_other_owner


def submit(job: JobSpec, site: Site, files: Files | None = None) -> Job:
    """Starts a job on its site and returns its handle; Ctrl-C waits until that is done.

    The run directory gets `job.json`, `site.json` and the texts of `render.scripts`, and `files` of
    whoever submits, when nothing but a scheduler can refuse any more. The job inherits the
    environment of the caller, so secrets are exported there and never written.

    Raises:
        ConfigError: the job cannot run there.
        JobError: a job is live in this run directory, or it is somebody else's, or the scheduler
            refuses, with its words.
        In each case the run directory is as it was before.
    """
    run_dir = Path(job.run_dir)
    refuse_other_owner(run_dir, "start a job in it")
    with uninterrupted():
        if site.login:
            return backend("login.submit").submit(job, site, files)
        check_submittable(site)
        texts, scheduler = scripts(job, site), backend(site.scheduler)
        scheduler.check(job, site)
        records = {"job.json": job.to_json(), "site.json": site.to_json()}
        try:
            with claimed(run_dir, {**(files or {}), **records, **texts}) as attempt:
                scheduled = scheduler.start(job, site, attempt, texts)
        except OSError as error:
            raise JobError(f"{run_dir}: {error}") from error
        if scheduled:
            hand_over(run_dir, attempt, scheduled)
        return Job.attach(run_dir)


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
