"""Import of trainers that tell of a step in one line.

The lines are public ones, cited where they stand.
"""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.record import ConfigError
from cluster.site import Site
from kit.commands.app import app
from kit.errors import DataError
from kit.foreign.importers import ImportReport, import_log
from kit.monitor.text import recorded_alerts
from kit.run import Run
from kit.spec import ModelSpec

TORCHTITAN = """\
[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405  grad_norm:  0.8319  memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%
[rank0]:[titan] 2026-05-18 16:04:47,456 - root - INFO - step: 15  loss:  3.10680  grad_norm:  0.8587  memory:  9.46GiB(64.99%)  tps: 7,334  tflops: 0.53  mfu: 0.17%
[rank0]:[titan] 2026-05-18 16:04:48,577 - root - INFO - step: 16  loss:  3.05047  grad_norm:  0.5443  memory:  9.46GiB(64.99%)  tps: 7,313  tflops: 0.52  mfu: 0.17%
[rank0]:[titan] 2026-05-18 16:04:49,702 - root - INFO - step: 17  loss:  3.14459  grad_norm:  0.5303  memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%
"""  # noqa: E501
"""github.com/pytorch/torchtitan, pull request 3393."""
EVERY_TEN = """\
[rank0]:[titan] 2025-06-04 08:51:48,074 - root - INFO - step:  1  loss: 12.2254  memory: 27.34GiB(28.78%)  tps: 375  tflops: 21.73  mfu: 2.20%
[rank0]:[titan] 2025-06-04 08:51:58,557 - root - INFO - step: 10  loss: 10.7069  memory: 30.99GiB(32.62%)  tps: 7,034  tflops: 407.35  mfu: 41.19%
[rank0]:[titan] 2025-06-04 08:52:10,224 - root - INFO - step: 20  loss:  8.9196  memory: 30.99GiB(32.62%)  tps: 7,022  tflops: 406.65  mfu: 41.12%
[rank0]:[titan] 2025-06-04 08:52:21,904 - root - INFO - step: 30  loss:  8.1423  memory: 30.99GiB(32.62%)  tps: 7,014  tflops: 406.23  mfu: 41.08%
"""  # noqa: E501
"""github.com/pytorch/ao, docs/source/pretraining.rst."""
RANKS = """\
[titan] 2026-02-24 19:46:17,508 - root - INFO - step:  4  loss:  7.62585  grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: 13.99%
[titan] 2026-02-24 19:46:17,508 - root - INFO - step:  4  loss:  7.62585  grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: 10,049  tflops: 314.68  mfu: 13.99%
[titan] 2026-02-24 19:46:19,145 - root - INFO - step:  5  loss:  7.07623  grad_norm: 46.5000  memory: 66.91GiB(37.51%)  tps: 10,007  tflops: 313.36  mfu: 13.93%
"""  # noqa: E501
"""github.com/pytorch/torchtitan, pull request 2389."""
NANOGPT = """\
iter 0: loss 4.2648, time 9371.81ms, mfu -100.00%
iter 10: loss 3.2202, time 893.76ms, mfu 16.68%
iter 20: loss 2.7697, time 894.88ms, mfu 16.67%
iter 30: loss 2.6104, time 893.50ms, mfu 16.68%
"""
"""github.com/karpathy/nanoGPT, issue 178."""
NANOGPT_NAN = """\
2023-03-22 09:31:56 iter 2990: loss 3.8853, time 1096.65ms, mfu 15.34%

2023-03-22 09:32:32 step 3000: train loss 4.0390, val loss 4.0427

saving checkpoint to out

2023-03-22 09:32:41 iter 3000: loss 4.2490, time 35392.33ms, mfu 13.85%

2023-03-22 09:32:52 iter 3010: loss nan, time 1019.95ms, mfu 14.12%
"""
"""github.com/karpathy/nanoGPT, issue 215."""
MAXTEXT = """\
I0811 21:54:55.531340 138304841739136 metric_logger.py:226] completed step: 1, seconds: 0.631, TFLOP/s/device: 5688.282, Tokens/s/device: 311629.521, total_weights: 1572864, loss: 12.979, lm_loss: 12.979, perplexity: 433358.281
I0811 21:55:06.119312 138304841739136 metric_logger.py:226] completed step: 2, seconds: 10.228, TFLOP/s/device: 350.869, Tokens/s/device: 19222.175, total_weights: 1572864, loss: 12.980, lm_loss: 12.980, perplexity: 433463.719
I0811 21:55:16.704861 138304841739136 metric_logger.py:226] completed step: 3, seconds: 10.344, TFLOP/s/device: 346.932, Tokens/s/device: 19006.461, total_weights: 1572864, loss: 12.979, lm_loss: 12.979, perplexity: 433110.281
I0811 21:55:27.300509       7 profiler_session.cc:121] Profiler session initializing.
"""  # noqa: E501
"""github.com/AI-Hypercomputer/maxtext, pull request 4847."""
NEMO = """\
0: Training epoch 0, iteration 28/99 | lr: 5.6e-06 | global_batch_size: 32 | global_step: 28 | reduced_train_loss: 2.778 | train_step_timing in s: 0.189 | consumed_samples: 928 | val_loss: 2.861 | val_ppl: 17.57
 0: Training epoch 0, iteration 29/99 | lr: 5.8e-06 | global_batch_size: 32 | global_step: 29 | reduced_train_loss: 2.782 | train_step_timing in s: 0.1903 | consumed_samples: 960 | val_loss: 2.861 | val_ppl: 17.57
 0: Training epoch 0, iteration 30/99 | lr: 6e-06 | global_batch_size: 32 | global_step: 30 | reduced_train_loss: 2.709 | train_step_timing in s: 0.1915 | consumed_samples: 992 | val_loss: 2.861 | val_ppl: 17.57
"""  # noqa: E501
"""github.com/aws-samples/awsome-distributed-training, the ESM-2 test case, with srun's labels."""
NEMO_MEMORY = """\
Training epoch 0, iteration 49/49 | lr: 7.496e-06 | global_batch_size: 128 | global_step: 49 | peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | reduced_train_loss: 11.96 | train_step_timing in s: 12.39 | consumed_samples: 6400
"""  # noqa: E501
"""github.com/NVIDIA/dgxc-benchmarking, Llama 3.1."""
OLD_MAXTEXT = """\
completed step: 15107, seconds: 2.167, TFLOP/s: 36.722, loss: 2.191
completed step: 15108, seconds: 2.164, TFLOP/s: 36.771, loss: 2.173
completed step: 15109, seconds: 2.166, TFLOP/s: 36.739, loss: 2.191
Completed eval step 9
eval metrics after step: 15109, loss=9.420, total_weights=75264.0
"""
"""github.com/AI-Hypercomputer/maxtext, issue 8; the last two from its documentation, with this
step."""
TRAINER_STATE = """\
{
  "best_metric": null,
  "epoch": 10.0,
  "global_step": 5490,
  "log_history": [
    {
      "epoch": 0.91,
      "grad_norm": 2.757542133331299,
      "learning_rate": 1.817850637522769e-05,
      "loss": 1.1409,
      "step": 500
    },
    {
      "epoch": 1.0,
      "eval_gen_len": 140.5492,
      "eval_loss": 0.6597685217857361,
      "step": 549
    },
    {
      "epoch": 1.0,
      "predict_loss": 0.6476863622665405
    },
    {
      "epoch": 1.82,
      "grad_norm": 3.1357340812683105,
      "learning_rate": 1.6357012750455374e-05,
      "loss": 0.6419,
      "step": 1000
    },
    {
      "epoch": 2.73,
      "grad_norm": 1.975117802619934,
      "learning_rate": 1.4535519125683062e-05,
      "loss": 0.5212,
      "step": 1500
    },
    {
      "epoch": 10.0,
      "step": 5490,
      "total_flos": 3.718809382109184e+16,
      "train_loss": 0.4479398911550831,
      "train_runtime": 64358.151
    }
  ],
  "logging_steps": 500,
  "max_steps": 5490,
  "trial_params": null
}
"""
"""github.com/Jaong/Checkpoint-of-CPT at 6a9b832, trainer_state.json, shortened."""
PLAN = {"tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 8, "global_batch_size": 8}


def imported(tmp_path: Path, text: str, **options) -> tuple[ImportReport, Run]:
    (tmp_path / "log").write_text(text)
    spec, changes = ModelSpec.preset("demo"), {"plan": PLAN | options.pop("plan", {})}
    out = tmp_path / "run"
    report = import_log(
        tmp_path / "log", out, site=Site.load("frontier"), spec=spec, changes=changes, **options
    )
    return report, Run.open(out)


@pytest.mark.parametrize(
    ("text", "format", "steps", "losses"),
    [
        (TORCHTITAN, "torchtitan", [14, 15, 16, 17], [3.24405, 3.1068, 3.05047, 3.14459]),
        (RANKS, "torchtitan", [4, 5], [7.62585, 7.07623]),
        (NEMO, "nemo", [29, 30, 31], [2.778, 2.782, 2.709]),
        (NEMO_MEMORY, "nemo", [50], [11.96]),
        (
            NANOGPT,
            "nanogpt",
            [1, *range(2, 32)],
            [4.2648, *[3.2202] * 10, *[2.7697] * 10, *[2.6104] * 10],
        ),
        (MAXTEXT, "maxtext", [2, 3, 4], [12.979, 12.98, 12.979]),
        (OLD_MAXTEXT, "maxtext", [15108, 15109, 15110], [2.191, 2.173, 2.191]),
        (
            TRAINER_STATE,
            "hf-trainer",
            [*range(1, 1501)],
            [*[1.1409] * 500, *[0.6419] * 500, *[0.5212] * 500],
        ),
    ],
)
def test_the_format_is_found_out(
    tmp_path: Path, text: str, format: str, steps: list[int], losses: list[float]
) -> None:
    report, run = imported(tmp_path, text)
    metrics = run.metrics()
    assert (report.format, report.attempts, report.skipped_lines) == (format, 1, 0)
    assert metrics["step"].tolist() == steps and metrics["loss"].tolist() == losses


def test_torchtitan_tells_times_memory_and_settings(tmp_path: Path) -> None:
    told = (  # as in torchtitan/train.py
        "[rank0]:[titan] 2026-05-18 16:04:30,838 - root - INFO - Trainer is initialized with local"
        " batch size 8, global batch size 64, gradient accumulation steps 1, sequence length 2048,"
        " total steps 10000 (warmup 2)\n[rank0]:[titan] 2026-05-18 16:04:30,838 - root - INFO -"
        " Training starts at step 1\n"
    )
    held_out = (
        "[rank0]:[titan] 2026-05-18 16:04:50,000 - root - INFO - validate step: 17  loss:  3.5 "
        " memory: 9GiB(6%)"
    )
    other_rank = TORCHTITAN.replace("rank0", "rank1").replace("3.", "4.")
    coloured = TORCHTITAN.replace("loss:", "\x1b[32mloss:").replace("tps:", "\x1b[34mtps:")
    report, run = imported(
        tmp_path,
        told + coloured + other_rank + held_out + "  tps: 9\n",
        plan={"global_batch_size": 64},
    )
    metrics = run.metrics()
    assert report.attempts == 1 and metrics["loss"].tolist() == [3.24405, 3.1068, 3.05047, 3.14459]
    assert metrics["step_time_s"].tolist() == pytest.approx(
        [1.118, 1.118, 1.1195, 1.1213], abs=1e-3
    )
    assert metrics["grad_norm"][0] == 0.8319 and metrics["memory_bytes"][0] == int(9.46 * 2**30)
    assert set(metrics["tokens"]) == {64 * 2048} and run.recipe.num_steps == 10000
    assert metrics["validation_loss"][-1] == 3.5
    resumed = (
        told
        + TORCHTITAN
        + told.replace("step 1", "step 16")
        + TORCHTITAN.partition("step: 15")[2].partition("\n")[2]
    )
    assert imported(tmp_path, resumed)[0].attempts == 2


def test_one_torchtitan_line_for_ten_steps(tmp_path: Path) -> None:
    report, run = imported(tmp_path, EVERY_TEN)
    times = run.metrics()["step_time_s"]
    assert (
        report.steps == 30
        and times[9] == pytest.approx(10.483 / 9, rel=1e-3)
        and times[29] == pytest.approx(1.17, rel=0.01)
    )


def healthy(every: int, seed: int) -> list[tuple[int, float, float]]:
    """Returns for each line of a healthy run, 20,000 steps, its step, that step's loss and the
    mean since the last.
    """
    steps = np.arange(1, 20_001)
    losses = (1.8 + 9 * steps**-0.35) * (
        1 + 0.015 * np.random.default_rng(seed).normal(size=20_000)
    )
    return list(
        zip(
            steps[every - 1 :: every],
            losses[every - 1 :: every],
            losses.reshape(-1, every).mean(1),
            strict=True,
        )
    )


STAMPED = "[titan] 2026-05-18 16:04:47,456 - root - INFO - "


@pytest.mark.parametrize(
    ("every", "form", "values"),
    [
        (
            10,
            STAMPED + "step: {0}  loss:  {1:.5f}  memory:  9.46GiB(64.99%)  tps: 7\n",
            "the last step's values",
        ),
        (50, "iter {0}: loss {1:.4f}, time 893.76ms, mfu 16.68%\n", "the last step's values"),
        (200, '    {{\n      "loss": {2:.4f},\n      "step": {0}\n    }},\n', "the line's means"),
    ],
)
def test_a_line_for_many_steps_makes_no_alarm(
    tmp_path: Path, every: int, form: str, values: str
) -> None:
    text = "".join(form.format(*line) for line in healthy(every, seed=every))
    report, run = imported(tmp_path, ('  "log_history": [\n' if "{{" in form else "") + text)
    assert len(run.metrics()) > 19_900 and recorded_alerts(run) == []
    assert (
        f"one line stands for {every} steps; each of them is recorded with {values}" in report.notes
    )


def test_nanogpt_evaluates_within_the_time_of_a_step(tmp_path: Path) -> None:
    _, run = imported(tmp_path, NANOGPT_NAN)
    metrics = run.metrics()
    at = {int(step): i for i, step in enumerate(metrics["step"])}
    assert metrics["validation_loss"][at[3001]] == 4.0427 and metrics["step_time_s"][at[3001]] < 2
    assert metrics["step_time_s"][at[2991]] == pytest.approx(1.09665) and np.isnan(
        metrics["loss"][at[3011]]
    )


def test_nemo_tells_batch_times_memory_and_a_held_out_loss_once(tmp_path: Path) -> None:
    report, run = imported(
        tmp_path,
        NEMO + NEMO.splitlines()[-1] + "\n" + NEMO[:60] + "\n",
        plan={"global_batch_size": 32},
    )
    metrics = run.metrics()
    assert (report.attempts, report.skipped_lines) == (1, 1) and run.recipe.num_steps == 100
    assert metrics["step_time_s"].tolist() == [0.189, 0.1903, 0.1915]
    assert metrics.total_tokens[-1] == 992 * run.spec.sequence_length, "as the log counts them"
    assert np.isfinite(metrics["validation_loss"]).tolist() == [True, False, False]
    _, run = imported(tmp_path, NEMO_MEMORY, plan={"global_batch_size": 128})
    assert run.metrics()["memory_bytes"].tolist() == [70833405952] and run.recipe.num_steps == 50


def test_held_out_losses_between_lines_keep_their_step(tmp_path: Path) -> None:
    metrics = imported(tmp_path, TRAINER_STATE)[1].metrics()
    known = np.flatnonzero(np.isfinite(metrics["validation_loss"]))
    assert metrics["step"][known].tolist() == [549] and metrics["loss"][548] == 0.6419
    run = imported(tmp_path, OLD_MAXTEXT)[1]
    assert run.metrics()["validation_loss"][-1] == 9.42


def test_a_pattern_for_others(tmp_path: Path) -> None:
    text = (
        "".join(
            f"0: it {i}/90 | {1.5 - i / 100:.2f} nats | 0.{i}0 s | lr 3e-4\n" for i in range(1, 6)
        )
        + "it 9 torn\n"
    )
    pattern = (
        r"it (?P<step>\d+)/(?P<total_steps>\d+) \| (?P<loss>\S+) nats \| (?P<step_time_s>\S+) s"
    )
    report, run = imported(tmp_path, text, pattern=pattern)
    assert (report.format, report.steps, run.recipe.num_steps) == ("pattern", 5, 90)
    assert run.metrics()["step_time_s"].tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        (NANOGPT, {"pattern": "(?P<step>"}, ConfigError, "no regular expression"),
        (NANOGPT, {"pattern": r"(?P<step>\d+)"}, ConfigError, "'loss' is missing. For example"),
        (
            NANOGPT,
            {"pattern": r"(?P<step>\d+)(?P<loss>x)(?P<los>x)"},
            ConfigError,
            "Did you mean 'loss'",
        ),
        (NANOGPT, {"pattern": r"(?P<step>x)(?P<loss>x)"}, DataError, "as a pattern log does"),
        (
            NANOGPT,
            {"pattern": r"(?P<step>\d+)(?P<loss>x)", "format": "nxdt"},
            ConfigError,
            "Give one of them",
        ),
        (
            NANOGPT,
            {"format": "torchtitan"},
            DataError,
            "as a torchtitan log does. Formats: megatron",
        ),
        (TRAINER_STATE, {"follow": True}, ConfigError, "does not grow"),
        ("hello\n", {}, DataError, "a log of a known format does"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(tmp_path, text, options, error, message) -> None:
    with pytest.raises(error, match=message):
        imported(tmp_path, text, **options)
    assert not (tmp_path / "run").exists()


def test_the_command_finds_out_and_lists(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(MAXTEXT)
    plan = [word for name, value in PLAN.items() for word in ("--set", f"plan.{name}={value}")]
    words = [
        "import",
        str(tmp_path / "log"),
        "--out",
        str(tmp_path / "run"),
        "--site",
        "frontier",
        "--model",
        "demo",
        *plan,
    ]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "maxtext: 3 steps in 1 attempt from 4 lines." in " ".join(
        shown.output.split()
    )
    told = CliRunner().invoke(app, ["import", "--help"], env={"COLUMNS": "80"}).output
    assert all(
        name in told
        for name in ("torchtitan", "nanogpt", "maxtext", "hf-trainer", "--pattern", r"\d+")
    )
