"""The benchmark of scale, at a size that is quick: every case runs, and says what it took."""

from pathlib import Path

from tests.benchmarks.scale import SIZES, measure

SMALL = {"search": 1024, "rank": 512, "heartbeats": 300, "monitor": 2000, "metrics": 50_000}


def test_every_case_runs_and_is_measured(tmp_path: Path) -> None:
    assert set(SMALL) == set(SIZES)
    rows = measure(tmp_path, SMALL)
    assert len(rows) == 7 and all(row.target and row.value > 0 for row in rows)
    assert rows[4].name == "metrics of 50,000 steps, read with MFU" and rows[4].value > 0
