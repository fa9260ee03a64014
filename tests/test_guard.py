"""What counts as a bad step."""

import math

import pytest

from kit.errors import RunError
from kit.guard import PATIENCE, Guard
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spikes import WINDOW

RECIPE = Recipe(data="data", num_steps=100)


def test_what_is_not_finite_is_answered_as_the_recipe_says():
    guard = Guard(RECIPE.replace(on_nan="skip"), Plan())
    assert guard.judge(2.0, 1.0) == ("go on", "")
    assert guard.judge(math.nan, 1.0) == ("skip", "the loss is nan")
    assert guard.judge(2.0, math.inf) == ("skip", "the gradient norm is inf")
    assert not guard.accepts(2.0, math.inf) and guard.accepts(2.0, 1.0)


def test_gradients_that_overflow_in_fp16_are_the_engines_own_affair():
    guard = Guard(RECIPE, Plan(engine="deepspeed", precision="fp16", zero_stage=1))
    assert guard.judge(2.0, math.inf)[0] == "go on"
    assert guard.judge(math.nan, 1.0)[0] == "stop"


def test_spike_is_seen_only_beside_enough_losses_and_patience_ends():
    guard = Guard(RECIPE.replace(on_spike="skip"), Plan())
    for i in range(WINDOW):
        assert guard.judge(100.0, 1.0)[0] == "go on", "too few losses to judge by"
        guard.note("go on", "", 2.0 + 0.01 * (i % 5))
    answer, what = guard.judge(3.0, 1.0)
    assert answer == "skip" and "spike" in what and guard.judge(2.04, 1.0)[0] == "go on"
    for _ in range(PATIENCE - 1):
        guard.note(answer, what, 3.0)
    with pytest.raises(RunError, match="skip leads nowhere"):
        guard.note(answer, what, 3.0)
