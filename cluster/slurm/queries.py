"""Queries Slurm about jobs with squeue, scontrol and sacct, always in explicit formats.

Only columns that were requested by name are parsed. The JSON output of these commands differs
between versions of Slurm, and users change the default columns by environment variables. sacct is
optional: it is used only on clusters with accounting.

Source of states and reasons: https://slurm.schedmd.com/squeue.html
"""

import os
import re
import shlex
import stat
from pathlib import Path

from cluster.files import user_name
from cluster.poll import SchedulerAnswer, run_command
from cluster.record import shortened
from cluster.slurm.reasons import why_it_waits
from cluster.state import CANCELLED, JobError, JobState, SchedulerJob

COMMAND_TIMEOUT_S = 20.0
FIRST_USER = 1000  # Lower user ids belong to root and to services, such as slurm.
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
SQUEUE_LINE = re.compile(r"(\d[\w+\[\]-]*)\|([A-Z_]+)\|([^|]*)\|(.*)")
"""Regular expression for a line of squeue's format `%i|%T|%N|%r`: job id, state, nodes, reason.
Site wrappers and plugins print further lines to standard output, which do not have this form."""
SACCT_LINE = re.compile(r"([A-Z_]+\+?(?: by \d+)?)\|(\d+:\d+)\|([^|]+)\|?")
"""Regular expression for a line of sacct's format `State,ExitCode,End`: state, exit code and
signal, end time."""


def query(jobs: list[SchedulerJob]) -> dict[str, SchedulerAnswer]:
    """Returns the state of each of `jobs` as Slurm reports it, by job id. All jobs must be of one
    cluster.

    Raises:
        JobError: Slurm does not answer.
    """
    wanted = [job.id for job in jobs]
    config = jobs[0].config
    answers, unknown_text = _squeue(wanted, config)
    for job_id in wanted:
        seen = answers.get(job_id)
        if seen is not None and not (seen.state and seen.state.is_final):
            continue
        try:
            end = _ended(job_id, config)
        except JobError as error:
            if unknown_text:
                raise not_understood("squeue", unknown_text) from error
            raise
        forgotten = f"Slurm no longer knows job {job_id}, and the job left no exit.json"
        lost = SchedulerAnswer(state=JobState.LOST, reason=forgotten)
        answers[job_id] = end or seen or lost
    return answers


def output(job: SchedulerJob) -> tuple[str, str]:
    """Returns (source, text) of the output of a job that is in no file. Both texts are empty, since
    all output of a Slurm job is in log files.
    """
    return "", ""


def native_state(job: SchedulerJob) -> str:
    """Returns Slurm's own name of the state of the job that runs this process, such as RUNNING, or
    '' if Slurm gives none.

    Slurm reports COMPLETING for every job that it is ending. This function then returns the state
    that follows: CANCELLED, TIMEOUT, or PENDING for a job that was requeued. For a job that was
    warned of its preemption it returns PREEMPTED.

    Raises:
        JobError: Slurm does not answer.
    """
    found = _show(job.id, job.config)
    state = found.get("JobState", "")
    if state == "COMPLETING":
        if int(found.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
            return "PENDING"
        return "TIMEOUT" if found["Reason"] == "TimeLimit" else "CANCELLED"
    # While Slurm sends a job the warning of its preemption, the state of the job is SIGNALING.
    if state in ("RUNNING", "SIGNALING") and found.get("PreemptTime", "None") != "None":
        return "PREEMPTED"
    return state


def matching_lines(text: str, form: re.Pattern[str]) -> list[re.Match[str]]:
    """Returns the matches of the pattern `form`, one for each line of a command's output that
    matches as a whole. Other lines are ignored.
    """
    matches = (form.fullmatch(line.strip()) for line in text.splitlines())
    return [match for match in matches if match]


def not_understood(command: str, text: str) -> JobError:
    """Returns the error for output of a Slurm command in which no line has the requested form."""
    name = command.split()[0]
    last = shortened(text.strip().splitlines()[-1], 200)
    return JobError(
        f"{command} printed {last!r}, which is not what was"
        f" asked for. Is it Slurm's own {name}? `type -a {name}` tells."
    )


def _squeue(job_ids: list[str], config: str | None) -> tuple[dict[str, SchedulerAnswer], str]:
    """Returns (answers, unparsed): a dict from job id to the job's state, and the output of squeue
    if no line of it could be parsed.

    If at least one line could be parsed, `unparsed` is empty.
    """
    words = [
        "squeue",
        "--noheader",
        "--states=all",
        f"--jobs={','.join(job_ids)}",
        "--format=%i|%T|%N|%r",
    ]
    text = _told_of_jobs(words, config)
    answers = {}
    for match in matching_lines(text, SQUEUE_LINE):
        job_id, native, nodes, reason = match.groups()
        state = STATES.get(native, JobState.RUNNING)
        answers[job_id] = SchedulerAnswer(state=state, reason=_words(native, nodes, reason, job_id))
    unknown = "" if answers else text.strip()
    return answers, unknown


def _words(native: str, nodes: str, reason: str, job_id: str) -> str:
    if native == "PENDING":
        return why_it_waits(reason, job_id)
    place = f" on {nodes}" if nodes else ""
    cause = f" ({reason})" if reason != "None" else ""
    return f"Slurm: {native}{place}{cause}"


def _ended(job_id: str, config: str | None) -> SchedulerAnswer | None:
    """Returns how a job has ended, or None if Slurm does not know. scontrol reports the end of a
    job for some minutes. On clusters with accounting, sacct reports it for longer.

    Raises:
        JobError: Slurm does not answer. Without an answer, the job must not be reported as lost.
    """
    found = _show(job_id, config)
    native = found.get("JobState", "")
    if found and native != "CANCELLED":
        return _final(native, found.get("ExitCode", "0:0"), found.get("Reason", ""))
    record = _accounting_record(job_id, config)
    if found:
        # Only the accounting names the user who has cancelled the job.
        if record and record[0].startswith("CANCELLED by"):
            native = record[0]
        return _final(native, found.get("ExitCode", "0:0"), found.get("Reason", ""))
    if record is None:
        return None
    native, exit_code, end = record
    # The record of a job's start may reach the accounting late, and then contains the job's present
    # state. Only the record of its end contains the exit code. Until then the job counts as
    # COMPLETING.
    state = STATES.get(native.split()[0].rstrip("+"), JobState.LOST)
    if state.is_final and end == "Unknown":
        native = "COMPLETING"
    return _final(native, exit_code)


def _accounting_record(job_id: str, config: str | None) -> tuple[str, str, str] | None:
    """Returns (state, exit code and signal, end time) of a job from sacct. The state may be
    followed by the user who has cancelled the job, as in `CANCELLED by 1001`. Returns None if the
    cluster has no accounting, or no record of the job.
    """
    words = [
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={job_id}",
        "--format=State,ExitCode,End",
    ]
    try:
        lines = matching_lines(slurm_command(words, config), SACCT_LINE)
    except JobError:  # The cluster has no accounting.
        return None
    if not lines:
        return None
    native, exit_code, end = lines[-1].groups()
    return native, exit_code, end


def _final(native: str, exit_code: str, reason: str = "") -> SchedulerAnswer:
    word = native.split()[0].rstrip("+")
    code, _, number = exit_code.partition(":")
    rc = int(code)
    signal_number = int(number or 0)
    if rc == 0 and signal_number:
        rc = 128 + signal_number
    state = STATES.get(word, JobState.LOST)
    text = f"Slurm: {native}, exit code {exit_code}"
    if reason not in ("", "None"):
        text += f", {reason}"
    if word == "CANCELLED":
        by = re.search(r" by (\d+)$", native)
        who = f" by {user_name(int(by[1]))}" if by else ""
        text = f"{CANCELLED}{who} ({text})"
    if (word, exit_code) == ("FAILED", "0:53"):
        text += (
            ": its log file could not be opened. Is the run directory visible on the compute nodes?"
        )
    if state is JobState.LOST:
        text += ". It was not requeued; `kit resume` starts it again"
    final_code = rc if state.is_final else None
    return SchedulerAnswer(state=state, reason=text, exit_code=final_code)


def _told_of_jobs(words: list[str], config: str | None) -> str:
    """Returns the output of a command about jobs, or an empty text if Slurm no longer knows the
    jobs.
    """
    try:
        return slurm_command(words, config)
    except JobError as error:
        if "Invalid job id" in str(error):
            return ""
        raise


def _show(job_id: str, config: str | None) -> dict[str, str]:
    """Returns some fields of `scontrol show job` by name, or an empty dict if Slurm no longer knows
    the job.

    Only fields at fixed places of a line are parsed, since the output also contains the job's name
    and paths, which may be any text.

    Raises:
        JobError: Slurm does not answer, or its output has another form.
    """
    text = _told_of_jobs(["scontrol", "show", "job", job_id], config)
    patterns = (
        r"^ {3}(JobState)=(\S+) (Reason)=(.*?) Dependency=",
        r"^ {3}Requeue=\d (Restarts)=(\d+) .* (ExitCode)=(\S+)",
        r"^ {3}.*(PreemptTime)=(\S+)",
    )
    found: dict[str, str] = {}
    for pattern in patterns:
        if match := re.search(pattern, text, re.MULTILINE):
            groups = match.groups()
            found.update(zip(groups[::2], groups[1::2], strict=True))
    if text.strip() and "JobState" not in found:
        raise not_understood("scontrol show job", text)
    return found


def slurm_command(
    words: list[str],
    config: str | None = None,
    cwd: Path | None = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    """Returns the output of a Slurm command. `config` is the path of the cluster's slurm.conf. If
    None, the environment of this process decides which cluster is used.

    Raises:
        JobError: The command fails as in `run_command`, or another user may have written `config`.
    """
    environment = client_environment(config)
    advice = "Submit from a login node of the cluster."
    return run_command(words, advice, timeout_s, environment=environment, cwd=cwd)


def client_environment(config: str | None = None) -> dict[str, str]:
    """Returns the environment variables for a Slurm command. Variables of a surrounding job, and
    variables by which users change the command's defaults, are removed.
    """
    habits = re.compile("(SLURM|SBATCH|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL|SRUN)_(?!CONF$)")
    kept = {key: value for key, value in os.environ.items() if not habits.match(key)}
    if config and config != kept.get("SLURM_CONF"):
        _refuse_strange_config(Path(config))
        kept["SLURM_CONF"] = config
    return kept


def _refuse_strange_config(config: Path) -> None:
    """Raises JobError if another user may have written a slurm.conf, since Slurm's commands load
    the libraries that the slurm.conf names.

    A run directory names the slurm.conf of its scheduler, and users pass run directories to others.
    """
    try:
        about = config.resolve().stat()
    except OSError:
        return  # The Slurm command will report the missing file.
    came_along = any((folder / "job.json").exists() for folder in config.resolve().parents)
    ours = about.st_uid == os.geteuid() or about.st_uid < FIRST_USER
    if came_along or not ours or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise JobError(
            f"the run directory names {config} as Slurm's configuration, which somebody else may"
            f" have written. If it is yours, export SLURM_CONF={shlex.quote(str(config))} and look"
            " again"
        )
