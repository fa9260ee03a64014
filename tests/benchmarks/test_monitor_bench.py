"""The dashboard's benchmark: what is counted, and that it says what it could not measure."""

from pathlib import Path

import pytest

from kit.show.results import write_results
from tests.benchmarks import lab, monitor
from tests.benchmarks.tables import table


def _live(factor: float) -> monitor.Live:
    return monitor.Live(
        paint_s=0.4 * factor,
        latencies_s=[0.1 * factor, 0.15 * factor, 0.5 * factor],
        kernel_cpu=0.05 * factor,
        bytes_per_s=80e3 * factor,
        zooms_s=[0.05 * factor] * 3,
        notebook_bytes=100_000,
        state_bytes=200_000,
    )


def test_latency_is_from_the_line_to_the_first_picture_that_holds_it() -> None:
    stamps = {11: 100.0, 12: 100.25, 13: 100.5}
    seen = [[10, 99_900.0], [11, 100_100.0], [13, 100_600.0], [13, 101_000.0]]
    assert monitor._latencies(stamps, seen) == pytest.approx([0.1, 0.1, 0.35])
    with pytest.raises(RuntimeError, match="1 of 3 steps were never drawn"):
        monitor._latencies(stamps, seen[:2] + [[12, 100_600.0]])


def test_each_number_has_the_other_dashboards_beside_it() -> None:
    rows = monitor._side_by_side(_live(1), _live(3))
    ours, theirs = rows[::2], rows[1::2]
    assert [other.name for other in theirs] == [f"{own.name}: plotly" for own in ours]
    latency = next(own for own in ours if "p50" in own.name)
    assert (latency.value, latency.target, latency.ok) == (0.15, "≤ 0.200 s", True)
    assert theirs[ours.index(latency)].note.startswith("3.0 x; p95 1,500 ms")
    assert [own.ok for own in monitor._side_by_side(_live(9), _live(1))[::2]][:4] == [False] * 4
    assert all(other.ok is None for other in theirs), "only ours has a target"


def test_without_a_browser_the_kernel_side_is_measured_and_the_rest_named(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(lab, "chromium", lambda: None)
    rows = monitor.measure(tmp_path, steps=2000)
    assert len(rows) == 3 and all(each.value > 0 for each in rows)
    assert "not measured: " in rows[0].note and "install" in rows[0].note
    results = write_results(
        "monitor",
        rows,
        command="python -m tests.benchmarks monitor",
        load_before=0.0,
        directory=tmp_path,
    )
    assert "2,000 steps read and pictured" in table(results)
