"""The file of published runs: the file in the package is accepted, and common errors in its rows
are refused.
"""

import csv

import numpy as np
import pytest

from cluster.record import ConfigError
from kit.config.spec import FlopBasis
from kit.estimate.fit import published
from kit.estimate.fit.published import FILE, Basis
from kit.papers.frontier_model import FACTS

GOOD = dict(
    each.partition("=")[::2]
    for each in (
        "source=paper system=Frontier gpu=MI250X-GCD peak_tflops_bf16=191.5 gpus=128 model=GPT-175B"
        " params_b= layers=96 hidden=12288 ffn_hidden=49152 heads=96 kv_heads=96 vocab=51200"
        " seq=2048 tp=4 pp=16 virtual_stages= cp= dp=2 zero_stage=1 micro_batch=1 global_batch=320"
        " recompute=full precision=fp16 seconds_per_iter=196.09 tflops_per_gpu=37.4 mfu= hfu="
        " kind=measured status=derived basis=hw flash_attention=1 overlap= memory_gb= note="
        " code_base= compiled="
    ).split()
)


@pytest.fixture
def write(tmp_path):
    def write(*changes):
        file = tmp_path / "rows.csv"
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, GOOD)
            writer.writeheader()
            writer.writerows([GOOD | change for change in changes])
        return file

    return write


@pytest.fixture(scope="module")
def runs():
    return published.load()


def test_shipped_rows_are_accepted_and_have_a_source(runs):
    with FILE.open() as stream:
        count = sum(1 for _ in csv.DictReader(stream))
    assert count - len(runs) == 6, "six rows have no layout or no time"
    assert all(run.source and run.system for run in runs)
    assert {run.kind for run in runs} == {"measured", "oom"}
    assert all(run.step_time_s is None for run in runs if run.kind == "oom")


def test_frontier_rows_have_layout_and_batch_of_the_scripts(runs):
    """The batches that the paper itself used were not found in any source. A row with another batch
    would have a step time from memory.
    """
    rows = [run for run in runs if run.source.startswith("Dash")]
    assert [run.spec.name for run in rows] == ["GPT-22B", "GPT-175B"]
    for run in rows:
        model = run.spec.name.removeprefix("GPT-")
        for field in ("tensor_parallel", "pipeline_parallel", "global_batch_size"):
            fact = FACTS.only(f"recipe_{field}", model)
            assert fact.known == "read" and getattr(run.plan, field) == fact.number, field
        assert run.num_devices == FACTS.value("recipe_devices", model)
    (poro,) = [run for run in runs if run.spec.name == "Poro-34B"]
    assert poro.status == "read" and poro.step_time_s == pytest.approx(2048**2 / 174_378, rel=1e-4)


def test_measured_rates_stay_below_site_ceiling(runs):
    """Every machine with measured rates has a site file, whose ceiling is compared."""
    for run in runs:
        assert run.site() is not None, run.system
        rate = run.flops_per_s()
        if rate is not None and run.precision not in published.SPEEDUP:
            assert rate < 0.9 * run.site().peak_flops_per_s("bf16")


def test_selene_times_give_published_hardware_flops(runs):
    run = next(run for run in runs if run.spec.name == "GPT-1008.0B" and run.system == "Selene")
    assert run.flops_per_s(FlopBasis.MEGATRON_RECOMPUTE) == pytest.approx(163e12, rel=0.001)
    assert run.basis is Basis.HARDWARE and run.num_devices == 3072 and not run.flash_attention


@pytest.mark.parametrize(
    "gpu, site",
    [
        ("NVIDIA B200", "hgx-b200"),
        ("GB200", "gb200-nvl72"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Intel Gaudi 2", "gaudi2"),
        ("H200-141GB", "hgx-h200"),
    ],
)
def test_site_is_found_by_vendor_device_name(write, gpu, site):
    run = published.load(write(dict(gpu=gpu, system="elsewhere")))[0]
    assert run.site().name == site


def test_torch_code_base_follows_from_source(write):
    """Plain torch code is recognised by its source. Its blocks are compiled unless a row says
    otherwise. What its FSDP2 overlaps does not depend on the column `overlap`.
    """
    torch_row = dict(source="KempnerInstitute/KempnerForge (a page)", overlap="data")
    forge, eager, other, stated = published.load(
        write(torch_row, torch_row | {"compiled": "no"}, {}, {"code_base": "torchtitan"})
    )
    assert forge.code_base == "kempnerforge" and forge.compiled and not forge.data_overlap
    assert not eager.compiled and other.code_base == "" and stated.code_base == "torchtitan"
    x = published.layouts([forge, eager, other, stated])
    assert x.native.tolist() == [True, True, False, True]
    assert x.separate_inputs.tolist() == [True, True, False, False]
    assert x.recomputed_products.tolist() == [0, 0, 0, 0.5]


def test_layouts_keep_every_run_in_order(runs):
    some = runs[::97]
    layouts = published.layouts(some)
    assert layouts.shape == (len(some),)
    assert [int(n) for n in layouts.num_devices] == [run.num_devices for run in some]
    assert np.isnan(published.measured_step_seconds(some)).tolist() == [
        run.kind == "oom" for run in some
    ]


def test_frontier_log_above_ceiling_is_refused(write):
    """A row with 149 TFLOP/s is refused, 37 TFLOP/s is accepted. The log computed its TFLOP/s for
    640 micro-batches (1,280 samples), but the engine ran 160 micro-batches (320 samples).
    """
    corrected = published.load(write({}))[0]
    assert corrected.flops_per_s(FlopBasis.MEGATRON_RECOMPUTE) == pytest.approx(37.4e12, rel=0.01)
    for said in ("149.8", ""):
        with pytest.raises(ConfigError, match=r"149\.\d TFLOP/s .* above 125.*frontier.*accumul"):
            published.load(write(dict(global_batch="1280", tflops_per_gpu=said)))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(global_batch="321"), "321 sequences cannot be divided among 2 replicas"),
        (dict(dp="4"), r"dp: 4 .* Expected 2"),
        (dict(gpus="130", dp=""), "no multiple"),
        (dict(mfu="38.38"), "38 % is 0.38"),
        (dict(hfu="1.2"), "above 1 is impossible"),
        (dict(seconds_per_iter="-3"), "above 0"),
        (dict(seconds_per_iter="196 s"), "not a number"),
        (dict(seconds_per_iter="0.19609"), "TFLOP/s per device is above"),
        (dict(tflops_per_gpu="37400"), "the unit"),
        (dict(heads="95"), "num_heads"),
        (dict(recompute="ful"), "recompute: 'ful' is not known. Did you mean 'full'"),
        (dict(overlap="maybe"), "overlap: 'maybe' is not known"),
        (dict(pp="64", tp="1", layers="32"), "64 x 1 stages of 32 layers"),
    ],
)
def test_bad_row_is_refused_with_line_and_reason(write, change, message):
    with pytest.raises(ConfigError, match="line 3: .*" + message):
        published.load(write({}, change))


def test_reader_continues_after_refused_rows(write):
    """Rows with an incomplete layout or without a step time are skipped and listed."""
    timeless = dict(seconds_per_iter="", tflops_per_gpu="")
    file = write({}, dict(global_batch="321"), dict(tp=""), timeless)
    runs, refused, left_out = published.read_runs(file)
    assert len(runs) == 1 and [line for line, _ in refused] == [3]
    assert left_out == [(4, "no tp"), (5, published.TIMELESS)]


def test_kernel_columns_are_read_or_assumed(write):
    """Columns that are empty get assumed values. The column `note` is never parsed."""
    note = (
        # words in a note, which must not set any field
        "kernel=torch; sequence parallelism; TP overlap; mem 12GB"
    )
    run = published.load(write(dict(overlap="yes", memory_gb="31.5", note=note)))[0]
    assert (run.flash_attention, run.data_overlap, run.fused_softmax) == (1, True, True)
    assert not run.plan.sequence_parallel
    assert run.memory_bytes == 31.5e9 and run.assumed == () and run.note == note
    run = published.load(write(dict(flash_attention="", recompute="", micro_batch="")))[0]
    assert set(run.assumed) == {"flash_attention", "recompute", "micro_batch_size"}
    assert (run.flash_attention, run.plan.recompute, run.plan.micro_batch_size) == (2, "none", 1)


def test_seconds_follow_from_mfu_or_flops(write):
    for change in (dict(tflops_per_gpu="", mfu="0.1468"), dict(status="")):
        [run] = published.load(write(dict(seconds_per_iter="") | change))
        assert run.step_time_s == pytest.approx(196.1, rel=0.002)


def test_missing_file_and_columns_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        published.load(tmp_path / "absent.csv")
    file = tmp_path / "short.csv"
    file.write_text("source,system\na,b\n")
    with pytest.raises(ConfigError, match="columns gpu, .* are missing"):
        published.load(file)
