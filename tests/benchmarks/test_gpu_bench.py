"""The benchmark of a GPU in its tiny form on the CPU: all four train the same model; what is said of a GPU is right."""

from pathlib import Path

import pytest

from tests.benchmarks import gpu, train_speed


def test_the_tiny_form_runs_all_four_side_by_side(tmp_path: Path, monkeypatch) -> None:
    """They raise where losses differ; those whose speed is compared on CPUs are among them."""
    assert {each.name for each in train_speed.AS_USED.values()} < {each.name for each in gpu.ENTRANTS.values()}
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    rows = {row.name: row for row in gpu.measure(tmp_path, rounds=1, steps=1)}
    assert {f"{name}, tiny" for name in gpu.ENTRANTS} < set(rows)
    assert all(row.value > 0 for row in rows.values())
    assert "says nothing of a GPU" in rows["matrix product, fp32"].note
    assert all(row.ok is None for row in rows.values()), "a CPU meets no target of a GPU"


def test_rows_of_a_gpu_are_judged_by_its_data_sheet() -> None:
    setup = gpu.setups(True)[0]
    assert gpu.datasheet_peak("NVIDIA H100 80GB HBM3") == pytest.approx(989e12, rel=0.01)
    assert gpu.datasheet_peak("Unknown") is None
    step_s = 8192 * setup.spec.flops_per_token() / (0.6 * 989e12)
    answers = {name: [{"step_s": step_s * factor, "memory_bytes": 40e9}] for name, factor in
               zip(gpu.ENTRANTS, (1.0, 1.1, 1.2, 1.5), strict=True)}  # fmt: skip
    rows = {row.name: row for row in gpu._rows(setup, answers, 700e12, 989e12)}
    assert rows["MFU against the data sheet, gpt-1.4b"].value == pytest.approx(0.6, rel=1e-3)
    assert rows["MFU against the data sheet, gpt-1.4b"].ok and rows["kit / plain compiled loop, gpt-1.4b"].ok
    assert rows["kit / Trainer, gpt-1.4b"].ok is False, "1.2 x, where 1.3 x is wanted"
    assert rows["memory: error of the estimate, gpt-1.4b"].value >= 0
