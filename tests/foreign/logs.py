"""Logs as trainers print them: public lines, cited where they stand, and some built like them."""

import datetime
import json


def arguments(words: str) -> dict[str, str]:
    """Returns Megatron's arguments of words `name=value`."""
    return dict(word.split("=", 1) for word in words.split())


ARGUMENTS = arguments(
    "bf16=True checkpoint_activations=True clip_grad=1.0 ffn_hidden_size=57344 hidden_size=14336"
    " log_interval=1 lr=6e-05 micro_batch_size=2 min_lr=6e-06 num_attention_heads=112"
    " num_layers=70 pipeline_model_parallel_size=8 seed=42 seq_length=2048"
    " tensor_model_parallel_size=8 world_size=128 virtual_pipeline_model_parallel_size=None"
    " zero_stage=0"
)
"""LUMI, 175B: github.com/spyysalo/lumi-llm-scaling, meg-ds/experiments/175B-scaling-comms."""
FRONTIER = ARGUMENTS | arguments(
    "bf16=False fp16=True ffn_hidden_size=49152 hidden_size=12288 micro_batch_size=1"
    " num_attention_heads=96 num_layers=96 pipeline_model_parallel_size=16"
    " tensor_model_parallel_size=4 zero_stage=1.0"
)
"""The run with "149 TFLOPs": github.com/sajal-vt/Megatron-DeepSpeed-ORNL, commit ef4161a, logs/."""
MODERN = arguments(
    "bf16=True context_parallel_size=2 cp_comm_type=['p2p'] fp8=None fp8_recipe=delayed"
    " group_query_attention=True hidden_size=4096 ffn_hidden_size=14336 log_interval=10 lr=0.0003"
    " micro_batch_size=1 mtp_num_layers=None multi_latent_attention=False normalization=RMSNorm"
    " num_attention_heads=32 num_experts=None num_layers=32 num_query_groups=8"
    " pipeline_model_parallel_size=2 position_embedding_type=rope recompute_granularity=selective"
    " seq_length=8192 sequence_parallel=True swiglu=True tensor_model_parallel_size=2"
    " untie_embeddings_and_output_weights=True use_distributed_optimizer=True window_size=None"
    " world_size=64"
)
"""As the logs of today's Megatron-LM have them: megatron/training/arguments.py."""
ENDING = """\
------------------------------------------------------------------------------------------------
 validation loss at iteration 2500 | lm loss value: 2.866578E+00 | lm loss PPL: 1.757677E+01 |
------------------------------------------------------------------------------------------------
[after training is done] datetime: 2025-04-14 18:16:35
 validation loss at iteration 2500 on test set | lm loss value: 2.867433E+00 | lm loss PPL: 1.759179E+01 |
"""  # noqa: E501
"""As Megatron-LM ends; numbers of a public log."""
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


def bar(step: int, clock: str, loss: str = "7.560") -> str:
    """Returns a progress bar of NeuronX Distributed Training, as in its pre-training tutorial."""
    return (
        f"Epoch 0:   0%|          | {step}/301501 [{clock}<1573:03:24, 18.79s/it, loss=7.75,"
        f" v_num=3-16, reduced_train_loss={loss}, lr=0.0003, global_step={step - 1}.0,"
        f" consumed_samples={128 * (step - 1)}.0, throughput=7.11, gradient_norm=1.95e+3]"
    )


def short_bar(count: int, clock: str, global_step: str, samples: str, loss: float = 2.5) -> str:
    """Returns a bar whose numbers tqdm has made as short as it does."""
    return (
        f"Epoch 0:  50%|xx| {count}/301501 [{clock}<1:00, 18.79s/it, reduced_train_loss={loss},"
        f" global_step={global_step}, consumed_samples={samples}]\n"
    )


REDRAWN = (
    bar(189, "59:12"),
    bar(190, "59:30"),
    bar(190, "59:30"),
    bar(191, "59:48", "7.910"),
    bar(192, "1:00:06", "nan"),
)
BARS = "\r".join(REDRAWN)
"""On one line, the last without an end."""
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
"""github.com/AI-Hypercomputer/maxtext, issue 8; the last two lines from its documentation."""


def trained(*values: float) -> dict[str, float]:
    """Returns an entry of the history of transformers' Trainer."""
    names = ("epoch", "grad_norm", "learning_rate", "loss", "step")
    return dict(zip(names, values, strict=True))


TRAINER_STATE = json.dumps(
    {
        "best_metric": None,
        "epoch": 10.0,
        "global_step": 5490,
        "log_history": [
            trained(0.91, 2.757542133331299, 1.817850637522769e-05, 1.1409, 500),
            {"epoch": 1.0, "eval_gen_len": 140.5492, "eval_loss": 0.6597685217857361, "step": 549},
            {"epoch": 1.0, "predict_loss": 0.6476863622665405},
            trained(1.82, 3.1357340812683105, 1.6357012750455374e-05, 0.6419, 1000),
            trained(2.73, 1.975117802619934, 1.4535519125683062e-05, 0.5212, 1500),
            {"epoch": 10.0, "step": 5490, "total_flos": 3.718809382109184e16, "train_loss": 0.448},
        ],
        "logging_steps": 500,
        "max_steps": 5490,
        "trial_params": None,
    },
    indent=2,
)
"""github.com/Jaong/Checkpoint-of-CPT at 6a9b832, trainer_state.json, shortened."""


def head(
    arguments: dict, *, vocabulary: int, engine_micro_batch: int | None = None, label: str = ""
) -> str:
    """Returns what Megatron prints before its first step."""
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (49 - len(name))} {value}" for name, value in arguments.items()]
    lines += ["-------------------- end of arguments ---------------------"]
    lines += [f" > padded vocab (size: 50257) with 943 dummy tokens (new size: {vocabulary})"]
    if engine_micro_batch:
        config = "[2023-11-10 13:17:25,835] [INFO] [config.py:964:print]  "
        lines += [f"{config} train_micro_batch_size_per_gpu  {engine_micro_batch}"]
    return "".join(f"{label}{line}\n" for line in lines)


START = head(ARGUMENTS, vocabulary=51200)


def line(
    step: int,
    seconds: float = 346.0,
    *,
    batch: int = 1024,
    total: int = 143066,
    loss: str = "6.071495E+01",
    milliseconds: bool = False,
    tflops: float = 67.05,
) -> str:
    """Returns Megatron-DeepSpeed's line about a step."""
    elapsed = f"(ms): {1000 * seconds:.1f}" if milliseconds else f"(s): {seconds:.2f}"
    return (
        f" iteration {step:8d}/{total:8d} | consumed samples: {step * batch:12d} | elapsed time per"
        f" iteration {elapsed} | learning rate: 8.388E-08 | global batch size: {batch:5d} | lm"
        f" loss: {loss} | loss scale: 1.0 | grad norm: 23.702 | number of skipped iterations:   0 |"
        f" number of nan iterations:   0 | samples per second: {batch / seconds:.3f} | TFLOPs:"
        f" {tflops:.2f} |\n"
    )


def lines(*steps: int, seconds: float = 346.0) -> str:
    return "".join(line(step, seconds) for step in steps)


def lumi(steps: range = range(1, 5)) -> str:
    """Returns the log of LUMI, as srun labels it."""
    return head(ARGUMENTS, vocabulary=51200, engine_micro_batch=2, label="  0: ") + "".join(
        "127: " + line(step, 346.65) for step in steps
    )


def frontier(engine_micro_batch: int | None = 4) -> str:
    """Returns the log with "149 TFLOPs", of an engine that ran a quarter of what it prints."""
    return (
        head(FRONTIER, vocabulary=50688, engine_micro_batch=engine_micro_batch)
        + "".join(
            line(step, 196.5, batch=1280, total=5, milliseconds=True, tflops=149.46)
            for step in range(1, 6)
        )
        + "[after training is done] \n"
    )


def modern(label: str = "", **changed: object) -> str:
    """Returns a log of today's Megatron-LM with some of its arguments changed."""
    steps = "".join(
        f" [2025-04-14 18:16:{second:02}.123456] iteration {step:8d}/    2500 | consumed samples:"
        f" {step * 64:12d} | elapsed time per iteration (ms): 6000.8 | throughput per GPU"
        " (TFLOP/s/GPU): 390.1 | learning rate: 1.001599E-05 | global batch size:    64 | lm loss:"
        " 2.895528E+00 | loss scale: 1.0 | grad norm: 1.101 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |\n"
        for step, second in ((1, 1), (2490, 33), (2500, 34))
    )
    return head({**MODERN, **changed}, vocabulary=128256, label=label) + steps + ENDING


def hlat(step: int, second: int, norm: str = "3.25") -> str:
    """Returns a line of HLAT's trainer."""
    return (
        f"[0]:LOG Wed Dec 21 00:12:{second:02} 2022 - (0, {step}) step_loss : {11.25 - step:.4f}"
        f" learning_rate : 2.80e-06 throughput : 6497.86 param_norm : 12.5 grad-norm : {norm}\n"
    )


def titan(times: list[datetime.datetime]) -> str:
    """Returns a line of torchtitan for each time, as in TORCHTITAN."""
    return "".join(
        f"[rank0]:[titan] {when:%Y-%m-%d %H:%M:%S},000 - root - INFO - step: {step:2d}"
        f"  loss:  {3 - step / 100:.5f}  grad_norm:  0.8319  memory:  9.46GiB(64.99%)"
        "  tps: 7,282  tflops: 0.52  mfu: 0.17%\n"
        for step, when in enumerate(times, 1)
    )
