"""metrics.jsonl: writing on a full disk, and MFU and summary for invalid values."""

import dataclasses
import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.monitor.dashboard import Dashboard
from kit.monitor.export import export_table
from kit.run import metrics
from kit.run.metrics import Metrics, MetricsWriter
from tests.support.recorded_runs import lines, recorded_run, row


def _metrics(file: Path, changes: dict[int, dict[str, float]], peak: bool = True) -> Metrics:
    file.write_text(lines([row(step, **changes.get(step, {})) for step in range(1, 31)]))
    site = Site.load("laptop")
    site = site.with_measured_peak("fp32", 1e11, "test") if peak else site
    plans = {1: Plan(global_batch_size=8)}
    return Metrics.read(file, spec=ModelSpec.preset("demo"), plans=plans, site=site)


class SmallDisk(io.FileIO):
    """A file on a disk with limited space. A write stores the bytes that fit, and raises an error
    only if no byte fits.
    """

    room = 0

    def write(self, data) -> int:
        if not self.room:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        took = super().write(bytes(data[: self.room]))
        self.room -= took
        return took


@pytest.mark.parametrize(
    ("before", "ended"),
    [(b"", b""), (b'{"step": 0}\n', b'{"step": 0}\n'), (b'{"step": 0, "lo', b'{"step": 0, "lo\n')],
    ids=["new", "whole", "torn"],
)
def test_metrics_rows_wait_for_free_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes, ended: bytes
):
    """All rows are written completely and in order, even if the existing file ends with an
    incomplete line.
    """
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(before)
    disk = SmallDisk(file, "ab+")
    monkeypatch.setattr(metrics, "open_for_appending", lambda _: disk)
    writer = MetricsWriter(file)
    for step in range(1, 60):
        # A row has 12 or 13 bytes, so often only a part of a row fits.
        disk.room = 0 if step < 5 else step % 23
        try:
            writer.write([{"step": step}] if step % 7 else [])
        except OSError:
            assert writer.pending
    assert writer.pending and len(file.read_bytes()) > len(before)
    disk.room = 1 << 20
    writer.write([{"step": 60}])
    disk.close()
    assert not writer.pending
    assert file.read_bytes().startswith(ended)
    written = file.read_bytes().removeprefix(ended)
    steps = [json.loads(line)["step"] for line in written.splitlines()]
    assert steps == [step for step in range(1, 61) if step % 7]


@pytest.mark.parametrize("other", ["site", "device"])
def test_mfu_uses_the_peak_of_each_attempts_device(tmp_path: Path, other: str) -> None:
    run = recorded_run(tmp_path / "run", steps=40, second_attempt_at=20)
    first, before = run.metrics()["attempt"] == 1, run.metrics().mfu()
    away = Site.load("laptop")
    device = away.device.replace(name="a core of another CPU")
    away = away.replace(name="elsewhere") if other == "site" else away.replace(device=device)
    away.with_measured_peak("fp32", 4e11, "test").write(run.directory / "site.attempt_01.json")
    corrected = run.site.with_measured_peak("fp32", 9e11, "before it was corrected")
    corrected.write(run.directory / "site.attempt_02.json")
    mfu = run.metrics().mfu()
    assert before is not None and mfu is not None and 0 < first.sum() < len(mfu)
    assert np.allclose(mfu[first], before[first] / 2)
    assert np.array_equal(mfu[~first], before[~first])
    dashboard = Dashboard(run)
    while dashboard.read():
        pass
    assert np.allclose(dashboard.curves["mfu"], mfu)
    assert np.allclose(export_table(run)["mfu"].to_numpy(), mfu)
    away.write(run.directory / "site.attempt_01.json")
    mfu = run.metrics().mfu()
    assert mfu is not None and np.isnan(mfu[first]).all()
    assert np.array_equal(mfu[~first], before[~first])


def test_summary_skips_steps_without_a_duration(tmp_path: Path) -> None:
    """If no step has a duration, step time, tokens per second and MFU are None."""
    whole = _metrics(tmp_path / "whole.jsonl", {}).summary()
    lost = {"step_time_s": float("nan")}
    torn = _metrics(tmp_path / "torn.jsonl", {25: lost}).summary()
    nowhere = _metrics(tmp_path / "none.jsonl", dict.fromkeys(range(40), lost)).summary()
    for name in ("step_time_s", "tokens_per_s", "mfu"):
        assert torn[name] == pytest.approx(whole[name])
        assert nowhere[name] is None


@pytest.mark.parametrize(
    ("too_fast", "why"), [(1, None), (2, "above the peak"), (30, "above the peak")]
)
def test_mfu_is_dropped_if_steps_exceed_the_peak(tmp_path, too_fast, why) -> None:
    """MFU is still computed if one of 30 steps exceeds the peak FLOP/s. If two steps exceed the
    peak, MFU is dropped.
    """
    changes = {step: {"step_time_s": 0.01} for step in range(1, too_fast + 1)}
    metrics = _metrics(tmp_path / "m.jsonl", changes)
    assert metrics.why_no_mfu == why and (metrics.mfu() is None) == (metrics.hfu() is None) == (
        why is not None
    )
    assert metrics.summary()["loss"] == pytest.approx(6.5), "whatever the peak"
    if (mfu := metrics.mfu()) is not None:
        assert np.isnan(mfu[0]) and 0 < mfu[1:].max() < 1, "a single step that is too fast has none"


def test_recomputation_counts_in_the_peak_check(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path / "m.jsonl", {})
    mfu = metrics.mfu()
    assert mfu is not None
    site = metrics.site.with_measured_peak("fp32", 1e11 * mfu.max() * 1.1, "test")
    again = {1: Plan(global_batch_size=8, recompute="full")}
    assert dataclasses.replace(metrics, site=site).mfu() is not None
    assert dataclasses.replace(metrics, site=site, plans=again).why_no_mfu == "above the peak"


def test_summary_keeps_nan_apart_from_missing_values(tmp_path: Path) -> None:
    last = {30: {"loss": float("nan"), "grad_norm": float("inf")}}
    lost = _metrics(tmp_path / "lost.jsonl", last).summary()
    assert lost["loss"] != lost["loss"] and lost["grad_norm"] == float("inf")
    nowhere = {step: {"grad_norm": None} for step in range(40)}
    assert _metrics(tmp_path / "none.jsonl", nowhere).summary()["grad_norm"] is None  # type: ignore[arg-type]


def test_rows_beyond_the_buffer_limit_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST_WAITING", 3)
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.add({"step": step} for step in range(1, 6))
    assert writer.num_unwritten == 5
    writer.write([{"step": 6}])
    assert writer.stream is not None
    writer.stream.close()
    written = [json.loads(line)["step"] for line in writer.file.read_text().splitlines()]
    assert written == [1, 2, 3] and writer.num_unwritten == 3
