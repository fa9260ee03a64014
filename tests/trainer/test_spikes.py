"""Detection of loss spikes: which steps count as a spike, and that step judge and alerts find the
same steps.
"""

import numpy as np
import pytest

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.trainer.bad_steps import StepJudge
from kit.trainer.spikes import WINDOW, find_bad_start, find_spikes, is_spike


def losses(steps: int, seed: int = 3) -> np.ndarray:
    """Returns random losses that fall as in training. The noise is 2 % of the last loss."""
    noise = np.random.default_rng(seed).normal(size=steps)
    return 1.9 + 9 * (1 + np.arange(steps) / 30) ** -0.45 + 0.04 * noise


def test_planted_spikes_are_found_without_false_alarms() -> None:
    random, loss = np.random.default_rng(3), losses(20_000)
    planted = np.sort(random.choice(np.arange(1000, 20_000), size=30, replace=False))
    loss[planted] += random.uniform(0.7, 2, size=30)
    assert [row for row, _ in find_spikes(loss)] == planted.tolist()
    starts = range(0, 20_000, 777)
    pieces = [row for start in starts for row, _ in find_spikes(loss[: start + 777], start)]
    assert pieces == planted.tolist(), "in whatever pieces the rows came in"


def test_spike_is_found_while_the_loss_still_falls() -> None:
    found = 0
    for seed in range(20):
        loss = losses(400, seed)
        loss[350] += 20 * 0.04
        found += [row for row, _ in find_spikes(loss)] == [350]
    assert found >= 18


def test_constant_or_non_finite_loss_is_no_spike() -> None:
    for nothing in (np.full(500, 2.0), np.full(500, np.nan), np.empty(0)):
        assert find_spikes(nothing) == []
    loss = losses(300)
    loss[100:150] = np.nan
    loss[200] = np.inf
    assert find_spikes(loss) == [] and find_spikes(loss, 120) == []


def test_loss_repeated_over_steps_is_one_spike() -> None:
    lines = losses(2000)
    lines[1500] += 1
    for every in (1, 10, 200):
        assert [row for row, _ in find_spikes(np.repeat(lines, every))] == [1500 * every]


GUESS = float(np.log(4096))
"""Loss of a uniform prediction over 4,096 tokens, 8.3 nats."""


# Losses of the demo model with a learning rate of 0.5, after five steps of warm-up.
TOO_FAST = "8.33 8.18 17.4 18.1 26.7 19.6 13.6 16.5 16.0 20.1 18.9 21.0 20.2 29.7 39.2 44.4 40.0"
RUINED = "2.1 2.2 2.6 3.4 3.9 4.4 4.8 5.1 5.3 5.4 5.5 5.5 5.6 5.5"  # losses of a fine-tuning run
WARMING_UP = "8.3 8.4 8.6 8.9 9.0 9.1 9.0 8.8 8.5 8.3 8.0 7.8"
SMALL_BATCHES = "2.1 2.6 2.4 2.9 2.6 2.5 2.4 2.6 2.5 2.4 2.3 2.4 2.3 2.2"
# Losses between the published losses of LUMI's 175B run on 128 nodes. Published: 60.7, 60.8, 60.6,
# 45.0 and 10.8 at steps 1, 2, 5, 10 and 20.
LUMI = "60.7 60.8 60.8 60.7 60.6 59 57 54 50 45 40 36 32 28 24 21 18 15 12.5 10.8 10.5"


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        (TOO_FAST, 11),
        (RUINED, 13),
        # The loss stays as bad as at the start.
        ([60.0 - 0.01 * i for i in range(60)], 39),
        (WARMING_UP, None),
        (SMALL_BATCHES, None),
        (LUMI, None),
    ],
)
def test_bad_start_is_found_by_step_40(losses: str | list[float], told: int | None) -> None:
    losses = [*map(float, losses.split())] if isinstance(losses, str) else losses
    guess = GUESS if losses[0] < 60 else float(np.log(51200))
    followed = np.append(losses, np.linspace(min(losses[-1], 60), min(losses[-1], 60) - 1, 60))
    assert find_bad_start(followed, guess) == told


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("first", [GUESS, 1.02 * GUESS, 2.0])
def test_healthy_start_is_not_a_bad_start(first: float, every: int) -> None:
    for seed in range(50):
        noise = np.random.default_rng(seed).normal(size=60)
        falling = first * (0.7 + 0.3 * np.exp(-np.arange(60) / 40)) * (1 + 0.03 * noise)
        assert find_bad_start(np.repeat(falling, every), GUESS) is None


@pytest.mark.parametrize("seed", range(3))
def test_step_judge_and_alerts_find_the_same_spikes(seed: int) -> None:
    random, loss = np.random.default_rng(seed), losses(1000, seed)
    loss[random.choice(1000, size=60)] += random.uniform(0.2, 3, size=60)
    loss[random.choice(1000, size=10)] = np.nan
    recipe, answered = Recipe(data="data", num_steps=1000, on_nan="skip", on_spike="skip"), []
    judge = StepJudge(recipe, Plan())
    for row, value in enumerate(loss.tolist()):
        answer, what = judge.judge(value, 1.0)
        judge.record(answer, what, value)
        answered += [row] if "spike" in what else []
        assert ("spike" in what) == is_spike(value, loss[:row].tolist()[-2 * WINDOW :])
    assert answered == [row for row, _ in find_spikes(loss)] and len(answered) > 10
