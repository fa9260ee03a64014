"""Derives model, layout and recipe of a training run from the settings and steps in its log."""

import collections
import dataclasses
import math
import os
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

from cluster.record import ConfigError
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.interop.logs.formats import Texts
from kit.interop.logs.logs import Parser, Step, is_training
from kit.interop.logs.numbers import parse_number
from kit.interop.logs.rows import StepRecorder
from kit.interop.weights.model_arguments import OTHER_WORK, megatron_spec

DEGREES = ("tensor_parallel", "pipeline_parallel", "data_parallel")
"""Fields of the plan that must be in the log or be given by the user."""
SIZES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "virtual_stages": "virtual_pipeline_model_parallel_size",
    "context_parallel": "context_parallel_size",
    "micro_batch_size": "micro_batch_size",
}
"""Dict from field of the plan (the kit's layout) to the Megatron argument with this meaning."""
RECIPE_ARGUMENTS = {
    "learning_rate": "lr",
    "min_learning_rate": "min_lr",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_eps",
    "weight_decay": "weight_decay",
    "gradient_clip": "clip_grad",
}
"""Dict from field of the recipe to the Megatron argument with this meaning."""
FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
FSDP_STAGES = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Dict from sharding strategy of Megatron-FSDP to the ZeRO stage that shards as much."""
ABSENT = ("None", "False", "0", "0.0", "[1]", "")
"""Texts of an argument in a log that mean that the argument is not used. For a model without
experts, Megatron-DeepSpeed prints `[1]`."""
LARGEST_INTERVAL = 10_000
"""Largest accepted number of steps per line. A larger number means that the log is damaged."""


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """Model, layout and recipe of a training run, read from its log and from the user's options."""

    spec: ModelSpec
    plan: Plan
    recipe: Recipe
    recorder: StepRecorder
    """Object that converts the steps of the log to rows of metrics.jsonl."""
    notes: list[str]
    """Notes for the user: values that were derived or assumed, and contradictions in the log."""


def configure_run(
    parser: Parser,
    steps: list[Step],
    *,
    spec: ModelSpec | None,
    changes: dict[str, dict[str, Any]],
) -> LoggedRun:
    """Returns model, plan (layout) and recipe of the run in a log, and the converter of its steps.
    Values that the user gives (`spec`, `changes`) are preferred to values of the log.

    Raises:
        ConfigError: A required value is neither in the log nor given, or a given value contradicts
            the log. The message has one line for each error.
    """
    form = parser.form
    settings = parser.settings
    steps = list(filter(is_training, steps))
    notes = list[str]()
    given_plan = changes["plan"]
    model, layout, batch = _all_or_errors(
        lambda: (spec or _spec(settings, notes)).replace(**changes["spec"]),
        lambda: _layout(settings, given_plan, notes),
        lambda: _sequences_per_step(settings, steps, given_plan),
    )
    given_batch = given_plan.get("global_batch_size")
    share = Fraction(given_batch, batch) if given_batch else _engine_share(settings, notes)
    sequences = batch * share
    if sequences.denominator > 1:
        raise ConfigError(
            f"plan.global_batch_size: {sequences} sequences. Give the number really run by --set."
        )
    plan = {"precision": "bf16", **layout, "global_batch_size": int(sequences), **given_plan}
    recipe = _recipe(settings, steps, changes["recipe"])
    interval = _interval(settings, steps)
    if "lr" not in settings:
        notes.append(
            "the log does not tell the recipe: fields of recipe.json that were not given are"
            " defaults"
        )
    if interval > 1:
        notes.append(
            f"one line stands for {interval} steps; each of them is recorded with {form.values}"
        )
    if form.counts_lines:
        notes.append(
            "its lines have no step: the first line is recorded as step"
            f" {parser.steps_per_line}, the second as step {2 * parser.steps_per_line}, and so on"
        )
    recorder = StepRecorder(
        batch=batch,
        length=model.sequence_length,
        share=share,
        own=batch if form.counts_before else 0,
        interval=interval,
    )
    return LoggedRun(model, Plan.from_dict(plan), recipe, recorder, notes)


def _all_or_errors(*parts: Callable[[], Any]) -> list[Any]:
    """Returns the result of each function. If some fail, raises one ConfigError with a line for
    each error.
    """
    results = []
    errors = []
    for part in parts:
        try:
            results.append(part())
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    return results


def _spec(settings: Texts, notes: list[str]) -> ModelSpec:
    """Returns the spec of the model that a log describes."""
    for name in OTHER_WORK:
        if settings.get(name, "None") not in ABSENT:
            raise ConfigError(
                f"model: {name} is {settings[name]} in the log, which the kit's decoder has not: "
                f"its FLOPs would be wrong. Give --model with a dense model that does as much "
                f"work for a token."
            )
    return megatron_spec(settings, notes)


def _layout(settings: Texts, given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns the fields of the plan (layout) that a log states. If the log does not print
    Megatron's arguments, the user must give the degrees of parallelism, and the result is {}.

    Raises:
        ConfigError: The log does not print the arguments, and the user has not given all degrees.
    """
    if "world_size" not in settings:
        if missing := [name for name in DEGREES if name not in given]:
            words = " ".join(f"--set plan.{name}=..." for name in missing)
            raise ConfigError(f"plan: the log does not tell {', '.join(missing)}. Give {words}")
        if "precision" not in given:
            notes.append("bf16 is assumed; --set plan.precision=fp32 if it was not")
        return {}
    flags = {name for name, text in settings.items() if text == "True"}
    sizes = {field: _whole(settings, argument, 1) for field, argument in SIZES.items()}
    tensor = sizes["tensor_parallel"]
    context = sizes["context_parallel"]
    is_interleaved = sizes["virtual_stages"] > 1
    ranks_of_replica = max(1, tensor * sizes["pipeline_parallel"] * context)
    replicas = _whole(settings, "world_size") // ranks_of_replica
    exchange = settings.get("cp_comm_type", "")
    all_to_all = context > 1 and "a2a" in exchange and "p2p" not in exchange
    return {
        **sizes,
        "context_exchange": "all_to_all" if all_to_all else "ring",
        "data_parallel": max(1, replicas),
        "schedule": "interleaved" if is_interleaved else "1f1b",
        "zero_stage": _zero_stage(settings, flags),
        "sequence_parallel": "sequence_parallel" in flags and tensor > 1,
        **_recomputation(settings, flags, sizes["virtual_stages"]),
        "precision": _precision(settings, flags, notes),
    }


def _zero_stage(settings: Texts, flags: set[str]) -> int:
    """Returns DeepSpeed's ZeRO stage. For Megatron-LM's distributed optimizer or its two FSDPs,
    returns the ZeRO stage that shards as much.
    """
    stages = [_whole(settings, "zero_stage")]
    if "use_distributed_optimizer" in flags:
        stages.append(1)
    if not flags.isdisjoint(FSDP):
        stages.append(FSDP_STAGES.get(settings.get("data_parallel_sharding_strategy", ""), 0))
    if "use_torch_fsdp2" in flags:
        stages.append(3)
    return max(stages)


def _recomputation(settings: Texts, flags: set[str], virtual_stages: int) -> dict[str, Any]:
    """Returns the plan's fields `recompute` and `recompute_layers`, from Megatron's arguments on
    activation recomputation.
    """
    kind = settings.get("recompute_granularity")
    if "checkpoint_activations" in flags:
        kind = "full"
    if kind not in ("full", "selective"):
        kind = "none"
    layers = None
    # Megatron's method `block` recomputes `recompute_num_layers` blocks of each stage. Its method
    # `uniform` recomputes all blocks, `recompute_num_layers` blocks at a time.
    if kind == "full" and settings.get("recompute_method") == "block":
        layers = _whole(settings, "recompute_num_layers") * virtual_stages or None
    return {"recompute": kind, "recompute_layers": layers}


def _precision(settings: Texts, flags: set[str], notes: list[str]) -> str:
    """Returns the precision of matrix products. Adds a note for fp16, which is shown as bf16, and
    for fp8.
    """
    if "fp16" in flags:
        notes.append("fp16 is shown as bf16, which has the same peak on these devices")
    if settings.get("fp8", "None") != "None":
        notes.append("matrix products in fp8: utilisation is of the peak in it")
        return "mxfp8" if settings.get("fp8_recipe") == "mxfp8" else "fp8"
    return "bf16" if flags & {"bf16", "fp16"} else "fp32"


def _sequences_per_step(settings: Texts, steps: list[Step], given: dict[str, Any]) -> int:
    """Returns the number of sequences per step: the number that the log prints, or the user's
    number, or the growth of consumed samples per step.

    Raises:
        ConfigError: The number is unknown, or the given number contradicts the log.
    """
    printed = [int(step["samples"]) for step in steps if step.get("samples")]
    batch = printed[-1] if printed else _whole(settings, "global_batch_size")
    if batch:
        return batch
    growth = _growth_of_samples(steps)
    given_batch = given.get("global_batch_size")
    if given_batch and growth not in (0, given_batch):
        raise ConfigError(
            f"plan.global_batch_size: {given_batch} sequences, but consumed_samples grows by"
            f" {growth:g} a step in the log. Leave it out, or give the log of this run."
        )
    if not (given_batch or growth):
        raise ConfigError(
            "plan.global_batch_size: not in the log. Give --set plan.global_batch_size=SEQUENCES."
        )
    return given_batch or int(growth)


def _growth_of_samples(steps: list[Step]) -> float:
    """Returns the most frequent growth of consumed samples per step, or 0 if they never grow."""
    counted = [step for step in steps if step.get("consumed_samples")]
    rates = collections.Counter[float]()
    for last, step in pairwise(counted):
        samples = step["consumed_samples"] - last["consumed_samples"]
        if step["step"] > last["step"] and samples > 0:
            rates[samples / (step["step"] - last["step"])] += 1
    return _most_frequent(rates, default=0)


def _engine_share(settings: Texts, notes: list[str]) -> Fraction | int:
    """Returns the fraction of the sequences in Megatron's log that DeepSpeed really ran. The
    fraction is 1, unless DeepSpeed's pipeline uses another micro-batch size than Megatron.

    DeepSpeed divides the global batch by its own micro-batch. Megatron then feeds it micro-batches
    of Megatron's size. With micro-batches of 1 in Megatron and 4 in DeepSpeed, a run trains on a
    quarter of the sequences that both print.

    Sources: `set_train_batch_size` in deepspeed/runtime/engine.py, and commit ef4161a of
    sajal-vt/Megatron-DeepSpeed-ORNL, whose log prints 149 TFLOP/s.
    """
    fed = _whole(settings, "micro_batch_size")
    counted = _whole(settings, "engine_micro_batch_size")
    has_pipeline = settings.get("no_pipeline_parallel") != "True"
    if fed < 1 or counted < 1 or fed == counted or not has_pipeline:
        return 1
    share = Fraction(fed, counted)
    notes.append(
        f"Megatron fed micro-batches of {fed}, DeepSpeed counted {counted}: each step ran {share} "
        f"of the sequences that the log prints, and tokens are counted so"
    )
    return share


def _recipe(settings: Texts, steps: list[Step], given: dict[str, Any]) -> Recipe:
    """Returns the recipe of the run in a log. Fields that the log does not state have their
    defaults.
    """
    fields: dict[str, Any] = {}
    for field, argument in RECIPE_ARGUMENTS.items():
        value = parse_number(settings.get(argument))
        if value is not None:
            fields[field] = value
    if not fields.get("learning_rate"):
        rates = [step["learning_rate"] for step in steps if step.get("learning_rate")]
        fields["learning_rate"] = max(rates, default=3e-4)
    lowest = fields.get("min_learning_rate", 0.0)
    fields["min_learning_rate"] = min(lowest, fields["learning_rate"])
    if fields.get("gradient_clip") == 0:
        fields["gradient_clip"] = None
    seed = settings.get("seed", "")
    if seed.isdecimal():
        fields["seed"] = int(seed)
    last = max(int(step["step"]) for step in steps)
    totals = [int(step["total_steps"]) for step in steps if step.get("total_steps")]
    total = max(totals, default=_whole(settings, "train_iters", last))
    fields["num_steps"] = max(total, last)
    data = settings.get("data_path", "").strip("[]'\"") or "unknown"
    fields["data"] = os.path.basename(data)
    return Recipe.from_dict(fields | given)


def _interval(settings: Texts, steps: list[Step]) -> int:
    """Returns the number of steps per line.

    Raises:
        ConfigError: The number is above LARGEST_INTERVAL.
    """
    interval = _whole(settings, "log_interval")
    if not interval:
        with_loss = [step for step in steps if "loss" in step]
        numbers = [int(step["step"]) for step in with_loss or steps]
        gaps = collections.Counter[int]()
        if len(numbers) > 2:
            gaps.update(after - before for before, after in pairwise(numbers))
        interval = _most_frequent(gaps, default=1)
    if interval > LARGEST_INTERVAL:
        raise ConfigError(
            f"import: one line for {interval:,} steps is more than the {LARGEST_INTERVAL:,} that "
            f"are believed. Is the log damaged? Remove the lines in it that no trainer printed."
        )
    return max(1, interval)


def _most_frequent(counts: collections.Counter[Any], default: Any) -> Any:
    """Returns the most frequent value, or `default` if `counts` is empty. If several values are
    equally frequent, the first is returned.
    """
    return max(counts, key=counts.__getitem__, default=default)


def _whole(settings: Texts, name: str, default: int = 0) -> int:
    """Returns the setting `name` of a log as a whole number, or `default` if it is missing or no
    number.
    """
    value = parse_number(settings.get(name))
    if value is None or not math.isfinite(value):
        return default
    return int(value)
