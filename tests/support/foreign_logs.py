"""Logs in the formats of other trainers: lines of public logs with their sources, and generated
lines in the same formats.
"""

import datetime
import json
from pathlib import Path


def public(name: str) -> str:
    """Returns the lines of a public log, stored as a data file."""
    return (Path(__file__).parents[1] / "interop" / "data" / f"{name}.log").read_text()


def arguments(words: str) -> dict[str, str]:
    """Returns Megatron's arguments by name, from text of the form `name=value name=value`."""
    return dict(word.split("=", 1) for word in words.split())


ARGUMENTS = arguments(
    "bf16=True checkpoint_activations=True clip_grad=1.0 ffn_hidden_size=57344 hidden_size=14336"
    " log_interval=1 lr=6e-05 micro_batch_size=2 min_lr=6e-06 num_attention_heads=112"
    " num_layers=70 pipeline_model_parallel_size=8 seed=42 seq_length=2048"
    " tensor_model_parallel_size=8 world_size=128 virtual_pipeline_model_parallel_size=None"
    " zero_stage=0"
)
"""Arguments of LUMI's 175B run. Source: github.com/spyysalo/lumi-llm-scaling,
meg-ds/experiments/175B-scaling-comms.
"""
FRONTIER = ARGUMENTS | arguments(
    "bf16=False fp16=True ffn_hidden_size=49152 hidden_size=12288 micro_batch_size=1"
    " num_attention_heads=96 num_layers=96 pipeline_model_parallel_size=16"
    " tensor_model_parallel_size=4 zero_stage=1.0"
)
"""Arguments of the Frontier run whose log reports "149 TFLOPs". Source:
github.com/sajal-vt/Megatron-DeepSpeed-ORNL, commit ef4161a, logs/.
"""
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
"""Arguments as printed by today's Megatron-LM. Source: megatron/training/arguments.py."""
ENDING = public("megatron-end")
"""Last lines of a Megatron-LM log. The numbers come from a public log."""
NEOX = public("gpt-neox")
"""Log of GPT-NeoX, in the format of megatron/logging.py and neox_args.py. Source:
github.com/EleutherAI/gpt-neox.
"""


def bar(step: int, clock: str, loss: str = "7.560") -> str:
    """Returns a progress bar of NeuronX Distributed Training, in the format shown in its
    pre-training tutorial.
    """
    return (
        f"Epoch 0:   0%|          | {step}/301501 [{clock}<1573:03:24, 18.79s/it, loss=7.75,"
        f" v_num=3-16, reduced_train_loss={loss}, lr=0.0003, global_step={step - 1}.0,"
        f" consumed_samples={128 * (step - 1)}.0, throughput=7.11, gradient_norm=1.95e+3]"
    )


def short_bar(count: int, clock: str, global_step: str, samples: str, loss: float = 2.5) -> str:
    """Returns a progress bar with numbers in the shortened form that tqdm prints, such as 1e+3."""
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
"""Progress bars separated by carriage returns on one line. The last bar has no line end."""
TORCHTITAN = public("torchtitan")
"""Log of torchtitan. Source: github.com/pytorch/torchtitan, pull request 3393."""
EVERY_TEN = public("torchtitan-every-ten")
"""Log of torchtitan that reports every tenth step. Source: github.com/pytorch/ao,
docs/source/pretraining.rst.
"""
RANKS = public("torchtitan-ranks")
"""Log of several torchtitan ranks. Source: github.com/pytorch/torchtitan, pull request 2389."""
NANOGPT = public("nanogpt")
"""Log of nanoGPT. Source: github.com/karpathy/nanoGPT, issue 178."""
NANOGPT_NAN = public("nanogpt-nan")
"""Log of nanoGPT with a NaN loss. Source: github.com/karpathy/nanoGPT, issue 215."""
MAXTEXT = public("maxtext")
"""Log of MaxText. Source: github.com/AI-Hypercomputer/maxtext, pull request 4847."""
NEMO = public("nemo")
"""Log of NeMo with srun's rank labels. Source: github.com/aws-samples/awsome-distributed-training,
the ESM-2 test case.
"""
NEMO_MEMORY = public("nemo-memory")
"""Log of NeMo with memory use. Source: github.com/NVIDIA/dgxc-benchmarking, Llama 3.1."""
OLD_MAXTEXT = public("maxtext-old")
"""Log of an old MaxText. Source: github.com/AI-Hypercomputer/maxtext, issue 8. The last two lines
come from its documentation.
"""


def trained(*values: float) -> dict[str, float]:
    """Returns one entry of `log_history` in the trainer_state.json of transformers' Trainer."""
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
"""Shortened trainer_state.json of transformers' Trainer. Source: github.com/Jaong/Checkpoint-of-CPT
at 6a9b832.
"""


def head(arguments, *, vocabulary, engine_micro_batch=None, label="") -> str:
    """Returns the lines that Megatron prints before its first step."""
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
    """Returns the line that Megatron-DeepSpeed prints for one step."""
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
    """Returns the log of LUMI's run, with the rank labels that srun adds."""
    return head(ARGUMENTS, vocabulary=51200, engine_micro_batch=2, label="  0: ") + "".join(
        "127: " + line(step, 346.65) for step in steps
    )


def frontier(engine_micro_batch: int | None = 4) -> str:
    """Returns the log of Frontier's run with "149 TFLOPs". DeepSpeed ran only a quarter of the
    micro-batch size that Megatron printed, so the speed is printed four times too high.
    """
    return (
        head(FRONTIER, vocabulary=50688, engine_micro_batch=engine_micro_batch)
        + "".join(
            line(step, 196.5, batch=1280, total=5, milliseconds=True, tflops=149.46)
            for step in range(1, 6)
        )
        + "[after training is done] \n"
    )


def modern(label: str = "", **changed: object) -> str:
    """Returns a log of today's Megatron-LM. Keywords change its arguments."""
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
    """Returns the line that HLAT's trainer prints for one step."""
    return (
        f"[0]:LOG Wed Dec 21 00:12:{second:02} 2022 - (0, {step}) step_loss : {11.25 - step:.4f}"
        f" learning_rate : 2.80e-06 throughput : 6497.86 param_norm : 12.5 grad-norm : {norm}\n"
    )


def titan(times: list[datetime.datetime]) -> str:
    """Returns one torchtitan log line for each time, in the format of the log TORCHTITAN."""
    return "".join(
        f"[rank0]:[titan] {when:%Y-%m-%d %H:%M:%S},000 - root - INFO - step: {step:2d}"
        f"  loss:  {3 - step / 100:.5f}  grad_norm:  0.8319  memory:  9.46GiB(64.99%)"
        "  tps: 7,282  tflops: 0.52  mfu: 0.17%\n"
        for step, when in enumerate(times, 1)
    )
