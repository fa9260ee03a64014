"""Candidates of a search for the fastest layout: every layout that a valid Plan can describe for
one model, number of devices and batch. The candidates are the elements of one `Layouts` object.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cluster.record import counted
from kit.config.model_rules import MODEL_RULES
from kit.config.plan import Plan
from kit.config.rules import PLAN_RULES
from kit.config.spec import ModelSpec
from kit.engines.capabilities import DEFAULT_ENGINE, EngineName, capabilities_of
from kit.errors import ConfigError
from kit.estimate.theory.layouts import (
    EXCHANGES,
    RECOMPUTE,
    SCHEDULES,
    Array,
    Layouts,
)

SEARCHED_FIELDS = {
    "tensor_parallel": "devices",
    "pipeline_parallel": "devices",
    "virtual_stages": "stages",
    "micro_batch_size": "sequences",
    "zero_stage": "0 to 3",
    "sequence_parallel": "bool",
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "context_parallel": "devices",
    "context_exchange": EXCHANGES,
    "recompute_layers": "blocks of a device",
}
"""Maps each field of `Plan` that a search chooses to the allowed values of the field. The argument
`only` of the search may restrict these fields. If the values depend on the model or on the number
of devices, a word describes them."""


class Shape(NamedTuple):
    """Degrees of parallelism, stages per device and micro-batch size of one layout. The product of
    the tensor, context, pipeline and data parallel degrees is the number of devices. Replicas times
    micro-batch size divides the batch. Pipeline devices times stages divides the number of layers.
    If the engine counts embedding and output as layers, this product may instead divide the number
    of layers plus 2.
    """

    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    virtual_stages: int
    data_parallel: int
    micro_batch_size: int


def candidates(
    spec: ModelSpec,
    num_devices: int,
    global_batch_size: int,
    *,
    engine: EngineName = DEFAULT_ENGINE,
    only: Mapping[str, Iterable[Any]] | None = None,
    node_devices: int = 0,
    **kernels: Any,
) -> Layouts:
    """Returns all layouts on `num_devices` devices that obey every rule for plans and every rule
    for plans of this model.

    Layouts that train identically are listed once. The ZeRO stage changes nothing if there is one
    replica, and the schedule changes nothing without a pipeline. Layouts that the engine cannot
    train are left out. The exception is context parallelism, which is included if `only` names it.

    `node_devices` is the number of devices per node. If it is above 0, layouts are added in which
    ZeRO 3 shards inside each node, so that no weight crosses the network. ZeRO stages 1 and 2 are
    not sharded inside nodes. They gather weights once per step and would then send more bytes.

    `only` maps a field of Plan to its allowed values, e.g. `{"tensor_parallel": [4, 8]}`. `kernels`
    are keyword arguments of `Layouts.of`.

    Raises:
        ConfigError: A number is below 1, a name in `only` is unknown, or no layout is left. The
            message names the rule.
    """
    for name, value in (("num_devices", num_devices), ("global_batch_size", global_batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"plan.{name}: {value!r} is not allowed. Give a whole number from 1.")
    limits = _limits(only or {})
    shapes = _shapes(spec, num_devices, global_batch_size, limits, engine)
    if not len(shapes["tensor_parallel"]):
        raise ConfigError(_why_none(spec, num_devices, global_batch_size, limits, engine))
    hybrid = capabilities_of(engine).shards_within_groups and 0 < node_devices < num_devices
    modes = _modes(limits, engine, hybrid=hybrid)
    if "recompute_layers" not in limits:
        # All layouts then share the default value of `recompute_layers`. One shared value is faster
        # to compute with than a column with one value per layout.
        del modes["recompute_layers"]
    columns = {name: values[:, None] for name, values in shapes.items()}
    columns.update(modes)
    columns["global_batch_size"] = np.array([float(global_batch_size)])
    is_hybrid = columns.pop("hybrid")
    if is_hybrid.any():
        inside = node_devices / columns["tensor_parallel"]
        columns["shard_size"] = np.where(is_hybrid, inside, 0.0)
    if capabilities_of(engine).copies_kv_heads:
        # Each rank needs a key/value head. If there are more ranks than heads, heads are copied.
        columns["num_kv_heads"] = np.maximum(spec.num_kv_heads, columns["tensor_parallel"])
    grid = dataclasses.replace(Layouts.of(spec, [Plan(engine=engine)], **kernels), **columns)
    mask = allowed(grid, spec, engine)
    if not mask.any():
        others = grid.select(allowed(grid, spec, DEFAULT_ENGINE))
        if len(others):
            # Raises ConfigError with a rule of the engine. The layout breaks as few rules as
            # possible, if possible without a pipeline, so that the message names no value of which
            # another layout is free.
            num_broken = sum(_broken_by_rule(others, spec, engine))
            keys = np.broadcast_arrays(others.pipeline_parallel, num_broken)
            others.plan(int(np.lexsort(keys)[0]), engine).check_shapes(spec)
    mask &= _is_listed_once(grid, mask, node_devices)
    if not mask.any():
        raise ConfigError(_none_left(num_devices, limits))
    return grid.select(mask)


def allowed(layouts: Layouts, spec: ModelSpec, engine: EngineName) -> Array:
    """Returns a Boolean mask with one element per layout. It is True if the layout breaks none of
    the rules for plans (`PLAN_RULES`, `MODEL_RULES`) with this model and engine.
    """
    broken = np.zeros(layouts.shape, bool)
    for is_broken in _broken_by_rule(layouts, spec, engine):
        broken |= is_broken
    return ~broken


def _broken_by_rule(layouts: Layouts, spec: ModelSpec, engine: EngineName) -> Iterator[Array]:
    """Yields one Boolean mask per rule of the engine. The mask is True for the layouts that break
    the rule, and may be broadcast.
    """
    capabilities = capabilities_of(engine)
    for rules, given in ((PLAN_RULES, (layouts,)), (MODEL_RULES, (layouts, spec))):
        for rule in rules:
            if rule.applies_to(capabilities):
                yield np.asarray(rule.breaks(*given))


def _is_listed_once(layouts: Layouts, mask: Array, node_devices: int) -> Array:
    """Returns a boolean mask that is True for one layout of each set of layouts that train
    identically. `mask` is True for the allowed layouts.

    Without a pipeline all schedules are identical, and 1f1b is kept. With one replica all ZeRO
    stages are identical, and the lowest allowed stage is kept. ZeRO 3 inside a node is kept if a
    node has at least two replicas, no replica spans two nodes, and the replicas are on several
    nodes.
    """
    kept_schedule = layouts.schedule.min()
    if np.any(layouts.is_one_of("schedule", "1f1b")):
        kept_schedule = SCHEDULES.index("1f1b")
    kept_zero_stage = layouts.zero_stage[mask.any(axis=0)].min(initial=4)
    has_pipeline = layouts.pipeline_parallel > 1
    has_replicas = layouts.context_parallel * layouts.data_parallel > 1
    ranks = layouts.tensor_parallel * layouts.data_parallel
    fills_nodes = (layouts.shard_size > 1) & (layouts.shard_size % 1 == 0) & (ranks > node_devices)
    return (
        (has_pipeline | (layouts.schedule == kept_schedule))
        & (has_replicas | (layouts.zero_stage == kept_zero_stage))
        & (fills_nodes | (layouts.shard_size == 0))
    )


def single_precision(layouts: Layouts) -> Layouts:
    """Returns the layouts with their float64 columns converted to float32. Float32 has seven
    digits, and its arrays need half of the memory traffic.
    """
    narrow = layouts.map(lambda c: c.astype(np.float32) if c.dtype == np.float64 else c)
    return dataclasses.replace(narrow, gated=layouts.gated.astype(np.float32))


def _limits(only: Mapping[str, Iterable[Any]]) -> dict[str, tuple]:
    limits = {}
    for name, values in only.items():
        if name not in SEARCHED_FIELDS:
            raise ConfigError(
                f"plan.{name}: unknown to the search for a layout. Allowed:"
                f" {', '.join(sorted(SEARCHED_FIELDS))}."
            )
        limits[name] = (values,) if isinstance(values, str | int) else tuple(values)
        allowed = SEARCHED_FIELDS[name]
        if isinstance(allowed, tuple) and not set(limits[name]) <= set(allowed):
            raise ConfigError(
                f"plan.{name}: {limits[name]} is not allowed. Allowed: {', '.join(allowed)}."
            )
    return limits


def _shapes(
    spec: ModelSpec, num_devices: int, batch: int, limits: dict[str, tuple], engine: EngineName
) -> dict[str, Array]:
    """Returns all combinations of degrees of parallelism, stages per device and micro-batch size
    that the model, the devices, the batch and `limits` allow. The result maps each field of `Shape`
    to an array with one element per combination.
    """
    shapes: list[Shape] = []
    for t in _choice(limits, "tensor_parallel", _tensor_degrees(spec, num_devices, engine)):
        context_degrees = [1]
        if "context_parallel" in limits:
            context_degrees = divisors(num_devices // t)
        for c in _choice(limits, "context_parallel", context_degrees):
            for p in _choice(limits, "pipeline_parallel", divisors(num_devices // (t * c))):
                replicas = num_devices // (t * c * p)
                stages = _stages_of_one(spec, p, engine)
                if batch % replicas or not stages:
                    continue
                sizes = _choice(limits, "micro_batch_size", divisors(batch // replicas))
                for v in _choice(limits, "virtual_stages", stages):
                    shapes += [Shape(t, c, p, v, replicas, size) for size in sizes]
    # Shapes with stages of unequal size come last. Layouts are evaluated in chunks, and a chunk
    # with unequal stages takes longer.
    shapes.sort(
        key=lambda shape: spec.num_layers % (shape.pipeline_parallel * shape.virtual_stages) != 0
    )
    table = np.array(shapes, dtype=float).reshape(-1, len(Shape._fields)).T
    return dict(zip(Shape._fields, table, strict=True))


def _stages_of_one(spec: ModelSpec, devices: int, engine: EngineName) -> list[int]:
    """Returns the allowed numbers of stages per device for a pipeline of `devices` devices, in
    ascending order. `Plan.stage_layers` defines which blocks each stage has.
    """
    if devices == 1:
        return [1]
    places = {spec.num_layers}
    if capabilities_of(engine).splits_ends_of_model:
        places.add(spec.num_layers + 2)
    counts = set()
    for count in places:
        if count % devices == 0:
            counts.update(divisors(count // devices))
    return sorted(counts)


def _tensor_degrees(spec: ModelSpec, num_devices: int, engine: EngineName) -> list[int]:
    width = np.gcd.reduce([spec.num_heads, spec.ffn_hidden_size, spec.vocab_size, num_devices])
    degrees = []
    for degree in divisors(int(width)):
        # A rank holds complete key/value heads. Only engine neuron copies them to several ranks.
        copies = Plan(tensor_parallel=degree, engine=engine).kv_replication(spec)
        if spec.num_kv_heads * copies % degree == 0:
            degrees.append(degree)
    return degrees


def _modes(limits: dict[str, tuple], engine: EngineName, hybrid: bool) -> dict[str, Array]:
    """Returns all combinations of schedule, recomputation, ZeRO stage, sequence parallelism and
    context exchange. The result maps a field name to an array with one element per combination.

    The array `hybrid` is True where ZeRO 3 shards inside each node. If the argument `hybrid` is
    False, the array has no True element.
    """
    zero_stages = capabilities_of(engine).searched_zero_stages
    if "zero_stage" in limits:
        zero_stages = range(4)
    exchanges = EXCHANGES[:1]
    if "context_parallel" in limits or "context_exchange" in limits:
        exchanges = EXCHANGES
    axes = {
        "schedule": _codes(limits, "schedule", SCHEDULES, SCHEDULES),
        "recompute": _codes(limits, "recompute", RECOMPUTE, RECOMPUTE),
        "zero_stage": np.array(_choice(limits, "zero_stage", zero_stages), float),
        "sequence_parallel": np.array(_choice(limits, "sequence_parallel", (False, True)), bool),
        "hybrid": np.array([False, True] if hybrid else [False]),
        "context_exchange": _codes(limits, "context_exchange", exchanges, EXCHANGES),
        "recompute_layers": np.array(
            [float(count or 0) for count in limits.get("recompute_layers", (0,))]
        ),
    }
    columns = [axis.ravel() for axis in np.meshgrid(*axes.values())]
    modes = dict(zip(axes, columns, strict=True))
    is_useful = ~modes["hybrid"] | (modes["zero_stage"] == 3)
    return {name: column[is_useful] for name, column in modes.items()}


def _codes(
    limits: dict[str, tuple], name: str, values: Iterable[str], names: tuple[str, ...]
) -> Array:
    """Returns the allowed values of the plan field `name` as an array of indices into `names`.
    `Layouts` stores a field with text values as such indices.
    """
    return np.array([names.index(value) for value in _choice(limits, name, values)], np.int8)


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def nearby_devices(num_devices: int, node_devices: int) -> list[int]:
    """Returns other numbers of devices, in the order in which a search tries them. The first
    numbers are 1 to 8 nodes fewer or more, nearest first. Then follow 1.25 to 256 times
    `num_devices`, with four numbers per doubling.
    """
    nodes = [num_devices + sign * i * node_devices for i in range(1, 9) for sign in (-1, 1)]
    grown = [num_devices * quarters * 2**i // 4 for i in range(8) for quarters in range(5, 9)]
    return [number for number in nodes + grown if number > 0]


def nearby_batches(batch: int, num_devices: int) -> list[int]:
    """Returns at most four batch sizes near `batch` that allow more replicas, nearest first. The
    number of replicas must divide both the batch and the devices. The returned sizes therefore
    have a larger greatest common divisor with `num_devices` than `batch` has.
    """
    rounded = {max(1, round(batch / part)) * part for part in divisors(num_devices)}
    shared = math.gcd(batch, num_devices)
    better = [other for other in rounded if math.gcd(other, num_devices) > shared]
    return sorted(better, key=lambda other: (abs(other - batch), other))[:4]


def _choice(limits: dict[str, tuple], name: str, values: Iterable[Any]) -> list[Any]:
    return [value for value in values if name not in limits or value in limits[name]]


def _none_left(num_devices: int, limits: dict[str, tuple]) -> str:
    restrictions = ", ".join(f"{name} in {values}" for name, values in limits.items())
    return (
        f"plan: no layout of {counted(num_devices, 'device')} is left by"
        f" {restrictions or 'the rules of Plan'}. Allow more values."
    )


def _why_no_degree(spec: ModelSpec, limits: dict[str, tuple], engine: EngineName) -> str:
    """Returns why the model cannot be split by the requested tensor parallel degrees, as sentences
    that begin with a space. Returns "" if one of them can split it, or if none is requested.
    """
    reasons = []
    for degree in limits.get("tensor_parallel", ()):
        try:
            Plan(tensor_parallel=degree, engine=engine).check_shapes(spec)
        except ConfigError as error:
            reasons.append(f" {error}")
        else:
            return ""
    return "".join(dict.fromkeys(reasons))


def _why_none(
    spec: ModelSpec, num_devices: int, batch: int, limits: dict[str, tuple], engine: EngineName
) -> str:
    """Returns the error message for a number of devices and a batch for which no layout exists. The
    message states the nearest batch and the nearest number of devices that have a layout.
    """
    if limits and len(_shapes(spec, num_devices, batch, {}, engine)["tensor_parallel"]):
        return f"{_none_left(num_devices, limits)}{_why_no_degree(spec, limits, engine)}"
    replicas = set()
    for t in _tensor_degrees(spec, num_devices, engine):
        for p in divisors(num_devices // t):
            if _stages_of_one(spec, p, engine):
                replicas.add(num_devices // (t * p))
    batches = [max(1, round(batch / count)) * count for count in replicas]
    nearest_batch = min(batches, key=lambda other: abs(other - batch))
    device_counts = set()
    # With 0 devices `_tensor_degrees` returns the degrees for any number of devices, since every
    # degree divides 0.
    for t in _tensor_degrees(spec, 0, engine):
        for p in range(1, spec.num_layers + 3):
            if _stages_of_one(spec, p, engine):
                device_counts.update(t * p * count for count in divisors(batch))
    nearest_devices = min(device_counts, key=lambda count: (abs(count - num_devices), count))
    return (
        f"plan.global_batch_size: {counted(batch, 'sequence')} on {counted(num_devices, 'device')}"
        f" is not allowed for {spec.name}: any layout has at least"
        f" {counted(min(replicas), 'replica')} (TP divides heads, feed-forward and"
        f" vocabulary, pipeline stages the {counted(spec.num_layers, 'layer')}), and"
        " replicas must divide the batch. The nearest that are allowed:"
        f" {counted(nearest_batch, 'sequence')}, or {counted(nearest_devices, 'device')}."
    )
