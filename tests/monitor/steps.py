"""Lines of metrics.jsonl as the trainer writes them, with round numbers."""

import json
from pathlib import Path

from cluster.site import Site
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec

STEPS = {1: range(1, 31), 2: range(21, 41)}
"""Of the attempts of the run in conftest.py; attempt 2 repeats steps 21 to 30."""


def row(step: int, attempt: int = 1, **values: object) -> dict:
    """Returns one step of 0.5 s and 2,048 tokens; the loss falls by 0.05 a step."""
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
    directory: Path,
    rows: list[dict],
    *plans: Plan,
    spec: str | ModelSpec = "demo",
    site: str = "laptop",
    planned: int = 80,
) -> Run:
    """Returns a run of these steps and of an attempt for each plan, without a job."""
    plans = plans or (Plan(global_batch_size=8),)
    where = Site.load(site)
    run = Run.create(
        directory,
        spec=ModelSpec.preset(spec) if isinstance(spec, str) else spec,
        plan=plans[-1],
        recipe=Recipe(data="data", num_steps=planned),
        site=where.with_measured_peak("fp32", 1e11, "test") if site == "laptop" else where,
    )
    for attempt, plan in enumerate(plans, 1):
        plan.write(run.directory / f"plan.attempt_{attempt:02d}.json")
    (run.directory / "metrics.jsonl").write_text(lines(rows))
    return run
