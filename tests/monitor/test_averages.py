"""All views compute a number in the same way: averages and medians are taken within one layout."""

import numpy as np
import pytest

from kit.config.plan import Plan
from kit.monitor.curves import Curves
from kit.monitor.dashboard import Dashboard
from kit.monitor.figure import snapshot
from kit.monitor.text import status_row, status_table
from kit.run import Run
from kit.show.terminal import as_text
from tests.support.recorded_runs import lines, made, row

CHANGE = 31
"""First step of the second attempt, whose steps take half the time."""


def run_with_two_attempts(folder, *, other_plan: bool, steps: int = 36) -> Run:
    plan = Plan(global_batch_size=8)
    second = plan.replace(data_parallel=2) if other_plan else plan
    rows = [
        row(step, 1 + (step >= CHANGE), step_time_s=0.5 if step < CHANGE else 0.25)
        for step in range(1, steps + 1)
    ]
    return made(folder, rows, plan, second)


def weighted_means(values: np.ndarray, weight: float, starts: list[int]) -> list[float]:
    """Returns the exponential average at each value, computed from its definition. The average
    restarts at each index in `starts`.
    """
    means = []
    for i in range(len(values)):
        first = max(start for start in starts if start <= i)
        weights = weight ** np.arange(i - first, -1, -1)
        means.append(float(weights @ values[first : i + 1] / weights.sum()))
    return means


@pytest.mark.parametrize("other_plan", [True, False])
def test_speed_average_restarts_with_a_new_layout(tmp_path, other_plan):
    run = run_with_two_attempts(tmp_path / "run", other_plan=other_plan)
    curves = Curves(run, smoothing=0.8).read_all()
    speed, loss = curves["tokens_per_s"], curves["loss"]
    starts = [0, CHANGE - 1] if other_plan else [0]
    for name in ("tokens_per_s", "mfu"):
        expected = weighted_means(curves[name], 0.8, starts)
        np.testing.assert_allclose(curves.average(name), expected)
    assert (curves.average("tokens_per_s")[CHANGE - 1] == speed[CHANGE - 1]) == other_plan
    np.testing.assert_allclose(curves.average("loss"), weighted_means(loss, 0.8, [0]))


def test_average_is_equal_for_growing_and_whole_file(tmp_path):
    run = run_with_two_attempts(tmp_path / "run", other_plan=True)
    file = run.directory / "metrics.jsonl"
    text = file.read_text().splitlines(keepends=True)
    unknown = lines([row(CHANGE, 2, step_time_s=float("nan"))])
    text[CHANGE - 1] = unknown
    file.write_text("")
    curves = Curves(run, smoothing=0.8)
    for start, end in ((0, 10), (10, CHANGE - 1), (CHANGE - 1, CHANGE), (CHANGE, 36)):
        with file.open("a") as stream:
            stream.writelines(text[start:end])
        curves.read_all().average("tokens_per_s")
    whole = Curves(run, smoothing=0.8).read_all()
    growing = curves.average("tokens_per_s")
    np.testing.assert_allclose(growing, whole.average("tokens_per_s"))
    assert np.isnan(growing[CHANGE - 1]), "no step of the new layout has a speed yet"
    assert growing[-1] == pytest.approx(2048 / 0.25)


def test_views_agree_on_speed_of_newest_layout(tmp_path):
    run = run_with_two_attempts(tmp_path / "run", other_plan=True)
    dashboard = Dashboard(run).read_all()
    shown = [run.metrics().summary(), status_row(run), dashboard.facts()]
    for numbers in shown:
        assert numbers["tokens_per_s"] == 2048 / 0.25, "not a median over both layouts"
        assert numbers["speed_steps"] == 6
    assert shown[0]["mfu"] == shown[1]["mfu"] == pytest.approx(shown[2]["mfu"])
    words = " ".join(as_text(status_table(run, 100)).split())
    assert "median of the last 6 steps; loss, grad norm: last step" in words
    assert snapshot(dashboard).caption == "pale: each step; line: smoothed over about 10 steps"
