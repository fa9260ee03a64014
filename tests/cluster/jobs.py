"""Functions that create, submit and inspect jobs in the tests of schedulers."""

import sys
from pathlib import Path
from typing import Any

from cluster.job import Job, JobSpec
from cluster.process import Process
from cluster.sandbox import Sandbox
from cluster.site import Site
from cluster.state import SchedulerJob, read_state

LAPTOP = Site.load("laptop")
STANDIN = str(Path(__file__).parent / "standin.py")


def job_spec(run_dir: Path | str, *argv: str, num_processes: int = 4, **changes) -> JobSpec:
    """Returns a job specification with one rank per node, unless `num_nodes` is given."""
    fields = {"name": Path(run_dir).name, "num_nodes": num_processes, **changes}
    return JobSpec(run_dir=str(run_dir), argv=argv, num_processes=num_processes, **fields)


def standin(run_dir: Path, steps: float = 10, step_s: float = 0.1, *more: float, **changes):
    """Returns a job specification that runs the simulated trainer standin.py. `steps`, `step_s` and
    `more` are the arguments of the trainer.
    """
    words = (str(word) for word in (run_dir, steps, step_s, *more))
    return job_spec(run_dir, sys.executable, STANDIN, *words, **changes)


def with_slurm(site: Site, **changes: Any) -> Site:
    """Returns a copy of a site with changed fields of `site.slurm`."""
    assert site.slurm is not None
    return site.replace(slurm=site.slurm.replace(**changes))


def scheduler_job(job: Job) -> SchedulerJob:
    """Returns the scheduler job that the run's state.json names at present."""
    state = read_state(job.run_dir)
    assert state is not None and state.scheduler_job is not None
    return state.scheduler_job


def occupy(sandbox: Sandbox, seconds: float, num_nodes: int = 4, partition: str = "batch") -> str:
    """Submits a job that occupies whole nodes for some seconds. Returns the job number."""
    words = ("--parsable", "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds}")
    return sandbox.run("sbatch", f"--partition={partition}", f"--nodes={num_nodes}", *words).strip()


def supervisor(job: Job) -> Process:
    """Returns the identity of the supervisor process that the run's state.json names."""
    state = read_state(job.run_dir)
    assert state is not None and state.process is not None
    return state.process
