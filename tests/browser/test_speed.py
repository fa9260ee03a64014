"""The dashboard shows the band of the expected speed, the verdict on the run's speed, and the
goodput bar.
"""

import json
import time
from pathlib import Path

import pytest

from cluster.state import JobState
from kit.monitor.speed import BAND_LABEL, SpeedMonitor
from kit.run import Run
from tests.support.recorded_runs import happened, recorded_run


def _at_pace(folder: Path, times: float) -> Run:
    """Returns a run that was recorded until now and whose steps take `times` the expected step
    time.
    """
    run = recorded_run(folder, steps=400, second_attempt_at=200)
    monitor = SpeedMonitor(run, run.metrics)
    monitor.update_comparison(wait=True)
    low, high = monitor.facts["band"]["step_time_s"]
    file, now = run.directory / "metrics.jsonl", time.time()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    wanted = times * (low * high) ** 0.5
    for row in rows:
        row["step_time_s"] *= wanted
        row |= {"data_s": 0.1 * wanted, "forward_backward_s": 0.7 * wanted}
        row["tokens"] = run.plan.global_batch_size * run.spec.sequence_length
        row["time"] = now - 1.1 * wanted * (400 - row["step"]) - 30 * (row["attempt"] == 1)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = rows[0]["time"] - 2 * wanted
    happened(run, 1, start - 20, JobState.QUEUED)
    happened(run, 1, start - 15, JobState.STARTING)
    happened(run, 1, start, JobState.RUNNING)
    happened(run, 1, rows[198]["time"] + 5, JobState.FAILED)
    happened(run, 2, rows[198]["time"] + 10, JobState.STARTING)
    return Run.open(run.directory)


@pytest.mark.parametrize(("times", "dark"), [(1.0, False), (6.0, True)])
def test_dashboard_shows_speed_verdict_and_goodput(open_screen, tmp_path, times, dark):
    screen = open_screen(_at_pace(tmp_path / "run", times), dark=dark)
    assert screen.page.locator(".kit-verdict").is_hidden(), "the first view waits for no estimate"
    screen.dashboard.update_speed(wait=True)
    screen.refresh()
    verdict = "as expected" if times == 1 else "slower than expected by"
    assert screen.text(".kit-verdict").startswith(verdict)
    facts = screen.dashboard.facts()
    mfu, band = facts["mfu"], facts["speed"]["band"]
    assert (band["mfu"][0] < mfu < band["mfu"][1]) == (times == 1), "the chart says the same"
    assert BAND_LABEL in screen.label("MFU")
    assert "waiting for data: " in screen.page.locator(".kit-tile").nth(2).get_attribute("title")
    bar = screen.page.locator(".kit-goodput")
    assert "Goodput" in bar.get_attribute("aria-label")
    assert "productive" in screen.text(".kit-shares")
    widths = bar.evaluate("e => [...e.children].map(c => c.getBoundingClientRect().width)")
    shares = [part["share"] for part in facts["speed"]["goodput"]["parts"]]
    total = bar.evaluate("e => e.getBoundingClientRect().width")
    assert [width / total for width in widths] == pytest.approx(shares, abs=0.01)
    screen.photograph(f"speed-{'dark' if dark else 'light'}")
