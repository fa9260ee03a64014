"""Runs a job on this machine: one process per device, under a supervisor. The supervisor continues
when the process that submitted the job ends.
"""

import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cluster.files import open_for_appending
from cluster.interpreter import PACKAGE_ROOT, source_command
from cluster.job import Job, JobSpec
from cluster.logs import log_tail
from cluster.record import ConfigError, counted
from cluster.site import Site
from cluster.state import JobError, read_exit
from cluster.submission import prepare_job, submit_prepared

MAX_PROCESSES = 256
END_WAIT_S = 60.0
STARTED = b"started\n"
"""Message that a supervisor writes to its standard output, a pipe to the process that submitted the
job, when the ranks are started."""


def start(job: JobSpec, site: Site, attempt: int, texts: Mapping[str, str]) -> None:
    """Starts a supervisor that does not depend on the caller and that starts all ranks. Returns as
    soon as the ranks are started. `cluster.local.supervisor` lists the environment variables of the
    ranks.

    Raises:
        JobError: Some rank could not be started. The ranks that were started have been ended.
    """
    run_dir = Path(job.run_dir)
    supervisor = source_command("cluster.local.supervisor", job.run_dir, str(attempt))
    said = run_dir / "logs" / f"attempt_{attempt:02d}_supervisor.log"
    with (
        open_for_appending(said) as log,
        subprocess.Popen(
            ["setsid", "--fork", *supervisor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=PACKAGE_ROOT,
            start_new_session=True,
        ) as child,
    ):
        assert child.stdout is not None
        # Without a message, guard and supervisor have ended before all ranks were started.
        if child.stdout.read(len(STARTED)) == STARTED:
            return
    report = read_exit(run_dir)
    reason = report.reason if report and report.attempt == attempt else log_tail(said)
    raise JobError(f"{run_dir}: attempt {attempt} could not be started: {reason}")


def check(job: JobSpec, site: Site) -> None:
    """Raises an error if this machine cannot run a job.

    Raises:
        ConfigError: The job has more than one node or more than MAX_PROCESSES processes, or its
            command or working directory is missing.
    """
    if job.num_nodes != 1:
        raise ConfigError(
            f"job.num_nodes: {job.num_nodes} is not allowed on this machine. Use 1, or another"
            " site."
        )
    check_count(job.num_processes)
    job.check_command()


def check_count(num_processes: int) -> None:
    """Raises ConfigError for more than MAX_PROCESSES processes, the limit of one machine."""
    if num_processes > MAX_PROCESSES:
        raise ConfigError(
            f"{num_processes:,} processes are too many for one machine. Give a plan of at most"
            f" {MAX_PROCESSES}, or a site with nodes for them: --site NAME or FILE.toml."
        )


def requeue(job: Job, scheduled: None) -> None:
    """Ends the running attempt of a job, if there is one, and starts the next attempt.

    Raises:
        ConfigError: The job cannot be started again. The running attempt was not ended.
        JobError: The running attempt has not ended after END_WAIT_S seconds.
    """
    prepared = prepare_job(job.spec, Site.read(job.run_dir / "site.json"))
    job.cancel()
    try:
        job.wait(END_WAIT_S)
    except TimeoutError as error:
        raise JobError(str(error)) from error
    submit_prepared(prepared)


def texts(job: JobSpec, site: Site) -> dict[str, str]:
    """Returns a dict with the text of one file, submit.sh. A user can run this script to start the
    next attempt by hand. Its comments describe the job.
    """
    supervisor = shlex.join(source_command("cluster.local.supervisor", job.run_dir))
    script = (
        "#!/bin/bash\n"
        f"# {job.name}: {counted(job.num_processes, 'process', 'processes')} on this machine, each"
        " running\n"
        # JSON escapes line breaks, which would end the comment.
        f"#   {json.dumps(job.argv)}\n"
        "# Run this script to start the next attempt in the foreground; Ctrl-C ends it.\n"
        f"cd {shlex.quote(str(PACKAGE_ROOT))} && exec {supervisor}\n"
    )
    return {"submit.sh": script}
