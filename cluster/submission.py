"""Submits a job to the scheduler of its site: this machine, Slurm or Kubernetes. Standard library
only.

`prepare_job` checks a job and returns a `PreparedJob`, which `submit_prepared` submits.
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
    """A job with its site and with all files that its submission writes and sends."""

    job: JobSpec
    site: Site
    scripts: Mapping[str, str]
    """Scripts by file name, in order of submission. Empty for a site with a login node, since the
    kit on the cluster writes the scripts."""
    files: Files
    """Texts by file name that the caller of `prepare_job` adds to the run directory. They are
    written before job.json, site.json and the scripts."""


def prepare_job(job: JobSpec, site: Site, files: Files | None = None) -> PreparedJob:
    """Returns a checked job with all files that its submission needs. Writes nothing.

    A job for a site with a login node is checked on the cluster, as part of its submission.

    Raises:
        ConfigError: The job cannot run on the site.
        JobError: The run directory belongs to another user.
    """
    check_startable(job, site)
    prepared = draft_job(job, site, files)
    if site.login is None:
        backend(site.scheduler).check(job, site)
    return prepared


def check_startable(job: JobSpec, site: Site) -> None:
    """Checks whether the run directory and the site of a job allow its start.

    Raises:
        ConfigError: The site file is not filled in, or the job does not fit the site.
        JobError: The run directory belongs to another user.
    """
    refuse_other_owner(Path(job.run_dir), "start a job in it")
    if site.login is None:
        check_submittable(site)
        check_fit(job, site)


def draft_job(job: JobSpec, site: Site, files: Files | None = None) -> PreparedJob:
    """Returns a job with all files that its submission would need, although it may not be ready for
    submission. Fields of its site may still have the placeholder EDIT as value, and the commands of
    its scheduler may be missing on this machine.

    Raises:
        ConfigError: The job does not fit the site.
    """
    texts = scripts(job, site) if site.login is None else {}
    return PreparedJob(job=job, site=site, scripts=texts, files=dict(files or {}))


def submit_prepared(prepared: PreparedJob) -> Job:
    """Submits a job that `prepare_job` has checked, and returns its handle. Ctrl-C takes effect
    only after the submission.

    Writes to the run directory before the job is submitted, in this order:

    1. The folders `logs`, `control` and `logs/attempt_NN`, and `.reserve`, which reserves disk
       space for the record of the job's end. Requests to earlier attempts are deleted.
    2. `state.json` of the next attempt, with the state `queued`, and its line in `history.jsonl`.
       From this step on, no other job can start in the directory.
    3. The files of the caller. Files with the value None are removed.
    4. `job.json`, `site.json` if it was not among the files of the caller, and the scripts.

    Then the job is submitted to the scheduler, and its job id is written into `state.json`.

    For a site with a login node, the kit on the cluster takes all these steps. The local run
    directory becomes a mirror, a copy of the run directory on the cluster.

    Raises:
        JobError: A job is live in this run directory, or the scheduler refuses the job. The message
            contains the scheduler's error. The files of the run directory are restored.
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

    The job inherits the environment of the caller. Secrets are therefore exported in this
    environment and never written to a file.

    Raises:
        ConfigError: The job cannot run on the site.
        JobError: The run directory belongs to another user, a job is live in it, or the scheduler
            refuses the job. The files of the run directory are restored.
    """
    return submit_prepared(prepare_job(job, site, files))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the end of the `with` block, since after an interrupted submission it
    would be unknown whether the job runs.
    """
    # Python handles signals only in the main thread.
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
