"""Submits jobs to Slurm, cancels them and requeues them.

`cluster.slurm.queries` queries Slurm about jobs. `cluster.slurm.script` writes the batch scripts of
jobs. `cluster.slurm.supervisor` runs inside the allocation of a job.
"""

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.attempts import FOLLOWS
from cluster.directory_handle import retry_disk
from cluster.files import write_atomic
from cluster.interpreter import PACKAGE_ROOT
from cluster.job import Job, JobSpec
from cluster.record import counted
from cluster.request import cpu_request
from cluster.scheduler import quote
from cluster.site import Site
from cluster.slurm.preflight import check as check
from cluster.slurm.queries import matching_lines, not_understood, slurm_command
from cluster.slurm.queries import output as output
from cluster.slurm.queries import query as query
from cluster.slurm.script import (
    container_environment,
    derived_lines,
    directives,
    environment,
    rank_command,
)
from cluster.slurm.script import texts as texts
from cluster.state import (
    JobError,
    SchedulerJob,
    compile_log,
    read_history,
    state_to_change,
    update_state,
)
from cluster.submission import check_startable, submit

EXCLUDED_AFTER = 2
"""Number of times that a node must be lost in one run before the next jobs of the run exclude the
node."""
ARRAY_SCRIPT = "array.sh"
GRES_ADVICE = (
    "`sinfo --format='%P %c %m %G'` shows the CPUs, the memory and the GPUs of a node. Under"
    ' [slurm] in the site file, gpus_per_node = "TYPE:8" asks for a type of GPU, and'
    ' sbatch_options = ["--gres=gpu:TYPE:8"] serves a cluster without --gpus-per-node.'
)
"""Advice to the user if Slurm refuses the GPUs or nodes that a job requests."""
SUBMIT_TIMEOUT_S = 120.0
"""Maximum time, in seconds, that sbatch may take. It is long because a busy slurmctld answers late,
and may accept a job even after sbatch has timed out."""


def start(job: JobSpec, site: Site, attempt: int, texts: Mapping[str, str]) -> SchedulerJob:
    """Submits the scripts of a job from its run directory. Returns the Slurm job of the last
    script, which runs the ranks.

    `texts` has the scripts by file name, in order of submission. Each script starts after the
    previous script has succeeded.

    Raises:
        JobError: Slurm refuses a script or does not answer. The job of an earlier script is
            cancelled.
    """
    run_dir = Path(job.run_dir)
    job_id = ""
    try:
        for name in texts:
            options = (
                [f"--dependency=afterok:{job_id}", "--kill-on-invalid-dep=yes"] if job_id else []
            )
            if name == "compile.sh":  # `script_logs` finds this log by the attempt.
                options.append(f"--output={compile_log(run_dir, attempt).relative_to(run_dir)}")
            job_id = _sbatch(run_dir, name, *options)
    except (JobError, OSError):
        if job_id:  # The job that compiles would be useless.
            with contextlib.suppress(JobError):
                slurm_command(["scancel", job_id])
        raise
    return SchedulerJob(scheduler="slurm", id=job_id, config=os.environ.get("SLURM_CONF"))


def submit_array(job: JobSpec, site: Site, tasks: Sequence[int], count: int) -> str:
    """Submits tasks of a job array and returns the job id of the array.

    The array has `count` tasks, numbered from 1. `tasks` are the numbers of the tasks to submit.
    Each task runs the command of `job` with the argument I/N (see `array_script`). The script and
    its logs are in the folder `job.run_dir`, which is created.

    Raises:
        ConfigError: The job cannot run on the site.
        JobError: The folder belongs to another user, an earlier job of the folder is still in the
            queue, or Slurm refuses the array.
    """
    run_dir = Path(job.run_dir)
    check_startable(job, site)
    check(job, site)
    words = ["squeue", "--me", "--noheader", "--format=%F %Z"]
    for number, place in _folders_of_jobs(slurm_command(words)):
        if os.path.realpath(place) == os.path.realpath(run_dir):
            raise JobError(
                f"{run_dir}: job {number} of this folder is still in the queue. Wait, or scancel"
                f" {number}."
            )
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / ARRAY_SCRIPT, array_script(job, site, count))
    return _sbatch(run_dir, ARRAY_SCRIPT, f"--array={','.join(map(str, tasks))}")


def array_script(job: JobSpec, site: Site, tasks: int) -> str:
    """Returns the batch script of a job array whose tasks are independent jobs of one node each.

    The command of a task is the command of `job` with one more argument, I/N: the number I of the
    task and the number N of all tasks.
    """
    request = cpu_request(job, site)
    slurm = request.table
    command = rank_command(job, slurm, sys.executable, str(PACKAGE_ROOT))
    if slurm.has_tasks_in_container:
        command = ["srun", "--nodes=1", "--ntasks=1", *slurm.srun_options, *command]
    lines = [
        "#!/bin/bash",
        (
            f"# {job.name}: each of {counted(tasks, 'task')} on a node of {site.name}. Submit from"
            " this folder, which"
        ),
        f"# needs a folder logs: sbatch --array=1-{tasks} {ARRAY_SCRIPT}",
        *derived_lines(request),
        *directives(job, slurm, "--requeue", log="logs/task-%a.log"),
        *environment(job, slurm, sys.executable),
        *container_environment(job, slurm, str(PACKAGE_ROOT)),
        f"cd {quote(job.working_directory)} || exit",
        f'exec {" ".join(map(quote, command))} "$SLURM_ARRAY_TASK_ID/{tasks}"',
    ]
    return "\n".join(lines) + "\n"


def cancel(job: SchedulerJob, run_dir: Path) -> None:
    """Cancels a job of a run. Slurm sends SIGTERM to all processes of the job, and SIGKILL after
    the cluster's KillWait.

    Raises:
        JobError: Slurm refuses or does not answer, or the job belongs to another run.
    """
    _refuse_another(job, run_dir)
    slurm_command(["scancel", job.id], job.config)


def requeue(job: Job, slurm_job: SchedulerJob) -> None:
    """Requeues a job under its job id. A job in a final state is submitted again, under a new job
    id.

    Raises:
        JobError: Slurm refuses or does not answer, or the job belongs to another run.
    """
    if job.status().state.is_final:
        submit(job.spec, Site.read(job.run_dir / "site.json"))
    else:
        _refuse_another(slurm_job, job.run_dir)
        requeue_this(slurm_job)


def _refuse_another(job: SchedulerJob, run_dir: Path) -> None:
    """Raises JobError if a job belongs to another run: it was submitted from another directory than
    `run_dir`. The kit submits every job of a run from the run directory.
    """
    words = ["squeue", "--noheader", "--states=all", f"--jobs={job.id}", "--format=%F %Z"]
    text = slurm_command(words, job.config)
    places = [place for _, place in _folders_of_jobs(text)]
    if text.strip() and not places:
        raise not_understood("squeue", text)
    if places and not any(os.path.realpath(place) == os.path.realpath(run_dir) for place in places):
        raise JobError(
            f"{run_dir}: job {job.id} is of {places[0]}, not of this run. It was left running."
        )


def _folders_of_jobs(text: str) -> list[tuple[str, str]]:
    """Returns (job id, folder) for each job in squeue's output with the format `%F %Z`. The job was
    submitted from this folder.
    """
    found = matching_lines(text, re.compile(r"(\d+) (/.*)"))
    return [(match[1], match[2]) for match in found]


def requeue_this(job: SchedulerJob) -> None:
    """Requeues a job that has not ended. Does nothing if the job is pending already.

    Raises:
        JobError: Slurm refuses or does not answer.
    """
    try:
        slurm_command(["scontrol", "requeue", job.id], job.config)
    except JobError as error:
        if "pending" not in str(error):  # The job was requeued already.
            raise


def submit_replacement_job(job: SchedulerJob, run_dir: Path, attempt: int) -> bool:
    """Submits a new job of the run, which replaces `job` after `attempt` has lost a node. Returns
    whether Slurm has accepted the new job.

    A requeue of `job` would wait until Slurm marks the lost node as down. Until then the node also
    stays allocated to `job`, so the new job starts on other nodes. The environment variable FOLLOWS
    tells the new job which attempt it replaces. The new job therefore starts even if this process
    dies before it has recorded the new job id.

    Raises:
        StaleAttemptError: The new job has taken over the run directory already.
    """
    os.environ[FOLLOWS] = f"{job.id}/{attempt}"
    try:
        new = _sbatch(run_dir, "submit.sh")
    except JobError as error:  # Some clusters accept no jobs from compute nodes.
        print(f"no new job: {error}", flush=True)
        return False
    # The new job can also start without this record, since FOLLOWS names the replaced attempt.
    with contextlib.suppress(OSError):
        retry_disk(lambda: _record_successor(run_dir, attempt, new))
    return True


def _record_successor(run_dir: Path, attempt: int, job_id: str) -> None:
    """Writes the id of the job that replaces this job into state.json."""
    state = state_to_change(run_dir)
    if state is not None and state.scheduler_job is not None:
        update_state(run_dir, attempt=attempt, scheduler_job=state.scheduler_job.replace(id=job_id))


def lost_nodes(run_dir: Path) -> list[str]:
    """Returns the nodes that were lost EXCLUDED_AFTER times or more in this run."""
    losses = Counter[str]()
    for event in read_history(run_dir):
        if event.lost_node:
            losses.update(event.lost_node.split(","))
    return sorted(node for node, times in losses.items() if times >= EXCLUDED_AFTER)


def _sbatch(run_dir: Path, script: str, *options: str) -> str:
    """Submits a script and returns the id of the new job. The job excludes the nodes of
    `lost_nodes`.

    Raises:
        JobError: Slurm refuses the job or does not answer. Without an answer, Slurm may still have
            accepted the job. Such a job takes over the run directory only if no other job owns it.
    """
    words = ["sbatch", "--parsable", *options]
    if nodes := lost_nodes(run_dir):
        words.append(f"--exclude={','.join(nodes)}")
    try:
        answer = slurm_command([*words, script], cwd=run_dir, timeout_s=SUBMIT_TIMEOUT_S)
    except JobError as error:
        if re.search(r"node configuration|generic resource|gres", str(error), re.IGNORECASE):
            raise JobError(f"{error} {GRES_ADVICE}") from error
        if "timed out" not in str(error):  # `run_command` or sbatch has timed out.
            raise
        raise JobError(
            f"{error}. The job may have been accepted all the same: look with `squeue --me"
            f" --format='%i %Z'` for {run_dir}, and `scancel` it before you launch again."
        ) from error
    # With several clusters `--parsable` prints `JOB_ID;CLUSTER`. Site wrappers print further lines.
    numbers = matching_lines(answer, re.compile(r"(\d+)(?:;\S+)?"))
    if not numbers:
        raise JobError(
            f"sbatch answered {answer.strip()!r}, which is no job number. Look with squeue --me."
        )
    return numbers[-1][1]
