"""The benchmarks at sizes that are quick: every row is measured, like is compared with like, and
costs are read from records correctly.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kit.data import training_samples
from kit.data.tokenizer import train_tokenizer
from kit.model import build_decoder
from kit.plan import Plan
from kit.recipe import DataSource, Recipe
from tests.benchmarks import (
    conversion,
    data,
    data_order,
    gpu,
    groups,
    monitor,
    scale,
    startup,
    storage,
    train_speed,
)
from tests.benchmarks.alone import alone
from tests.benchmarks.evaluate import TASKS, Subject, _check_same, _ratios, _speeds
from tests.benchmarks.results import write_results
from tests.benchmarks.startup import CHECKPOINT_EVERY, costs
from tests.benchmarks.tables import table
from tests.browser import lab


def test_costs_are_found_in_stamps() -> None:
    steps = np.arange(1, 4 * CHECKPOINT_EVERY)
    first = (steps % CHECKPOINT_EVERY == 1) & (steps > 1)
    step_s = np.where(first, 0.75, 0.5)
    between_s = np.where(first, 0.125, 0.0625)
    metrics = {"step": steps, "step_time_s": step_s, "time": np.cumsum(step_s + between_s)}
    cost = costs(metrics)  # type: ignore[arg-type]
    assert [*cost.values()] == pytest.approx([0.5, 0.0625, 0.0625, 0.25])


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    data_order.write_sources(tmp_path)
    return tmp_path


def test_a_rank_has_room_for_any_data(tiny_dataset, sources: Path) -> None:
    assert alone("data_order", tiny_dataset.directory, sources)["memory_mb"] < 100
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


@pytest.fixture
def subject(llama_spec) -> Subject:
    tokenizer = train_tokenizer(["a line of text"], 257)
    return Subject(
        name="tiny",
        decoder=build_decoder(llama_spec),
        tokenizer=tokenizer,
        items=10,
        rounds=3,
        batch_size=8,
    )


def test_ratios_are_of_totals_within_a_round(subject: Subject) -> None:
    times = {
        "kit": {task: [1.0, 2.0, 4.0] for task in TASKS},
        "HFLM": {task: [2.0, 6.0 + (task == "piqa") * 6, 4.0] for task in TASKS},
    }
    rows = {row.name: row for row in _ratios(subject, times)}
    assert rows["kit / HFLM, tiny, piqa"].value == 2 and rows["kit / HFLM, tiny, piqa"].ok is None
    whole = rows["kit / HFLM, tiny, all"]
    assert (whole.value, whole.ok, whole.note) == (2, True, "median of 3 rounds, 1.00 to 4.00")
    speeds = {row.name: row.value for row in _speeds(subject, times)}
    assert speeds == {"kit, tiny": 5, "HFLM, tiny": 2.5}


def test_two_that_disagree_are_not_compared() -> None:
    _check_same({"kit": [-1.0, -2.0], "HFLM": [-1.0, -2.0005]}, "piqa")
    with pytest.raises(RuntimeError, match="differs by 0.002 nats"):
        _check_same({"kit": [-1.0, -2.0], "HFLM": [-1.0, -2.002]}, "piqa")


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


def _live(factor: float) -> monitor.Live:
    late = [0.1 * factor, 0.15 * factor, 0.5 * factor]
    return monitor._live(
        monitor.KIT, 0.4 * factor, late, 0.05 * factor, [0.05 * factor] * 3, 80e3, 100_000, 200_000
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
    slow = monitor._side_by_side(_live(9), _live(1))[::2]
    assert [own.ok for own in slow if own.target][:3] == [False] * 3
    assert all(other.ok is None for other in theirs), "only ours has a target"


def test_without_a_browser_the_kernel_side_is_measured_and_the_rest_named(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(lab, "chromium", lambda: None)
    rows = monitor.measure(tmp_path, steps=2000)
    assert len(rows) == 2 and all(each.value > 0 for each in rows)
    assert "not measured: " in rows[0].note and "install" in rows[0].note
    results = write_results(
        "monitor",
        rows,
        command="python -m tests.benchmarks monitor",
        load_before=0.0,
        directory=tmp_path,
    )
    assert "2,000 steps read and pictured" in table(results)


def test_groups_are_measured_both_ways(tmp_path: Path) -> None:
    rows = groups.measure(tmp_path, 12)
    before, lazy = rows[:4], rows[4:]
    assert [row.name.partition(": ")[2] for row in before] == [
        row.name.partition(": ")[2] for row in lazy
    ]
    assert (
        all(row.ok for row in lazy[:2])
        and lazy[0].value < before[0].value
        and before[1].value >= 12
    )


def test_a_plan_that_is_kept_costs_less(tmp_path: Path, llama_spec) -> None:
    plan = Plan(
        tensor_parallel=2, pipeline_parallel=4, data_parallel=2, zero_stage=1, global_batch_size=4
    )
    found = storage.seconds(tmp_path, 2, is_before=False, spec=llama_spec, plan=plan)
    assert found["ranks"] == 8 and found["items"] > 8 * 3 and found["bytes"] > 0
    assert found["seconds"][1] < found["seconds"][0]


SMALL = {"search": 1024, "rank": 512, "heartbeats": 300, "monitor": 2000, "metrics": 50_000}


def test_every_case_runs_and_is_measured(tmp_path: Path) -> None:
    assert set(SMALL) == set(scale.SIZES)
    rows = scale.measure(tmp_path, SMALL)
    assert len(rows) == 7 and all(row.target and row.value > 0 for row in rows)
    assert rows[4].name == "metrics of 50,000 steps, read with MFU" and rows[4].value > 0


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
    rows = {row.name: row for row in storage.measure(tmp_path, llama_spec, pause_s=0)}
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
        row.name: row for row in startup.measure_cold(tmp_path, install=False, text_bytes=2_400_000)
    }
    assert list(rows)[0] == "git clone" and rows["launch to first loss"].value > 0.5
    whole = rows.pop("from `git clone` to the first loss").value
    assert whole == sum(row.value for row in rows.values())


def test_an_export_is_measured(llama_spec, tmp_path: Path) -> None:
    peak, seconds = conversion.measure(tmp_path, llama_spec, shard_bytes=50_000)
    assert 0.1 < peak.value < 1.0 and "to 1 files" not in peak.note and seconds.value > 0
