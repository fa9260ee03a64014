"""Straggler detection: it finds a slow rank, and names no rank if step times differ only by noise
of any strength.
"""

import math

import numpy as np
import pytest

from kit.monitor.detectors import MIN_SAMPLES, SLOW, slowest_rank
from kit.monitor.ranks import BY_CHANCE, SAMPLES

WINDOWS = 400


def times(ranks: int, samples: int, spread: float, memory: float, seed: int) -> np.ndarray:
    """Returns step times [rank, sample] of ranks of equal speed. The lognormal noise has the
    standard deviation `spread` and the autocorrelation `memory`.
    """
    random = np.random.default_rng(seed)
    noise = random.normal(size=(ranks, samples))
    for i in range(1, samples):
        noise[:, i] = memory * noise[:, i - 1] + math.sqrt(1 - memory**2) * noise[:, i]
    return np.exp(spread * noise)


def chance(times: np.ndarray) -> tuple[int, float]:
    found = slowest_rank(times / np.median(times, axis=0))
    assert found is not None
    return found[0], found[2]


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize(
    ("spread", "memory"), [(0.02, 0.0), (0.2, 0.0), (0.5, 0.0), (0.2, 0.7), (0.5, 0.7)]
)
def test_noise_alone_names_no_straggler(ranks, spread, memory):
    for seed in range(WINDOWS):
        samples = (MIN_SAMPLES, SAMPLES)[seed % 2]
        assert chance(times(ranks, samples, spread, memory, seed))[1] >= BY_CHANCE


@pytest.mark.parametrize("ranks", [2, 8])
def test_false_alarms_at_allowed_ratio_are_bounded(ranks):
    found = []
    for seed in range(2000):
        slow = times(ranks, MIN_SAMPLES, 0.1, 0.0, seed)
        slow[1] *= SLOW
        found.append(chance(slow)[1])
    for level in (0.1, 0.01):
        assert np.mean(np.array(found) < level) <= level + 3 * math.sqrt(level / 2000)


@pytest.mark.parametrize(
    ("ratio", "spread", "samples"),
    [(1.4, 0.01, MIN_SAMPLES), (1.25, 0.02, SAMPLES), (1.5, 0.1, SAMPLES), (3, 0.1, 48)],
)
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_real_straggler_is_found(ranks, ratio, spread, samples):
    found = 0
    for seed in range(20):
        slow = times(ranks, samples, spread, 0.5, seed)
        slow[1] *= ratio
        rank, by_chance = chance(slow)
        found += rank == 1 and by_chance < BY_CHANCE
    assert found >= 18


def test_ranks_without_times_are_not_judged():
    assert slowest_rank(np.full((4, MIN_SAMPLES), np.nan)) is None
    quiet = times(4, MIN_SAMPLES, 0.01, 0.0, 1)
    quiet[2] = np.nan
    found = slowest_rank(quiet / np.nanmedian(quiet, axis=0))
    assert found is not None and found[0] != 2 and found[2] > BY_CHANCE
