"""Sends a job to where its site says: this machine, Slurm or Kubernetes. Standard library only.

`prepare_job` checks a job and returns all that its submission needs. `submit_prepared` submits it.
"""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.attempts import Files, claimed, hand_over
from cluster.job import Job, JobSpec
from cluster.ownership import refuse_other_owner
from cluster.poll import backend
from cluster.render import check_fit, check_submittable, scripts
from cluster.site import Site
from cluster.state import JobError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job with everything that its submission writes and sends."""

    job: JobSpec
    site: Site
    scripts: Mapping[str, str]
    """Scripts by file name, in order of submission. Empty behind a login node, where the kit on the
    other side writes them."""
    files: Files
    """Files of the caller, which are written before job.json, site.json and the scripts."""


def prepare_job(job: JobSpec, site: Site, files: Files | None = None) -> PreparedJob:
    """Returns a checked job with everything that its submission needs. Writes nothing.

    A job behind a login node is checked on the other side, as part of its submission.

    Raises:
        ConfigError: the job cannot run there.
        JobError: the run directory belongs to another user.
    """
    check_startable(job, site)
    prepared = draft_job(job, site, files)
    if site.login is None:
        backend(site.scheduler).check(job, site)
    return prepared


def check_startable(job: JobSpec, site: Site) -> None:
    """Raises an error if the run directory or the site of a job forbids to start it.

    Raises:
        ConfigError: the site file is not filled in, or the job does not fit the site.
        JobError: the run directory belongs to another user.
    """
    refuse_other_owner(Path(job.run_dir), "start a job in it")
    if site.login is None:
        check_submittable(site)
        check_fit(job, site)


def draft_job(job: JobSpec, site: Site, files: Files | None = None) -> PreparedJob:
    """Returns what `prepare_job` returns, for a job that may lack something: fields of its site may
    still say EDIT, and its scheduler may be missing on this machine.

    Raises:
        ConfigError: the job does not fit the site.
    """
    texts = scripts(job, site) if site.login is None else {}
    return PreparedJob(job=job, site=site, scripts=texts, files=dict(files or {}))


def submit_prepared(prepared: PreparedJob) -> Job:
    """Starts a job that `prepare_job` has checked and returns its handle. Ctrl-C waits until that
    is done.

    Writes to the run directory before the job is submitted, in this order:

    1. The folders `logs`, `control` and `logs/attempt_NN`, and `.reserve`, the room that a full
       disk leaves for the end of the job. Requests to earlier attempts are deleted.
    2. `state.json` of the next attempt, which is queued, and its line in `history.jsonl`. From now
       on no other job can start in the directory.
    3. The files of the caller. Files with the value None are removed.
    4. `job.json`, `site.json` if it was not among the files of the caller, and the scripts.

    After that the scheduler gets the job, and `state.json` gets the number of the job.

    Behind a login node the kit on the other side does this. The directory here becomes a mirror.

    Raises:
        JobError: a job is live in this run directory, or the scheduler refuses, with its words.
            The run directory is as it was before.
    """
    job = prepared.job
    site = prepared.site
    run_dir = Path(job.run_dir)
    with uninterrupted():
        if site.login:
            return backend("login.submit").submit(job, site, prepared.files)
        files = dict(prepared.files)
        files["job.json"] = job.to_json()
        files["site.json"] = site.to_json()
        files |= prepared.scripts
        try:
            with claimed(run_dir, files) as attempt:
                scheduled = backend(site.scheduler).start(job, site, attempt, prepared.scripts)
        except OSError as error:
            raise JobError(f"{run_dir}: {error}") from error
        if scheduled:
            hand_over(run_dir, attempt, scheduled)
        return Job.attach(run_dir)


def submit(job: JobSpec, site: Site, files: Files | None = None) -> Job:
    """Checks a job, starts it on its site and returns its handle.

    The job inherits the environment of the caller, so secrets are exported there and never written.

    Raises:
        As `prepare_job` and `submit_prepared`. In each case the run directory is as it was before.
    """
    return submit_prepared(prepare_job(job, site, files))


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
