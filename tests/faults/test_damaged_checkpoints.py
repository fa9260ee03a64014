"""Damaged checkpoints are found by their checksums and renamed. The run resumes from the previous
checkpoint.
"""

import os
import shutil
import time
import zlib
from pathlib import Path

import pytest

from cluster.state import read_history, read_state
from kit.errors import CheckpointError
from kit.interop.weights import load_model
from kit.run import Run
from kit.run.alerts import AlertLog
from kit.run.checkpoint import checksum
from tests.support.attempts import Attempt, finished
from tests.support.fault_cost import assert_same, cost

pytestmark = pytest.mark.timeout(900)


def torn(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def damaged(with_checkpoints, tmp_path) -> Run:
    """A copy of the finished run with checkpoints of steps 10 and 20 only. Tests damage the
    checkpoint of step 20.
    """
    shutil.copytree(with_checkpoints.directory, tmp_path / "damaged")
    run = Run.open(tmp_path / "damaged")
    shutil.rmtree(run.checkpoints.path(30))
    return run


@pytest.mark.parametrize(
    ("damage", "which"),
    [
        (torn, "*.distcp"),
        (bit_flipped, "*.distcp"),
        (bit_flipped, ".metadata"),
        (bit_flipped, "manifest.json"),
    ],
)
def test_damaged_checkpoint_is_set_aside_on_resume(with_checkpoints, damaged, damage, which):
    """The run resumes from the previous checkpoint. The damaged folder is renamed and keeps its
    files. Log, history, state.json and alerts report the damage.
    """
    folder = damaged.checkpoints.path(20)
    damage(min(folder.glob(which)))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    attempt = finished(damaged, 2)
    assert attempt.resumed_from() == 10 and damaged.checkpoints.steps() == [10, 20, 30]
    assert_same(damaged, with_checkpoints)
    kept = {file.name: file.read_bytes() for file in folder.with_suffix(".damaged-2").iterdir()}
    assert kept == before
    said = "the checkpoint of step 20 is damaged and kept as step_00000020.damaged-2"
    assert f"WARNING: {said}" in attempt.log() and "went on from step 10" in attempt.log()
    assert any(said in event.reason for event in read_history(damaged.directory))
    state = read_state(damaged.directory)
    assert state is not None and said in state.notice
    alerts = AlertLog(damaged.directory / "alerts.jsonl").alerts
    assert [(alert.kind, alert.level) for alert in alerts] == [("checkpoint", "error")]
    lost = sum(map(len, before.values())) - sum(map(len, kept.values()))
    kind = damage.__name__.replace("_", " ")
    name = f"damaged checkpoint (`{which}`, {kind}): deleted bytes"
    note = "the resume finds the damage by size or checksum, renames the folder, uses the previous"
    note += " checkpoint, and reports the damage"
    cost(name, lost, at_most=0, note=note)


def test_run_with_only_damaged_checkpoints_stops(damaged):
    """The run stops instead of training again from step 0."""
    for step in (10, 20):
        bit_flipped(min(damaged.checkpoints.path(step).glob("*.distcp")))
    attempt = Attempt(damaged, 2)
    assert attempt.wait() == [os.EX_CONFIG] * 2
    assert "are damaged, nothing was changed" in attempt.log()
    assert damaged.checkpoints.steps() == [10, 20]


def test_load_model_refuses_damaged_checkpoint(damaged):
    bit_flipped(damaged.checkpoints.path(20) / ".metadata")
    with pytest.raises(CheckpointError, match=".metadata is damaged: its checksum"):
        load_model(damaged, 20)
    torn(max(damaged.checkpoints.path(20).glob("*.distcp")))
    with pytest.raises(CheckpointError, match="but its manifest says"):
        load_model(damaged, 20)


def test_checkpoint_checksum_exceeds_50_mb_per_s(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20) * 64)
    start = time.perf_counter()
    assert checksum(file) == zlib.crc32(file.read_bytes())
    rate = file.stat().st_size / (time.perf_counter() - start) / 1e6
    note = "CRC-32 of a file in the page cache; ranks verify in parallel; other programs used the"
    note += " core too"
    cost("speed at which a rank verifies a checkpoint", rate, "MB/s", note=note)
    assert rate > 50
