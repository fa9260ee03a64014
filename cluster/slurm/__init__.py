"""Sends jobs to Slurm, ends them and puts them back into the queue.

What Slurm says of them is asked by `cluster.slurm.queries`. The script itself comes from
`cluster.render`; what runs inside the allocation is `cluster.slurm.supervisor`.
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
"""A node that was lost so often in this run is left out of the next start."""
ARRAY_SCRIPT = "array.sh"
GRES_ADVICE = (
    "`sinfo --format='%P %c %m %G'` shows the CPUs, the memory and the GPUs of a node. Under"
    ' [slurm] in the site file, gpus_per_node = "TYPE:8" asks for a type of GPU, and'
    ' sbatch_options = ["--gres=gpu:TYPE:8"] serves a cluster without --gpus-per-node.'
)
"""Advice for a request for nodes that Slurm refuses."""
SUBMIT_TIMEOUT_S = 120.0
"""A busy controller takes its time, and what it has not answered it may do all the same."""


def start(job: JobSpec, site: Site, attempt: int, texts: Mapping[str, str]) -> SchedulerJob:
    """Sends the scripts of a job, which lie in its run directory, and returns its number.

    Raises:
        JobError: as `_sbatch`; nothing is left in the queue of what was sent before.
    """
    run_dir = Path(job.run_dir)
    job_id = ""
    try:
        for name in texts:
            options = (
                [f"--dependency=afterok:{job_id}", "--kill-on-invalid-dep=yes"] if job_id else []
            )
            if name == "compile.sh":  # So that it is found from the attempt that it compiles for.
                options.append(f"--output={compile_log(run_dir, attempt).relative_to(run_dir)}")
            job_id = _sbatch(run_dir, name, *options)
    except (JobError, OSError):
        if job_id:  # what was to compile ahead for the job that was refused
            with contextlib.suppress(JobError):
                slurm_command(["scancel", job_id])
        raise
    return SchedulerJob(scheduler="slurm", id=job_id, config=os.environ.get("SLURM_CONF"))


def submit_array(job: JobSpec, site: Site, tasks: Sequence[int], count: int) -> str:
    """Sends some tasks of an array of `count` to Slurm, numbered from 1, as `array_script` says;
    returns its number.

    The script and its logs are in `job.run_dir`, which is made.

    Raises:
        ConfigError: the job cannot run there.
        JobError: the directory is somebody else's, a job that was sent from it is in the queue, or
            Slurm refuses.
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
    """Returns the script of an array whose tasks have nothing to do with each other, each a job of
    one node.

    The command of a task is the job's and, as its last word, I/N: which task it is, and of how
    many.
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
    """Ends a job of a run: SIGTERM to all its processes, SIGKILL after the cluster's KillWait.

    Raises:
        JobError: Slurm refuses or does not answer, or the job is not this run's.
    """
    _refuse_another(job, run_dir)
    slurm_command(["scancel", job.id], job.config)


def requeue(job: Job, slurm_job: SchedulerJob) -> None:
    """Puts a job back into the queue, under its number where Slurm still knows it, as a new one
    otherwise.

    Raises:
        JobError: Slurm refuses or does not answer, or the job is not this run's.
    """
    if job.status().state.is_final:
        submit(job.spec, Site.read(job.run_dir / "site.json"))
    else:
        _refuse_another(slurm_job, job.run_dir)
        requeue_this(slurm_job)


def _refuse_another(job: SchedulerJob, run_dir: Path) -> None:
    """Raises JobError unless a job was submitted from this run directory, as all of the kit's
    are.
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
    """Returns (job number, folder that it was submitted from) of each line of `%F %Z`."""
    found = matching_lines(text, re.compile(r"(\d+) (/.*)"))
    return [(match[1], match[2]) for match in found]


def requeue_this(job: SchedulerJob) -> None:
    """Puts a job that has not ended back into the queue.

    Raises:
        JobError: Slurm refuses or does not answer.
    """
    try:
        slurm_command(["scontrol", "requeue", job.id], job.config)
    except JobError as error:
        if "pending" not in str(error):  # then somebody else was quicker
            raise


def begin_elsewhere(job: SchedulerJob, run_dir: Path, attempt: int) -> bool:
    """Submits a run's job once more, in place of this one, whose attempt has lost a node; False
    where Slurm refuses.

    This job, requeued, would wait until Slurm takes the node for down, and keeps the node until
    then; so the new one begins on others. It knows whom it follows, should this process die before
    it has written who does.

    Raises:
        StaleAttemptError: it has begun already.
    """
    os.environ[FOLLOWS] = f"{job.id}/{attempt}"
    try:
        new = _sbatch(run_dir, "submit.sh")
    except JobError as error:  # some clusters take no jobs from compute nodes
        print(f"no new job: {error}", flush=True)
        return False
    # The new job begins without this record too, since it knows whom it follows.
    with contextlib.suppress(OSError):
        retry_disk(lambda: _record_successor(run_dir, attempt, new))
    return True


def _record_successor(run_dir: Path, attempt: int, job_id: str) -> None:
    """Writes into state.json the number of the job that takes the place of this one."""
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
    """Returns the number of a new job, which keeps off the nodes that `lost_nodes` names.

    Raises:
        JobError: Slurm refuses, or does not answer, and has the job perhaps; should it start, it
            takes the run directory only if no other job has it.
    """
    words = ["sbatch", "--parsable", *options]
    if nodes := lost_nodes(run_dir):
        words.append(f"--exclude={','.join(nodes)}")
    try:
        answer = slurm_command([*words, script], cwd=run_dir, timeout_s=SUBMIT_TIMEOUT_S)
    except JobError as error:
        if re.search(r"node configuration|generic resource|gres", str(error), re.IGNORECASE):
            raise JobError(f"{error} {GRES_ADVICE}") from error
        if "timed out" not in str(error):  # as sbatch says itself, too
            raise
        raise JobError(
            f"{error}. The job may have been accepted all the same: look with `squeue --me"
            f" --format='%i %Z'` for {run_dir}, and `scancel` it before you launch again."
        ) from error
    # Of several clusters `--parsable` gives `NUMBER;CLUSTER`. Wrappers print lines of their own.
    numbers = matching_lines(answer, re.compile(r"(\d+)(?:;\S+)?"))
    if not numbers:
        raise JobError(
            f"sbatch answered {answer.strip()!r}, which is no job number. Look with squeue --me."
        )
    return numbers[-1][1]
