"""Time that counts in a job which fails: the equation against simulated jobs."""

import numpy as np
import pytest

from kit.estimate.rehearsal import time_that_counts


@pytest.mark.parametrize(
    ("between_failures_s", "save_s", "restart_s"),
    [(16 * 3600, 60, 600), (3 * 3600, 5, 120), (3600, 300, 900)],
)
def test_a_simulated_job_is_as_slow(between_failures_s, save_s, restart_s):
    """Work of many intervals, repeated until no failure falls into one; a restart may fail too."""
    rng, interval = np.random.default_rng(0), (2 * save_s * between_failures_s) ** 0.5
    spent, intervals = 0.0, 20_000
    for _ in range(intervals):
        need = interval + save_s
        while (failure := rng.exponential(between_failures_s)) < need:
            spent += failure
            need = restart_s + interval + save_s  # what the next attempt must get through
        spent += need
    rates = {"between_failures_s": between_failures_s, "save_s": save_s, "lost_s": restart_s}
    share = time_that_counts(interval, **rates)
    assert intervals * interval / spent == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(
    ("between_failures_s", "write_s"),
    [(3.16 * 3600, 0), (3.16 * 3600, 300), (3.16 * 3600, 900), (3600, 300)],
)
def test_a_save_counts_only_when_it_has_been_written(between_failures_s, write_s):
    """Attempts of random length, each of which keeps the steps before its newest whole save."""
    interval = max((2 * 5 * between_failures_s) ** 0.5, write_s)
    lasted = np.random.default_rng(0).exponential(between_failures_s, 100_000)
    # Saves that are whole before the end.
    written = np.maximum(lasted - 200 - write_s, 0) // (interval + 5)
    rates = {"between_failures_s": between_failures_s, "save_s": 5, "lost_s": 200 + write_s}
    share = time_that_counts(interval, **rates)
    assert share == pytest.approx(written.sum() * interval / lasted.sum(), abs=0.005)
