"""The rules of a plan, each once: what it breaks on, and the sentence that refuses it.

`breaks` is written on names that `Plan` has for one plan and `kit.estimate.theory.layouts.Layouts`
as arrays for many, so the same rule refuses a plan and masks the candidates of a search. It keeps
to comparisons, arithmetic, `&` and `|`, which mean the same for both (`~`, `and`, `or` do not).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from cluster.record import counted

ENGINES = ("native", "deepspeed", "neuron")
MULTI_STAGE_SCHEDULES = ("interleaved", "zero_bubble", "zbv")
SPLIT_SCHEDULES = ("zero_bubble", "zbv")
"""Their backward pass is in two halves: for the input, and for the weights."""
TRN1_CORES = 32
"""NeuronCores, and so ranks of engine neuron, on a node: a trn1.32xlarge."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: of a plan (`RULES`), or of a plan and a model (`MODEL_RULES`)."""

    breaks: Callable[..., Any]
    """Of (plan) or (plan, spec): bool. Of layouts in the place of the plan: their mask."""
    sentence: Callable[..., str]
    """Of the same: what is wrong, the value, what is allowed, what to do."""
    engines: tuple[str, ...] = ENGINES


def _with_engine(
    engines: tuple[str, ...], field: str, breaks: Callable[[Any], Any], reason: str
) -> Rule:
    """Returns a rule of some engines; the sentence names the plan's, the field and its value."""
    return Rule(
        engines=engines,
        breaks=breaks,
        sentence=lambda plan: (
            f"plan.{field}: {getattr(plan, field)!r} is not allowed with engine"
            f" {plan.engine!r}: {reason}."
        ),
    )


def _shards(breaks: Callable[[Any], Any], reason: Callable[[Any], str], **kwargs: Any) -> Rule:
    """Returns a rule of plans whose ZeRO shards over fewer than all replicas."""
    return Rule(
        breaks=lambda plan: plan.is_hybrid & breaks(plan),
        sentence=lambda plan: f"plan.shard_size: {plan.shard_size} is not allowed {reason(plan)}.",
        **kwargs,
    )


def _piped(breaks: Callable[[Any], Any], sentence: Callable[[Any], str]) -> Rule:
    """Returns a rule of plans with a pipeline."""
    return Rule(breaks=lambda plan: (plan.pipeline_parallel > 1) & breaks(plan), sentence=sentence)


def _sequences(plan: Any) -> Any:
    return plan.micro_batch_size * plan.data_parallel


RULES = (
    _shards(
        lambda plan: plan.zero_stage == 0,
        lambda _: "with zero_stage 0, which shards nothing; use zero_stage 1, 2 or 3",
    ),
    _shards(
        lambda _: True,
        lambda plan: (
            f"with engine {plan.engine!r}, which shards over all of data_parallel; use None"
        ),
        engines=("deepspeed", "neuron"),
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
        sentence=lambda plan: (
            f"plan.global_batch_size: {counted(plan.global_batch_size, 'sequence')} cannot be"
            f" cut into micro-batches of {plan.micro_batch_size} on"
            f" {counted(plan.data_parallel, 'replica')}. Use a multiple of {_sequences(plan)}, for"
            " example"
            f" {max(1, round(plan.global_batch_size / _sequences(plan))) * _sequences(plan)}."
        ),
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
    # This and the next measured on torch 2.13: recomputation runs once for each half of the
    # backward pass (selective fails), and with ZeRO 3 the second half reads weights that are
    # already dropped: gradients are silently wrong.
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
        ("native", "neuron"),
        "precision",
        lambda plan: plan.is_one_of("precision", "fp16"),
        "only DeepSpeed scales the loss, without which small gradients are lost; use 'bf16', or"
        " engine 'deepspeed'",
    ),
    _with_engine(
        ("deepspeed",),
        "zero_stage",
        lambda plan: (plan.pipeline_parallel > 1) & (plan.zero_stage > 1),
        "its pipeline sums gradients whole; use 0 or 1",
    ),
    _with_engine(
        ("deepspeed", "neuron"),
        "schedule",
        lambda plan: (
            (plan.pipeline_parallel > 1)
            & plan.is_one_of("schedule", "gpipe", *MULTI_STAGE_SCHEDULES)
        ),
        "its pipeline runs 1F1B only here; use '1f1b'",
    ),
    _with_engine(
        ("deepspeed",),
        "sequence_parallel",
        lambda plan: plan.sequence_parallel,
        "its Frontier recipe has none; turn it off",
    ),
    # torch keeps and recomputes operations by their order, which gathering and dropping weights
    # upsets.
    _with_engine(
        ("deepspeed",),
        "recompute",
        lambda plan: (plan.zero_stage == 3) & plan.is_one_of("recompute", "selective"),
        "not with zero_stage 3; use 'full'",
    ),
    _with_engine(
        ("deepspeed",),
        "compile",
        lambda plan: plan.compile,
        "compiled blocks were not tried under it; turn it off",
    ),
    # Measured with DeepSpeed 0.19.8: bf16 at stage 0 keeps no fp32 sum of gradients and strays by
    # 8e-3.
    _with_engine(
        ("deepspeed",),
        "precision",
        lambda plan: (
            plan.is_one_of("precision", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
            & (plan.zero_stage == 0)
        ),
        "stage 0 keeps sums of gradients no wider; use zero_stage 1, also with one replica",
    ),
    _with_engine(
        ("neuron",),
        "zero_stage",
        lambda plan: plan.zero_stage > 1,
        "NxD shards the optimizer only; use 0 or 1",
    ),
    _with_engine(
        ("neuron",),
        "compile",
        lambda plan: plan.compile,
        "its graphs are compiled by neuronx-cc; turn it off",
    ),
)
"""In the order in which they are tried: each may rely on those before it."""


def _divided(
    what: str,
    degree: Callable[[Any], Any],
    name: Callable[[Any], str],
    count: Callable[[Any, Any], Any] | None = None,
    more: int = 0,
    **kwargs: Any,
) -> Rule:
    """Returns the rule that a degree of the plan divides a number of the model, or `more`."""
    number = count or (lambda plan, spec: getattr(spec, what))

    def sentence(plan: Any, spec: Any) -> str:
        value = number(plan, spec)
        allowed = [i for i in range(1, 129) if 0 in (value % i, (value + more) % i)]
        return (
            f"spec.{what}: {value} is not divisible by {name(plan)} = {degree(plan)}. Allowed for"
            f" this model: {', '.join(map(str, allowed))}."
        )

    def breaks(plan: Any, spec: Any) -> Any:
        value, parts = number(plan, spec), degree(plan)
        return (value % parts != 0) & ((value + more) % parts != 0 if more else True)

    return Rule(breaks=breaks, sentence=sentence, **kwargs)


def _over_heads(plan: Any) -> Any:
    """Returns over how many ranks heads are cut: those of Ulysses exchange whole heads."""
    is_exchanged = plan.is_one_of("context_exchange", "all_to_all")
    return plan.tensor_parallel * (1 + is_exchanged * (plan.context_parallel - 1))


def _head_degrees(plan: Any) -> str:
    exchanged = _over_heads(plan) > plan.tensor_parallel
    return "tensor_parallel x context_parallel" if exchanged else "tensor_parallel"


def _sequence_parts(plan: Any) -> Any:
    """Returns into how many parts a sequence is cut.

    Each rank of context parallelism has a part of its head and one of its tail: equal work under
    the causal mask.
    """
    tensor = 1 + plan.sequence_parallel * (plan.tensor_parallel - 1)
    return tensor * (1 + (plan.context_parallel > 1) * (2 * plan.context_parallel - 1))


def _needs_parts(plan: Any) -> str:
    if plan.context_parallel == 1:
        return f"tensor_parallel = {plan.tensor_parallel}, which sequence_parallel needs"
    tensor = " x tensor_parallel" if plan.sequence_parallel else ""
    return f"2 x context_parallel{tensor} = {_sequence_parts(plan)}"


def _groups_of_four(plan: Any) -> int:
    return min(plan.num_devices, TRN1_CORES) // 4


MODEL_RULES = (
    Rule(
        engines=("neuron",),
        breaks=lambda _, spec: spec.family != "llama" or spec.bias or spec.tied_embeddings,
        sentence=lambda _, spec: (
            "plan.engine: 'neuron' trains Llamas without biases and tied embeddings, as HLAT did;"
            f" {spec.name!r} is not one. Use engine 'native', or another model."
        ),
    ),
    # On Trn1 NxD (0.9 to 0.18: parallel_layers/parallel_state.py) spreads each group of four over
    # its node, side by side with others of the same pipeline stage, but adds up copied heads as if
    # the four were neighbours.
    Rule(
        engines=("neuron",),
        breaks=lambda plan, spec: (plan.tensor_parallel == 4) & (plan.kv_replication(spec) > 1),
        sentence=lambda _, spec: (
            "plan.tensor_parallel: 4 is not allowed with engine 'neuron' where spec.num_kv_heads"
            f" is {spec.num_kv_heads}: NxD adds up the gradients of copied key/value heads over the"
            f" wrong ranks. Use {spec.num_kv_heads}, or 8 and more."
        ),
    ),
    # The groups of four on a node, or of all devices where these are fewer, divide the replicas.
    Rule(
        engines=("neuron",),
        breaks=lambda plan, _: (
            (plan.tensor_parallel == 4)
            & (
                (plan.num_devices >= TRN1_CORES) & (plan.data_parallel % (TRN1_CORES // 4) != 0)
                | (plan.num_devices < TRN1_CORES) & (plan.num_devices > 4 * plan.data_parallel)
            )
        ),
        sentence=lambda plan, _: (
            f"plan.data_parallel: {plan.data_parallel} is not allowed with engine 'neuron',"
            f" tensor_parallel 4 and pipeline_parallel {plan.pipeline_parallel}: NxD makes the"
            f" {_groups_of_four(plan)} groups of four ranks on a node replicas of each other. Use a"
            f" multiple of {TRN1_CORES // 4}, pipeline_parallel 1, or another tensor_parallel."
        ),
    ),
    _divided(
        "num_layers",
        lambda plan: plan.num_stages,
        lambda _: "the number of pipeline stages, nor with embedding and loss as a layer each,",
        more=2,  # `Plan.stage_layers`
        engines=("native",),
    ),
    _divided(
        "num_layers",
        lambda plan: plan.num_stages,
        lambda plan: f"the number of pipeline stages, equal ones with engine {plan.engine!r},",
        engines=("deepspeed", "neuron"),
    ),
    _divided("num_heads", _over_heads, _head_degrees),
    _divided(
        "num_kv_heads",
        _over_heads,
        _head_degrees,
        lambda plan, spec: spec.num_kv_heads * plan.kv_replication(spec),
    ),
    _divided("ffn_hidden_size", lambda plan: plan.tensor_parallel, lambda _: "tensor_parallel"),
    _divided("vocab_size", lambda plan: plan.tensor_parallel, lambda _: "tensor_parallel"),
    Rule(
        breaks=lambda plan, spec: spec.sequence_length % _sequence_parts(plan) != 0,
        sentence=lambda plan, spec: (
            f"spec.sequence_length: {spec.sequence_length} is not divisible by"
            f" {_needs_parts(plan)}."
        ),
    ),
)
