"""A creeping loss: found within a few hundred steps on made curves, and not where a healthy run looks like one."""

import json

import numpy as np
import pytest

from kit.monitor.creep import creeps
from kit.monitor.dashboard import Dashboard
from kit.run.alerts import AlertLog
from tests.monitor.recorded import recorded_run

STEPS = np.arange(6000)
HEALTHY = 1.9 + 9 * (1 + STEPS / 30) ** -0.45
LATER = np.maximum(0, STEPS - 3000)
UNKNOWN = np.full(len(STEPS), np.nan)
WARMED_AGAIN = np.minimum(1e-4 + 2e-4 * LATER / 300, 3e-4)


def noisy(losses: np.ndarray, deviation: float, seed: int) -> np.ndarray:
    return losses * (1 + deviation * np.random.default_rng(seed).normal(size=len(losses)))


@pytest.mark.parametrize(
    ("slope", "deviation", "within"),
    [(0.03, 0.01, 300), (0.01, 0.002, 400), (0.01, 0.01, 450), (0.01, 0.03, 1000), (0.005, 0.01, 1200)],
)
def test_a_rise_is_found(slope: float, deviation: float, within: int) -> None:
    """Slopes in 100 steps and deviations of a step, both relative to the loss."""
    risen = np.where(LATER > 0, HEALTHY[3000] * (1 + slope * LATER / 100), HEALTHY)
    for seed in range(10):
        found = creeps(noisy(risen, deviation, seed), UNKNOWN)
        assert found and 3000 < found[0].row <= 3000 + within and found[0].now > found[0].before


@pytest.mark.parametrize("deviation", [0.001, 0.01, 0.03])
@pytest.mark.parametrize(
    "losses",
    [
        HEALTHY,
        np.full(len(STEPS), 2.5),
        HEALTHY + 0.3 * (LATER > 0),  # a new mix of data
        HEALTHY + 0.5 * (LATER > 0) * np.exp(-LATER / 400),  # that is soon learned
        HEALTHY + 0.1 * np.floor(np.clip(LATER / 600, 0, 3)),  # and again, and again
        HEALTHY + 0.025 * np.sin(STEPS / 240),
        np.maximum(HEALTHY, 2.6) - 0.1 * np.clip(LATER / 1500, 0, 1),  # a decay at the end
    ],
)
def test_healthy_curves_and_new_data_are_no_rise(losses: np.ndarray, deviation: float) -> None:
    assert not [creep for seed in range(5) for creep in creeps(noisy(losses, deviation, seed), UNKNOWN)]


def test_a_learning_rate_that_rises_again_explains_a_rise() -> None:
    losses = noisy(HEALTHY + 0.2 * (1 - np.exp(-LATER / 300)), 0.005, 0)
    assert creeps(losses, UNKNOWN) and not creeps(losses, WARMED_AGAIN)


def test_noise_alone_is_no_rise() -> None:
    random = np.random.default_rng(0)
    for noise in (random.normal(size=300_000), random.standard_t(3, size=300_000)):
        assert not creeps(3 + 0.03 * noise, np.full(300_000, np.nan))
    for steps in (10, 100, 400):
        of_lines = np.repeat(3 + 0.03 * random.normal(size=400_000 // steps), steps)
        assert not creeps(of_lines, np.full(len(of_lines), np.nan)), "a line for many steps says one thing"
    lines = np.repeat(2 + np.arange(400) / 4000 + 0.01 * random.normal(size=400), 10)
    (first, *_) = creeps(lines, np.full(4000, np.nan))
    assert 2900 < first.steps <= 3000, "counted as steps"


def test_what_is_not_finite_is_left_out_and_looks_in_parts_find_the_same() -> None:
    risen = noisy(np.where(LATER > 0, HEALTHY[3000] * (1 + LATER / 10_000), HEALTHY), 0.01, 1)
    whole = creeps(risen, WARMED_AGAIN * np.nan)
    parts = [creeps(risen[:end], UNKNOWN[:end], end - 100) for end in range(100, 6001, 100)]
    assert whole == [creep for part in parts for creep in part]
    risen[::7] = np.inf
    assert creeps(risen, UNKNOWN) and creeps(np.empty(0), np.empty(0)) == creeps(risen[:5], UNKNOWN[:5]) == []


def test_it_is_an_alert_that_is_said_once(tmp_path) -> None:
    run = recorded_run(tmp_path / "run", steps=2000, planned=9000)
    dashboard = Dashboard(run)
    row = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    noise = np.random.default_rng(0).normal(size=3000)
    with (run.directory / "metrics.jsonl").open("a") as stream:
        for step in range(2001, 2800):
            row |= {"step": step, "loss": 3.25 + 0.03 * noise[step] + 0.0005 * (step - 2000)}
            stream.write(json.dumps(row) + "\n")
    for _ in range(3):
        while dashboard.read():
            pass
        dashboard.look()
    (alert,) = AlertLog(run.directory / "alerts.jsonl").alerts
    assert alert.kind == "rise" and 2000 < alert.step < 2800 and "without a spike" in alert.message
