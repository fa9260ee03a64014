"""The benchmark of the data's order, on files of full size (they are sparse), by counts and
bytes instead of times.
"""

from pathlib import Path

import numpy as np
import pytest

from kit.data import training_samples
from kit.recipe import DataSource, Recipe
from tests.benchmarks import data_order


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    data_order.write_sources(tmp_path)
    return tmp_path


def test_a_rank_has_room_for_any_data(tiny_dataset, sources: Path) -> None:
    assert data_order.run_rank(tiny_dataset.directory, sources)["memory_mb"] < 100
    assert sum(file.stat().st_blocks for file in sources.iterdir()) * 512 < 20e6


def test_a_batch_reads_its_windows_and_nothing_else(
    tiny_dataset, sources: Path, monkeypatch
) -> None:
    import kit.data.token_file as token_file

    reads, pread = [], token_file.os.pread
    monkeypatch.setattr(token_file.os, "pread", lambda *args: reads.append(args[1]) or pread(*args))
    recipe = Recipe(
        data=str(tiny_dataset.directory),
        num_steps=1,
        sources=(DataSource(paths=(str(sources / "one"),)),),
    )
    samples = training_samples(recipe, data_order.SEQUENCE_LENGTH)
    reads.clear()
    for first in (0, 10**6, 10**9):
        assert samples.batch(first, 4).shape == (4, 4097)
    assert reads == 12 * [2 * 4097]


def test_the_order_stands_beside_numpys() -> None:
    distance, name = data_order.compare(draws=20_000, epochs=20)
    assert distance < 4, name
    assert data_order.met_once(300_000) == 1.0
    assert np.isfinite(distance)
