"""Run directories as a job would leave them, written within milliseconds for tests of code that
only reads runs.
"""

import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from cluster.heartbeats import RankHeartbeat, write_rank_heartbeat
from cluster.job import JobSpec
from cluster.process import Process
from cluster.site import Site
from cluster.state import Event, JobState, RunState, log_path
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.monitor.dashboard import Dashboard
from kit.run import Run
from kit.run.alerts import Alert
from tests.support.runs import new_run

TOKENS = 4096
STEPS = {1: range(1, 31), 2: range(21, 41)}
"""Steps of each attempt of the run in conftest.py, by attempt number. Attempt 2 repeats steps 21 to
30.
"""


def row(step: int, attempt: int = 1, **values: object) -> dict:
    """Returns the metrics row of one step, with 0.5 s and 2,048 tokens. The loss falls by 0.05 per
    step.
    """
    return {
        "step": step,
        "attempt": attempt,
        "time": 1e9 + step,
        "step_time_s": 0.5,
        "tokens": 2048,
        "loss": 8 - step / 20,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "memory_bytes": 10**8,
        **values,
    }


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def made(
    directory, rows, *plans, spec: str | ModelSpec = "demo", site="laptop", planned=80, peak=1e11
) -> Run:
    """Returns a run with these metrics rows and one attempt for each plan. The run has no job."""
    where = Site.load(site)
    run = new_run(
        directory,
        spec=ModelSpec.preset(spec) if isinstance(spec, str) else spec,
        plan=plans[-1],
        recipe=Recipe(data="data", num_steps=planned),
        site=where.with_measured_peak("fp32", peak, "test") if site == "laptop" else where,
    )
    for attempt, plan in enumerate(plans, 1):
        plan.write(run.directory / f"plan.attempt_{attempt:02d}.json")
    (run.directory / "metrics.jsonl").write_text(lines(rows))
    return run


def recorded_run(
    directory: Path,
    *,
    steps=400,
    planned=1000,
    ranks=1,
    second_attempt_at=None,
    spike_at=None,
    state=JobState.RUNNING,
    pipeline=1,
) -> Run:
    """Returns a run whose recorded job is this process, so that the job counts as alive."""
    plan = Plan(
        global_batch_size=4 * ranks, data_parallel=ranks // pipeline, pipeline_parallel=pipeline
    )
    attempts = 1 if second_attempt_at is None else 2
    run = made(directory, [], *attempts * [plan], planned=planned, peak=2e11)
    job = JobSpec(name=run.name, run_dir=str(run.directory), argv=("true",), num_processes=ranks)
    job.write(run.directory / "job.json")
    write(run, rows(1, steps, spike_at=spike_at, second_attempt_at=second_attempt_at))
    log = log_path(run.directory, attempts, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"step {i} of {planned}: all is well\n" for i in range(1, steps + 1)))
    (run.directory / "ranks").mkdir(exist_ok=True)
    say(run, state, attempts, steps)
    return run


def rows(first, last, *, spike_at=None, second_attempt_at=None) -> list[str]:
    """Returns the lines of metrics.jsonl for steps `first` to `last`."""
    told = []
    for step, noise in enumerate(
        np.random.default_rng(first).normal(size=(last + 1 - first, 3)), first
    ):
        loss, norm = 9 * (1 + step / 30) ** -0.45, 1.5 * (1 + step / 300) ** -0.6
        row = {
            "step": step,
            "attempt": 1 + (second_attempt_at is not None and step >= second_attempt_at),
            "time": 1.7e9 + 1.02 * step,
            "step_time_s": 1 + 0.02 * abs(noise[0]),
            "tokens": TOKENS,
            "loss": 1.9 + loss + 0.04 * noise[1] + 4 * (step == spike_at),
            "grad_norm": 0.35 + norm + 0.05 * abs(noise[2]),
            "learning_rate": 1.5e-4 * (1 + math.cos(3 * step / max(last, 1000))),
            "memory_bytes": 6 * 2**30,
        }
        row |= {"validation_loss": 2.0 + loss} if step % 50 == 0 else {}
        told.append(json.dumps(row) + "\n")
    return told


def add_rows(run: Run, first: int, last: int) -> None:
    """Appends the rows of steps `first` to `last` to the run's metrics.jsonl."""
    write(run, rows(first, last))


def add_row(run: Run, step: int, **values: object) -> None:
    """Appends the row of one step to the run's metrics.jsonl. Keywords replace its values."""
    write(run, [json.dumps(json.loads(rows(step, step)[0]) | values) + "\n"])


def write(run: Run, lines: list[str]) -> None:
    """Appends lines to the run's metrics.jsonl."""
    with (run.directory / "metrics.jsonl").open("a") as stream:
        stream.writelines(lines)


def alert(message: str, step: int, kind: str = "spike", **values: Any) -> Alert:
    """Returns an alert of level "warning" from attempt 1."""
    told = {"kind": kind, "level": "warning", "attempt": 1, "time": 1.0} | values
    return Alert(message=message, step=step, **told)


def looked_at(run: Run, **options) -> Dashboard:
    """Returns a dashboard that has read all metrics of a run and was updated once."""
    return look(Dashboard(run, **options))


def look(dashboard: Dashboard) -> Dashboard:
    """Makes a dashboard read all new metrics and update once. Returns the dashboard."""
    dashboard.catch_up()
    return dashboard


def spoil(run: Run, values: dict[int, dict[str, Any]]) -> None:
    """Replaces values in the rows of metrics.jsonl. `values` maps a step to its new values."""
    file = run.directory / "metrics.jsonl"
    told = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | values.get(row["step"], {})) + "\n" for row in told))


def say(run, state, attempt=1, step=0, process=None) -> None:
    """Writes the state.json of a job with a fresh heartbeat. The default process is this
    process.
    """
    process = process or Process.current()
    told = RunState(state=state, attempt=attempt, step=step, step_time_s=1.0, process=process)
    told.replace(heartbeat=time.time()).write(run.directory / "state.json")


def happened(run: Run, attempt: int, at: float, state: JobState, **fields: Any) -> None:
    """Appends an event to the history.jsonl of a run."""
    event = Event(time=at, attempt=attempt, state=state, **fields)
    with (run.directory / "history.jsonl").open("a") as stream:
        stream.write(json.dumps(event.to_dict()) + "\n")


def beat(run: Run, step: int, *, slow_rank: int | None = None, attempt: int = 1) -> None:
    """Writes one heartbeat of every rank. The step of `slow_rank` takes 0.4 s longer."""
    for rank in range(run.plan.num_devices):
        time_s = 1.0 + 0.01 * math.sin(rank * 7 + step) + 0.4 * (rank == slow_rank)
        heartbeat = RankHeartbeat(
            rank=rank,
            attempt=attempt,
            step=step,
            time=time.time(),
            step_time_s=time_s,
            host=os.uname().nodename,
            parts_s=(0.01, 1.4, 0.06, 0.03, 1.5 - time_s),
            own_s=time_s,
        )
        write_rank_heartbeat(run.directory, heartbeat)


def dead_process() -> Process:
    """Returns the identity of a process of this machine that has already ended."""
    child = subprocess.Popen(["sleep", "60"])
    start_ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    child.kill()
    child.wait()
    return Process.current().replace(pid=child.pid, start_ticks=start_ticks)
