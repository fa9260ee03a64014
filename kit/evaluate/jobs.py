"""Evaluation as a job of a run's site, where a model needs several devices or is given them."""

import dataclasses
import sys
from collections.abc import Sequence

from cluster import submission
from cluster.job import JobSpec
from cluster.render import nodes_for
from cluster.state import JobState
from kit.errors import RunError, kit_command
from kit.evaluate.benchmarks import Options, layout
from kit.run import Run


def eval_job(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> JobSpec:
    """Returns the job that scores one checkpoint: each process runs the command that a user would
    type.

    Raises:
        ConfigError: as `layout`.
    """
    chosen = ["--suite", tasks] if isinstance(tasks, str) else ["--tasks", ",".join(tasks)]
    argv = [sys.executable, "-m", "kit", "eval", str(run.directory), "--step", str(step), *chosen]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            argv += ["--set", f"{field.name}={str(value).lower() if value is True else value}"]
    devices = layout(run.spec, run.site, options).num_devices
    return JobSpec(
        name=f"{run.name}-eval-{step}",
        run_dir=str(run.directory / "eval" / "jobs" / f"step_{step:08d}"),
        argv=tuple(argv),
        num_processes=devices,
        num_nodes=1 if run.site.scheduler == "local" else nodes_for(devices, run.site),
        max_restarts=0,
    )


def score_in_job(run: Run, step: int, tasks: Sequence[str] | str, options: Options) -> None:
    """Scores a checkpoint in a job of the run's site and returns when that is done; an interrupt
    ends the job.

    Raises:
        ConfigError, JobError: the site cannot run it.
        RunError: it did not come to its end.
    """
    job = submission.submit(eval_job(run, step, tasks, options), run.site)
    try:
        status = job.wait()
    except KeyboardInterrupt:
        job.cancel()
        raise
    if status.state is not JobState.DONE:
        words = [status.reason, *job.logs(0).strip().splitlines()][-1].rstrip(".")
        more = kit_command("logs", job.run_dir)
        raise RunError(f"{run.name}, step {step}: not scored: {words}. All that it said: `{more}`.")
