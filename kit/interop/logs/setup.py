"""What was trained and how, as a log tells it: model, layout, recipe, and what disagrees."""

import collections
import math
import os
from fractions import Fraction
from itertools import pairwise
from typing import Any

from cluster.record import ConfigError
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.interop.logs.formats import Texts, number
from kit.interop.logs.logs import Parser, Step, StepRecorder
from kit.interop.weights.other_trainers import OTHER_WORK, megatron_spec

DEGREES = ("tensor_parallel", "pipeline_parallel", "data_parallel")
SIZES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "virtual_stages": "virtual_pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "micro_batch_size": "micro_batch_size",
}
FSDP = {"use_megatron_fsdp", "use_custom_fsdp"}
FSDP_STAGES = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage of each strategy of Megatron-FSDP's."""
ABSENT = ("None", "False", "0", "0.0", "[1]", "")
"""The last but one is how Megatron-DeepSpeed prints one expert, that is none."""
LARGEST_INTERVAL = 10_000
RECIPE_ARGUMENTS = {
    "lr": "learning_rate",
    "min_lr": "min_learning_rate",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_eps": "eps",
    "weight_decay": "weight_decay",
    "clip_grad": "gradient_clip",
}


def describe(
    parser: Parser,
    steps: list[Step],
    *,
    spec: ModelSpec | None,
    changes: dict[str, dict[str, Any]],
) -> tuple[ModelSpec, Plan, Recipe, StepRecorder, list[str]]:
    """Returns what a log tells of: model, plan, recipe, what makes rows of its steps, and notes.

    What the user gives (`spec`, `changes`) wins.

    Raises:
        ConfigError: something is neither in the log nor given, a line for each such thing; or what
            was given contradicts the log.
    """
    settings = parser.settings
    given = changes["plan"]
    notes = list[str]()
    found = list[Any]()
    lacking = list[str]()
    for part in (
        lambda: (spec or _told_spec(settings, notes)).replace(**changes["spec"]),
        lambda: _told_plan(settings, given, notes),
        lambda: _printed_batch(settings, steps, given),
    ):
        try:
            found.append(part())
        except ConfigError as error:
            lacking.append(str(error))
    if lacking:
        raise ConfigError("\n".join(lacking))
    (model, told, batch), asked = found, given.get("global_batch_size")
    share = Fraction(asked, batch) if asked else _engine_share(settings, notes)
    if (really := batch * share).denominator > 1:
        raise ConfigError(
            f"plan.global_batch_size: {really} sequences. Give the number really run by --set."
        )
    plan = {"precision": "bf16", **told, "global_batch_size": int(really), **given}
    recipe = _recipe(settings, steps, changes["recipe"])
    interval = _interval(settings, steps)
    if "lr" not in settings:
        notes.append(
            "the log does not tell the recipe: fields of recipe.json that were not given are"
            " defaults"
        )
    if interval > 1:
        notes.append(
            f"one line stands for {interval} steps; each of them is recorded with"
            f" {parser.form.values}"
        )
    if parser.form.counts_lines:
        notes.append(
            "its lines have no step: the first line is recorded as step"
            f" {parser.steps_per_line}, the second as step {2 * parser.steps_per_line}, and so on"
        )
    recorder = StepRecorder(
        batch=batch,
        length=model.sequence_length,
        share=share,
        own=batch if parser.form.counts_before else 0,
        interval=interval,
    )
    return model, Plan.from_dict(plan), recipe, recorder, notes


def _told_spec(settings: Texts, notes: list[str]) -> ModelSpec:
    for name in OTHER_WORK:
        if settings.get(name, "None") not in ABSENT:
            raise ConfigError(
                f"model: {name} is {settings[name]} in the log, which the kit's decoder has not: "
                f"its FLOPs would be wrong. Give --model with a dense model that does as much "
                f"work for a token."
            )
    return megatron_spec(settings, notes)


def _engine_share(settings: Texts, notes: list[str]) -> Fraction | int:
    """Returns 1, or less where DeepSpeed's pipeline ran less than Megatron counts sequences for.

    DeepSpeed cuts the global batch by its own micro-batch, then Megatron feeds it micro-batches of
    Megatron's size. A run with 1 here and 4 there trains on a quarter of what both print. Source:
    `set_train_batch_size` in deepspeed/runtime/engine.py; commit ef4161a of
    sajal-vt/Megatron-DeepSpeed-ORNL, whose log prints 149 TFLOP/s.
    """
    fed, counted = (
        _whole(settings, name) for name in ("micro_batch_size", "engine_micro_batch_size")
    )
    if fed < 1 or counted < 1 or fed == counted or settings.get("no_pipeline_parallel") == "True":
        return 1
    share = Fraction(fed, counted)
    notes.append(
        f"Megatron fed micro-batches of {fed}, DeepSpeed counted {counted}: each step ran {share} "
        f"of the sequences that the log prints, and tokens are counted so"
    )
    return share


def _printed_batch(settings: Texts, steps: list[Step], given: dict[str, Any]) -> int:
    """Returns the sequences of one step that the log tells, or those that were given."""
    printed = [int(step["samples"]) for step in steps if step.get("samples")][-1:]
    told = [step for step in steps if step.get("consumed_samples")]
    rates = collections.Counter(
        (step["consumed_samples"] - last["consumed_samples"]) / (step["step"] - last["step"])
        for last, step in pairwise(told)
        if step["step"] > last["step"] and step["consumed_samples"] > last["consumed_samples"]
    )
    batch = sum(printed) or _whole(settings, "global_batch_size")
    rate = max(rates, key=rates.__getitem__, default=0)
    asked = given.get("global_batch_size")
    if not batch and asked and rate not in (0, asked):
        raise ConfigError(
            f"plan.global_batch_size: {asked} sequences, but consumed_samples grows by {rate:g} a "
            f"step in the log. Leave it out, or give the log of this run."
        )
    if not (batch or asked or rate):
        raise ConfigError(
            "plan.global_batch_size: not in the log. Give --set plan.global_batch_size=SEQUENCES."
        )
    return batch or asked or int(rate)


def _told_plan(settings: Texts, given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if "world_size" not in settings:
        if missing := [name for name in DEGREES if name not in given]:
            words = " ".join(f"--set plan.{name}=..." for name in missing)
            raise ConfigError(f"plan: the log does not tell {', '.join(missing)}. Give {words}")
        if "precision" not in given:
            notes.append("bf16 is assumed; --set plan.precision=fp32 if it was not")
        return {}
    flags = {name for name, text in settings.items() if text == "True"}
    sizes = {name: _whole(settings, theirs, 1) for name, theirs in SIZES.items()}
    tensor, pipeline, virtual, context, _ = sizes.values()
    if "fp16" in flags:
        notes.append("fp16 is shown as bf16, which has the same peak on these devices")
    if narrow := settings.get("fp8", "None") != "None":
        notes.append("matrix products in fp8: utilisation is of the peak in it")
    eight = "mxfp8" if settings.get("fp8_recipe") == "mxfp8" else "fp8"
    half = "bf16" if flags & {"bf16", "fp16"} else "fp32"
    full = "full" if "checkpoint_activations" in flags else settings.get("recompute_granularity")
    # Megatron's method `block`: so many of each stage; `uniform`: all, so many at a time.
    is_block = settings.get("recompute_method") == "block"
    blocks = _whole(settings, "recompute_num_layers") * virtual or None if is_block else None
    exchange = settings.get("cp_comm_type", "")
    strategy = settings.get("data_parallel_sharding_strategy", "")
    stages = (  # DeepSpeed's, and what Megatron-LM's optimizer and its two FSDPs shard as much as
        _whole(settings, "zero_stage"),
        int("use_distributed_optimizer" in flags),
        FSDP_STAGES.get(strategy, 0) if flags & FSDP else 0,
        3 if "use_torch_fsdp2" in flags else 0,
    )
    return sizes | {
        "context_exchange": "all_to_all"
        if context > 1 and "a2a" in exchange and "p2p" not in exchange
        else "ring",
        "data_parallel": max(
            1, _whole(settings, "world_size") // max(1, tensor * pipeline * context)
        ),
        "schedule": "interleaved" if virtual > 1 else "1f1b",
        "zero_stage": max(stages),
        "sequence_parallel": "sequence_parallel" in flags and tensor > 1,
        "recompute": full if full in ("full", "selective") else "none",
        "recompute_layers": blocks if full == "full" else None,
        "precision": eight if narrow else half,
    }


def _recipe(settings: Texts, steps: list[Step], given: dict[str, Any]) -> Recipe:
    found = {name: number(settings.get(theirs)) for theirs, name in RECIPE_ARGUMENTS.items()}
    told: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    rates = [rate for step in steps if (rate := step.get("learning_rate"))]
    told["learning_rate"] = told.get("learning_rate") or max(rates, default=3e-4)
    told["min_learning_rate"] = min(told.get("min_learning_rate", 0.0), told["learning_rate"])
    told |= {"gradient_clip": None} if told.get("gradient_clip") == 0 else {}
    told |= {"seed": int(settings["seed"])} if settings.get("seed", "").isdecimal() else {}
    last = max(int(step["step"]) for step in steps)
    totals = [int(total) for step in steps if (total := step.get("total_steps"))]
    total = max(totals, default=_whole(settings, "train_iters", last))
    data = os.path.basename(settings.get("data_path", "").strip("[]'\"") or "unknown")
    return Recipe.from_dict({"data": data, "num_steps": max(total, last), **told, **given})


def _interval(settings: Texts, steps: list[Step]) -> int:
    """Returns how many steps a line stands for."""
    told = [int(step["step"]) for step in steps if "loss" in step]
    told = told or [int(step["step"]) for step in steps if "attempt" in step]
    gaps = collections.Counter(b - a for a, b in pairwise(told if len(told) > 2 else ()))
    most = max(gaps, key=gaps.__getitem__, default=1)
    interval = max(1, _whole(settings, "log_interval") or most)
    if interval > LARGEST_INTERVAL:
        raise ConfigError(
            f"import: one line for {interval:,} steps is more than the {LARGEST_INTERVAL:,} that "
            f"are believed. Is the log damaged? Remove the lines in it that no trainer printed."
        )
    return interval


def _whole(settings: Texts, name: str, default: int = 0) -> int:
    found = number(settings.get(name))
    return int(found) if found is not None and math.isfinite(found) else default
