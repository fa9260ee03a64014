"""Import of logs of trainers that print a step on several lines, print rounded numbers, or print no
step number.
"""

import gzip
import io
import json
import math
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers.trainer_callback import PrinterCallback, TrainerState
from typer.testing import CliRunner

from cluster.record import ConfigError
from kit.cli.app import app
from kit.errors import DataError
from kit.interop.logs.numbers import lacks_digits, parse_number
from tests.interop.conftest import DEGREES, assert_told
from tests.support import foreign_logs as logs

NONE = math.nan

# Log of nanotron, from github.com/huggingface/nanotron, issue 390.
NANOTRON = "".join(
    f"10/17/2025 16:3{1 + i}:56 [INFO|DP=0|PP=0|TP=0]: iteration: {327281 + i} / 378950 |"
    " consumed_tokens: 85.8G | elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K |"
    " tokens_per_sec_per_gpu: 11.4K | global_batch_size: 64 |"
    f" lm_loss: {loss} | lr: 1e-05 | model_tflops_per_gpu: 38.3 | hardware_tflops_per_gpu: 38.3 |"
    " grad_norm: 1.25\n"
    for i, loss in enumerate(("2.38", "2.35", "2.51"))
)
# Log of OLMo, in the format of allenai/OLMo.
OLMO = """\
[2024-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step=1/739328]
    train/CrossEntropyLoss=11.25
    train/Perplexity=76,631
    throughput/total_tokens=4,194,304
    System/Peak GPU Memory (MB)=42,133
[2024-04-17 09:42:38] INFO     [olmo.train:816, rank=0] [step=2/739328]
    train/CrossEntropyLoss=10.73
    throughput/device/batches_per_second=0.0869
[2024-04-17 09:42:50] INFO     [olmo.train:816, rank=0] [step=3/739328]
    train/CrossEntropyLoss=10.64
    throughput/device/batches_per_second=0.0869
"""
# Log of OLMo-core, made with the format strings of its `ConsoleLoggerCallback`. Metrics are printed
# every other step.
OLMO_CORE = "".join(
    f"2025-06-01 10:00:{5 * step:02}.120\thost:0\tolmo_core.train.callbacks:88\tINFO\t"
    f"[step={step}/???,epoch=1,eta=1d2h]\n    train/CE loss={9 - step}.250\n"
    f"    train/load balancing loss=0.01\n    optim/total grad norm=0.{step}000\n"
    "    optim/LR (group 0)=0.0004\n"
    if step % 2
    else f"2025-06-01 10:00:{5 * step:02}.120\thost:0\tx:8\tINFO\t[step={step}/???,epoch=1]\n"
    for step in range(1, 8)
)
# Log of Composer, from github.com/mosaicml/composer, pull request 1884.
COMPOSER = "".join(
    f"[batch={step}/3]:\n\t Train epoch: 0\n\t Train trainer/global_step: {step - 1}\n"
    f"\t Train loss/train/total: {13 - step}.0570\n\t Train throughput/batches_per_sec: 0.0503\n"
    "\t Train throughput/device/batches_per_sec: 0.0031\n"
    f"\t Train wall_clock/train: {20 * step}.0\n"
    "\t Train lr-DecoupledAdamW/group0: 0.0001\n[Eval batch=1/9] Eval on eval data\n"
    for step in range(1, 4)
)
COMPOSER_EPOCHS = "".join(
    f"[epoch={epoch}][batch={batch}/2]:\n\t Train loss/train/total: {epoch}.{batch}\n"
    for epoch in (1, 2)
    for batch in (1, 2)
)
# Log of LitGPT in the format of litgpt/pretrain.py, with two micro-batches per step.
LITGPT = "".join(
    f"Epoch 1 | iter {i} step {i // 2} | loss train: {9 - i}.500, val: n/a | iter time:"
    f" {200 + i}.00 ms{' (step)' * (i % 2 == 0)} remaining time: 0:01:54\n"
    for i in range(1, 7)
)
# Log of LitGPT that prints every fiftieth micro-batch, from github.com/Lightning-AI/litgpt, issue
# 1607.
LITGPT_EVERY = "".join(
    f"Epoch 34 | iter {3050700 + 50 * i} step {610140 + 10 * i} | loss train: 2.{846 - i}, val:"
    " 2.861 | iter time: 112.20 ms (step) remaining time: 0:01:54\n"
    for i in range(4)
)
# Log line of an older LitGPT version, from issue 1042 of the same repository, Lightning-AI/litgpt.
LITGPT_OLD = """\
iter 1760 | step 220: loss 1.5947, iter time: 263.85 ms (optimizer.step)
iter 1770 | step 221: loss 1.5191, iter time: 89.96 ms
iter 1800 | step 225: loss 1.8572, iter time: 257.35 ms (optimizer.step)
"""
# Log of nanochat in the format of scripts/base_train.py of karpathy/nanochat.
NANOCHAT = "".join(
    f"step 0000{i}/00300 (0.{i}3%) | loss: 11.09035{i} | lrm: 1.00 | dt: {500 + i}.25ms | tok/sec:"
    " 23,508 | bf16_mfu: 0.17 | epoch: 1 pq: 0 rg: 5 | total time: 0.00m\n"
    for i in range(3)
)
# Log of DeepSpeed, from github.com/deepspeedai/DeepSpeed, issue 1825.
DEEPSPEED = "".join(
    f"[2022-03-11 {clock}] [INFO] [logging.py:69:log_dist] [Rank 0] step={step}, skipped=2,"
    " lr=[5e-05], mom=[[0.9, 0.999]]\n"
    f"[2022-03-11 {clock}] [INFO] [timer.py:189:stop] 0/{step}, SamplesPerSec=83.4\n"
    for step, clock in ((40, "02:06:58,985"), (50, "02:07:14,130"), (60, "02:07:29,274"))
)
PIPELINE = "".join(
    f"steps: {step} loss: 2.{step}000 iter time (s): 0.250 samples/sec: 32.000\n" for step in (1, 2)
)
LLAMA_FACTORY = "".join(
    json.dumps(
        {
            "current_steps": 5 * i,
            "total_steps": 100,
            "loss": 5.5 - i,
            "lr": 1e-5,
            "epoch": 0.1,
            "percentage": 5.0,
            "elapsed_time": f"23:59:{20 + 10 * i}" if i < 4 else "1 day, 0:00:00",
            "remaining_time": "0:10:00",
        }
    )
    + "\n"
    for i in range(1, 5)
)
TOLD = {
    "nanotron": (
        NANOTRON,
        {"step": [327281, 327282, 327283], "loss": [2.38, 2.35, 2.51], "step_time_s": [11.5] * 3},
    ),
    "olmo": (
        OLMO,
        {
            "step": [1, 2, 3],
            "loss": [11.25, 10.73, 10.64],
            "step_time_s": [12.0] * 3,
            "num_steps": 739328,
        },
    ),
    "olmo: core": (
        OLMO_CORE,
        {
            "step": [1, 2, 3, 4, 5, 6, 7],
            "loss": [8.25, 6.25, 6.25, 4.25, 4.25, 2.25, 2.25],
            "grad_norm": [0.1, 0.3, 0.3, 0.5, 0.5, 0.7, 0.7],
            "learning_rate": 4e-4,
            "step_time_s": [5.0] * 7,
        },
    ),
    "composer": (
        COMPOSER,
        {"step": [1, 2, 3], "loss": [12.057, 11.057, 10.057], "step_time_s": [20.0] * 3},
    ),
    "composer: epochs": (COMPOSER_EPOCHS, {"step": [1, 2, 3, 4], "loss": [1.1, 1.2, 2.1, 2.2]}),
    "litgpt": (
        LITGPT,
        {
            "step": [1, 2, 3],
            "loss": [7.5, 5.5, 3.5],
            "step_time_s": pytest.approx([0.407, 0.407, 0.411]),
        },
    ),
    "litgpt: every fiftieth": (
        LITGPT_EVERY,
        {"step": [*range(610131, 610171)], "step_time_s": [NONE] * 40},
    ),
    "litgpt: older": (LITGPT_OLD, {"loss": [1.5947, 1.8572], "step": [220, 225]}),
    "nanochat": (
        NANOCHAT,
        {"step": [1, 2, 3], "num_steps": 300, "step_time_s": [0.50025, 0.50125, 0.50225]},
    ),
    "deepspeed": (
        DEEPSPEED,
        {"step": [*range(31, 61)], "step_time_s": pytest.approx([1.5145] * 30, rel=1e-3)},
    ),
    "deepspeed: pipeline": (PIPELINE, {"step": [1, 2], "loss": [2.1, 2.2]}),
    "llama-factory": (
        LLAMA_FACTORY,
        {"step": [*range(1, 21)], "num_steps": 100, "step_time_s": [2.0] * 20},
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_log_of_each_trainer_is_read(read_node, name):
    text, told = TOLD[name]
    report, run = read_node(text)
    if not isinstance(told.get("learning_rate", []), list):
        assert set(run.metrics()["learning_rate"]) == {told.pop("learning_rate")}
    assert_told(report, run, {"format": name.partition(":")[0], "skipped_lines": 0, **told})


def test_log_with_loss_of_experts_gives_a_note(read_node):
    """The user gives a dense model, although the log has a loss of experts. The import adds a note
    about it.
    """
    assert any("'load balancing loss', which" in note for note in read_node(OLMO_CORE)[0].notes)
    assert not any("experts" in note for note in read_node(OLMO)[0].notes)


def test_deepspeed_lines_in_a_megatron_log_are_ignored(read_node):
    report, _ = read_node(DEEPSPEED.replace("step=4", "step=1") + logs.NEOX, 512)
    assert (report.format, report.steps) == ("megatron", 30)


def printed(entries: list[dict]) -> str:
    """Returns the text that transformers prints for entries of the Trainer's log history."""
    state = SimpleNamespace(is_local_process_zero=True)
    with redirect_stdout(io.StringIO()) as stream:
        for entry in entries:
            PrinterCallback().on_log(None, state, None, logs=dict(entry))
    return stream.getvalue()


def entries(count: int, first: int = 0) -> list[dict]:
    """Returns entries of the Trainer's log history: one every ten steps, at 1,000 steps per epoch,
    and the final summary.
    """
    steps = [1] * first + [10 * i for i in range(1, count + 1)]
    told = [
        {"loss": 3 - step / 1000, "grad_norm": 1.5, "learning_rate": 2e-4, "epoch": step / 1000}
        for step in steps
    ]
    return [*told, {"train_runtime": 12.5, "train_loss": 2.5, "epoch": count / 100}]


@pytest.mark.parametrize("quoted", [True, False], ids=["transformers 5", "transformers 4"])
def test_printed_trainer_lines_need_logging_steps(read_node, log, quoted):
    text = printed(entries(30))
    if not quoted:
        text = re.sub(r": '([^']*)'", r": \1", text)
    with pytest.raises(
        ConfigError, match="trainer_state.json has the steps.*import.logging_steps=10"
    ):
        read_node(text)
    report, run = read_node(text, **{"import": {"logging_steps": 10}})
    assert (report.format, report.steps, report.skipped_lines) == ("hf-trainer", 300, 0)
    assert run.metrics()["loss"][9::10].tolist() == pytest.approx(
        [3 - i / 100 for i in range(1, 31)], abs=1e-3
    )
    with pytest.raises(DataError, match="of epoch 0.001, though 0.00.* logging_first_step"):
        read_node(printed(entries(30, first=1)), **{"import": {"logging_steps": 10}})
    with pytest.raises(ConfigError, match="have their step. Leave it out"):
        read_node(NANOCHAT, **{"import": {"logging_steps": 10}})


def test_trainer_state_beside_the_log_is_named_and_read(log):
    for step in (20, 100):
        (log.parent / f"checkpoint-{step}").mkdir()
        state = TrainerState(global_step=step, max_steps=100)
        state.log_history = [{**entry, "step": 10 * i} for i, entry in enumerate(entries(10), 1)]
        state.save_to_json(str(log.parent / f"checkpoint-{step}" / "trainer_state.json"))
    log.write_text(printed(entries(10)))
    words = ["--out", str(log.parent / "run"), "--site", "frontier", "--model", "demo"]
    words += ["--set", "plan.global_batch_size=8"]
    for name, value in DEGREES.items():
        words += ["--set", f"plan.{name}={value}"]
    refused = CliRunner().invoke(app, ["import", str(log), *words])
    assert "kit import" in str(refused.exception) and "checkpoint-100" in str(refused.exception)
    shown = CliRunner().invoke(app, ["import", str(log.parent), *words])
    assert "hf-trainer: 100 steps in 1 attempt" in " ".join(shown.output.split()), shown.exception


# Patterns of the user for logs of unknown trainers ------------------------------------------------

OWN = {
    "one line": "[3] Step 7/90: train loss = 1.50 (step time 850ms)\n[3] Step 8/90: train loss ="
    " nan (step time 1.2s)\n",
    "loss first": "loss=2.5, iter #4\nloss=2.25, iter #5\n",
    "several lines": "== update 1\n lr 1e-3\n  nll loss: 2.5\n== update 2\n  nll loss: 2.25\n",
    "bar": "Epoch 0:   0%|          | 1/1793507 [00:02<1175:20:35,  0.42it/s, train_loss=10.90]\n"
    "Epoch 0:   0%|          | 2/1793507 [00:02<611:40:05,  0.81it/s, train_loss=10.80]\n",
    "thousands": "step 999 | loss 2.5\nstep 1,000 | loss 2.25\n",
    "json": '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n',
}


@pytest.mark.parametrize("name", OWN)
def test_suggested_pattern_reads_the_log(read_node, name):
    with pytest.raises(DataError) as refused:
        read_node(OWN[name])
    (pattern,) = re.findall(r"--pattern ('.*'), which finds 2 steps here", str(refused.value))
    report, run = read_node(OWN[name], pattern=shlex.split(pattern)[0])
    others = {"one line": [7, 8], "loss first": [4, 5], "thousands": [999, 1000]}
    steps = others.get(name, [1, 2])
    assert (report.steps, run.metrics()["step"].tolist()) == (2, steps)
    if name == "one line":
        assert run.metrics()["step_time_s"].tolist() == [0.85, 1.2]


def test_pattern_reads_a_step_from_several_lines(read_node):
    text = "epoch 1 | update 1,024\n  loss 2.50 (avg)\n  speed 850ms/it\nepoch 1 | update 1,025\n"
    pattern = r"update (?P<step>\S+)|loss (?P<loss>\S+)|speed (?P<step_time_s>\S+)"
    report, run = read_node(text + "  loss 2.25\n  speed 2it/s\n", pattern=pattern)
    told = {"step": [1024, 1025], "loss": [2.5, 2.25], "step_time_s": [0.85, 0.5]}
    assert_told(report, run, {"attempts": 1, "skipped_lines": 0, **told})


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("step 1,000 loss 2.5", r"step (?P<step>\d+).*loss (?P<loss>\S+)"),
        ("step 1,234,567, loss 2.5", r"step (?P<step>\d+)|loss (?P<loss>\S+)"),
        ("1,000 loss 2.5", r"(?P<step>\d+) loss (?P<loss>\S+)"),
    ],
)
def test_pattern_refuses_part_of_a_number(read_node, line, pattern):
    with pytest.raises(ConfigError, match=r"--pattern: finds step '\d+' where the log has '1,"):
        read_node(f"step 999 loss 2.5\n{line}\n", pattern=pattern)
    complete = pattern.replace(r"\d+", r"[\d,]+")
    _, run = read_node(f"{line}\n", pattern=complete)
    assert run.metrics()["step"].tolist() in ([1000], [1_234_567])


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("12,345,0.5", r"^(?P<step>\d+),.*,(?P<loss>\S+)"),
        ("12,345,0.5", r"^(?P<step>\d+).*,(?P<loss>\S+)"),
        ("12,345", r"^(?P<step>\d+),(?P<loss>\d+)"),
        ("345,12 loss=0.5", r",(?P<step>\d+) loss=(?P<loss>\S+)"),
        ("12, 345, 0.5", r"^(?P<step>\d+).*, (?P<loss>\S+)"),
    ],
)
def test_pattern_reads_a_step_beside_a_comma(read_node, line, pattern):
    _, run = read_node(f"{line}\n", pattern=pattern)
    assert run.metrics()["step"].tolist() == [12]


def test_line_with_rounded_step_is_left_out(read_node):
    pattern = r"at (?P<step>\S+) loss (?P<loss>\S+)"
    with pytest.raises(DataError, match=r"the step 3\.1e\+4 is rounded"):
        read_node("at 3.1e+4 loss 2.5\n", pattern=pattern)
    report, run = read_node(
        "at 999 loss 2.5\nat 1k loss 2.5\nat 1.001k loss 2.4\n", pattern=pattern
    )
    assert run.metrics()["step"].tolist() == [999, 1001]
    assert any("1 line left out, since the step is not known" in note for note in report.notes)


def test_follow_names_lines_without_a_known_step(read_node, log):
    def grow(_: float) -> None:
        if log.stat().st_size > 50:
            raise KeyboardInterrupt
        with log.open("a") as stream:
            stream.write("at 3.1e+4 loss 2.5\nat 3.1e+4 loss 2.4\n")

    pattern = r"at (?P<step>\S+) loss (?P<loss>\S+)"
    report, _ = read_node("at 1 loss 2.5\n", pattern=pattern, follow=True, idle=grow)
    (note,) = [note for note in report.notes if "left out" in note]
    assert note.startswith("2 lines left out, since the step is not known: the step 3.1e+4")


NUMBERS = {
    "1.2k": 1200,
    "3.4M": 3.4e6,
    "1.5B": 1.5e9,
    "1,234": 1234,
    "12.3%": 0.123,
    "2.1e+4": 21000,
    "85.8G": 85.8e9,
    "850ms": None,
    "n/a": None,
    "": None,
    "1.2.3": None,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_in_logs_are_parsed(text):
    assert parse_number(text) == (None if NUMBERS[text] is None else pytest.approx(NUMBERS[text]))


def test_times_and_rounded_numbers_in_logs_are_parsed():
    times = {"850ms": 0.85, "1.2s/it": 1.2, "4it/s": 0.25, "2": 2.0, "11.5K": 11500, "1.5h": 5400}
    for text, seconds in times.items():
        assert parse_number(text, "s") == pytest.approx(seconds)
    assert parse_number("1.2s", "ms") == 1200 and parse_number("850ms", "ms") == pytest.approx(850)
    assert not any(map(lacks_digits, ("31000", "31,000", "1.234k", "1.5e1", "3.0", "?")))
    assert all(map(lacks_digits, ("3.1e+4", "85.8G", "1k", "1.2M")))


# Incomplete progress bars, and files that are no log ----------------------------------------------


def test_progress_bar_contradicting_its_step_is_refused(read_node):
    """The example has step 34,103 but 3.1e+4 on the progress bar. Source:
    github.com/aws-samples/awsome-distributed-training, bionemo.
    """
    bars = [logs.short_bar(34_103 + i, f"{i}:00", "3.1e+4", "1e+7", 2.5 - i) for i in range(3)]
    with pytest.raises(DataError, match=r"3\.1e\+4 stands for 30,950 to 31,050, .* 34,102, which"):
        read_node("".join(bars))
    agreeing = [logs.short_bar(31_003 + i, f"{i}:00", "3.1e+4", "1e+7", 2.5 - i) for i in range(2)]
    report, run = read_node("".join([*agreeing, bars[2]]))
    assert run.metrics()["step"].tolist() == [31_003, 31_004]
    assert any("1 line left out" in note for note in report.notes)


BINARY = {
    "ckpt.pt": "a checkpoint of nanoGPT",
    "consolidated.00.pth": "a checkpoint of Meta",
    "other.pt": "pickled weights (.pt), not a log",
    "model.safetensors": "a safetensors file: weights",
    "train.log.gz": "compressed by gzip. Unpack it",
    "core": "binary data, not a log",
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_file_is_refused_as_a_log(name, tmp_path):
    file = tmp_path / name
    if name.endswith((".pt", ".pth")):
        torch.save({"model": {"w": torch.zeros(9)}}, file)
    elif name.endswith(".safetensors"):
        save_file({"w": torch.zeros(9)}, file)
    else:
        file.write_bytes(gzip.compress(b"x") if name.endswith(".gz") else bytes(range(256)) * 9)
    for words in ([], ["--site", "frontier"]):
        shown = CliRunner().invoke(app, ["import", str(file), "--out", str(tmp_path / "o"), *words])
        assert f"{name}: {BINARY[name]}" in str(shown.exception)
    if "checkpoint of" in BINARY[name]:
        shown = CliRunner().invoke(app, ["import", str(tmp_path), "--out", str(tmp_path / "o")])
        assert f"It holds {BINARY[name]}" in str(shown.exception)
    assert not Path(tmp_path / "o").exists()
