"""Learning rates of every schedule, compared step by step with the schedulers of transformers."""

from typing import Any

import pytest
import torch
from transformers import optimization

from kit.config.recipe import Recipe

PEAK, FLOOR, STEPS = 3e-4, 3e-5, 1000
RECIPE = Recipe(
    data="x", num_steps=STEPS, learning_rate=PEAK, min_learning_rate=FLOOR, decay_share=0.2
)
"""Recipe of the test. With the schedule `wsd`, the learning rate decays in the last 200 steps."""


def theirs(schedule: str, warmup_steps: int, **options: float | str) -> list[float]:
    """Returns the learning rates of transformers for steps 1 to 1,200. Its schedulers return
    factors, which are multiplied by the peak rate.
    """
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
    "stable, then 1 - sqrt": (
        {"schedule": "wsd", "decay_shape": "sqrt"},
        "warmup_stable_decay",
        {**DOWN, "decay_type": "1-sqrt"},
    ),
    "stable, then a cosine": (
        {"schedule": "wsd", "decay_shape": "cosine"},
        "warmup_stable_decay",
        {**DOWN, "decay_type": "cosine"},
    ),
}
"""Maps a description to (changes of the recipe, name of transformers' schedule, options of this
schedule)."""


@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_match_transformers(name: str, warmup_steps: int) -> None:
    changes, schedule, options = SCHEDULES[name]
    found, expected = ours(warmup_steps, **changes), theirs(schedule, warmup_steps, **options)
    # For schedules with a floor, transformers starts the warm-up at the floor. The kit starts it at
    # 0, so warm-up steps are not compared.
    from_floor = schedule in ("cosine_with_min_lr", "warmup_stable_decay")
    begin, end = warmup_steps * from_floor, len(found)
    if "cosine" in schedule:  # transformers' cosine rises again after the last step
        end = STEPS
        expected[warmup_steps:] = [max(FLOOR, rate) for rate in expected[warmup_steps:]]
        assert found[STEPS:] == pytest.approx([FLOOR] * 200)
    assert found[begin:end] == pytest.approx(expected[begin:end], rel=1e-12)
