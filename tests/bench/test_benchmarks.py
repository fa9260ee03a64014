"""The benchmarks at small sizes. They return the rows of `docs/benchmarks.md`, compare only equal
work, and compute costs correctly from records.
"""

import importlib
import importlib.util
import inspect
import multiprocessing
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.config.plan import Plan
from kit.config.recipe import DataSource, Recipe
from kit.data import training_samples
from kit.show.results import Row, row
from kit.trainer import background
from tests.bench import (
    conversion,
    data,
    data_order,
    evaluate,
    gpu,
    groups,
    growth,
    monitor,
    overhead,
    scale,
    startup,
    storage,
    train_speed,
    waits,
)
from tests.bench.__main__ import BENCHMARKS
from tests.bench.alone import Alone
from tests.bench.overhead import CHECKPOINT_EVERY, costs
from tests.bench.results import Results
from tests.support import lab
from tests.support.environments import ROOT

DOCUMENT = (ROOT / "docs/benchmarks.md").read_text()
PLAN = Plan(
    tensor_parallel=2, pipeline_parallel=4, data_parallel=2, zero_stage=1, global_batch_size=4
)
GROWN = {
    "start": (64, 128),
    "checkpoint": (64, 128),
    "steps": (100, 400),
    "documents": (100, 400),
    "order": (1000, 4000),
    "layouts": (8, 64),
    "runs": (2, 4),
    "items": (3, 6),
}
SIZES = {"search": 1024, "rank": 512, "heartbeats": 300, "monitor": 2000, "metrics": 50_000}


def documented(name: str) -> set[str]:
    """Returns the row names of a benchmark's table in the documentation, with each number replaced
    by N.
    """
    table = re.search(rf"<!-- bench:{name} -->(.*?)<!-- /bench:{name} -->", DOCUMENT, re.S)
    assert table, name
    return {_sizeless(cell) for cell in re.findall(r"^\| ([^|\s].*?) \|", table[1], re.M)}


def _sizeless(name: str) -> str:
    return re.sub(r"\d[\d,]*", "N", name)


def assert_documented(name: str, rows: list[Row]) -> dict[str, Row]:
    """Asserts that `rows` have the names of the documented table, and have values. Returns the rows
    by name.
    """
    assert {_sizeless(each.name) for each in rows} == documented(name)
    assert all(np.isfinite(each.value) and each.value >= 0 for each in rows)
    return {each.name: each for each in rows}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each isolated part of a benchmark in a fork of this process, so that modules are not
    imported again. Peak memory is not measured. `data_order` still runs in a new process.
    """

    def alone(function: Callable[..., Any], *arguments: Any) -> Alone:
        context, quiet = multiprocessing.get_context("fork"), warnings.simplefilter
        with ProcessPoolExecutor(1, context, initializer=quiet, initargs=("ignore",)) as pool:
            return Alone(pool.submit(function, *arguments).result(), 500_000_000, 0)

    for module in (conversion, growth, overhead, scale, storage):
        monkeypatch.setattr(module, "alone", alone)


def test_every_speed_table_has_a_benchmark() -> None:
    first, after = DOCUMENT.split("## How far estimates")[:2]
    names = set(re.findall(r"<!-- bench:(\w+) -->", first)) - {"compiled_demo"}
    assert names - {"compiled_llama_100m"} | {"gpu"} == set(BENCHMARKS)


def test_checkpoint_benchmark_gives_documented_rows(llama_spec, tmp_path: Path, forked) -> None:
    rows = assert_documented("checkpoints", storage.measure(tmp_path, llama_spec, pause_s=0))
    assert all(each.value > 0 for each in rows.values())


def test_planning_benchmark_times_first_and_later_save(llama_spec, tmp_path: Path, forked) -> None:
    first, later = assert_documented(
        "planning", storage.measure_planning(tmp_path, 2, llama_spec, PLAN)
    ).values()
    # The later save takes less time, but not always on a busy machine.
    assert first.name.endswith("8 ranks") and first.value > 0 and later.value > 0
    assert int(first.note.split()[0]) > 8 * 3


def test_conversion_benchmark_measures_export(llama_spec, tmp_path: Path, forked) -> None:
    spec = llama_spec.replace(name="hlat-70b")
    peak, seconds = assert_documented(
        "conversion", conversion.measure(tmp_path, spec, shard_bytes=50_000)
    ).values()
    assert peak.value == 0.5 and "to 1 files" not in peak.note and seconds.value > 0


def test_scale_benchmark_measures_every_case(tmp_path: Path, forked) -> None:
    assert set(SIZES) == set(scale.CASES)
    rows = assert_documented("scale", scale.measure(tmp_path, SIZES))
    assert len(rows) == 7 and all(each.target and each.value > 0 for each in rows.values())


@pytest.mark.slow
def test_growth_benchmark_gives_documented_rows(tiny_dataset, tmp_path: Path, forked) -> None:
    assert set(GROWN) == set(growth.KINDS)
    rows = growth.measure(tmp_path, tiny_dataset, GROWN)
    assert {_sizeless(each.name) for each in rows} == documented("growth")
    assert all(np.isfinite(each.value) and each.note.count(",") >= 2 for each in rows)


def test_growth_steeper_than_linear_is_noted() -> None:
    linear = growth.exponent_row("a", "ranks", {10: 2.0, 100: 20.0, 1000: 200.0})
    square = growth.exponent_row("b", "ranks", {10: 0.01, 100: 1.0})
    assert (linear.value, linear.ok) == (pytest.approx(1), True) and "steeper" not in linear.note
    assert (square.value, square.ok) == (pytest.approx(2), False)
    assert square.note == "steeper than linear: CPU time 0.0100, 1 s at 10, 100 ranks"


def test_step_overhead_is_split_by_component(
    tiny_dataset, spec, tmp_path: Path, monkeypatch, forked
) -> None:
    monkeypatch.setattr(overhead.heartbeat, "BEAT_EVERY_S", 0.1)
    monkeypatch.setattr(background, "PASS_EVERY_S", 0.02)
    monkeypatch.setattr(overhead.loop, "REQUESTS_MAX_STEPS", 8)
    monkeypatch.setattr(overhead.loop, "REQUESTS_EVERY_S", 60)
    found = overhead.measure_beside(tmp_path, tiny_dataset, steps=100, spec=spec)
    assert {_sizeless(each.name) for each in found} == documented("beside")
    step, look, beat, whole = found
    # The other two rows are differences of medians. On a busy machine they may be negative.
    assert step.value > 0
    assert whole.value == pytest.approx(step.value + look.value + beat.value / 2)
    assert {"hook", "telemetry", "metrics"} <= set(re.findall(r"[a-z]+", step.note))


@pytest.mark.thorough
def test_waits_benchmark_gives_documented_rows(tiny_dataset, tmp_path: Path) -> None:
    rows = assert_documented("waits", waits.measure(tmp_path, tiny_dataset, repeats=1))
    assert all(each.value > 0 for each in rows.values())


def test_ranks_join_without_a_full_mesh(tmp_path: Path) -> None:
    descriptors, to_join, in_all, _ = assert_documented(
        "groups", groups.measure(tmp_path, 12)
    ).values()
    assert descriptors.value < 2 * 12, "a full mesh has a connection to each rank in each group"
    assert to_join.value == 0 and in_all.value > 0


def test_data_benchmark_gives_documented_rows(tiny_dataset, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data, "ROUND_S", 0.02)
    rows = assert_documented("data", data.measure(tmp_path, tiny_dataset, text_bytes=50_000))
    flat, ours, ratio, tokenised = (each.value for each in rows.values())
    assert flat > 0.1 and ours > 0.1 and ratio > 0.05 and tokenised > 0


def test_data_order_benchmark_meets_its_targets(tiny_dataset, tmp_path: Path) -> None:
    """The memory of a rank and the randomness of its data order meet their targets. The sparse
    files take under 20 MB of disk.
    """
    small = {"draws": 20_000, "epochs": 20, "whole": 300_000}
    rows = [
        *assert_documented(
            "data_order", data_order.measure(tmp_path, tiny_dataset, **small)
        ).values()
    ]
    assert [each.ok for each in (rows[0], *rows[3:])] == [True] * 3, rows
    assert sum(file.stat().st_blocks for file in tmp_path.iterdir()) * 512 < 20e6


def test_batch_reads_only_its_windows(tiny_dataset, tmp_path: Path, monkeypatch) -> None:
    import kit.data.token_file as token_file

    data_order.write_sparse(tmp_path / "one", data_order.TOKENS // 2, data_order.DOCUMENTS // 2)
    reads, pread = [], token_file.os.pread
    monkeypatch.setattr(token_file.os, "pread", lambda *args: reads.append(args[1]) or pread(*args))
    sources = (DataSource(paths=(str(tmp_path / "one"),)),)
    recipe = Recipe(data=str(tiny_dataset.directory), num_steps=1, sources=sources)
    samples = training_samples(recipe, data_order.SEQUENCE_LENGTH)
    reads.clear()
    for first in (0, 10**6, 10**9):
        assert samples.batch(first, 4).shape == (4, 4097)
    assert reads == 12 * [2 * 4097]


def test_overhead_is_computed_from_time_stamps() -> None:
    steps = np.arange(1, 4 * CHECKPOINT_EVERY)
    first = (steps % CHECKPOINT_EVERY == 1) & (steps > 1)
    step_s = np.where(first, 0.75, 0.5)
    between_s = np.where(first, 0.125, 0.0625)
    metrics = {"step": steps, "step_time_s": step_s, "time": np.cumsum(step_s + between_s)}
    cost = costs(metrics)  # type: ignore[arg-type]
    assert [*cost.values()] == pytest.approx([0.5, 0.0625, 0.0625, 0.25])


@pytest.mark.thorough
def test_cold_start_benchmark_measures_each_phase(tmp_path: Path) -> None:
    """Phases that need a package index are skipped. The demo model trains on a tenth of the demo
    text.
    """
    *phases, whole = startup.measure_cold(tmp_path, install=False, text_bytes=2_400_000)
    assert phases[0].name == "git clone" and phases[-1].value > 0.5
    assert {each.name for each in (*phases, whole)} < documented("cold_start")
    assert whole.value == pytest.approx(sum(each.value for each in phases))


def test_scoring_speed_is_compared_within_rounds(monkeypatch) -> None:
    found = {
        task: {"kit": [1.0, 2.0, 4.0], "HFLM": [2.0, 6.0 + (task == "piqa") * 6, 4.0]}
        for task in evaluate.TASKS
    }
    subject = evaluate.Subject("demo model", None, None, items=10, rounds=3, batch_size=8)  # type: ignore[arg-type]
    rows = {each.name: each for each in evaluate.judged(subject, found)}
    assert set(rows) == {name for name in documented("evaluate") if "SmolLM" not in name}
    ratio = "speed of the kit / speed of HFLM, demo model"
    assert rows[f"{ratio}, piqa"].value == 2 and rows[f"{ratio}, piqa"].ok is None
    whole = rows[f"{ratio}, all tasks"]
    assert (whole.value, whole.ok, whole.note) == (2, True, "median of 3 rounds, 1 to 4")
    assert rows["scoring by the kit, demo model"].value == 5
    assert rows["scoring by lm-eval's `HFLM`, demo model"].value == 2.5
    evaluate.check_same({"kit": [(1, [-1.0, -2.0])], "HFLM": [(1, [-1.0, -2.0005])]}, "piqa")
    with pytest.raises(RuntimeError, match="differs by 0.002 nats"):
        evaluate.check_same({"kit": [(1, [-1.0, -2.0])], "HFLM": [(1, [-1.0, -2.002])]}, "piqa")


def answered(
    entrants, *_, setup=train_speed.DEMO, losses=(), step_s=(), absent=(), **__
) -> train_speed.Answers:
    """Returns simulated measurements of contestants: a warm-up step of 9 s, later steps of 1 s,
    equal losses. The arguments replace these values for single contestants.
    """
    given, used = {}, {"allocated_bytes": 40e9, "reserved_bytes": 44e9}
    for name in entrants.keys() - dict(absent).keys():
        spent, loss = dict(step_s).get(name, 1.0), dict(losses).get(name, 9.0)
        given[name] = [
            {"step_s": each, "step_cpu_s": each, "losses": [9.1, loss], **used}
            for each in (9.0, spent, spent)
        ]
    ordered = {name: given[name] for name in entrants if name in given}
    return train_speed.Answers(setup=setup, given=ordered, absent=dict(absent))


def test_speeds_exclude_warm_up_and_other_losses(tmp_path: Path, monkeypatch) -> None:
    """A contestant whose losses differ from the kit's trains another model, so no speed ratio is
    computed for it.
    """
    monkeypatch.setattr(train_speed, "take_answers", answered)
    rows = assert_documented("train_speed", train_speed.measure(tmp_path))
    assert rows["kit, 1 thread"].value == 16 * 256 and rows["kit / Trainer, 1 thread"].value == 1
    rows = assert_documented("engines", train_speed.measure_engines(tmp_path))
    assert rows["native engine, 1 thread"].value == 1000
    rows = assert_documented("optimizers", train_speed.measure_optimizers(tmp_path))
    assert rows["CPU time of a step with Muon / CPU time of a step with AdamW"].value == 1
    others = {"losses": {"plain loop": 9.9}, "step_s": {"Trainer": 3.0}, "absent": {"lost": "none"}}
    taken = answered({**train_speed.AS_USED, "lost": None}, **others)
    rows = train_speed.speeds(taken, "here", {"Trainer": 4.0, "plain loop": 1.0})
    rows = {each.name: each for each in rows}
    assert rows["kit / Trainer, here"].value == 3 and rows["kit / Trainer, here"].ok is False
    assert rows["plain loop, here: losses differ from the kit's"].ok is False
    assert "kit / plain loop, here" not in rows
    assert rows["programs that were not measured, here"].note == "lost: none"


def test_contestant_beyond_time_limit_is_named(tmp_path: Path) -> None:
    setup, steps = gpu.models(False)["tiny"]
    given = {gpu.KIT: gpu.ENTRANTS[gpu.KIT]}
    with pytest.raises(RuntimeError, match="kit did not train tiny: not measured within 0 s"):
        train_speed.take_answers(given, tmp_path, rounds=1, steps=steps, setup=setup, limit_s=0.0)


@pytest.mark.thorough
def test_gpu_benchmark_without_gpu_runs_tiny_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    rows = {row.name: row for row in gpu.measure(tmp_path, model="tiny", rounds=1, compiled=False)}
    absent = {"torchtitan"} if importlib.util.find_spec("torchtitan") is None else set()
    present = gpu.ENTRANTS.keys() - absent
    assert {f"{name}, tiny" for name in present} < set(rows), rows
    assert {f"kit / {name}, tiny" for name in present - gpu.RECOMPUTED.keys()} < set(rows), (
        "same losses"
    )
    assert ("programs that were not measured, tiny" in rows) is bool(absent)
    for name in absent:
        assert f"{name}: not installed" in rows["programs that were not measured, tiny"].note
    assert "says nothing about a GPU" in rows["rate of a matrix product, fp32"].note
    assert all(row.ok is None for row in rows.values()), "a tiny model meets no target"


@pytest.mark.thorough
def test_gpu_benchmark_dry_run_trains_one_model(tmp_path: Path) -> None:
    """All contestants compute the same losses with four micro-batches per weight update."""
    command = [sys.executable, "-m", "tests.bench.gpu", "--dry-run", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row.name: row for row in Results.read(tmp_path / "dry_run_tiny.json").rows}
    assert {"kit / Trainer, tiny", "kit / DeepSpeed ZeRO 1, tiny"} < set(rows), done.stdout
    assert "kit, tiny: error of the predicted step time" in rows


BARE = """
import importlib.machinery, importlib.metadata, re, sys
allowed = {*sys.stdlib_module_names, "kit", "cluster", "tests"}
waiting = ["torch", "numpy"]
while waiting:
    package = re.match(r"[\\w.-]+", waiting.pop())[0].lower().replace("_", "-")
    if package in allowed:
        continue
    allowed.add(package)
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        continue
    allowed |= {str(file).split("/")[0].removesuffix(".py") for file in distribution.files or ()}
    waiting += [need for need in distribution.requires or () if "extra ==" not in need]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in allowed:
            return importlib.machinery.PathFinder.find_spec(name, path, target)

sys.meta_path = [*sys.meta_path[:2], Finder()]  # after the built-in and the frozen modules
import tests.bench.gpu
from tests.bench.train_speed import not_installed
print(not_installed(tests.bench.gpu.ENTRANTS["kit"]) or "all there")
"""


def test_gpu_benchmark_needs_only_torch_and_numpy() -> None:
    """The process cannot import any other package."""
    command = [sys.executable, "-c", BARE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "all there\n", done.stderr


def test_benchmark_parameters_match_declaration() -> None:
    for name, benchmark in BENCHMARKS.items():
        module = importlib.import_module(f"tests.bench.{benchmark.module}")
        parameters = inspect.signature(getattr(module, benchmark.function)).parameters
        assert next(iter(parameters)) == "workplace", name
        assert ("dataset" in parameters) is benchmark.reads_dataset, name


def test_gpu_benchmark_keeps_results_after_a_failure(tmp_path: Path, monkeypatch, capsys) -> None:
    """The kit fails and the Trainer's package is missing. The other contestants are still
    measured.
    """
    setup, steps = gpu.models(True)["llama-1b"]

    def take(entrants, workplace, *, limit_s, **_) -> train_speed.Answers:
        limits.append(limit_s)
        if gpu.KIT in entrants:
            raise RuntimeError("kit did not train llama-1b: out of memory")
        return answered(entrants, setup=setup)

    limits: list[float] = []
    monkeypatch.setattr(gpu, "take_answers", take)
    missing = {"transformers": "not installed: accelerate"}
    monkeypatch.setattr(gpu, "not_installed", lambda entrant: missing.get(entrant.name, ""))
    taken = gpu.take_each_alone(tmp_path, setup, rounds=1, steps=steps, limit_s=100)
    assert limits == pytest.approx([20, 25, 100 / 3, 50, 100], rel=0.01), "equal shares"
    printed = capsys.readouterr().out
    assert "kit: kit did not train llama-1b: out of memory" in printed
    assert "torchtitan: 1 s per step" in printed
    rows = {row.name: row for row in gpu.judged(taken, PRODUCT, gpu.datasheet_site("H200"))}
    assert "MFU relative to the peak in the data sheet, torchtitan, llama-1b" in rows
    assert not any(each.target for each in rows.values() if "memory" not in each.name), rows
    note = rows["programs that were not measured, llama-1b"].note
    assert "out of memory" in note and "Trainer: not installed: accelerate" in note


PRODUCT = row("rate of a matrix product, bf16", 700, "TFLOP/s")


def test_gpu_rows_are_judged_by_data_sheet() -> None:
    setup, _ = gpu.models(True)["gpt-1.4b"]
    site = gpu.datasheet_site("NVIDIA H100 80GB HBM3")
    assert site is not None and gpu.datasheet_site("Unknown") is None
    assert site.peak_flops_per_s("bf16") == pytest.approx(989e12, rel=0.01)
    tokens = 4 * 8192
    unit = tokens * setup.spec.flops_per_token() / (0.6 * 989e12)
    step_s = {gpu.KIT: unit, gpu.SELECTIVE: 1.1 * unit, gpu.PLAIN: 0.9 * unit}
    taken = answered(gpu.ENTRANTS, setup=setup, step_s=step_s)
    rows = {each.name: each for each in gpu.judged(taken, PRODUCT, site)}
    sheet = rows["MFU relative to the peak in the data sheet, kit, gpt-1.4b"]
    assert sheet.value == pytest.approx(0.6, rel=1e-3) and sheet.ok
    rival = rows["MFU relative to the peak in the data sheet, plain compiled loop, gpt-1.4b"]
    assert rival.value == pytest.approx(0.6 / 0.9, rel=1e-3) and rival.ok is None
    assert rows["kit / plain compiled loop, gpt-1.4b"].ok is False, (
        "a faster rival is told as it is"
    )
    kept, again = (
        rows[f"{name}, gpt-1.4b: error of the estimated memory"].note for name in gpu.RECOMPUTED
    )
    assert "37.3 GiB allocated" in kept and "41.0 reserved" in kept and kept != again
    predicted = rows["kit, gpt-1.4b: error of the predicted step time"]
    assert f"{unit:.4g} s measured" in predicted.note and predicted.value < 0.5


def test_cpu_rows_match_documented_tables() -> None:
    for name, (setup, _) in gpu.models(False).items():
        taken = answered(gpu.ENTRANTS, setup=setup, absent={"torchtitan": "none"})
        rows = gpu.judged(taken, row("rate of a matrix product, fp32", 0.1, "TFLOP/s"), None)
        if name != "tiny":
            assert_documented(f"compiled_{name.replace('-', '_')}", rows)


def test_latency_is_from_line_to_first_picture() -> None:
    stamps = {11: 100.0, 12: 100.25, 13: 100.5}
    seen = [[10, 99_900.0], [11, 100_100.0], [13, 100_600.0], [13, 101_000.0]]
    assert monitor.latencies(stamps, seen) == pytest.approx([0.1, 0.1, 0.35])
    with pytest.raises(RuntimeError, match="Step 13 was never drawn"):
        monitor.latencies(stamps, seen[:2] + [[12, 100_600.0]])


def test_monitor_benchmark_without_browser_is_partial(tmp_path: Path, monkeypatch) -> None:
    """The cost in the kernel is measured. The rows name the quantities that were not measured."""
    monkeypatch.setattr(lab, "chromium", lambda: None)
    rows = monitor.measure(tmp_path, steps=2000)
    assert {_sizeless(each.name) for each in rows} < documented("monitor")
    assert len(rows) == 2 and all(each.value > 0 for each in rows)
    assert "not measured: " in rows[0].note and "install" in rows[0].note


def test_kit_row_has_target_and_plotly_row_has_ratio() -> None:
    """The kit's rows have the target. The rows of the plotly dashboard have the ratio."""
    ours, theirs = row("zoom", 0.15, "s", at_most=0.2), row("zoom", 0.45, "s", note="p95")
    own, other = monitor.side_by_side([ours], [theirs])
    assert own == ours and (other.name, other.ok) == ("zoom: plotly", None)
    assert other.note == "3.0 times the kit's value; p95"
