"""A lasting rise of the loss is found within 400 steps or eight log lines. A healthy run gives no
such alert.
"""

import numpy as np
import pytest

from kit.config.recipe import DataPhase, DataSource
from kit.monitor.dashboard import Dashboard
from kit.monitor.detectors import LossRise, RiseDetector
from kit.monitor.text import recorded_alerts
from kit.run import Run
from kit.run.alerts import AlertLog
from kit.trainer.spikes import find_bad_start, find_spikes
from tests.support.recorded_runs import TOKENS, add_row, look, recorded_run

STEPS = np.arange(6000)
HEALTHY = 1.9 + 9 * (1 + STEPS / 30) ** -0.45
LATER = np.maximum(0, STEPS - 3000)
AGAIN = np.minimum(1e-4 + 2e-4 * LATER / 300, 3e-4)
WARMED_AGAIN = np.where(LATER > 0, AGAIN, 3e-4 - 2e-4 * STEPS / 3000)
PLATEAU = np.full(len(STEPS), 2.5)


def rises(losses: np.ndarray, rates: np.ndarray | float = np.nan, new_data=()) -> list[LossRise]:
    return RiseDetector().find(losses, np.broadcast_to(rates, losses.shape), new_data)


def as_logged(losses: np.ndarray, every: int, *, means: bool) -> np.ndarray:
    """Returns one loss per step, as a log with one line per `every` steps gives it. With `means`, a
    line has the mean loss of its steps, otherwise the loss of its last step.
    """
    lines = losses[: len(losses) // every * every].reshape(-1, every)
    return np.repeat(lines.mean(axis=1) if means else lines[:, -1], every)


def noisy(losses: np.ndarray, deviation: float, seed: int) -> np.ndarray:
    return losses * (1 + deviation * np.random.default_rng(seed).normal(size=len(losses)))


CREEPING = [(0.03, 0.01, 550), (0.01, 0.002, 650), (0.01, 0.01, 750), (0.01, 0.03, 1100)]


@pytest.mark.parametrize(("slope", "deviation", "within"), [*CREEPING, (0.005, 0.01, 1000)])
def test_slow_rise_is_found_once(slope, deviation, within):
    """`slope` is the loss rise per 100 steps, and `deviation` the noise of one step, both relative
    to the loss. The rise must be found within `within` steps.
    """
    risen = np.where(LATER > 0, HEALTHY[3000] * (1 + slope * LATER / 100), HEALTHY)
    for seed in range(10):
        (found,) = rises(noisy(risen, deviation, seed))
        assert 3400 <= found.row <= 3000 + within and found.low_row < 3100
        assert found.low == pytest.approx(HEALTHY[3000], rel=0.015)
        assert found.level > 1.015 * found.low


@pytest.mark.parametrize(
    ("every", "means", "within"),
    [(1, True, 450), (10, False, 450), (50, True, 450), (200, True, 400)],
)
def test_lasting_jump_is_found_within_450_steps(every, means, within):
    for seed in range(5):
        jumped = as_logged(noisy(HEALTHY + 1.5 * (LATER > 0), 0.012, seed), every, means=means)
        (found,) = rises(jumped)
        assert 3399 <= found.row < 3000 + within and 2700 < found.low_row < 3000
        assert found.level - found.low == pytest.approx(1.5, abs=0.2)


@pytest.mark.parametrize("deviation", [0.001, 0.012, 0.03])
@pytest.mark.parametrize(
    "losses",
    [
        HEALTHY,
        PLATEAU,
        HEALTHY + 0.5 * (LATER > 0) * (LATER < 300),  # the loss rises for a short time
        HEALTHY + 0.5 * (LATER > 0) * np.exp(-LATER / 400),  # the loss rises and decays again
        PLATEAU + 0.5 * (LATER > 0) * np.exp(-LATER / 200),
        PLATEAU + 0.0125 * np.sin(STEPS / 240),
        # the learning rate decays at the end, and the loss falls
        np.maximum(HEALTHY, 2.6) - 0.1 * np.clip(LATER / 1500, 0, 1),
    ],
)
def test_healthy_and_recovering_curves_are_no_rise(losses, deviation):
    assert not [rise for seed in range(5) for rise in rises(noisy(losses, deviation, seed))]


def test_new_data_or_warmup_restarts_rise_detection():
    """New data or a second warm-up explains a rise, so no alert is given. The first warm-up, or a
    warm-up that ended long before the rise, does not explain it.
    """
    harder = noisy(HEALTHY + 0.3 * (LATER > 0), 0.01, 0)
    assert rises(harder) and not rises(harder, new_data=(3001,))
    warmed = noisy(HEALTHY + 0.2 * (1 - np.exp(-LATER / 300)), 0.005, 0)
    assert rises(warmed) and not rises(warmed, WARMED_AGAIN)
    blown = noisy(np.where(LATER > 0, HEALTHY + 0.001 * LATER, HEALTHY), 0.01, 0)
    assert rises(blown, np.minimum(STEPS, 5000) * 1e-7), "the first warm-up explains nothing"
    over = np.minimum((STEPS - 499) / 300, 1) * 1e-4
    second = np.where(STEPS < 500, 3e-4 * (1 - STEPS / 500), over)
    assert rises(blown, second), "nor one that was over long before"


@pytest.mark.parametrize("every", [1, 10, 50, 200])
@pytest.mark.parametrize("means", [True, False])
def test_healthy_curve_has_no_alarm_at_any_log_interval(every, means):
    """Each curve has 20,000 steps and a log line every `every` steps. If a line counted as `every`
    equal losses, the noise would seem too small and the next line would look like a rise.
    """
    steps = np.arange(1, 20_001)
    for seed in range(3):
        for curve in (1.8 + 9 * steps**-0.35, np.full(20_000, 2.5)):
            lines = as_logged(noisy(curve, (0.012, 0.015)[seed % 2], seed), every, means=means)
            assert (find_spikes(lines), rises(lines), find_bad_start(lines, 10.8)) == ([], [], None)


def test_noise_alone_is_no_rise():
    random = np.random.default_rng(0)
    for noise in (random.normal(size=100_000), random.standard_t(3, size=100_000)):
        assert not rises(3 + 0.03 * noise)


def test_rise_detection_in_parts_equals_one_pass():
    """Both detections ignore losses that are not finite."""
    risen = noisy(np.where(LATER > 0, HEALTHY[3000] * (1 + LATER / 10_000), HEALTHY), 0.01, 1)
    detector, whole = RiseDetector(), rises(risen)
    parts = [detector.find(risen[:end], risen * np.nan) for end in range(70, 6001, 70)]
    assert whole and whole == [rise for part in parts for rise in part]
    risen[::7] = np.inf
    assert rises(risen) and rises(np.empty(0)) == rises(risen[:5]) == []


def test_rise_gives_one_alert(tmp_path):
    run = recorded_run(tmp_path / "run", steps=2000, planned=9000)
    dashboard = Dashboard(run)
    noise = np.random.default_rng(0).normal(size=3000)
    for step in range(2001, 2800):
        add_row(run, step, loss=3.25 + 0.03 * noise[step] + 0.0005 * (step - 2000))
    for _ in range(3):
        look(dashboard)
    (alert,) = AlertLog(run.directory / "alerts.jsonl").alerts
    assert alert.kind == "rise" and 2400 <= alert.step < 2800
    assert "lowest 3.2" in alert.message and "go back to a checkpoint before it" in alert.message


def test_rise_after_planned_mix_change_gives_no_alert(tmp_path):
    for known in (True, False):
        run = recorded_run(tmp_path / f"run {known}", steps=2000, planned=9000)
        sources = (DataSource(paths=("a",)), DataSource(paths=("b",)))
        phases = (DataPhase(until_tokens=2000 * TOKENS, weights=(1.0, 0.0)),) if known else ()
        run.recipe.replace(sources=sources, phases=phases).write(run.directory / "recipe.json")
        losses = 3.7 + 0.03 * np.random.default_rng(0).normal(size=800)
        for step, loss in enumerate(losses, 2001):
            add_row(run, step, loss=loss)
        kinds = [alert.kind for alert in recorded_alerts(Run.open(run.directory))]
        assert ("rise" in kinds) != known
