"""Learning rates of every schedule, step by step, against transformers' schedulers."""

from typing import Any

import pytest
import torch
from transformers import optimization

from kit.recipe import Recipe

PEAK, FLOOR, STEPS = 3e-4, 3e-5, 1000
RECIPE = Recipe(
    data="x", num_steps=STEPS, learning_rate=PEAK, min_learning_rate=FLOOR, decay_share=0.2
)
"""Of `wsd` the last 200 steps go down."""


def theirs(schedule: str, warmup_steps: int, **options: float | str) -> list[float]:
    """Returns transformers' rate of steps 1 to 1,200, the peak where it is 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler: Any = optimization.get_scheduler(
        schedule, optimizer, warmup_steps, STEPS, scheduler_specific_kwargs=options
    )
    return [PEAK * scheduler.lr_lambdas[0](step) for step in range(1, STEPS + 201)]


def ours(warmup_steps: int, **changes: float | str) -> list[float]:
    recipe = RECIPE.replace(warmup_steps=warmup_steps, **changes)
    return [recipe.learning_rate_at(step) for step in range(1, STEPS + 201)]


@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_constant(warmup_steps: int) -> None:
    expected = theirs("constant_with_warmup", warmup_steps)
    assert ours(warmup_steps, schedule="constant") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_cosine_that_ends_at_its_floor(warmup_steps: int) -> None:
    # Theirs warms up from the floor, and turns up again after the last step.
    expected = theirs("cosine_with_min_lr", warmup_steps, min_lr=FLOOR)[warmup_steps:STEPS]
    found = ours(warmup_steps)
    assert found[warmup_steps:STEPS] == pytest.approx(expected, rel=1e-12)
    assert found[STEPS:] == pytest.approx([FLOOR] * 200)


@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_cosine_to_zero_that_is_cut_off_at_its_floor(warmup_steps: int) -> None:
    # Their warm-up from zero, and their cosine to zero.
    expected = theirs("cosine", warmup_steps)[:STEPS]
    expected[warmup_steps:] = [max(FLOOR, rate) for rate in expected[warmup_steps:]]
    found = ours(warmup_steps, cosine_floor="clamped")
    assert found[:STEPS] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
def test_stable_then_straight_down(warmup_steps: int) -> None:
    down = {"num_decay_steps": 200, "decay_type": "linear", "min_lr_ratio": FLOOR / PEAK}
    expected = theirs("warmup_stable_decay", warmup_steps, **down)[warmup_steps:]
    assert ours(warmup_steps, schedule="wsd")[warmup_steps:] == pytest.approx(expected, rel=1e-12)
