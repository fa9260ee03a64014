"""Candidates: every layout that a Plan may describe for one model, device count and batch, as
one Layouts.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
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
"""Fields of a plan that a search chooses and that `only` may restrict, with their allowed values. A
text describes values that depend on the model."""


class Shape(NamedTuple):
    """Degrees and sizes of a layout whose products and divisions are whole."""

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
    """Returns all layouts of `num_devices` that obey every rule of Plan and of Plan.check, each
    once.

    ZeRO on one replica changes nothing and is left out; so is every schedule but one where there is
    no pipeline, and what the engine does not train, save context parallelism, which is offered
    where `only` names it. With `node_devices` ZeRO 3 may also shard inside a node alone, so that no
    weight crosses the network; stages 1 and 2 gather weights once a step and would send more bytes
    so. `only` names allowed values of a Plan's fields, e.g. `{"tensor_parallel": [4, 8]}`; kernels
    are those of `Layouts.of`.

    Raises:
        ConfigError: a number below 1, an unknown name in `only`, or nothing that fits; the message
            says which rule.
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
        # All layouts have the same number, and one number is faster than a column.
        del modes["recompute_layers"]
    columns = {name: values[:, None] for name, values in shapes.items()}
    columns.update(modes)
    columns["global_batch_size"] = np.array([float(global_batch_size)])
    is_hybrid = columns.pop("hybrid")
    if is_hybrid.any():
        inside = node_devices / columns["tensor_parallel"]
        columns["shard_size"] = np.where(is_hybrid, inside, 0.0)
    if capabilities_of(engine).copies_kv_heads:
        # Each rank holds at least one key/value head.
        columns["num_kv_heads"] = np.maximum(spec.num_kv_heads, columns["tensor_parallel"])
    grid = dataclasses.replace(Layouts.of(spec, [Plan(engine=engine)], **kernels), **columns)
    mask = allowed(grid, spec, engine)
    if not mask.any():
        others = grid.select(allowed(grid, spec, DEFAULT_ENGINE))
        if len(others):
            # Raises ConfigError with the rule of the engine.
            others.plan(0, engine).check_shapes(spec)
    mask &= _is_listed_once(grid, mask, node_devices)
    if not mask.any():
        raise ConfigError(_none_left(num_devices, limits))
    return grid.select(mask)


def allowed(layouts: Layouts, spec: ModelSpec, engine: EngineName) -> Array:
    """Returns which layouts break no rule of a plan for this model and engine, bool."""
    broken = np.zeros(layouts.shape, bool)
    capabilities = capabilities_of(engine)
    for rules, given in ((PLAN_RULES, (layouts,)), (MODEL_RULES, (layouts, spec))):
        for rule in rules:
            if rule.applies_to(capabilities):
                broken |= rule.breaks(*given)
    return ~broken


def _is_listed_once(layouts: Layouts, mask: Array, node_devices: int) -> Array:
    """Returns which layouts of a grid of shapes and modes are not equal to another one with other
    fields, bool.

    Without a pipeline all schedules are equal, and 1f1b is kept. On one replica all stages of ZeRO
    are equal, and the lowest allowed one is kept. ZeRO 3 inside a node needs several whole nodes of
    several ranks.
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
    """Returns the same layouts in float32: half the memory traffic, seven digits."""
    narrow = layouts.map(lambda c: c.astype(np.float32) if c.dtype == np.float64 else c)
    return dataclasses.replace(narrow, gated=layouts.gated.astype(np.float32))


def _limits(only: Mapping[str, Iterable[Any]]) -> dict[str, tuple]:
    limits = {}
    for name, values in only.items():
        if name not in SEARCHED_FIELDS:
            raise ConfigError(
                f"search.only.{name}: unknown. Allowed: {', '.join(sorted(SEARCHED_FIELDS))}."
            )
        limits[name] = (values,) if isinstance(values, str | int) else tuple(values)
        allowed = SEARCHED_FIELDS[name]
        if isinstance(allowed, tuple) and not set(limits[name]) <= set(allowed):
            raise ConfigError(
                f"search.only.{name}: {limits[name]} is not allowed. Allowed: {', '.join(allowed)}."
            )
    return limits


def _shapes(
    spec: ModelSpec, num_devices: int, batch: int, limits: dict[str, tuple], engine: EngineName
) -> dict[str, Array]:
    """Returns all shapes as columns by name of a field."""
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
    # Chunks that contain an uneven layout take longer, so uneven layouts come last.
    shapes.sort(
        key=lambda shape: spec.num_layers % (shape.pipeline_parallel * shape.virtual_stages) != 0
    )
    table = np.array(shapes, dtype=float).reshape(-1, len(Shape._fields)).T
    return dict(zip(Shape._fields, table, strict=True))


def _stages_of_one(spec: ModelSpec, devices: int, engine: EngineName) -> list[int]:
    """Returns how many stages a device of so long a pipeline may hold: `Plan.stage_layers`."""
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
        # A rank holds whole key/value heads, which only engine neuron copies.
        copies = Plan(tensor_parallel=degree, engine=engine).kv_replication(spec)
        if spec.num_kv_heads * copies % degree == 0:
            degrees.append(degree)
    return degrees


def _modes(limits: dict[str, tuple], engine: EngineName, hybrid: bool) -> dict[str, Array]:
    """Returns all combinations of schedule, recomputation, ZeRO stage, sequence parallelism and
    context exchange as columns by name.

    Column `hybrid` says whether ZeRO shards inside a node only. `hybrid` allows it.
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
    """Returns the allowed values of a field as codes, which are indices into `names`."""
    return np.array([names.index(value) for value in _choice(limits, name, values)], np.int8)


def divisors(number: int) -> list[int]:
    """Returns all divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def nearby_devices(num_devices: int, node_devices: int) -> list[int]:
    """Returns other numbers of devices, nearest first: up to 8 whole nodes more or fewer, then by
    quarters up to 256 times as many.
    """
    nodes = [num_devices + sign * i * node_devices for i in range(1, 9) for sign in (-1, 1)]
    grown = [num_devices * quarters * 2**i // 4 for i in range(8) for quarters in range(5, 9)]
    return [number for number in nodes + grown if number > 0]


def nearby_batches(batch: int, num_devices: int) -> list[int]:
    """Returns at most four batches that share more divisors with the devices, nearest first:
    replicas divide both.
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


def _why_none(
    spec: ModelSpec, num_devices: int, batch: int, limits: dict[str, tuple], engine: EngineName
) -> str:
    """Returns what is wrong with a device count or batch that no layout fits, and the nearest
    that work.
    """
    if limits and len(_shapes(spec, num_devices, batch, {}, engine)["tensor_parallel"]):
        return _none_left(num_devices, limits)
    replicas = set()
    for t in _tensor_degrees(spec, num_devices, engine):
        for p in divisors(num_devices // t):
            if _stages_of_one(spec, p, engine):
                replicas.add(num_devices // (t * p))
    batches = [max(1, round(batch / count)) * count for count in replicas]
    nearest_batch = min(batches, key=lambda other: abs(other - batch))
    device_counts = set()
    # 0 is a multiple of each tensor degree.
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
