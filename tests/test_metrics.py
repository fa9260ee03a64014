"""The reader of `metrics.jsonl`: one bad value costs its own step only."""

import json
from pathlib import Path

import pytest

from cluster.site import Site
from kit.metrics import Metrics
from kit.plan import Plan
from kit.spec import ModelSpec


def _metrics(file: Path, changes: dict[int, dict[str, float]], peak: bool = True) -> Metrics:
    rows = [
        {"step": step, "attempt": 1, "time": 1e9 + step, "step_time_s": 0.5, "tokens": 2048, "loss": 8 - step / 20,
         "grad_norm": 1.0, **changes.get(step, {})}
        for step in range(1, 31)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    site = Site.load("laptop").with_measured_peak("fp32", 1e11, "test") if peak else Site.load("laptop")
    return Metrics.read(file, spec=ModelSpec.preset("demo"), plans={1: Plan(global_batch_size=8)}, site=site)


def test_one_lost_duration_costs_neither_speed_nor_mfu(tmp_path: Path) -> None:
    whole = _metrics(tmp_path / "whole.jsonl", {}).summary()
    torn = _metrics(tmp_path / "torn.jsonl", {25: {"step_time_s": float("nan")}}).summary()
    for name in ("step_time_s", "tokens_per_s", "mfu"):
        assert torn[name] == pytest.approx(whole[name])


def test_speeds_are_unknown_where_no_step_has_a_duration(tmp_path: Path) -> None:
    summary = _metrics(tmp_path / "m.jsonl", {step: {"step_time_s": float("nan")} for step in range(40)}).summary()
    assert summary["step_time_s"] is None and summary["tokens_per_s"] is None and summary["mfu"] is None


def test_lost_loss_and_norm_are_told_apart_from_unrecorded_ones(tmp_path: Path) -> None:
    lost = _metrics(tmp_path / "lost.jsonl", {30: {"loss": float("nan"), "grad_norm": float("inf")}}).summary()
    assert lost["loss"] != lost["loss"] and lost["grad_norm"] == float("inf")
    nowhere = {step: {"grad_norm": None} for step in range(40)}
    assert _metrics(tmp_path / "none.jsonl", nowhere).summary()["grad_norm"] is None  # type: ignore[arg-type]
