"""Fixture with a run of two attempts, for tests that copy or export the records of a run."""

import math
from pathlib import Path

import pytest

from kit.config.plan import Plan
from kit.run import Run
from tests.support.recorded_runs import STEPS, lines, made, row


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns a run of two attempts. Its metrics have a NaN, an infinite value, an incomplete line
    and a line in another format.
    """
    run = made(tmp_path / "a run", [], *[Plan(global_batch_size=8) for _ in STEPS])
    rows = [row(step, attempt) for attempt, steps in STEPS.items() for step in steps]
    rows[4]["loss"], rows[5]["grad_norm"] = math.nan, math.inf
    text = (
        lines(rows[:30])
        + '{"step": 31, "att\nsrun: error: foreign\n{"step": Infinity, "attempt": 1}\n'
        + lines(rows[30:])
    )
    (run.directory / "metrics.jsonl").write_text(text)
    return run
