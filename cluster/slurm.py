"""Sends jobs to Slurm and asks about them: sbatch, squeue, scontrol, sacct and scancel, always with explicit formats.

Nothing is parsed but text in columns that were asked for by name: the JSON of these commands changes from version to
version, and users change the default columns by environment variables. sacct is used where it works and not needed.
The script itself comes from `cluster.render`; what runs inside the allocation is `cluster.slurm_supervisor`.

Source of states and reasons: https://slurm.schedmd.com/squeue.html
"""

import contextlib
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

from cluster.attempts import claim_attempt, hand_over
from cluster.job import Job, JobSpec
from cluster.poll import Look
from cluster.record import write_atomic
from cluster.site import Site
from cluster.state import JobError, JobState, SchedulerJob, read_history, write_end

COMMAND_TIMEOUT_S = 20.0
EXCLUDED_AFTER = 2
"""A node that was lost so often in this run is left out of the next start."""

STATES = {
    "PENDING": JobState.QUEUED,
    "CONFIGURING": JobState.CONFIGURING,
    "RUNNING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SUSPENDED": JobState.STALLED,
    "STOPPED": JobState.STALLED,
    "COMPLETING": JobState.STOPPING,
    "SIGNALING": JobState.STOPPING,
    "STAGE_OUT": JobState.STOPPING,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "SPECIAL_EXIT": JobState.REQUEUED,
    "COMPLETED": JobState.DONE,
    "NODE_FAIL": JobState.LOST,
    "BOOT_FAIL": JobState.FAILED,
    "CANCELLED": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "FAILED": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PREEMPTED": JobState.FAILED,
    "REVOKED": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
}
WAITS = {
    "Priority": "others are first",
    "Resources": "no nodes are free yet",
    "BeginTime": "it may start again in a moment",
    "Dependency": "another job must end first",
    "Nodes required for job are DOWN": "its nodes are down or reserved",
    "ReqNodeNotAvail": "nodes it asks for are down or reserved",
}
HOPELESS = {
    "PartitionConfig": "no job of this partition may have so many nodes or so much time",
    "PartitionNodeLimit": "no job of this partition may have so many nodes",
    "PartitionTimeLimit": "no job of this partition may run so long",
    "PartitionDown": "the partition does not start jobs",
    "PartitionInactive": "the partition does not take jobs",
    "BadConstraints": "no node has what it asks for",
    "DependencyNeverSatisfied": "the job that it waits for has failed or never was",
    "InvalidAccount": "the account may not run jobs here",
    "InvalidQOS": "the quality of service may not be used here",
    "AccountNotAllowed": "the account may not use this partition",
    "QOSNotAllowed": "the quality of service may not be used here",
    "JobHeldUser": "it is held; `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "launch failed requeued held": "it could not be started and is held; `scontrol release` tries again",
}


def submit(job: JobSpec, site: Site) -> Job:
    """Sends a job to Slurm and returns its handle.

    The run directory gets `job.json`, `site.json` and `submit.sh`, which is what Slurm runs. The job inherits the
    environment of the caller, so secrets are exported there and never written.

    Raises:
        ConfigError: the job cannot run on this site; nothing was written.
        JobError: a job is live in this run directory, or Slurm refuses, with its words.
    """
    from cluster import preflight
    from cluster.render import check_submittable, scripts

    texts = scripts(job, site)
    check_submittable(site)
    preflight.check(job, site)
    run_dir = Path(job.run_dir)
    attempt, job_id = claim_attempt(run_dir), ""
    try:
        (run_dir / "logs").mkdir(exist_ok=True)
        job.write(run_dir / "job.json")
        site.write(run_dir / "site.json")
        for name, text in texts.items():
            write_atomic(run_dir / name, text)
        for name in texts:
            job_id = _sbatch(run_dir, name, after=job_id)
    except (JobError, OSError) as error:
        if job_id:  # what was to compile ahead for the job that was refused
            with contextlib.suppress(JobError):
                cancel(SchedulerJob(scheduler="slurm", id=job_id, config=os.environ.get("SLURM_CONF")))
        write_end(run_dir, attempt=attempt, rc=1, reason=str(error))
        raise
    hand_over(run_dir, attempt, SchedulerJob(scheduler="slurm", id=job_id, config=os.environ.get("SLURM_CONF")))
    return Job.attach(run_dir)


def look(jobs: list[SchedulerJob]) -> dict[str, Look]:
    """Returns what Slurm says about jobs of one cluster, by job id.

    Raises:
        JobError: Slurm does not answer.
    """
    config = jobs[0].config
    wanted = [job.id for job in jobs]
    looks = _squeue(wanted, config)
    for job_id in wanted:
        seen = looks.get(job_id)
        if seen is None or (seen.state and seen.state.is_final):
            looks[job_id] = _ended(job_id, config) or seen or _forgotten(job_id)
    return looks


def cancel(job: SchedulerJob) -> None:
    """Ends a job: SIGTERM to all its processes, SIGKILL after the cluster's KillWait.

    Raises:
        JobError: Slurm refuses or does not answer.
    """
    slurm_command(["scancel", job.id], job.config)


def requeue(job: Job, slurm_job: SchedulerJob) -> None:
    """Puts a job back into the queue, under its number where Slurm still knows it, as a new one otherwise.

    Raises:
        JobError: Slurm refuses or does not answer.
    """
    if job.status().state.is_final:
        submit(job.spec, Site.read(job.run_dir / "site.json"))
    else:
        requeue_this(slurm_job, job.run_dir)


def requeue_this(job: SchedulerJob, run_dir: Path) -> None:
    """Puts a job that has not ended back into the queue, without the nodes that failed it EXCLUDED_AFTER times.

    Raises:
        JobError: Slurm refuses or does not answer.
    """
    nodes = lost_nodes(run_dir)
    # Only a waiting job can be told to avoid nodes, and unless it is held it may have started on them by then.
    word = "requeuehold" if nodes else "requeue"
    try:
        slurm_command(["scontrol", word, job.id], job.config)
    except JobError as error:
        if "pending" not in str(error):  # then somebody else was quicker
            raise
    if nodes:
        try:
            slurm_command(["scontrol", "update", f"JobId={job.id}", f"ExcNodeList={','.join(nodes)}"], job.config)
        except JobError as error:  # it waits in the queue all the same
            print(f"{', '.join(nodes)} cannot be left out: {error}", flush=True)
        slurm_command(["scontrol", "release", job.id], job.config)


def lost_nodes(run_dir: Path) -> list[str]:
    """Returns the nodes that were lost EXCLUDED_AFTER times or more in this run."""
    losses = Counter(event.lost_node for event in read_history(run_dir) if event.lost_node)
    return sorted(node for node, times in losses.items() if times >= EXCLUDED_AFTER)


def native_state(job: SchedulerJob) -> str:
    """Returns Slurm's word for the state of the very job that asks; '' when it has none.

    Slurm says COMPLETING of every job that it is ending. The word returned is the state after that: CANCELLED, TIMEOUT,
    or PENDING for a job that goes back to the queue. A job that is warned of its preemption is PREEMPTED.

    Raises:
        JobError: Slurm does not answer.
    """
    found = _show(job.id, job.config)
    state = found.get("JobState", "")
    if state == "COMPLETING":
        if int(found.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
            return "PENDING"
        return "TIMEOUT" if found["Reason"] == "TimeLimit" else "CANCELLED"
    return "PREEMPTED" if state == "RUNNING" and found.get("PreemptTime", "None") != "None" else state


def hosts(node_list: str) -> list[str]:
    """Returns the names in a list such as 'node[1-3,07],login2', in order.

    Raises:
        JobError: it is not such a list.
    """
    names = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", node_list):
        expanded = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            choices = [plain] if plain else [number for text in ranges.split(",") for number in _numbers(text)]
            expanded = [prefix + choice for prefix in expanded for choice in choices]
        names += expanded
    if not names:
        raise JobError(f"{node_list!r} names no node. SLURM_JOB_NODELIST should; is this inside a Slurm job?")
    return names


def _numbers(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _sbatch(run_dir: Path, script: str, after: str) -> str:
    """Returns the number of a new job, which waits for the success of the job `after`, if any."""
    words = ["sbatch", "--parsable"]
    if after:
        words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    if nodes := lost_nodes(run_dir):
        words.append(f"--exclude={','.join(nodes)}")
    answer = slurm_command([*words, script], os.environ.get("SLURM_CONF"), cwd=run_dir)
    job_id = answer.strip().partition(";")[0]
    if not job_id.isdigit():
        raise JobError(f"sbatch answered {answer.strip()!r}, which is no job number. Look with squeue --me.")
    return job_id


def _squeue(job_ids: list[str], config: str | None) -> dict[str, Look]:
    """Returns the jobs that squeue still shows; columns: number, state, nodes, reason."""
    words = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(job_ids)}", "--format=%i|%T|%N|%r"]
    try:
        lines = slurm_command(words, config).splitlines()
    except JobError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    looks = {}
    for line in lines:
        job_id, native, nodes, reason = line.split("|", 3)
        state = STATES.get(native.split()[0], JobState.RUNNING)
        looks[job_id] = Look(state=state, native=native, nodes=nodes, reason=_words(native, nodes, reason))
    return looks


def _words(native: str, nodes: str, reason: str) -> str:
    if native != "PENDING":
        return f"Slurm: {native}{f' on {nodes}' if nodes else ''}{f' ({reason})' if reason != 'None' else ''}"
    for key, meaning in HOPELESS.items():
        if reason.startswith(key):
            return f"waits, and will not start: {reason} ({meaning}). Cancel it, change what it asks for, submit again."
    meaning = next((meaning for key, meaning in WAITS.items() if reason.startswith(key)), "")
    return f"waits: {reason}{f' ({meaning})' if meaning else ''}" if reason != "None" else "waits to be scheduled"


def _ended(job_id: str, config: str | None) -> Look | None:
    """Returns the end of a job from scontrol (for some minutes) or sacct (where there is one).

    Raises:
        JobError: scontrol does not answer; a job that nobody could be asked about is not taken for a lost one.
    """
    if found := _show(job_id, config):
        return _final(
            found["JobState"], found.get("ExitCode", "0:0"), found.get("NodeList", ""), found.get("Reason", "")
        )
    columns = "--format=State,ExitCode,NodeList"
    words = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", columns]
    try:
        lines = slurm_command(words, config).splitlines()
    except JobError:  # no accounting here
        return None
    if not lines:
        return None
    native, exit_code, nodes = lines[-1].split("|", 2)
    return _final(native, exit_code, nodes, "")


def _final(native: str, exit_code: str, nodes: str, reason: str) -> Look:
    word = native.split()[0].rstrip("+")
    code, _, number = exit_code.partition(":")
    rc = int(code) or (128 + int(number or 0) if int(number or 0) else 0)
    state = STATES.get(word, JobState.LOST)
    text = f"Slurm: {native}, exit code {exit_code}"
    if reason not in ("", "None"):
        text += f", {reason}"
    if (word, exit_code) == ("FAILED", "0:53"):
        text += ": its log file could not be opened. Is the run directory visible on the compute nodes?"
    if state is JobState.LOST:
        text += ". It was not requeued; .requeue() starts it again"
    return Look(state=state, native=native, nodes=nodes, reason=text, exit_code=rc if state.is_final else None)


def _forgotten(job_id: str) -> Look:
    return Look(state=JobState.LOST, reason=f"Slurm no longer knows job {job_id}, and the job left no exit.json")


def _show(job_id: str, config: str | None) -> dict[str, str]:
    """Returns some fields of `scontrol show job`, or nothing when it no longer knows the job.

    Only fields at fixed places are taken: the job's name and paths are in there too, and may hold anything.
    """
    try:
        text = slurm_command(["scontrol", "show", "job", job_id], config)
    except JobError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    patterns = (r"^ {3}(JobState)=(\S+) (Reason)=(.*?) Dependency=",
                r"^ {3}Requeue=\d (Restarts)=(\d+) .* (ExitCode)=(\S+)",
                r"^ {3}(NodeList)=(\S+)", r"^ {3}.*(PreemptTime)=(\S+)")  # fmt: skip
    found: dict[str, str] = {}
    for pattern in patterns:
        if match := re.search(pattern, text, re.MULTILINE):
            groups = match.groups()
            found.update(zip(groups[::2], groups[1::2], strict=True))
    return found if "JobState" in found else {}


def slurm_command(words: list[str], config: str | None, cwd: Path | None = None) -> str:
    """Returns what a Slurm command prints.

    Raises:
        JobError: it is not installed, fails or does not answer in time; with its own words.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=COMMAND_TIMEOUT_S,
            env=client_environment(config), stdin=subprocess.DEVNULL, cwd=cwd,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise JobError(f"{words[0]} is not installed here. Submit from a login node of the cluster.") from error
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{words[0]} did not answer within {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise JobError(f"{shlex.join(words[:3])}: {said}")
    return done.stdout


def client_environment(config: str | None) -> dict[str, str]:
    """Returns the environment for a Slurm command: without what a surrounding job or habits would change."""
    prefixes = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_", "SRUN_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    return kept | ({"SLURM_CONF": config} if config else {})
