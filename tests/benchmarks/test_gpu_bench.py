"""The benchmark of a GPU in its tiny form on the CPU: who trains the same model is compared;
others are named.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.benchmarks import gpu, train_speed


@pytest.mark.thorough
def test_the_tiny_form_runs_all_side_by_side(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    rows = {row.name: row for row in gpu.measure(tmp_path, model="tiny", rounds=1, compiled=False)}
    absent = {"torchtitan"} if importlib.util.find_spec("torchtitan") is None else set()
    present = gpu.ENTRANTS.keys() - absent
    assert {f"{name}, tiny" for name in present} < set(rows), rows
    assert {f"kit / {name}, tiny" for name in present - gpu.RECOMPUTED.keys()} < set(rows), (
        "same losses"
    )
    assert ("not measured, tiny" in rows) is bool(absent)
    assert all("No module named 'torchtitan'" in rows["not measured, tiny"].note for _ in absent)
    assert "says nothing of a GPU" in rows["matrix product, fp32"].note
    assert all(row.ok is None for row in rows.values()), "a tiny model meets no target"


def answers(step_s: float, loss: float = 9.0, **others: float) -> list[dict]:
    return [{"step_s": step_s, "step_cpu_s": step_s, "losses": [9.1, loss], **others}] * 3


def test_rows_of_a_gpu_are_judged_by_its_data_sheet() -> None:
    setup, _ = gpu.models(True)["gpt-1.4b"]
    assert gpu.datasheet_peak("NVIDIA H100 80GB HBM3") == pytest.approx(989e12, rel=0.01)
    assert gpu.datasheet_peak("Unknown") is None
    step_s = 8192 * setup.spec.flops_per_token() / (0.6 * 989e12)
    used = {"allocated_bytes": 40e9, "reserved_bytes": 44e9}
    given = {
        gpu.KIT: answers(step_s, **used),
        gpu.SELECTIVE: answers(1.1 * step_s, **used),
        gpu.PLAIN: answers(0.9 * step_s),
        "Trainer": answers(1.2 * step_s, loss=9.9),
    }
    rows = {
        row.name: row for row in gpu.judged(setup, given, {"torchtitan": "none"}, 700e12, 989e12)
    }
    sheet = rows["MFU against the data sheet, gpt-1.4b"]
    assert sheet.value == pytest.approx(0.6, rel=1e-3) and sheet.ok
    assert rows["kit / plain compiled loop, gpt-1.4b"].ok is False, (
        "a faster rival is told as it is"
    )
    assert rows["Trainer, gpt-1.4b: losses differ from the kit's"].ok is False
    assert (
        "kit / Trainer, gpt-1.4b" not in rows
        and rows["not measured, gpt-1.4b"].note == "torchtitan: none"
    )
    kept, again = (
        rows[f"{name}, gpt-1.4b: error of the estimated memory"].note for name in gpu.RECOMPUTED
    )
    assert "37.3 GiB allocated" in kept and "41.0 reserved" in kept and kept != again


def test_speeds_are_taken_after_the_warm_up(tmp_path: Path, monkeypatch) -> None:
    steps = [{"step_s": 9.0, "losses": [1.0]}, {"step_s": 2.0, "losses": [2.0]}]
    others = [steps[0], {"step_s": 3.0, "losses": [2.1]}]
    found = ({"kit": steps, "other": steps}, {})
    monkeypatch.setattr(train_speed, "take_answers", lambda *_, **__: found)
    assert train_speed.take_turns({}, tmp_path, threads=1, rounds=1) == {
        "kit": [2.0],
        "other": [2.0],
    }
    found[0]["other"] = others
    with pytest.raises(RuntimeError, match="other.*differ by 0.05"):
        train_speed.take_turns({}, tmp_path, threads=1, rounds=1)


def test_one_that_is_not_done_in_time_is_named_and_the_rest_is_not_kept(tmp_path: Path) -> None:
    setup, _ = gpu.models(False)["tiny"]
    given = {"kit": gpu.ENTRANTS[gpu.KIT]}
    limits = {
        "threads": 1,
        "rounds": 1,
        "steps": 1,
        "setup": setup,
        "together": False,
        "limit_s": 0.0,
    }
    assert train_speed.take_answers(given, tmp_path, **limits) == ({}, {"kit": "no time was left"})
