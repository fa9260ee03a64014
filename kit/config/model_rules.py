"""The rules for a plan together with the model that it splits. `kit.config.rules` has the rules for
a plan alone.
"""

from collections.abc import Callable
from typing import Any

from kit.config.rules import Rule
from kit.config.spec import SWITCHES

TRN1_CORES = 32
"""Number of NeuronCores of a node of type trn1.32xlarge. Engine neuron has one rank per
NeuronCore."""


def _divided(
    what: str,
    degree: Callable[[Any], Any],
    name: Callable[[Any], str],
    count: Callable[[Any, Any], Any] | None = None,
    more: int = 0,
    **kwargs: Any,
) -> Rule:
    """Returns the rule that a number of the model, such as its layers, must be divisible by a
    degree of the plan. If `more` is not 0, it is enough that the number plus `more` is divisible by
    the degree.

    `what` is the field of the model. `count` returns the number if it is not the value of this
    field. `degree` returns the degree, and `name` its name for the error message. `kwargs` are
    further fields of the Rule.
    """
    number = count or (lambda plan, spec: getattr(spec, what))

    def sentence(plan: Any, spec: Any) -> str:
        value = number(plan, spec)
        allowed = [i for i in range(1, 129) if 0 in (value % i, (value + more) % i)]
        return (
            f"spec.{what}: {value} is not divisible by {name(plan)} = {degree(plan)}. Allowed for"
            f" this model: {', '.join(map(str, allowed))}."
        )

    def breaks(plan: Any, spec: Any) -> Any:
        value = number(plan, spec)
        parts = degree(plan)
        is_indivisible = value % parts != 0
        if more:
            is_indivisible = is_indivisible & ((value + more) % parts != 0)
        return is_indivisible

    return Rule(breaks=breaks, sentence=sentence, **kwargs)


def _trains_switch(name: str) -> Rule:
    """Returns the rule that a field of the model must have its default, for the engines that do not
    train other values.
    """
    return Rule(
        applies_to=lambda engine: name in engine.untrained_switches,
        breaks=lambda _, spec: name in spec.switches,
        sentence=lambda plan, spec: (
            f"spec.{name}: {spec.switches[name]!r} is not trained by engine {plan.engine!r}. Use"
            " engine 'native', or another model."
        ),
    )


def _over_heads(plan: Any) -> Any:
    """Returns the number of ranks over which attention heads are split. If context parallelism
    exchanges heads all-to-all (Ulysses), its ranks are included.
    """
    is_exchanged = plan.is_one_of("context_exchange", "all_to_all")
    return plan.tensor_parallel * (1 + is_exchanged * (plan.context_parallel - 1))


def _head_degrees(plan: Any) -> str:
    """Returns the names of the degrees over which attention heads are split, for an error
    message.
    """
    exchanged = _over_heads(plan) > plan.tensor_parallel
    return "tensor_parallel x context_parallel" if exchanged else "tensor_parallel"


def _sequence_parts(plan: Any) -> Any:
    """Returns the number of parts into which a sequence is split.

    Each context parallel rank has two parts: one near the start of the sequence and one near its
    end. The ranks then have equal work, since tokens near the end attend to more tokens under the
    causal mask.
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
        applies_to=lambda engine: engine.only_plain_llama,
        breaks=lambda _, spec: (
            spec.family != "llama"
            or spec.has_layernorm
            or not spec.gated
            or spec.bias
            or spec.tied_embeddings
        ),
        sentence=lambda _, spec: (
            "plan.engine: 'neuron' trains Llamas without biases and tied embeddings, as HLAT did;"
            f" {spec.name!r} is not one. Use engine 'native', or another model."
        ),
    ),
    *map(_trains_switch, sorted(SWITCHES)),
    # On Trn1, NxD (0.9 to 0.18: parallel_layers/parallel_state.py) does not put the four ranks of a
    # tensor group next to each other. It spreads them over the node, between ranks of other groups.
    # But NxD sums the gradients of copied heads as if the four ranks were neighbours.
    Rule(
        applies_to=lambda engine: engine.copies_kv_heads,
        breaks=lambda plan, spec: (plan.tensor_parallel == 4) & (plan.kv_replication(spec) > 1),
        sentence=lambda _, spec: (
            "plan.tensor_parallel: 4 is not allowed with engine 'neuron' where spec.num_kv_heads"
            f" is {spec.num_kv_heads}: NxD adds up the gradients of copied key/value heads over the"
            f" wrong ranks. Use {spec.num_kv_heads}, or 8 and more."
        ),
    ),
    # NxD makes all tensor groups of four ranks on a node replicas of each other. The number of
    # groups per node must therefore divide the number of replicas. If there is less than one node,
    # all groups must be replicas.
    Rule(
        applies_to=lambda engine: engine.copies_kv_heads,
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
        more=2,  # Embedding and loss may count as one layer each (`Plan.stage_layers`).
        applies_to=lambda engine: engine.splits_ends_of_model,
    ),
    _divided(
        "num_layers",
        lambda plan: plan.num_stages,
        lambda plan: f"the number of pipeline stages, equal ones with engine {plan.engine!r},",
        applies_to=lambda engine: not engine.splits_ends_of_model,
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
