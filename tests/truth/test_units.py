"""Units in the tables of figures: published numbers are converted to the unit of the axis."""

import math

import pytest

from kit.papers import paper_figure
from kit.papers.frontier_memory import frontier_stages, lumi_bytes

LOGGED_MIB = 25_142
"""Allocated memory in MiB that Megatron printed for the first pipeline stage, after the skipped
step, in the log of run 405287."""


def column(rows: list[dict], panel: str, series: str) -> list[float]:
    return [row["y"] for row in rows if (row.get("panel"), row.get("series")) == (panel, series)]


def test_stage_memory_table_is_in_gib() -> None:
    _, rows = paper_figure("frontier-stage-memory").draw()
    assert column(rows, "a", "log")[0] == pytest.approx(LOGGED_MIB / 1024)
    peak = [float(each) / 1024**3 for each in frontier_stages()[1].total_bytes]
    assert column(rows, "b", "state and activations") == pytest.approx(peak)
    assert column(rows, "c", "bf16 Adam, ZeRO 1")[0] == pytest.approx(lumi_bytes(2) / 1024**3)


def test_model_memory_table_is_in_tb_and_gcds() -> None:
    """The memory of a GCD is 64 GiB."""
    _, rows = paper_figure("frontier-memory").draw()
    rows = [row for row in rows if "bytes" in row]
    for row in rows:
        size = row["bytes"] * row["parameters"]
        assert row["TB"] == pytest.approx(size / 1e12)
        assert row["GCDs of 64 GiB"] == math.ceil(size / (64 * 1024**3))
    assert len(rows) >= 9


def test_rooflines_are_in_teraflops() -> None:
    _, rows = paper_figure("frontier-roofline").draw()
    roofs = [row["y"] for row in rows if "upper bound" in str(row.get("source"))]
    assert max(roofs) == pytest.approx(191.5), "the peak of a GCD"
    assert min(roofs) == pytest.approx(16), "10 FLOP a byte at 1.6 TB/s"
