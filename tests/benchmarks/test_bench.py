"""The benchmarks themselves: they compare like with like, and read costs from records correctly."""

import numpy as np
import pytest

from tests.benchmarks.overhead import CHECKPOINT_EVERY, costs


def test_costs_are_found_in_stamps() -> None:
    steps = np.arange(1, 4 * CHECKPOINT_EVERY)
    first = (steps % CHECKPOINT_EVERY == 1) & (steps > 1)
    step_s = np.where(first, 0.75, 0.5)
    between_s = np.where(first, 0.125, 0.0625)
    metrics = {"step": steps, "step_time_s": step_s, "time": np.cumsum(step_s + between_s)}
    cost = costs(metrics)  # type: ignore[arg-type]
    assert cost.step_s == 0.5
    assert (cost.recording_s, cost.checkpoint_s, cost.slowed_s) == pytest.approx(
        (0.0625, 0.0625, 0.25)
    )
