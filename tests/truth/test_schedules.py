"""Learning rates of every schedule, step by step, against transformers' schedulers."""

from typing import Any

import pytest
import torch
from transformers import optimization

from kit.config.recipe import Recipe

PEAK, FLOOR, STEPS = 3e-4, 3e-5, 1000
RECIPE = Recipe(
    data="x", num_steps=STEPS, learning_rate=PEAK, min_learning_rate=FLOOR, decay_share=0.2
)
"""Of `wsd` the last 200 steps go down."""


def theirs(schedule: str, warmup_steps: int, **options: float | str) -> list[float]:
    """Returns transformers' rate of steps 1 to 1,200, the peak where it is 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    asked = schedule, optimizer, warmup_steps, STEPS
    scheduler: Any = optimization.get_scheduler(*asked, scheduler_specific_kwargs=options)
    return [PEAK * scheduler.lr_lambdas[0](step) for step in range(1, STEPS + 201)]


def ours(warmup_steps: int, **changes: float | str) -> list[float]:
    recipe = RECIPE.replace(warmup_steps=warmup_steps, **changes)
    return [recipe.learning_rate_at(step) for step in range(1, STEPS + 201)]


DOWN = {"num_decay_steps": 200, "decay_type": "linear", "min_lr_ratio": FLOOR / PEAK}
SCHEDULES = {
    "constant": ({"schedule": "constant"}, "constant_with_warmup", {}),
    "cosine to its floor": ({}, "cosine_with_min_lr", {"min_lr": FLOOR}),
    "cosine to zero, cut off": ({"cosine_floor": "clamped"}, "cosine", {}),
    "stable, then straight down": ({"schedule": "wsd"}, "warmup_stable_decay", DOWN),
}
"""What the recipe says, and what transformers calls it."""


@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_transformers(name: str, warmup_steps: int) -> None:
    changes, schedule, options = SCHEDULES[name]
    found, expected = ours(warmup_steps, **changes), theirs(schedule, warmup_steps, **options)
    from_floor = schedule in ("cosine_with_min_lr", "warmup_stable_decay")  # theirs warms up so
    begin, end = warmup_steps * from_floor, len(found)
    if "cosine" in schedule:  # theirs turns up again after the last step
        end = STEPS
        expected[warmup_steps:] = [max(FLOOR, rate) for rate in expected[warmup_steps:]]
        assert found[STEPS:] == pytest.approx([FLOOR] * 200)
    assert found[begin:end] == pytest.approx(expected[begin:end], rel=1e-12)
