"""The rules of a plan. Each rule has a condition that is true if the rule is broken, and an error
message.

A plan is checked in four places:

- alone: `PLAN_RULES` of this module, in `Plan.__post_init__`
- with a model: `kit.config.model_rules`, in `Plan.check`
- with a recipe: `kit.config.recipe_rules`
- with the machine and the installed software: `check_engine` and `check_site` of
  `kit.engines.build`

`kit.launcher.prepare` makes all of these checks before a launch.

`Rule.breaks` uses only attributes that both `Plan` and `kit.estimate.theory.layouts.Layouts` have.
In a Plan an attribute is one value. In Layouts it is an array with one value per layout of a
search. Therefore one rule both rejects a plan and marks the forbidden layouts of a search. Rules
must use only comparisons, arithmetic, `&` and `|`, which work equally on values and arrays. The
operators `~`, `and` and `or` do not.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from cluster.record import counted
from kit.engines.capabilities import Capabilities

MULTI_STAGE_SCHEDULES = ("interleaved", "zero_bubble", "zbv")
SPLIT_SCHEDULES = ("zero_bubble", "zbv")
"""Schedules that split the backward pass into two halves: gradients of inputs, and gradients of
weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: for a plan (`PLAN_RULES`), for a plan and a model (`kit.config.model_rules`), or
    for a recipe and a plan (`kit.config.recipe_rules`).
    """

    breaks: Callable[..., Any]
    """Function that takes (plan), (plan, spec) or (recipe, plan), and returns whether the rule is
    broken. If `Layouts` are passed as the plan, it returns a boolean array with one value per
    layout."""
    sentence: Callable[..., str]
    """Function that takes the arguments of `breaks` and returns the error message: the field, its
    value, what is allowed, and what to do."""
    applies_to: Callable[[Capabilities], bool] = lambda _: True
    """Function that takes the capabilities of an engine and returns whether the rule applies to
    this engine. By default a rule applies to all engines."""


def _with_engine(
    applies_to: Callable[[Capabilities], bool],
    field: str,
    breaks: Callable[[Any], Any],
    reason: str,
) -> Rule:
    """Returns a rule for the engines that `applies_to` selects. Its error message contains the
    engine, the field, the value and `reason`.
    """
    return Rule(
        applies_to=applies_to,
        breaks=breaks,
        sentence=lambda plan: (
            f"plan.{field}: {getattr(plan, field)!r} is not allowed with engine"
            f" {plan.engine!r}: {reason}."
        ),
    )


def _shards(breaks: Callable[[Any], Any], reason: Callable[[Any], str], **kwargs: Any) -> Rule:
    """Returns a rule for plans that have a `shard_size`. Its error message ends with the result of
    `reason`.
    """
    return Rule(
        breaks=lambda plan: plan.is_hybrid & breaks(plan),
        sentence=lambda plan: f"plan.shard_size: {plan.shard_size} is not allowed {reason(plan)}.",
        **kwargs,
    )


def _piped(breaks: Callable[[Any], Any], sentence: Callable[[Any], str]) -> Rule:
    """Returns a rule for plans with pipeline parallelism, so with at least two pipeline devices."""
    return Rule(breaks=lambda plan: (plan.pipeline_parallel > 1) & breaks(plan), sentence=sentence)


def _sequences(plan: Any) -> Any:
    return plan.micro_batch_size * plan.data_parallel


def _some_blocks(plan: Any) -> Any:
    return False if plan.recompute_layers is None else plan.recompute_layers > 0


def _indivisible_batch(plan: Any) -> str:
    """Returns the error message for a batch that is not a multiple of replicas x micro-batch size.
    The message names the micro-batch size only if it is above 1. Otherwise the number of replicas
    alone is the cause.
    """
    batch = plan.global_batch_size
    size = plan.micro_batch_size
    sequences = counted(batch, "sequence")
    replicas = counted(plan.data_parallel, "replica")
    step = _sequences(plan)
    nearest = max(1, round(batch / step)) * step
    advice = f"Use a multiple of {step}, for example {nearest}."
    if size == 1:
        return f"plan.global_batch_size: {sequences} cannot be divided among {replicas}. {advice}"
    if batch % plan.data_parallel == 0:
        fitting = math.gcd(size, batch // plan.data_parallel)
        advice += f" Or set plan.micro_batch_size to {fitting}."
    else:
        advice += f" With plan.micro_batch_size 1, a multiple of {plan.data_parallel} is enough."
    return (
        f"plan.global_batch_size: {sequences} cannot be cut into micro-batches of {size} on"
        f" {replicas}. {advice}"
    )


PLAN_RULES = (
    _shards(
        lambda plan: plan.zero_stage == 0,
        lambda _: "with zero_stage 0, which shards nothing; use zero_stage 1, 2 or 3",
    ),
    _shards(
        lambda _: True,
        lambda plan: (
            f"with engine {plan.engine!r}, which shards over all of data_parallel; use None"
        ),
        applies_to=lambda engine: not engine.shards_within_groups,
    ),
    _shards(
        lambda plan: plan.context_parallel > 1,
        lambda _: "with context_parallel, which nobody tried",
    ),
    _shards(
        lambda plan: plan.data_parallel % plan.shard_group != 0,
        lambda plan: f"with data_parallel {plan.data_parallel}, which it must divide",
    ),
    Rule(
        breaks=lambda plan: plan.global_batch_size % _sequences(plan) != 0,
        sentence=_indivisible_batch,
    ),
    Rule(
        breaks=lambda plan: (plan.virtual_stages > 1) & (plan.pipeline_parallel == 1),
        sentence=lambda plan: (
            f"plan.virtual_stages: {plan.virtual_stages} needs pipeline_parallel of at least 2,"
            " got 1."
        ),
    ),
    _piped(
        lambda plan: (
            plan.is_one_of("schedule", *MULTI_STAGE_SCHEDULES) & (plan.virtual_stages == 1)
        ),
        lambda plan: (
            f"plan.virtual_stages: schedule {plan.schedule!r} needs at least 2 stages a device,"
            " got 1."
        ),
    ),
    _piped(
        lambda plan: plan.is_one_of("schedule", "gpipe", "1f1b") & (plan.virtual_stages > 1),
        lambda plan: (
            f"plan.virtual_stages: schedule {plan.schedule!r} has 1 stage a device, got"
            f" {plan.virtual_stages}. Use schedule"
            f" {', '.join(map(repr, MULTI_STAGE_SCHEDULES))}."
        ),
    ),
    _piped(
        lambda plan: plan.is_one_of("schedule", "zbv") & (plan.virtual_stages != 2),
        lambda plan: (
            "plan.virtual_stages: schedule 'zbv' has exactly 2 stages a device, got"
            f" {plan.virtual_stages}."
        ),
    ),
    _piped(
        lambda plan: (
            plan.is_one_of("schedule", "zbv")
            & (plan.num_microbatches < 2 * plan.pipeline_parallel - 1)
        ),
        lambda plan: (
            "plan.global_batch_size: schedule 'zbv' needs at least"
            f" {2 * plan.pipeline_parallel - 1} micro-batches, got {plan.num_microbatches}."
            " Raise global_batch_size or lower micro_batch_size."
        ),
    ),
    # The reason for this rule and the next rule was measured with torch 2.13. Recomputation runs
    # once for each half of the backward pass, and selective recomputation fails. With ZeRO 3, the
    # second half reads weights that are already freed, so gradients are wrong without an error.
    _piped(
        lambda plan: (
            plan.is_one_of("schedule", *SPLIT_SCHEDULES)
            & plan.is_one_of("recompute", "selective", "full")
        ),
        lambda plan: (
            f"plan.recompute: {plan.recompute!r} with schedule {plan.schedule!r} is not allowed,"
            " since its split backward pass would recompute twice. Use recompute 'none' or"
            " schedule '1f1b' or 'interleaved'."
        ),
    ),
    _piped(
        lambda plan: plan.is_one_of("schedule", *SPLIT_SCHEDULES) & (plan.zero_stage == 3),
        lambda plan: (
            f"plan.zero_stage: 3 with schedule {plan.schedule!r} is not allowed, since its split"
            " backward pass needs weights that ZeRO 3 has dropped. Use zero_stage 2 or schedule"
            " '1f1b' or 'interleaved'."
        ),
    ),
    _piped(
        lambda plan: (
            plan.is_one_of("schedule", "interleaved", "zero_bubble")
            & (plan.num_microbatches % plan.pipeline_parallel != 0)
        ),
        lambda plan: (
            f"plan.global_batch_size: schedule {plan.schedule!r} needs the"
            f" {plan.num_microbatches} micro-batches to be a multiple of pipeline_parallel"
            f" {plan.pipeline_parallel}. Change the global or micro batch."
        ),
    ),
    Rule(
        breaks=lambda plan: plan.sequence_parallel & (plan.tensor_parallel == 1),
        sentence=lambda _: (
            "plan.sequence_parallel: needs tensor_parallel of at least 2, got 1. Turn it off."
        ),
    ),
    Rule(
        breaks=lambda plan: (
            plan.is_one_of("context_exchange", "all_to_all") & (plan.context_parallel == 1)
        ),
        sentence=lambda plan: (
            f"plan.context_exchange: {plan.context_exchange!r} needs context_parallel of at"
            " least 2, got 1."
        ),
    ),
    _with_engine(
        lambda engine: not engine.scales_loss,
        "precision",
        lambda plan: plan.is_one_of("precision", "fp16"),
        "only DeepSpeed scales the loss, without which small gradients are lost; use 'bf16', or"
        " engine 'deepspeed'",
    ),
    _with_engine(
        lambda engine: engine.max_zero_stage_with_pipeline == 1,
        "zero_stage",
        lambda plan: (plan.pipeline_parallel > 1) & (plan.zero_stage > 1),
        "its pipeline sums gradients whole; use 0 or 1",
    ),
    _with_engine(
        lambda engine: not engine.schedules_other_than_1f1b,
        "schedule",
        lambda plan: (
            (plan.pipeline_parallel > 1)
            & plan.is_one_of("schedule", "gpipe", *MULTI_STAGE_SCHEDULES)
        ),
        "its pipeline runs 1F1B only here; use '1f1b'",
    ),
    _with_engine(
        lambda engine: not engine.sequence_parallel,
        "sequence_parallel",
        lambda plan: plan.sequence_parallel,
        "its Frontier recipe has none; turn it off",
    ),
    # Torch's selective recomputation identifies operations by their order. ZeRO 3 changes the
    # order, since it gathers and frees weights.
    _with_engine(
        lambda engine: not engine.selective_recompute_with_zero_3,
        "recompute",
        lambda plan: (plan.zero_stage == 3) & plan.is_one_of("recompute", "selective"),
        "not with zero_stage 3; use 'full'",
    ),
    _with_engine(
        lambda engine: engine.recomputes_some_blocks,
        "recompute_layers",
        lambda plan: _some_blocks(plan) & plan.is_one_of("recompute", "none", "selective"),
        "it needs recompute 'full'; use None",
    ),
    _with_engine(
        lambda engine: not engine.recomputes_some_blocks,
        "recompute_layers",
        _some_blocks,
        "it recomputes all blocks or none; use None",
    ),
    _with_engine(
        lambda engine: not engine.compiles_blocks and not engine.runs_on_trainium,
        "compile",
        lambda plan: plan.compile,
        "compiled blocks were not tried under it; turn it off",
    ),
    # Measured with DeepSpeed 0.19.8: in bf16 at ZeRO stage 0, gradients are not summed in fp32, and
    # the result deviates by 8e-3.
    _with_engine(
        lambda engine: not engine.bf16_without_zero,
        "precision",
        lambda plan: (
            plan.is_one_of("precision", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
            & (plan.zero_stage == 0)
        ),
        "stage 0 keeps sums of gradients no wider; use zero_stage 1, also with one replica",
    ),
    _with_engine(
        lambda engine: engine.max_zero_stage == 1,
        "zero_stage",
        lambda plan: plan.zero_stage > 1,
        "NxD shards the optimizer only; use 0 or 1",
    ),
    _with_engine(
        lambda engine: engine.runs_on_trainium,
        "compile",
        lambda plan: plan.compile,
        "its graphs are compiled by neuronx-cc; turn it off",
    ),
)
"""Rules for a plan alone, in the order in which they are checked. A rule may assume that all
earlier rules are satisfied."""
