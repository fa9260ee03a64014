"""Goodput is the share of a job's time that trains steps which are not lost in a failure. The
formula is compared with simulated jobs.
"""

import numpy as np
import pytest

from kit.estimate.rehearsal import time_that_counts


@pytest.mark.parametrize(
    ("between_failures_s", "save_s", "restart_s"),
    [(16 * 3600, 60, 600), (3 * 3600, 5, 120), (3600, 300, 900)],
)
def test_goodput_formula_matches_simulated_failures(between_failures_s, save_s, restart_s):
    """Simulates 20,000 checkpoint intervals. Each interval is repeated until it passes without a
    failure. A failure may also happen during a restart.
    """
    rng, interval = np.random.default_rng(0), (2 * save_s * between_failures_s) ** 0.5
    spent, intervals = 0.0, 20_000
    for _ in range(intervals):
        need = interval + save_s
        while (failure := rng.exponential(between_failures_s)) < need:
            spent += failure
            # The next attempt must pass this time without a failure.
            need = restart_s + interval + save_s
        spent += need
    rates = {"between_failures_s": between_failures_s, "save_s": save_s, "lost_s": restart_s}
    share = time_that_counts(interval, **rates)
    assert intervals * interval / spent == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(
    ("between_failures_s", "write_s"),
    [(3.16 * 3600, 0), (3.16 * 3600, 300), (3.16 * 3600, 900), (3600, 300)],
)
def test_goodput_counts_only_completed_saves(between_failures_s, write_s):
    """Simulates attempts that end at a random time. An attempt keeps the steps before its last
    completed save.
    """
    interval = max((2 * 5 * between_failures_s) ** 0.5, write_s)
    lasted = np.random.default_rng(0).exponential(between_failures_s, 100_000)
    # number of saves that are complete when the attempt ends
    written = np.maximum(lasted - 200 - write_s, 0) // (interval + 5)
    rates = {"between_failures_s": between_failures_s, "save_s": 5, "lost_s": 200 + write_s}
    share = time_that_counts(interval, **rates)
    assert share == pytest.approx(written.sum() * interval / lasted.sum(), abs=0.005)
