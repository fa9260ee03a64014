"""Saving as often as Daly's equation says: nothing near it is better, and a simulation of
failures agrees.
"""

import numpy as np
import pytest

from kit.rehearsal.goodput import Goodput

JOBS = [
    Goodput(between_failures_s=16 * 3600, save_s=60, restart_s=600, write_s=0),
    Goodput(between_failures_s=3 * 3600, save_s=5, restart_s=120, write_s=0),
    Goodput(between_failures_s=3600, save_s=300, restart_s=900, write_s=0),
]


@pytest.mark.parametrize("job", JOBS)
def test_the_best_interval_is_the_best(job):
    best = job.best_interval_s()
    others = np.geomspace(best / 10, best * 10, 400)
    assert max(job.at(other) for other in others) <= job.at(best) * 1.0002
    assert 0 < job.at(best) < 1


@pytest.mark.parametrize("job", JOBS)
def test_a_simulated_job_is_as_slow(job):
    """Work of many intervals, each repeated until no failure falls into it; a restart may fail
    too.
    """
    rng, interval = np.random.default_rng(0), job.best_interval_s()
    spent, intervals = 0.0, 20_000
    for _ in range(intervals):
        need = interval + job.save_s
        while (failure := rng.exponential(job.between_failures_s)) < need:
            spent += failure
            need = job.restart_s + interval + job.save_s  # what the next attempt must get through
        spent += need
    assert intervals * interval / spent == pytest.approx(job.at(interval), rel=0.02)


def test_saves_that_take_longer_than_failures_let_are_no_more_frequent():
    job = Goodput(between_failures_s=100, save_s=300, restart_s=10, write_s=0)
    assert job.best_interval_s() == 100


@pytest.mark.parametrize(
    ("between_failures_s", "write_s"),
    [(3.16 * 3600, 0), (3.16 * 3600, 300), (3.16 * 3600, 900), (3600, 300)],
)
def test_a_save_counts_only_when_it_has_been_written(between_failures_s, write_s):
    """Attempts of random length, each of which keeps the steps before its newest save that is
    whole.
    """
    job = Goodput(between_failures_s=between_failures_s, save_s=5, restart_s=200, write_s=write_s)
    interval = job.best_interval_s()
    lasted = np.random.default_rng(0).exponential(between_failures_s, 100_000)
    written = np.maximum(lasted - job.restart_s - write_s, 0) // (
        interval + job.save_s
    )  # saves whole before the end
    assert job.at(interval) == pytest.approx(written.sum() * interval / lasted.sum(), abs=0.005)
    assert interval >= write_s, "one is written at a time"
