"""Sends a Python function to a site through submitit (pip install submitit), as jobs of a sweep often are.

    sent = send(evaluate, step=1000, site=Site.load("my-frontier.toml"), run_dir="runs/eval-1000")
    sent.result()                       submitit's own handle: the value, or the exception
    Job.attach("runs/eval-1000")        the same job in the words of this package: status, logs, cancel

submitit pickles the function with its arguments into `run_dir/submitit` and starts it in one process. A training run is
better sent by `cluster.slurm.submit`, whose script can be read and which comes back after a failure.
Standard library otherwise.
"""

import dataclasses
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.attempts import claim_attempt, hand_over
from cluster.job import JobSpec
from cluster.process import Process
from cluster.record import ConfigError
from cluster.render import check_submittable, slurm_table
from cluster.scheduler import Slurm, quote
from cluster.site import Site
from cluster.state import JobError, JobState, SchedulerJob, log_path, update_state, write_end

DEFAULT_LIMIT_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A function that tells the run directory when it starts and how it ends; pickled in place of the function."""

    function: Callable[..., Any]
    run_dir: str
    attempt: int

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        update_state(
            Path(self.run_dir), attempt=self.attempt, state=JobState.RUNNING, process=Process.current(),
            heartbeat=time.time(), reason="the function runs",
        )  # fmt: skip
        try:
            value = self.function(*arguments, **named)
        except BaseException as error:
            self._end(1, f"{type(error).__name__}: {error}", traceback.format_exc())
            raise
        self._end(0, "the function has returned")
        return value

    def _end(self, rc: int, reason: str, tail: str = "") -> None:
        write_end(Path(self.run_dir), attempt=self.attempt, rc=rc, reason=reason, log_tail=tail)


def send(
    function: Callable[..., Any],
    *arguments: Any,
    site: Site,
    run_dir: str | os.PathLike[str],
    time_limit_s: float | None = None,
    **named: Any,
) -> Any:
    """Returns submitit's handle of a job that calls `function(*arguments, **named)` on one device of a site.

    Args:
        function: anything that pickles; a function of a notebook does.
        arguments: passed on.
        site: local or Slurm.
        run_dir: new directory, or one whose job has ended.
        time_limit_s: of the job; default: an hour, or less where the site gives less.
        named: passed on.

    Raises:
        ConfigError: the site is neither local nor Slurm, or not filled in.
        JobError: submitit is missing or refuses, or a job is live in this run directory.
    """
    try:
        submitit = import_module("submitit")
    except ImportError as error:
        raise JobError(
            "sending a function needs submitit, which is not installed. Run: pip install submitit"
        ) from error
    parameters = _parameters(site, time_limit_s)
    path = Path(run_dir).expanduser().absolute()
    name = getattr(function, "__name__", type(function).__name__)
    job = JobSpec(name=name, run_dir=str(path), argv=(sys.executable, "-m", "submitit.core._submit"), num_processes=1)
    attempt = claim_attempt(path)
    try:
        job.write(path / "job.json")
        executor = submitit.AutoExecutor(path / "submitit", cluster="slurm" if site.scheduler == "slurm" else "local")
        executor.update_parameters(name=name, **parameters)
        sent = executor.submit(Recorded(function, str(path), attempt), *arguments, **named)
    except Exception as error:  # of submitit, and of the scheduler through it
        reason = " ".join(str(error).split())[:500]
        write_end(path, attempt=attempt, rc=1, reason=reason)
        raise JobError(f"submitit: {reason}") from error
    (path / "logs").mkdir(exist_ok=True)
    log_path(path, attempt, 0).symlink_to(sent.paths.stdout)
    if site.scheduler == "slurm":
        hand_over(path, attempt, SchedulerJob(scheduler="slurm", id=sent.job_id, config=os.environ.get("SLURM_CONF")))
    return sent


def _parameters(site: Site, time_limit_s: float | None) -> dict[str, Any]:
    """Returns what a site file says, in submitit's words."""
    limit_s = time_limit_s or DEFAULT_LIMIT_S
    if site.scheduler == "local":
        return {"timeout_min": math.ceil(limit_s / 60)}
    if site.scheduler != "slurm":
        raise ConfigError(f"site.scheduler: submitit cannot send to {site.scheduler!r}. Use a local or a Slurm site.")
    check_submittable(site)
    slurm = slurm_table(site)
    setup = [*(f"module load {name}" for name in slurm.modules), *slurm.setup]
    setup += [f"export {key}={quote(value)}" for key, value in (slurm.environment | slurm.environment_one_node).items()]
    return {
        "timeout_min": math.ceil((slurm.limit_s(1, limit_s) or limit_s) / 60),
        "cpus_per_task": slurm.cpus_per_task or 1,
        "slurm_partition": slurm.partition,
        "slurm_setup": setup,
        "slurm_additional_parameters": _more_options(slurm),
    }


def _more_options(slurm: Slurm) -> dict[str, Any]:
    given = {"account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
    options = {key: value for key, value in given.items() if value is not None}
    if slurm.gpus_per_task or slurm.gpus_per_node:
        options["gpus"] = "1"
    return options
