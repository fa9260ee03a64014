"""The one rule of what a loss spike is: what it finds, what it leaves, and that everybody judges by it alike."""

import numpy as np
import pytest

from kit.plan import Plan
from kit.recipe import Recipe
from kit.trainer.guard import Guard
from kit.trainer.spikes import WINDOW, spikes, stands_out


def losses(steps: int, seed: int = 3) -> np.ndarray:
    """Returns a loss that falls as in training, with noise of 2 % of its end."""
    noise = np.random.default_rng(seed).normal(size=steps)
    return 1.9 + 9 * (1 + np.arange(steps) / 30) ** -0.45 + 0.04 * noise


def test_planted_spikes_are_found_without_false_alarms() -> None:
    random, loss = np.random.default_rng(3), losses(20_000)
    planted = np.sort(random.choice(np.arange(1000, 20_000), size=30, replace=False))
    loss[planted] += random.uniform(0.7, 2, size=30)
    assert [row for row, _ in spikes(loss)] == planted.tolist()
    pieces = [row for start in range(0, 20_000, 777) for row, _ in spikes(loss[: start + 777], start)]
    assert pieces == planted.tolist(), "in whatever pieces the rows came in"


def test_a_spike_is_found_while_the_loss_still_falls() -> None:
    found = 0
    for seed in range(20):
        loss = losses(400, seed)
        loss[350] += 20 * 0.04
        found += [row for row, _ in spikes(loss)] == [350]
    assert found >= 18


def test_what_is_constant_or_not_finite_is_no_spike() -> None:
    assert spikes(np.full(500, 2.0)) == [] and spikes(np.full(500, np.nan)) == [] and spikes(np.empty(0)) == []
    loss = losses(300)
    loss[100:150] = np.nan
    loss[200] = np.inf
    assert spikes(loss) == [] and spikes(loss, 120) == []


@pytest.mark.parametrize("seed", range(3))
def test_guard_and_alerts_judge_every_loss_alike(seed: int) -> None:
    random, loss = np.random.default_rng(seed), losses(1000, seed)
    loss[random.choice(1000, size=60)] += random.uniform(0.2, 3, size=60)
    loss[random.choice(1000, size=10)] = np.nan
    guard, answered = Guard(Recipe(data="data", num_steps=1000, on_nan="skip", on_spike="skip"), Plan()), []
    for row, value in enumerate(loss.tolist()):
        answer, what = guard.judge(value, 1.0)
        guard.note(answer, what, value)
        answered += [row] if "spike" in what else []
        assert ("spike" in what) == stands_out(value, loss[:row].tolist()[-2 * WINDOW :])
    assert answered == [row for row, _ in spikes(loss)] and len(answered) > 10
