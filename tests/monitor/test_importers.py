"""Import of other trainers' logs.

Numbers are those of two public Megatron-DeepSpeed logs; lines are built here.
"""

import datetime
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from typer.testing import CliRunner

from cluster.record import ConfigError
from cluster.site import Site
from kit.commands.app import app
from kit.errors import DataError, RunError
from kit.foreign.importers import ImportReport, import_log
from kit.launcher import resume
from kit.monitor import alerts, run_figure, status_row, status_table
from kit.monitor.export import export_table
from kit.monitor.goodput import ledger
from kit.monitor.sinks import scalars
from kit.monitor.text import recorded_alerts
from kit.run import Run
from kit.spec import ModelSpec
from tests.monitor.recorded import looked_at

ARGUMENTS = {
    "bf16": True,
    "checkpoint_activations": True,
    "clip_grad": 1.0,
    "ffn_hidden_size": 57344,
    "hidden_size": 14336,
    "log_interval": 1,
    "lr": 6e-05,
    "micro_batch_size": 2,
    "min_lr": 6e-06,
    "num_attention_heads": 112,
    "num_layers": 70,
    "pipeline_model_parallel_size": 8,
    "seed": 42,
    "seq_length": 2048,
    "tensor_model_parallel_size": 8,
    "world_size": 128,
    "virtual_pipeline_model_parallel_size": None,
    "zero_stage": 0,
}
"""LUMI, 175B on 16 nodes: github.com/spyysalo/lumi-llm-scaling,
meg-ds/experiments/175B-scaling-comms."""
FRONTIER = {
    **ARGUMENTS,
    "bf16": False,
    "fp16": True,
    "ffn_hidden_size": 49152,
    "hidden_size": 12288,
    "micro_batch_size": 1,
    "num_attention_heads": 96,
    "num_layers": 96,
    "pipeline_model_parallel_size": 16,
    "tensor_model_parallel_size": 4,
    "zero_stage": 1.0,
}
"""The run with "149 TFLOPs": github.com/sajal-vt/Megatron-DeepSpeed-ORNL, commit ef4161a, logs/."""


def head(
    arguments: dict, *, vocabulary: int, engine_micro_batch: int | None = None, label: str = ""
) -> str:
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (49 - len(name))} {value}" for name, value in arguments.items()]
    lines += ["-------------------- end of arguments ---------------------"]
    lines += [f" > padded vocab (size: 50257) with 943 dummy tokens (new size: {vocabulary})"]
    if engine_micro_batch:
        config = (
            "[2023-11-10 13:17:25,835] [INFO] [config.py:964:print]  "
            " train_micro_batch_size_per_gpu  "
        )
        lines += [f"{config}{engine_micro_batch}"]
    return "".join(f"{label}{line}\n" for line in lines)


def line(
    step: int,
    seconds: float,
    *,
    batch: int = 1024,
    total: int = 143066,
    loss: str = "6.071495E+01",
    milliseconds: bool = False,
    tflops: float = 67.05,
) -> str:
    elapsed = f"(ms): {1000 * seconds:.1f}" if milliseconds else f"(s): {seconds:.2f}"
    return (
        f" iteration {step:8d}/{total:8d} | consumed samples: {step * batch:12d} | elapsed time per"
        f" iteration {elapsed} | learning rate: 8.388E-08 | global batch size: {batch:5d} | lm"
        f" loss: {loss} | loss scale: 1.0 | grad norm: 23.702 | number of skipped iterations:   0 |"
        f" number of nan iterations:   0 | samples per second: {batch / seconds:.3f} | TFLOPs:"
        f" {tflops:.2f} |\n"
    )


def lumi(steps: range = range(1, 5)) -> str:
    return head(ARGUMENTS, vocabulary=51200, engine_micro_batch=2, label="  0: ") + "".join(
        "127: " + line(step, 346.65) for step in steps
    )


def frontier(engine_micro_batch: int | None = 4) -> str:
    body = "".join(
        line(step, 196.5, batch=1280, total=5, milliseconds=True, tflops=149.46)
        for step in range(1, 6)
    )
    return (
        head(FRONTIER, vocabulary=50688, engine_micro_batch=engine_micro_batch)
        + body
        + "[after training is done] \n"
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


def written(log: Path, text: str) -> Path:
    log.write_text(text)
    return log


def megatron(log: Path, site: str = "lumi", **options) -> tuple[ImportReport, Run]:
    out = log.parent / "run"
    report = import_log(log, out, format="megatron", site=Site.load(site), **options)
    return report, Run.open(out)


MODERN = {
    "bf16": True,
    "context_parallel_size": 2,
    "cp_comm_type": "['p2p']",
    "fp8": None,
    "fp8_recipe": "delayed",
    "group_query_attention": True,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "log_interval": 10,
    "lr": 3e-4,
    "micro_batch_size": 1,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "normalization": "RMSNorm",
    "num_attention_heads": 32,
    "num_experts": None,
    "num_layers": 32,
    "num_query_groups": 8,
    "pipeline_model_parallel_size": 2,
    "position_embedding_type": "rope",
    "recompute_granularity": "selective",
    "seq_length": 8192,
    "sequence_parallel": True,
    "swiglu": True,
    "tensor_model_parallel_size": 2,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "window_size": None,
    "world_size": 64,
}
"""Arguments of today's Megatron-LM, by the names and values that its logs have:
megatron/training/arguments.py."""
ENDING = """\
------------------------------------------------------------------------------------------------
 validation loss at iteration 2500 | lm loss value: 2.866578E+00 | lm loss PPL: 1.757677E+01 |
------------------------------------------------------------------------------------------------
[after training is done] datetime: 2025-04-14 18:16:35
 validation loss at iteration 2500 on test set | lm loss value: 2.867433E+00 | lm loss PPL: 1.759179E+01 |
"""  # noqa: E501
"""As Megatron-LM ends; numbers of a public log."""


def modern(log: Path, label: str = "", **arguments) -> tuple[ImportReport, Run]:
    steps = "".join(
        f" [2025-04-14 18:16:{second:02}.123456] iteration {step:8d}/    2500 | consumed samples:"
        f" {step * 64:12d} | elapsed time per iteration (ms): 6000.8 | throughput per GPU"
        " (TFLOP/s/GPU): 390.1 | learning rate: 1.001599E-05 | global batch size:    64 | lm loss:"
        " 2.895528E+00 | loss scale: 1.0 | grad norm: 1.101 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |\n"
        for step, second in ((1, 1), (2490, 33), (2500, 34))
    )
    log.write_text(head({**MODERN, **arguments}, vocabulary=128256, label=label) + steps + ENDING)
    return megatron(log, "dgx-h100")


@pytest.mark.parametrize("label", ["", "[default0]:", "0: "])
def test_todays_megatron_tells_context_parallelism_shards_and_ends_with_another_set(
    log: Path, label: str
) -> None:
    report, run = modern(log, label)
    plan = run.plan
    assert (plan.context_parallel, plan.context_exchange, plan.data_parallel, plan.zero_stage) == (
        2,
        "ring",
        8,
        1,
    )
    assert plan.num_devices == 64 and run.spec.num_params == pytest.approx(8.03e9, rel=1e-2)
    assert report.steps == 1 + 2 * 10, (
        "the first line stands for one step, the others for ten; a gap stays one"
    )
    assert run.metrics()["validation_loss"][-1] == 2.866578, "not the test set's"


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
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
    ],
)
def test_todays_megatron_tells_its_options(
    log: Path, arguments: dict, field: str, value: object
) -> None:
    assert getattr(modern(log, **arguments)[1].plan, field) == value


def test_model_with_other_work_a_token_is_refused_until_one_is_given(log: Path) -> None:
    with pytest.raises(ConfigError, match="num_experts is 8 in the log"):
        modern(log, num_experts=8)
    assert not (log.parent / "run").exists()
    _, run = megatron(log, "dgx-h100", spec=ModelSpec.preset("hlat-7b"))
    assert run.spec.name == "hlat-7b"


NEOX = """\
-------------------- arguments --------------------
  hidden_size ..................... 64..........................updated
  world_size ...................... 8...........................updated
---------------- end of arguments ----------------
 samples/sec: 51.234 | iteration       10/      50 | elapsed time per iteration (ms): 9876.5 | learning rate: 1.234E-04 | approx flops per GPU: 150.3TFLOPS | lm_loss: 7.123456E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |
 samples/sec: 51.234 | iteration       20/      50 | elapsed time per iteration (ms): 9876.5 | learning rate: 1.234E-04 | approx flops per GPU: 150.3TFLOPS | lm_loss: 6.5E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |
 samples/sec: 51.234 | iteration       30/      50 | elapsed time per iteration (ms): 9876.5 | learning rate: 1.234E-04 | approx flops per GPU: 150.3TFLOPS | lm_loss: 6.2E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |
 validation results at iteration 30 | lm_loss value: 6.9E+00 | lm_loss_ppl value: 9.9E+02 |
"""  # noqa: E501
"""As megatron/logging.py and neox_args.py of github.com/EleutherAI/gpt-neox print it."""


def test_gpt_neox_tells_steps_and_losses_but_not_the_model(log: Path) -> None:
    with pytest.raises(ConfigError, match="does not tell num_layers, hidden_size"):
        megatron(written(log, NEOX), "frontier")
    plan = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 8,
        "global_batch_size": 512,
    }
    _, run = megatron(log, "frontier", spec=ModelSpec.preset("demo"), changes={"plan": plan})
    metrics = run.metrics()
    assert metrics["step"].tolist() == list(range(1, 31)) and metrics["loss"][[9, 29]].tolist() == [
        7.123456,
        6.2,
    ]
    assert metrics["validation_loss"][-1] == 6.9 and run.recipe.num_steps == 50
    twice = written(log, "".join(line * 2 for line in NEOX.splitlines(keepends=True)))
    again = megatron(twice, "frontier", spec=ModelSpec.preset("demo"), changes={"plan": plan})[
        1
    ].metrics()
    assert again["step"].tolist() == metrics["step"].tolist(), "as two ranks print them"
    assert set(again["attempt"]) == {1}


def test_lumi_log_gives_model_layout_and_the_published_utilisation(log: Path) -> None:
    report, run = megatron(written(log, lumi()))
    assert (report.steps, report.attempts, report.skipped_lines) == (4, 1, 0)
    assert ImportReport.read(run.directory / "import.json") == report
    plan = run.plan
    assert (plan.tensor_parallel, plan.pipeline_parallel, plan.data_parallel, plan.recompute) == (
        8,
        8,
        2,
        "full",
    )
    assert (
        run.spec.num_params == pytest.approx(173.4e9, rel=1e-3) and run.recipe.num_steps == 143066
    )
    mfu, hfu = run.metrics().mfu(), run.metrics().hfu()
    assert mfu is not None and hfu is not None
    assert hfu[-1] * 191.5 == pytest.approx(67.0, abs=0.3), "what the log prints is HFU"
    assert mfu[-1] == pytest.approx(0.263, abs=0.001)


def test_tflops_of_a_log_whose_engine_ran_a_quarter_are_not_believed(log: Path) -> None:
    report, run = megatron(written(log, frontier()), "frontier")
    assert run.plan.global_batch_size == 320 and set(run.metrics()["tokens"]) == {320 * 2048}
    hfu = run.metrics().hfu()
    assert hfu is not None and hfu[-1] * 191.5 == pytest.approx(37.4, abs=0.3), "not 149"
    assert any("DeepSpeed counted 4" in note and "1/4" in note for note in report.notes)
    assert any("prints 149.5 TFLOP/s" in note for note in report.notes)


def test_steps_faster_than_matrix_products_are_refused_and_can_be_put_right(log: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"149\.\d TFLOP/s on each of 128 devices is more than the 125\.0"
    ):
        megatron(written(log, frontier(engine_micro_batch=None)), "frontier")
    assert not (log.parent / "run").exists(), "nothing was written"
    _, run = megatron(log, "frontier", changes={"plan": {"global_batch_size": 320}})
    assert set(run.metrics()["tokens"]) == {320 * 2048}


def test_views_work_on_an_imported_run(log: Path) -> None:
    _, run = megatron(written(log, frontier()), "frontier")
    row = status_row(run)
    assert (row["state"], row["step"], row["num_steps"]) == ("imported", 5, 5)
    assert row["reason"] == "the log says that training is done, at step 5"
    assert status_table(run) and len(run_figure(run)[1]["step"]) == 5
    dashboard = looked_at(run)
    rows = [json.loads(row) for row in (run.directory / "metrics.jsonl").read_text().splitlines()]
    told = [
        dashboard.facts()["hfu"],
        export_table(run)["hfu"].to_pylist()[-1],
        scalars(run, rows)[-1]["hfu"],
    ]
    assert told == pytest.approx([37.4 / 191.5] * 3, rel=0.01), (
        "the whole block again, as Megatron runs and counts it"
    )
    assert "149.46" in run.job.logs()


@pytest.mark.parametrize("age_s", [0, 1e6])
def test_nothing_is_judged_here_and_now_of_a_log_that_nobody_follows(
    log: Path, age_s: float, monkeypatch
) -> None:
    changed = time.time() - age_s
    log.write_text(
        head(ARGUMENTS, vocabulary=51200) + "".join(line(step, 346.0) for step in range(1, 9))
    )
    os.utime(log, (changed, changed))
    _, run = megatron(log, changes={"recipe": {"checkpoint_every": 2}})
    row = status_row(run)
    assert (row["state"], row["reason"]) == ("imported", "the log was read to its end, at step 8")
    assert row["eta_s"] is None and run.metrics()["time"].tolist() == pytest.approx(
        [changed - 346 * i for i in range(7, -1, -1)]
    ), "counted back from its last change"
    monkeypatch.setattr(
        alerts.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})()
    )
    dashboard = looked_at(run)
    now = alerts.time.monotonic()
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now + 1e6)
    dashboard.look()
    facts = dashboard.facts()
    assert "iteration        8/" in dashboard.log(), "its log is a link, and is read all the same"
    assert (
        recorded_alerts(run) == dashboard.alerts() == []
        and facts["eta_s"] is None
        and facts["allowed"] == []
    )
    with pytest.raises(RunError, match="nothing to stop, it was imported"):
        CliRunner().invoke(app, ["stop", str(run.directory)], catch_exceptions=False)
    with pytest.raises(RunError, match="was imported from a log"):
        resume(run.directory)


def test_a_log_that_is_followed_is_judged_as_far_as_it_tells(log: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        alerts.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})()
    )
    log.write_text(lumi(range(1, 9)))
    seen = []

    def look(_: float) -> None:
        run = Run.open(log.parent / "run")
        dashboard = looked_at(run)
        now = alerts.time.monotonic()
        with pytest.MonkeyPatch.context() as later:
            later.setattr(alerts.time, "monotonic", lambda: now + 1e5)
            dashboard.look()
        seen.append((status_row(run)["state"], [alert["kind"] for alert in dashboard.alerts()]))
        raise KeyboardInterrupt

    changes = {"recipe": {"checkpoint_every": 2}}
    _, run = megatron(log, changes=changes, follow=True, idle=look)
    assert seen == [("running", ["stall"])], "not our disk, nor checkpoints that are elsewhere"
    assert status_row(run)["state"] == "imported", "nobody follows it any more"


def test_time_stamps_of_lines_are_used(log: Path) -> None:
    stamped = "".join(
        f" [2025-04-13 23:4{step}:12]" + line(step, 50.0, tflops=400) for step in range(1, 4)
    )
    log.write_text(head(ARGUMENTS, vocabulary=51200) + stamped)
    small = {"num_layers": 2}  # so that 50 s are believable
    times = megatron(log, changes={"spec": small})[1].metrics()["time"]
    assert (times[1:] - times[:-1]).tolist() == [60.0, 60.0]


TITAN = (
    "[rank0]:[titan] {:%Y-%m-%d %H:%M:%S},000 - root - INFO - step: {:2d}  loss:  {:.5f} "
    " grad_norm:  0.8319  "
)
TITAN += "memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%\n"
"""A line of torchtitan, as in `test_formats.py`."""


def titan(log: Path, times: list[datetime.datetime], **given: str) -> tuple[ImportReport, Run]:
    log.write_text(
        "".join(TITAN.format(when, step, 3 - step / 100) for step, when in enumerate(times, 1))
    )
    plan = {
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 8,
        "global_batch_size": 8,
    }
    site, spec = Site.load("trn1.32xlarge"), ModelSpec.preset("llama3-8b")
    report = import_log(
        log, log.parent / "run", site=site, spec=spec, changes={"plan": plan, "import": given}
    )
    return report, Run.open(log.parent / "run")


def test_an_imported_run_ends_with_its_last_line_however_old_the_file_is(log: Path) -> None:
    first = datetime.datetime(2025, 6, 1, 12)
    # Copied today.
    _, run = titan(log, [first + datetime.timedelta(minutes=10 * i) for i in range(12)])
    found = ledger(run)
    assert found.goodput == 1 and found.wall_s == pytest.approx(2 * 3600)
    assert found.usd == pytest.approx(2 * 21.50), "two hours of one node"


@pytest.fixture
def berlin(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("night", ["2025-10-26 01:30", "2025-03-30 01:30"])
def test_stamps_are_utc_wherever_they_are_read_and_when_clocks_change(
    log: Path, berlin, night: str
) -> None:
    first = datetime.datetime.fromisoformat(night)
    report, run = titan(log, [first + datetime.timedelta(minutes=10 * i) for i in range(12)])
    assert (
        set(run.metrics()["step_time_s"]) == {600.0} and ledger(run).seconds["productive"] == 7200
    )
    assert run.metrics()["time"][0] == first.replace(tzinfo=datetime.UTC).timestamp()
    assert any("read as UTC" in note for note in report.notes)


@pytest.mark.parametrize("night", ["2025-10-25 23:30", "2025-03-29 23:30"])
def test_stamps_of_a_stated_zone_do_not_jump_where_its_clocks_change(log: Path, night: str) -> None:
    zone, first = (
        ZoneInfo("Europe/Berlin"),
        datetime.datetime.fromisoformat(night).replace(tzinfo=datetime.UTC),
    )
    local = [(first + datetime.timedelta(minutes=10 * i)).astimezone(zone) for i in range(18)]
    _, run = titan(log, local, zone="Europe/Berlin")
    assert (
        set(run.metrics()["step_time_s"]) == {600.0}
        and run.metrics()["time"][0] == first.timestamp()
    )
    with pytest.raises(ConfigError, match="'Berlin' is unknown. Give one as Europe/Berlin"):
        titan(log, local, zone="Berlin")


def test_a_stamp_with_its_own_offset_is_of_no_other_zone(log: Path) -> None:
    log.write_text(
        "".join(f"2025-06-01T12:0{step}:00+02:00 it {step} loss=2.{step}\n" for step in (1, 2, 3))
    )
    run = log.parent / "run"
    report = import_log(
        log,
        run,
        site=Site.load("trn1.32xlarge"),
        spec=ModelSpec.preset("demo"),
        pattern=r"(?P<time>\S+) it (?P<step>\d+) loss=(?P<loss>\S+)",
        changes={"plan": {**LAYOUT, "global_batch_size": 8}},
    )
    times = Run.open(run).metrics()["time"]
    assert times[0] == datetime.datetime(2025, 6, 1, 10, 1, tzinfo=datetime.UTC).timestamp()
    assert not any("zone" in note for note in report.notes)


def test_tokens_are_those_that_the_log_counts(log: Path) -> None:
    """Iterations 5,001 to 5,100 of a batch that was 16 before: what was seen cannot be told from
    these steps.
    """
    lines = "".join(
        line(step, 60.0, batch=32, tflops=390).replace(
            f"{32 * step:12d}", f"{16 * 5000 + 32 * (step - 5000):12d}"
        )
        for step in range(5010, 5101, 10)
    )
    _, run = megatron(
        written(log, head({**MODERN, "log_interval": 10}, vocabulary=128256) + lines), "dgx-h100"
    )
    seen = [(16 * 5000 + 32 * number) * 8192 for number in range(1, 101)]
    assert run.metrics().total_tokens.tolist() == seen
    dashboard = looked_at(run)
    assert dashboard.facts()["tokens"] == status_row(run)["tokens"] == seen[-1]
    assert export_table(run)["total_tokens"].to_pylist() == seen


def test_tokens_of_sequences_that_grew_are_those_that_the_log_counts(log: Path) -> None:
    """Megatron-DeepSpeed's curriculum: 3,000 steps of 1,024 tokens a sequence were seen before
    these of 2,048.
    """
    seen = [(3000 * 1024 + number * 2048) * 1024 for number in range(1, 5)]
    lines = [
        line(step, 346.65).replace(
            "| elapsed", f"| consumed tokens: {tokens:12d} | actual seqlen: 2048 | elapsed"
        )
        for step, tokens in enumerate(seen, 3001)
    ]
    assert (
        megatron(written(log, head(ARGUMENTS, vocabulary=51200) + "".join(lines)))[1]
        .metrics()
        .total_tokens.tolist()
        == seen
    )


def test_restart_is_a_new_attempt_and_a_line_printed_twice_is_not(log: Path) -> None:
    start = head(ARGUMENTS, vocabulary=51200)
    report, run = megatron(
        written(
            log,
            start
            + "".join(line(s, 346.0) for s in (1, 2, 3, 3, 4))
            + start
            + "".join(line(s, 350.0) for s in (3, 4, 5)),
        )
    )
    assert (report.attempts, report.steps) == (2, 7)
    metrics = run.metrics()
    assert metrics["step"].tolist() == [1, 2, 3, 4, 5] and metrics["attempt"].tolist() == [
        1,
        1,
        2,
        2,
        2,
    ]
    assert sorted(run.plans()) == [1, 2]


def test_second_import_of_a_log_that_began_anew_keeps_nothing_of_the_first(log: Path) -> None:
    start = head(ARGUMENTS, vocabulary=51200)
    assert (
        megatron(
            written(log, start + "".join(line(s, 346.0) for s in (1, 2)) + start + line(2, 350.0))
        )[0].attempts
        == 2
    )
    report, run = megatron(written(log, start + line(1, 346.0)))
    assert report.attempts == 1 and sorted(run.plans()) == [1]
    assert run.job.status().attempt == 1 and len(run.job.history) == 1


def test_restart_without_arguments_is_seen_by_its_repeated_steps(log: Path) -> None:
    steps = [line(step, 346.0) for step in (1, 2, 3)] + [line(step, 350.0) for step in (2, 3)]
    report, run = megatron(written(log, head(ARGUMENTS, vocabulary=51200) + "".join(steps)))
    assert report.attempts == 2 and run.metrics()["attempt"].tolist() == [1, 2, 2]


def test_torn_mixed_reordered_and_foreign_lines(log: Path) -> None:
    torn, mixed = line(3, 346.0)[:120] + "\n", line(4, 346.0)[:90] + line(5, 346.0)
    body = (
        line(1, 346.0)
        + "srun: error: node died\n\x00\xff\n"
        + torn
        + mixed
        + line(7, 346.0)
        + line(6, 346.0)
        + line(8, 346.0)[:-9]
    )
    log.write_bytes((head(ARGUMENTS, vocabulary=51200) + body).encode("latin-1"))
    report, run = megatron(log)
    assert run.metrics()["step"].tolist() == [1, 6, 7] and report.attempts == 1
    assert report.skipped_lines == 2, "the last line has no end yet and is not counted"


def test_nan_loss_and_skipped_steps_are_kept_as_they_are(log: Path) -> None:
    no_loss = line(2, 346.0).replace(" lm loss: 6.071495E+01 |", "")
    report, run = megatron(
        written(
            log,
            head(ARGUMENTS, vocabulary=51200)
            + line(1, 346.0, loss="nan")
            + no_loss
            + line(3, 346.0, loss="inf"),
        )
    )
    losses = run.metrics()["loss"]
    assert report.attempts == 1, "the same line twice, though NaN is not equal to NaN"
    assert math.isnan(losses[0]) and math.isnan(losses[1]) and math.isinf(losses[2])


def test_line_for_several_steps_counts_for_each_of_them(log: Path) -> None:
    arguments = {**ARGUMENTS, "log_interval": 10}
    report, run = megatron(
        written(
            log,
            head(arguments, vocabulary=51200) + "".join(line(step, 346.0) for step in (10, 20, 50)),
        )
    )
    assert run.metrics()["step"].tolist() == [*range(1, 21), *range(41, 51)], "a gap stays a gap"
    assert any(
        note == "one line stands for 10 steps; each of them is recorded with the line's means"
        for note in report.notes
    )


def lines_of(every: int, losses: list[float], changed: dict[int, str] | None = None) -> str:
    """Returns a log with a line for many steps; `changed` has the ends of some lines, from the
    loss on, by number.
    """
    arguments = {
        **ARGUMENTS,
        "log_interval": every,
        "hidden_size": 1024,
        "num_layers": 24,
        "bf16": False,
        "fp16": True,
        "num_attention_heads": 16,
        "ffn_hidden_size": 4096,
        "seq_length": 512,
    }
    text = head(arguments, vocabulary=51200)
    for number, loss in enumerate(losses, 1):
        said = line(number * every, 20.0, loss=f"{loss:.6E}", tflops=1)
        before, _, after = said.partition(" lm loss:")
        text += (
            before + changed[number] + "\n"
            if number in (changed or {})
            else before + " lm loss:" + after
        )
    return text


def alerts_of(log: Path) -> list[tuple[str, int, str]]:
    _, run = megatron(log)
    return [(alert.kind, alert.step, alert.message) for alert in recorded_alerts(run)]


BLOWN_UP = [
    9.61,
    8.12,
    7.2,
    6.5,
    5.95,
    5.5,
    5.12,
    4.8,
    4.52,
    4.28,
    4.08,
    3.92,
    3.78,
    3.66,
    3.56,
    4.61,
    5.19,
    5.48,
    5.7,
    5.89,
    6.03,
    6.15,
    6.24,
    6.31,
    6.42,
    6.48,
    6.55,
    6.61,
    6.66,
    6.7,
    6.74,
    6.77,
    6.81,
    6.83,
    6.87,
    6.89,
    6.92,
    6.94,
]
"""A line for 200 steps. Lowest 3.56 at step 3,000 and 6.94 at 7,600 are of a public run of 350M on
LUMI, 4-alibi-bf16-nods; what is between them is made up."""


def test_a_public_blow_up_is_one_rise_that_names_the_lowest_step(log: Path) -> None:
    ((kind, step, message),) = alerts_of(written(log, lines_of(200, BLOWN_UP)))
    assert kind == "rise" and 3201 <= step <= 3400
    assert (
        message
        == "lowest 3.56 at step 3,000, now 5.19 and not back for 400 steps; go back to a checkpoint"
        " before it, unless the data became harder"
    )
    assert (
        alerts_of(written(log, lines_of(200, BLOWN_UP[:16] + [3.51, 3.45, 3.4, 3.36, 3.33, 3.3])))
        == []
    ), "a bump of one line"


NAN_LINE = (
    " loss scale: 1.0 | grad norm: 0.000 | number of skipped iterations:  81 | number of nan"
    " iterations:  81 | samples per second: 51.200 | TFLOPs: 1.00 |"
)
SKIPPED = (
    " loss scale: {} | number of skipped iterations:   1 | number of nan iterations:   0 | "
    "samples per second: 51.200 | TFLOPs: 1.00 |"
)


def test_what_megatron_says_of_nan_and_the_loss_scale_is_read(log: Path) -> None:
    """As its `training_log` prints it: steps with NaN are counted, and left out of the mean
    loss.
    """
    scaled = lines_of(200, BLOWN_UP[:9], {7: " lm loss: 1.110000E+01 |" + NAN_LINE}).replace(
        "loss scale: 1.0 | grad norm: 23", "loss scale: 65536.0 | grad norm: 23"
    )
    found = alerts_of(written(log, scaled))
    assert found[0] == ("nan", 1201, "the loss of 81 of 200 steps is not finite")
    assert (
        found[1][:2] == ("loss_scale", 1201)
        and "fell to 1, from up to 65,536" in found[1][2]
        and len(found) == 2
    )
    assert alerts_of(
        written(log, scaled.replace("81 |", "200 |").replace("lm loss: 1.110000E+01 |", ""))
    )[0] == (
        "nan",
        1201,
        "the loss of 200 steps is not finite",
    ), "and no loss is printed"


def test_steps_skipped_to_find_the_loss_scale_are_no_alarm(log: Path) -> None:
    skipped = {
        number: SKIPPED.format(2.0 ** max(16, 33 - number)) for number in (*range(1, 16), 40)
    }
    text = lines_of(1, [10.9 - 0.02 * number for number in range(1, 60)], skipped)
    assert (
        alerts_of(written(log, text.replace("loss scale: 1.0 |", "loss scale: 131072.0 |"))) == []
    )
    assert [
        (kind, step)
        for kind, step, _ in alerts_of(
            written(
                log,
                text.replace("loss scale: 1.0 |", "loss scale: 131072.0 |").replace(
                    "1.030000E+01", "nan"
                ),
            )
        )
    ] == [("nan", 30)]


def test_validation_loss_belongs_to_its_step(log: Path) -> None:
    said = (
        " validation loss at iteration 2 | lm loss value: 1.111471E+01 | lm loss PPL: 6.715179E+04"
        " | \n"
    )
    metrics = megatron(
        written(
            log,
            head(ARGUMENTS, vocabulary=51200)
            + line(1, 346.0)
            + line(2, 346.0)
            + said
            + line(3, 346.0),
        )
    )[1].metrics()
    assert metrics["validation_loss"][1] == pytest.approx(11.11471) and math.isnan(
        metrics["validation_loss"][2]
    )


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        (
            "hello\nworld\n",
            {},
            DataError,
            "none of its 2 lines tells of a step as a megatron log does",
        ),
        (line(1, 346.0), {}, ConfigError, "does not tell num_layers, hidden_size"),
        (
            line(1, 346.0),
            {"spec": ModelSpec.preset("gpt-175b")},
            ConfigError,
            "does not tell tensor_parallel",
        ),
        (lumi(), {"format": "megatorn"}, ConfigError, "Did you mean 'megatron'"),
        (lumi(), {"changes": {"plan": {"tensr": 2}}}, ConfigError, "tensr"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    log: Path, text: str, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        import_log(
            written(log, text),
            log.parent / "run",
            **{"format": "megatron", "site": Site.load("lumi"), **options},
        )
    assert not (log.parent / "run").exists()


def test_all_that_a_log_lacks_is_told_at_once(log: Path) -> None:
    with pytest.raises(ConfigError) as told:
        import_log(
            written(
                log,
                "Epoch 0:   0%| | 5/10 [10:00<10:00, 60.0s/it, reduced_train_loss=2.5,"
                " global_step=4.0]\n" * 2,
            ),
            log.parent / "run",
            site=Site.load("trn1.32xlarge"),
        )
    for lacking in (
        "--model",
        "--set plan.tensor_parallel=... --set plan.pipeline_parallel=...",
        "global_batch_size",
    ):
        assert lacking in str(told.value)
    assert len(str(told.value).splitlines()) == 3 and not (log.parent / "run").exists()


def test_missing_log_and_a_directory_of_someone_else(log: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        megatron(log)
    log.write_text(lumi())
    (log.parent / "run").mkdir()
    (log.parent / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="was not imported from"):
        megatron(log)
    assert [file.name for file in (log.parent / "run").iterdir()] == ["thesis.txt"]


def test_follow_records_what_the_log_gains_until_training_is_done(log: Path) -> None:
    text = frontier().splitlines(keepends=True)
    first = next(i for i, found in enumerate(text) if " iteration " in found)
    log.write_text("".join(text[: first + 1]))
    parts = iter(["".join(text[first + 1 : first + 2])[:50], "".join(text[first + 1 :])])

    def grow(_: float) -> None:
        # The second part repeats the start of a line whose first half is there already.
        with log.open("a") as stream:
            part = next(parts)
            stream.write(part if len(part) == 50 else part[50:])

    report, run = megatron(log, "frontier", follow=True, idle=grow)
    assert (report.steps, report.skipped_lines) == (5, 0) and run.metrics()["step"].tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert status_row(run)["state"] == "imported"


@pytest.mark.parametrize("deleted", ["log", "run"])
def test_follow_ends_when_log_or_run_is_deleted(log: Path, deleted: str) -> None:
    log.write_text(lumi())
    out = log.parent / "run"
    report = import_log(
        log,
        out,
        format="megatron",
        site=Site.load("lumi"),
        follow=True,
        idle=lambda _: log.unlink() if deleted == "log" else shutil.rmtree(out),
    )
    assert report.steps == 4 and out.exists() == (deleted == "log")
    assert deleted == "run" or status_row(Run.open(out))["state"] == "imported"


BARS = "\r".join(
    f"Epoch 0:   0%|          | {step}/301501 [{clock}<1573:03:24, 18.79s/it, loss=7.75,"
    f" v_num=3-16, reduced_train_loss={loss}, lr=0.0003, global_step={step - 1}.0,"
    f" consumed_samples={128 * (step - 1)}.0, throughput=7.11, gradient_norm=1.95e+3]"
    for step, clock, loss in (
        (189, "59:12", "7.560"),
        (190, "59:30", "7.560"),
        (190, "59:30", "7.560"),
        (191, "59:48", "7.910"),
        (192, "1:00:06", "nan"),
    )
)
"""As in the AWS Neuron documentation, NxDT pre-training tutorial; redrawn on one line, the last
without an end."""
LAYOUT = {"tensor_parallel": 8, "pipeline_parallel": 1, "data_parallel": 4}


def nxdt(log: Path, plan: dict, **options) -> tuple[ImportReport, Run]:
    spec, site, out = ModelSpec.preset("hlat-7b"), Site.load("trn1.32xlarge"), log.parent / "run"
    report = import_log(
        log, out, format="nxdt", site=site, spec=spec, changes={"plan": plan, **options}
    )
    return report, Run.open(out)


def test_nxdt_progress_bar_gives_steps_batch_and_times_from_its_clock(log: Path) -> None:
    report, run = nxdt(written(log, "junk\n" + BARS), LAYOUT)
    metrics = run.metrics()
    assert metrics["step"].tolist() == [189, 190, 191, 192] and report.attempts == 1
    assert run.plan.global_batch_size == 128 and run.plan.precision == "bf16"
    assert metrics["step_time_s"].tolist() == [18.0] * 4 and metrics["grad_norm"][0] == 1950
    assert metrics.total_tokens.tolist() == [128 * step * 4096 for step in (189, 190, 191, 192)]
    assert math.isnan(metrics["loss"][-1]) and run.recipe.num_steps == 301501
    assert any("defaults" in note for note in report.notes)


def test_nxdt_batch_that_contradicts_the_log_is_refused(log: Path) -> None:
    with pytest.raises(ConfigError, match="256 sequences, but consumed_samples grows by 128"):
        nxdt(written(log, BARS), {**LAYOUT, "global_batch_size": 256})


def test_nxdt_steps_beyond_the_bars_precision_come_from_its_count(log: Path) -> None:
    _, run = nxdt(
        written(
            log,
            "".join(
                f"Epoch 0:  50%|xx| {step}/301501 [{clock}<1:00, 18.79s/it,"
                f" reduced_train_loss={loss}, global_step=1.5e+5, consumed_samples=1.92e+7]\n"
                for step, clock, loss in ((150101, "10:00", 2.1), (150102, "10:30", 2.2))
            ),
        ),
        {**LAYOUT, "global_batch_size": 128},
    )
    assert run.metrics()["step"].tolist() == [150101, 150102]


def test_nxdt_steps_that_a_bar_rounds_are_no_repeats(log: Path) -> None:
    """tqdm writes 995 to 1004 as 1e+3, which is shorter; ten held-out batches are in the bar's
    own count as well.
    """
    report, run = nxdt(
        written(
            log,
            "".join(
                f"Epoch 0:   3%|xx| {step + 11}/301501 [{step}:00<1:00, 60.0s/it,"
                " reduced_train_loss=2.5,"
                f" global_step={'1e+3' if 995 <= step <= 1004 else f'{step}.0'},"
                f" consumed_samples={128 * step:.2e}]\n"
                for step in range(990, 1010)
            ),
        ),
        {**LAYOUT, "global_batch_size": 128},
    )
    assert run.metrics()["step"].tolist() == list(range(991, 1011)) and report.attempts == 1


def test_hlat_lines_with_norms_and_a_torn_one(log: Path) -> None:
    said = [
        f"[0]:LOG Wed Dec 21 00:12:{second} 2022 - (0, {step}) step_loss : {11.25 - step:.4f}"
        " learning_rate : 2.80e-06 throughput : 6497.86 param_norm : 12.5 grad-norm : 3.25\n"
        for step, second in ((1, "05"), (2, "30"), (3, "55"))
    ]
    report, run = nxdt(
        written(log, "".join(said) + said[0][:90] + "\n"),
        {**LAYOUT, "data_parallel": 32, "global_batch_size": 1024},
        recipe={"num_steps": 500},
    )
    metrics = run.metrics()
    assert (
        metrics["step_time_s"].tolist() == [25.0] * 3
        and metrics["grad_norm"].tolist() == [3.25] * 3
    )
    assert run.recipe.num_steps == 500 and report.skipped_lines == 1
    assert any(
        "prints 6.5e+03 sequences/s, but clock and batch make 41" in note for note in report.notes
    )


def test_two_lines_of_hlat_on_one_are_no_step(log: Path) -> None:
    said = [
        f"[0]:LOG Wed Dec 21 00:12:{10 * step} 2022 - (0, {step}) step_loss : {11 - step:.4f} "
        f"learning_rate : 2.80e-06 throughput : 6497.86 grad-norm : {step}.25\n"
        for step in range(1, 6)
    ]
    report, run = nxdt(
        written(log, "".join([said[0], said[1], said[2][:95], *said[3:]])),
        {**LAYOUT, "data_parallel": 32, "global_batch_size": 1024},
    )
    assert run.metrics()["step"].tolist() == [1, 2, 5] and report.skipped_lines == 1


def test_a_bar_that_is_redrawn_on_one_long_line(log: Path) -> None:
    bar = (
        BARS.split("\r")[0]
        .replace("global_step=188.0", "global_step={}.0")
        .replace("59:12", "{}:12")
    )
    _, run = nxdt(
        written(log, "\r".join(bar.format(step, step) for step in range(100))),
        {**LAYOUT, "global_batch_size": 128},
    )
    assert run.metrics()["step"].tolist() == list(range(1, 101))


def test_bars_are_followed_though_none_ends_its_line(log: Path) -> None:
    parts = BARS.split("\r")
    log.write_text("\r".join(parts[:2]))
    grown = iter(["\r" + parts[2][:60], parts[2][60:] + "\r" + parts[3], "\r" + parts[4]])

    def grow(_: float) -> None:
        part = next(grown, None)
        if part is None:
            raise KeyboardInterrupt
        with log.open("a") as stream:
            stream.write(part)

    spec, site, out = ModelSpec.preset("hlat-7b"), Site.load("trn1.32xlarge"), log.parent / "run"
    changes = {"plan": LAYOUT | {"global_batch_size": 128}}
    report = import_log(log, out, site=site, spec=spec, changes=changes, follow=True, idle=grow)
    assert Run.open(out).metrics()["step"].tolist() == [189, 190, 191, 192]
    assert (report.steps, report.attempts, report.skipped_lines) == (4, 1, 0)
