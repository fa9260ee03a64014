"""The benchmarks of data and checkpoints, at a size that is quick: every number is measured, and
believable.
"""

from pathlib import Path

import pytest

from tests.benchmarks import checkpoints, cold_start, conversion, data


def test_data_is_read_both_ways_and_text_is_encoded(
    tiny_dataset, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(data, "ROUND_S", 0.02)
    rows = {row.name: row for row in data.measure(tmp_path, tiny_dataset, text_bytes=50_000)}
    flat, ours = (
        rows["flat windows, per CPU-second"].value,
        rows["the kit's samples, per CPU-second"].value,
    )
    assert flat > 0.1 and ours > 0.1
    assert rows["flat windows / the kit's samples"].value > 0.05
    assert rows["tokenisation, per CPU-second"].value > 0


def test_checkpoints_are_saved_and_loaded_and_compared_with_a_plain_write(
    llama_spec, tmp_path: Path
) -> None:
    rows = {row.name: row for row in checkpoints.measure(tmp_path, llama_spec, pause_s=0)}
    assert all(row.value > 0 for row in rows.values())
    # Not faster than training waits: the stall is a part of the save.
    whole_ms = 1e3 * 12 * llama_spec.num_params / 1e6 / rows["save, to the disk"].value
    assert rows["stall of training by a save"].value < 3 * whole_ms


@pytest.mark.thorough
def test_a_clone_comes_to_its_first_loss(tmp_path: Path) -> None:
    """Without what a package index would have to answer; with the demo's model, on a tenth of
    its text.
    """
    rows = {
        row.name: row for row in cold_start.measure(tmp_path, install=False, text_bytes=2_400_000)
    }
    assert list(rows)[0] == "git clone" and rows["launch to first loss"].value > 0.5
    whole = rows.pop("from `git clone` to the first loss").value
    assert whole == sum(row.value for row in rows.values())


def test_an_export_is_measured(llama_spec, tmp_path: Path) -> None:
    peak, seconds = conversion.measure(tmp_path, llama_spec, shard_bytes=50_000)
    assert 0.1 < peak.value < 1.0 and "to 1 files" not in peak.note and seconds.value > 0
