"""Values that are read from the logs of each trainer, and from logs of unknown trainers."""

import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.record import ConfigError
from kit.cli.app import app
from kit.config.spec import ModelSpec
from kit.errors import DataError
from kit.monitor.text import recorded_alerts
from tests.interop.conftest import DEGREES, assert_told
from tests.support import foreign_logs as logs

NONE = math.nan
LENGTH = ModelSpec.preset("demo").sequence_length
INITIALIZED = (  # the format of torchtitan/train.py
    "[rank0]:[titan] 2026-05-18 16:04:30,838 - root - INFO - Trainer is initialized with local"
    " batch size 8, global batch size 64, gradient accumulation steps 1, sequence length 2048,"
    " total steps 10000 (warmup 2)\n[rank0]:[titan] 2026-05-18 16:04:30,838 - root - INFO -"
    " Training starts at step 1\n"
)
VALIDATED = (
    "[rank0]:[titan] 2026-05-18 16:04:50,000 - root - INFO - validate step: 17  loss:  3.5  memory:"
    " 9GiB(6%)  tps: 9\n"
)
OTHER_RANK = logs.TORCHTITAN.replace("rank0", "rank1").replace("3.", "4.")
COLOURED = logs.TORCHTITAN.replace("loss:", "\x1b[32mloss:").replace("tps:", "\x1b[34mtps:")
ROUNDED = [
    (step, "1e+3" if 995 <= step <= 1004 else f"{step}.0", f"{128 * step:.2e}")
    for step in range(990, 1010)
]


def tells(text: str, batch: int | None = 8, **told: Any) -> tuple[str, int | None, dict[str, Any]]:
    """Returns (log, batch size that the user gives, expected facts of the run and values of all its
    steps).
    """
    return text, batch, told


LOGS = {
    "megatron: GPT-NeoX": tells(
        logs.NEOX,
        512,
        num_steps=50,
        step=[*range(1, 31)],
        loss=[*[7.123456] * 10, *[6.5] * 10, *[6.2] * 10],
        validation_loss=[*[NONE] * 29, 6.9],
    ),
    "megatron: GPT-NeoX of two ranks": tells(
        "".join(line * 2 for line in logs.NEOX.splitlines(keepends=True)),
        512,
        step=[*range(1, 31)],
        attempt=[1] * 30,
    ),
    "torchtitan: all that it tells": tells(
        INITIALIZED + COLOURED + OTHER_RANK + VALIDATED,
        64,
        num_steps=10000,
        step=[14, 15, 16, 17],
        loss=[3.24405, 3.1068, 3.05047, 3.14459],
        step_time_s=pytest.approx([1.118, 1.118, 1.1195, 1.1213], abs=1e-3),
        grad_norm=[0.8319, 0.8587, 0.5443, 0.5303],
        memory_bytes=[int(9.46 * 2**30)] * 4,
        tokens=[64 * 2048] * 4,
        validation_loss=[NONE, NONE, NONE, 3.5],
    ),
    "torchtitan: two ranks": tells(logs.RANKS, step=[4, 5], loss=[7.62585, 7.07623]),
    "torchtitan: a line for ten steps": tells(
        logs.EVERY_TEN,
        step=[*range(1, 31)],
        step_time_s=pytest.approx([10.483 / 9] * 10 + [1.1667] * 10 + [1.1681] * 10, rel=1e-3),
    ),
    "torchtitan: started again": tells(
        INITIALIZED
        + logs.TORCHTITAN
        + INITIALIZED.replace("step 1", "step 16")
        + "".join(logs.TORCHTITAN.splitlines(keepends=True)[2:]),
        64,
        attempts=2,
        step=[14, 15, 16, 17],
        attempt=[1, 1, 2, 2],
    ),
    "nanogpt": tells(
        logs.NANOGPT,
        step=[*range(1, 32)],
        loss=[4.2648, *[3.2202] * 10, *[2.7697] * 10, *[2.6104] * 10],
    ),
    "nanogpt: it evaluates within the time of a step, which is not taken": tells(
        logs.NANOGPT_NAN,
        step=[*range(2982, 3012)],
        loss=[*[3.8853] * 10, *[4.2490] * 10, *[NONE] * 10],
        validation_loss=[*[NONE] * 19, 4.0427, *[NONE] * 10],
        step_time_s=pytest.approx([1.09665] * 10 + [1.01995] * 20),
    ),
    "maxtext": tells(logs.MAXTEXT, step=[2, 3, 4], loss=[12.979, 12.98, 12.979]),
    "maxtext: an older one": tells(
        logs.OLD_MAXTEXT,
        step=[15108, 15109, 15110],
        loss=[2.191, 2.173, 2.191],
        validation_loss=[NONE, NONE, 9.42],
    ),
    "hf-trainer": tells(
        logs.TRAINER_STATE,
        step=[*range(1, 1501)],
        loss=[*[1.1409] * 500, *[0.6419] * 500, *[0.5212] * 500],
        validation_loss=[*[NONE] * 548, 0.6597685217857361, *[NONE] * 951],
    ),
    "nemo": tells(
        logs.NEMO + logs.NEMO.splitlines()[-1] + "\n" + logs.NEMO[:60] + "\n",
        32,
        num_steps=100,
        skipped_lines=1,
        step=[29, 30, 31],
        loss=[2.778, 2.782, 2.709],
        step_time_s=[0.189, 0.1903, 0.1915],
        total_tokens=[928 * LENGTH, 960 * LENGTH, 992 * LENGTH],
        validation_loss=[2.861, NONE, NONE],
    ),
    "nemo: its memory": tells(
        logs.NEMO_MEMORY, 128, num_steps=50, step=[50], loss=[11.96], memory_bytes=[70833405952]
    ),
    "nxdt": tells(
        "junk\n" + logs.BARS,
        None,
        global_batch_size=128,
        precision="bf16",
        num_steps=301501,
        notes="fields of recipe.json that were not given are defaults",
        step=[189, 190, 191, 192],
        loss=[7.56, 7.56, 7.91, NONE],
        grad_norm=[1950] * 4,
        step_time_s=[18.0] * 4,
        total_tokens=[128 * step * LENGTH for step in (189, 190, 191, 192)],
    ),
    "nxdt: redrawn on one long line": tells(
        "\r".join(logs.bar(step + 1, f"{step}:12") for step in range(100)),
        128,
        step=[*range(1, 101)],
    ),
    "nxdt: steps beyond the bar's precision are those of its count": tells(
        logs.short_bar(150101, "10:00", "1.5e+5", "1.92e+7", 2.1)
        + logs.short_bar(150102, "10:30", "1.5e+5", "1.92e+7", 2.2),
        128,
        step=[150101, 150102],
    ),
    # tqdm prints the counts 995 to 1004 as 1e+3, because this is shorter. The total of the progress
    # bar includes ten validation batches.
    "nxdt: steps that the bar rounds": tells(
        "".join(logs.short_bar(step + 11, f"{step}:00", *short) for step, *short in ROUNDED),
        128,
        step=[*range(991, 1011)],
    ),
    "nxdt: HLAT, a torn line": tells(
        logs.hlat(1, 5) + logs.hlat(2, 30) + logs.hlat(3, 55) + logs.hlat(1, 5)[:90] + "\n",
        1024,
        notes="prints 6,498 sequences/s, but clock and batch make 41",
        skipped_lines=1,
        step=[1, 2, 3],
        loss=[10.25, 9.25, 8.25],
        grad_norm=[3.25] * 3,
        step_time_s=[25.0] * 3,
    ),
    "nxdt: HLAT, two lines on one": tells(
        "".join(
            logs.hlat(step, 10 * step, f"{step}.25")[: 95 if step == 3 else None]
            for step in range(1, 6)
        ),
        1024,
        skipped_lines=1,
        step=[1, 2, 5],
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_log_format_is_detected_and_read(read_node, name):
    text, batch, told = LOGS[name]
    report, run = read_node(text, batch)
    told = {"format": name.partition(":")[0], "attempts": 1, "skipped_lines": 0} | told
    assert told.pop("notes", "") in " ".join(report.notes)
    assert_told(report, run, told)


def healthy(every: int, seed: int) -> list[tuple[int, float, float]]:
    """Returns (step, loss of this step, mean loss of the steps on the line) for each log line. The
    log has one line per `every` steps, 20,000 steps in all, and no loss rise.
    """
    steps = np.arange(1, 20_001)
    noise = 0.015 * np.random.default_rng(seed).normal(size=20_000)
    losses = (1.8 + 9 * steps**-0.35) * (1 + noise)
    last, means = losses[every - 1 :: every], losses.reshape(-1, every).mean(1)
    return list(zip(steps[every - 1 :: every], last, means, strict=True))


STAMPED = "[titan] 2026-05-18 16:04:47,456 - root - INFO - "
FORMS = {
    10: STAMPED + "step: {0}  loss:  {1:.5f}  memory:  9.46GiB(64.99%)  tps: 7\n",
    50: "iter {0}: loss {1:.4f}, time 893.76ms, mfu 16.68%\n",
    200: '    {{\n      "loss": {2:.4f},\n      "step": {0}\n    }},\n',
}


@pytest.mark.parametrize("every", FORMS)
def test_log_line_for_many_steps_gives_no_alert(read_node, every):
    text = "".join(FORMS[every].format(*line) for line in healthy(every, seed=every))
    report, run = read_node(('  "log_history": [\n' if every == 200 else "") + text)
    assert len(run.metrics()) > 19_900 and recorded_alerts(run) == []
    values = "the line's means" if every == 200 else "the last step's values"
    note = f"one line stands for {every} steps; each of them is recorded with {values}"
    assert note in report.notes


def test_own_pattern_reads_an_unknown_log(read_node):
    told = [f"0: it {i}/90 | {1.5 - i / 100:.2f} nats | 0.{i}0 s | lr 3e-4\n" for i in range(1, 6)]
    pattern = (
        r"it (?P<step>\d+)/(?P<total_steps>\d+) \| (?P<loss>\S+) nats \| (?P<step_time_s>\S+) s"
    )
    report, run = read_node("".join(told) + "it 9 torn\n", pattern=pattern)
    assert (report.format, report.steps, run.recipe.num_steps) == ("pattern", 5, 90)
    assert run.metrics()["step_time_s"].tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_import_detects_the_format_and_help_lists_all(log):
    log.write_text(logs.MAXTEXT)
    words = ["import", str(log), "--out", str(log.parent / "run"), "--site", "frontier"]
    words += ["--model", "demo", "--set", "plan.global_batch_size=8"]
    for name, value in DEGREES.items():
        words += ["--set", f"plan.{name}={value}"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0
    assert "maxtext: 3 steps in 1 attempt from 4 lines." in " ".join(shown.output.split())
    told = CliRunner().invoke(app, ["import", "--help"], env={"COLUMNS": "80"}).output
    for name in ("torchtitan", "nanogpt", "maxtext", "hf-trainer", "--pattern", r"\d+"):
        assert name in told


Mistake = tuple[dict[str, Any], type[Exception], str]


def other(message: str, error: type[Exception] = ConfigError, **given: Any) -> Mistake:
    """Returns a mistake of a user who imports a nanoGPT log and gives the layout, which the log
    lacks.
    """
    told = {"text": logs.NANOGPT, "model": "demo", "plan": DEGREES | {"global_batch_size": 8}}
    return told | given, error, message


def megatron(message: str, error: type[Exception] = ConfigError, **given: Any) -> Mistake:
    """Returns a mistake of a user who imports a Megatron log."""
    return {"text": logs.lumi(), "format": "megatron"} | given, error, message


LOSS = r"(?P<step>\d+)(?P<loss>x)"
TOO_FAST = r"149\.\d TFLOP/s on each of 128 devices is more than the 125\.0"
UNTOLD = {"site": "frontier", "text": logs.frontier(engine_micro_batch=None)}
MISTAKES = [
    other("no regular expression", pattern="(?P<step>"),
    other("'loss' is missing. For example", pattern=r"(?P<step>\d+)"),
    other("Did you mean 'loss'", pattern=f"{LOSS}(?P<los>x)"),
    other("as a pattern log does", DataError, pattern=r"(?P<step>x)(?P<loss>x)"),
    other("Give one of them", pattern=LOSS, format="nxdt"),
    other("as a torchtitan log does. Formats: megatron", DataError, format="torchtitan"),
    other("does not grow", text=logs.TRAINER_STATE, follow=True),
    other("a log of a known format does", DataError, text="hello\n"),
    other("'Berlin' is unknown. Give one as Europe/Berlin", **{"import": {"zone": "Berlin"}}),
    other(
        "256 sequences, but consumed_samples grows by 128",
        text=logs.BARS,
        plan=DEGREES | {"global_batch_size": 256},
    ),
    megatron("none of its 2 lines tells of a step as a megatron log", DataError, text="a\nb\n"),
    megatron("does not tell num_layers, hidden_size", text=logs.line(1)),
    megatron("does not tell num_layers, hidden_size", text=logs.NEOX, site="frontier"),
    megatron("does not tell tensor_parallel", text=logs.line(1), model="gpt-175b"),
    megatron("Did you mean 'megatron'", format="megatorn"),
    megatron("tensr", plan={"tensr": 2}),
    megatron("num_experts is 8 in the log", text=logs.modern(num_experts=8), site="dgx-h100"),
    megatron(TOO_FAST, **UNTOLD),
]


@pytest.mark.parametrize(("given", "error", "message"), MISTAKES)
def test_wrong_log_import_is_refused_before_writing(read, log, given, error, message):
    with pytest.raises(error, match=message):
        read(**given)
    assert not (log.parent / "run").exists()


def test_one_error_names_all_settings_a_log_lacks(read, log):
    with pytest.raises(ConfigError) as told:
        read(
            "Epoch 0:   0%| | 5/10 [10:00<10:00, 60.0s/it, reduced_train_loss=2.5,"
            " global_step=4.0]\n" * 2,
            "trn1.32xlarge",
        )
    layout = "--set plan.tensor_parallel=... --set plan.pipeline_parallel=..."
    for lacking in ("--model", layout, "global_batch_size"):
        assert lacking in str(told.value)
    assert len(str(told.value).splitlines()) == 3 and not (log.parent / "run").exists()


MODERN_TELLS = [
    ({"cp_comm_type": "['a2a']"}, "context_exchange", "all_to_all"),
    ({"use_torch_fsdp2": True, "pipeline_model_parallel_size": 1}, "zero_stage", 3),
    (
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
        "zero_stage",
        2,
    ),
    ({"data_parallel_sharding_strategy": "optim_grads_params"}, "zero_stage", 1),
    ({"fp8": "hybrid"}, "precision", "fp8"),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "precision", "mxfp8"),
    ({"num_experts": "[1]"}, "precision", "bf16"),
    (
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 3,
        },
        "recompute_layers",
        3,
    ),
    (
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 3,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 4,
        },
        "recompute_layers",
        12,
    ),
    (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "recompute_layers",
        None,
    ),
]


@pytest.mark.parametrize(("arguments", "field", "value"), MODERN_TELLS)
def test_current_megatron_log_gives_plan_options(read, arguments, field, value):
    assert getattr(read(logs.modern(**arguments), "dgx-h100")[1].plan, field) == value


@pytest.mark.parametrize("label", ["", "[default0]:", "0: "])
def test_current_megatron_log_gives_layout_and_steps(read, label):
    """The log ends with a loss of the test set, which must not be imported as a validation loss."""
    report, run = read(logs.modern(label), "dgx-h100")
    plan = run.plan
    assert (plan.context_parallel, plan.context_exchange) == (2, "ring")
    assert (plan.data_parallel, plan.zero_stage, plan.num_devices) == (8, 1, 64)
    assert run.spec.num_params == pytest.approx(8.03e9, rel=1e-2)
    assert report.steps == 1 + 2 * 10, (
        "the first line stands for one step, the others for ten; a gap stays one"
    )
    assert run.metrics()["validation_loss"][-1] == 2.866578, "not the test set's"


def test_given_settings_override_the_log(read):
    """The model in the log has experts, which the kit does not support. The import is refused
    unless the user gives a model.
    """
    given = {"recipe": {"num_steps": 5000}}
    run = read(logs.modern(num_experts=8), "dgx-h100", "hlat-7b", **given)[1]
    assert (run.spec.name, run.recipe.num_steps) == ("hlat-7b", 5000)


def test_lumi_log_gives_model_layout_and_published_mfu(read):
    report, run = read(logs.lumi(), format="megatron")
    assert (report.steps, report.attempts, report.skipped_lines) == (4, 1, 0)
    assert report.read(run.directory / "import.json") == report
    plan = run.plan
    assert (plan.tensor_parallel, plan.pipeline_parallel, plan.data_parallel) == (8, 8, 2)
    assert plan.recompute == "full" and run.recipe.num_steps == 143066
    assert run.spec.num_params == pytest.approx(173.4e9, rel=1e-3)
    mfu, hfu = run.metrics().mfu(), run.metrics().hfu()
    assert mfu is not None and hfu is not None
    assert hfu[-1] * 191.5 == pytest.approx(67.0, abs=0.3), "what the log prints is HFU"
    assert mfu[-1] == pytest.approx(0.263, abs=0.001)


def test_overstated_tflops_of_a_log_are_not_used(read):
    """The log prints four times the TFLOP/s that were reached. Its global batch size has four times
    as many sequences as DeepSpeed trained.
    """
    report, run = read(logs.frontier(), "frontier")
    assert run.plan.global_batch_size == 320 and set(run.metrics()["tokens"]) == {320 * 2048}
    hfu = run.metrics().hfu()
    assert hfu is not None and hfu[-1] * 191.5 == pytest.approx(37.4, abs=0.3), "not 149"
    assert any("DeepSpeed counted 4" in note and "1/4" in note for note in report.notes)
    assert any("prints 149.5 TFLOP/s" in note for note in report.notes)
    untold = logs.frontier(engine_micro_batch=None)
    _, run = read(untold, "frontier", plan={"global_batch_size": 320})
    assert set(run.metrics()["tokens"]) == {320 * 2048}, "as it can be put right"
