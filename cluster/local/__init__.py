"""Runs a job on this machine: one process per device, under a supervisor that outlives whoever submitted it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.attempts import Files
from cluster.job import Job, JobSpec
from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import JobError

MAX_PROCESSES = 256
PACKAGE_ROOT = Path(__file__).parents[2]


def submit(job: JobSpec, files: Files | None = None) -> Job:
    """Starts a job on this machine and returns its handle once its processes are started.

    The run directory gets `job.json` and `submit.sh`, a script that starts the next attempt by hand. The processes
    inherit the environment of the caller; `job.environment` wins. See `cluster.local.supervisor` for what they find
    in it. The job goes on when the caller ends.

    Args:
        job: what to run.
        files: of whoever submits, for the run directory; written when nothing refuses the job any more.

    Raises:
        ConfigError: the command or the working directory does not exist, or one machine cannot run so many processes.
        JobError: a job is live in this run directory, or the processes could not be started.
        In each case the run directory is as it was before.
    """
    check(job)
    started = subprocess.run(
        [sys.executable, "-m", "cluster.local.supervisor", "--submit", job.run_dir],
        input=json.dumps({"job": job.to_dict(), "files": dict(files or {})}), text=True, encoding="utf-8",
        capture_output=True, cwd=PACKAGE_ROOT, start_new_session=True,
    )  # fmt: skip
    if started.returncode:
        raise JobError(started.stderr.strip())
    return Job.attach(job.run_dir)


def check(job: JobSpec) -> None:
    """Returns nothing if this machine can start the job; raises as `submit`."""
    if job.num_nodes != 1:
        raise ConfigError(f"job.num_nodes: {job.num_nodes} is not allowed on this machine. Use 1, or another site.")
    check_count(job.num_processes)
    if not Path(job.working_directory).is_dir():
        raise ConfigError(f"job.working_directory: {job.working_directory!r} is not a directory. Create it first.")
    in_directory = "/" in job.argv[0]  # a name alone is looked up in PATH
    command = os.path.join(job.working_directory, job.argv[0]) if in_directory else job.argv[0]
    if shutil.which(command, path=job.environment.get("PATH")) is None:
        raise ConfigError(f"job.argv: {job.argv[0]!r} is not an executable file. Check the path, or install it.")


def check_count(num_processes: int) -> None:
    """Returns nothing if one machine can run so many processes.

    Raises:
        ConfigError: it cannot.
    """
    if num_processes > MAX_PROCESSES:
        raise ConfigError(
            f"{num_processes:,} processes would choke one machine. Give a plan of at most {MAX_PROCESSES}, or a site "
            f"with nodes for them: --site NAME or FILE.toml."
        )


def texts(job: JobSpec, site: Site) -> dict[str, str]:
    """Returns the script of a job by its name in the run directory."""
    return {"submit.sh": render_script(job)}


def render_script(job: JobSpec) -> str:
    """Returns submit.sh: what was started, in words, and the command that starts it again."""
    supervisor = shlex.join([sys.executable, "-m", "cluster.local.supervisor", job.run_dir])
    return (
        "#!/bin/bash\n"
        f"# {job.name}: {job.num_processes} processes on this machine, each of them running\n"
        f"#   {json.dumps(job.argv)}\n"  # in JSON, since a line break in a word would end the comment
        "# Run this script to start the next attempt in the foreground; Ctrl-C ends it.\n"
        f"cd {shlex.quote(str(PACKAGE_ROOT))} && exec {supervisor}\n"
    )
