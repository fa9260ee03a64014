"""A run of two attempts for the tests that copy or export what it recorded."""

import math
from pathlib import Path

import pytest

from cluster.site import Site
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.spec import ModelSpec
from tests.monitor.steps import STEPS, lines, row


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two attempts, with a NaN and an infinite value, a torn and a foreign line."""
    run = Run.create(
        tmp_path / "a run",
        spec=ModelSpec.preset("demo"),
        plan=Plan(global_batch_size=8),
        recipe=Recipe(data="data", num_steps=80),
        site=Site.load("laptop").with_measured_peak("fp32", 1e11, "test"),
    )
    for attempt in STEPS:
        run.plan.write(run.directory / f"plan.attempt_{attempt:02d}.json")
    rows = [row(step, attempt) for attempt, steps in STEPS.items() for step in steps]
    rows[4]["loss"], rows[5]["grad_norm"] = math.nan, math.inf
    text = (
        lines(rows[:30])
        + '{"step": 31, "att\nsrun: error: foreign\n{"step": Infinity, "attempt": 1}\n'
        + lines(rows[30:])
    )
    (run.directory / "metrics.jsonl").write_text(text)
    return run
