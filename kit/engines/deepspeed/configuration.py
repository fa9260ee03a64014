"""Converts a plan and a recipe to the configuration of two other projects: DeepSpeed's JSON and the
command line of Megatron-DeepSpeed.

Imports no torch.
"""

from typing import Any

from cluster.record import ConfigError
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec

CONFIG_FILE = "deepspeed.json"
"""Name of the file in the run directory that holds the result of `deepspeed_config` as JSON."""
LOSS_SCALING = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""Options of dynamic loss scaling in fp16. The values are DeepSpeed's defaults, written out so
that a user sees them. The scale begins at 2^16. It is halved when gradients overflow for the
second time, and each step with an overflow is skipped. It is doubled after 1000 steps without an
overflow."""


def deepspeed_config(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Returns DeepSpeed's configuration of a plan. All values are derived from plan and recipe, so
    the configuration cannot contradict the plan or the recipe.

    The optimizer is not in the configuration, since the kit passes torch's AdamW to DeepSpeed.
    DeepSpeed's own AdamW would be compiled when a job starts.
    """
    # At ZeRO stage 0, DeepSpeed clips gradients but does not report their norm. The kit then
    # computes the norm and clips, so DeepSpeed must not clip (0.0).
    clip = 0.0
    if plan.zero_stage and recipe.gradient_clip is not None:
        clip = recipe.gradient_clip
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": plan.zero_stage},
        "steps_per_print": None,  # The kit writes its own metrics.
    }
    if plan.precision != "fp32":
        config[plan.precision] = {"enabled": True}
        if plan.precision == "fp16":
            config[plan.precision] |= LOSS_SCALING
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def check_batch(plan: Plan, reported: dict[str, int]) -> None:
    """Raises ConfigError if a batch size that DeepSpeed reports differs from the batch size of the
    plan. `reported` maps names of fields of the plan, e.g. `micro_batch_size`, to DeepSpeed's
    values. The message names both numbers.

    In a 175B run on Frontier, the batch size was set in two places with different values, and
    nobody noticed. Megatron used micro-batches of 1, DeepSpeed's JSON said 4, and the printed
    TFLOP/s were four times the real value.
    """
    for name, value in reported.items():
        wanted = getattr(plan, name)
        if value != wanted:
            raise ConfigError(
                f"plan.{name}: the plan says {wanted}, but DeepSpeed reports {value}. Its"
                " configuration disagrees with the plan: leave train_batch_size,"
                " train_micro_batch_size_per_gpu and gradient_accumulation_steps as"
                " deepspeed_config(plan, recipe) gives them."
            )


def is_frontier_gpt(spec: ModelSpec) -> bool:
    """Returns whether Megatron-DeepSpeed's `pretrain_gpt.py` trains the model: a GPT with tied
    embeddings.
    """
    return spec.family == "gpt" and spec.tied_embeddings and not spec.switches


def megatron_arguments(spec: ModelSpec, plan: Plan, recipe: Recipe) -> list[str]:
    """Returns the command-line arguments with which Megatron-DeepSpeed's `pretrain_gpt.py` trains
    the model as plan and recipe specify.

    Raises:
        ConfigError: The model is not a GPT of the Frontier paper, the plan is for another engine,
            or Megatron-DeepSpeed does not have the recipe's learning rate schedule.

    Source: the launch scripts of the Frontier paper's authors (github.com/olcf/ai-training-series
    and github.com/sajal-vt/Megatron-DeepSpeed-ORNL) and Megatron-DeepSpeed's
    `megatron/arguments.py`.
    """
    if not is_frontier_gpt(spec):
        raise ConfigError(
            f"spec.name: {spec.name!r} is no GPT with tied embeddings, which is what"
            " pretrain_gpt.py trains by these flags. Use one of the GPT presets."
        )
    if plan.engine != "deepspeed":
        raise ConfigError(
            f"plan.engine: {plan.engine!r} is not Megatron-DeepSpeed's. Use engine 'deepspeed'."
        )
    if recipe.schedule == "wsd":
        raise ConfigError(
            "recipe.schedule: 'wsd' is no --lr-decay-style of Megatron-DeepSpeed. Use 'cosine' or"
            " 'constant'."
        )
    flags: dict[str, Any] = {
        "--tensor-model-parallel-size": plan.tensor_parallel,
        "--pipeline-model-parallel-size": plan.pipeline_parallel,
        "--num-layers": spec.num_layers,
        "--hidden-size": spec.hidden_size,
        "--ffn-hidden-size": spec.ffn_hidden_size,
        "--num-attention-heads": spec.num_heads,
        "--seq-length": spec.sequence_length,
        "--max-position-embeddings": spec.sequence_length,
        "--micro-batch-size": plan.micro_batch_size,
        "--global-batch-size": plan.global_batch_size,
        "--train-iters": recipe.num_steps,
        "--optimizer": "adam",
        "--lr": recipe.learning_rate,
        "--min-lr": recipe.min_learning_rate,
        "--lr-decay-style": recipe.schedule,
        "--lr-decay-iters": recipe.decay_steps or recipe.num_steps,
        "--lr-warmup-iters": recipe.warmup_steps,
        "--adam-beta1": recipe.beta1,
        "--adam-beta2": recipe.beta2,
        "--adam-eps": recipe.eps,
        "--weight-decay": recipe.weight_decay,
        "--clip-grad": recipe.gradient_clip or 0.0,
        "--init-method-std": spec.init_std,
        "--seed": recipe.seed,
        "--data-path": recipe.data,
        "--zero-stage": plan.zero_stage,
        "--deepspeed_config": CONFIG_FILE,
    }
    switches = ["--deepspeed"]
    if plan.precision != "fp32":
        switches.append(f"--{plan.precision}")
    if plan.recompute != "none":
        switches += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    if plan.pipeline_parallel == 1:
        switches.append("--no-pipeline-parallel")
    words = []
    for flag, value in flags.items():
        words += [flag, str(value)]
    return words + switches
