"""Candidates: every layout that a Plan may describe for one model, device count and batch, as
one Layouts.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cluster.record import counted
from kit.config.model_rules import MODEL_RULES
from kit.config.plan import Plan
from kit.config.rules import RULES
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

_FREE = {
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
"""What a search may choose, and what `only` may restrict."""


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
    if "recompute_layers" not in limits:  # of all layouts the same: faster as one number
        del modes["recompute_layers"]
    columns = {name: values[:, None] for name, values in shapes.items()} | modes
    columns["global_batch_size"] = np.array([float(global_batch_size)])
    if (is_hybrid := columns.pop("hybrid")).any():
        inside = node_devices / columns["tensor_parallel"]
        columns["shard_size"] = np.where(is_hybrid, inside, 0.0)
    if capabilities_of(engine).copies_kv_heads:  # a rank holds at least one key/value head
        columns["num_kv_heads"] = np.maximum(spec.num_kv_heads, columns["tensor_parallel"])
    grid = dataclasses.replace(Layouts.of(spec, [Plan(engine=engine)], **kernels), **columns)
    mask = allowed(grid, spec, engine)
    if not mask.any():
        others = grid.select(allowed(grid, spec, DEFAULT_ENGINE))
        if len(others):
            others.plan(0, engine).check_shapes(spec)  # which raises what the engine refuses
    mask &= _once(grid, mask, node_devices)
    if not mask.any():
        raise ConfigError(_none_left(num_devices, limits))
    return grid.select(mask)


def allowed(layouts: Layouts, spec: ModelSpec, engine: EngineName) -> Array:
    """Returns which layouts break no rule of a plan for this model and engine, bool."""
    broken = np.zeros(layouts.shape, bool)
    capabilities = capabilities_of(engine)
    for rules, given in ((RULES, (layouts,)), (MODEL_RULES, (layouts, spec))):
        for rule in rules:
            if rule.applies_to(capabilities):
                broken |= rule.breaks(*given)
    return ~broken


def _once(x: Layouts, mask: Array, node_devices: int) -> Array:
    """Returns which layouts of a grid of shapes and modes are no other one under another name.

    Without a pipeline all schedules are one, and on one replica all stages of ZeRO are the lowest
    that is allowed. ZeRO 3 inside a node needs several whole nodes of several ranks.
    """
    schedules = x.schedule
    stages = x.zero_stage[mask.any(axis=0)]
    one = SCHEDULES.index("1f1b") if np.any(x.is_one_of("schedule", "1f1b")) else schedules.min()
    ranks = x.tensor_parallel * x.data_parallel
    nodes = (x.shard_size > 1) & (x.shard_size % 1 == 0) & (ranks > node_devices)
    return (
        ((x.pipeline_parallel > 1) | (schedules == one))
        & ((x.context_parallel * x.data_parallel > 1) | (x.zero_stage == stages.min(initial=4)))
        & (nodes | (x.shard_size == 0))
    )


def single_precision(layouts: Layouts) -> Layouts:
    """Returns the same layouts in float32: half the memory traffic, seven digits."""
    narrow = layouts.map(lambda c: c.astype(np.float32) if c.dtype == np.float64 else c)
    return dataclasses.replace(narrow, gated=layouts.gated.astype(np.float32))


def _limits(only: Mapping[str, Iterable[Any]]) -> dict[str, tuple]:
    limits = {}
    for name, values in only.items():
        if name not in _FREE:
            raise ConfigError(f"search.only.{name}: unknown. Allowed: {', '.join(sorted(_FREE))}.")
        limits[name] = (values,) if isinstance(values, str | int) else tuple(values)
        allowed = _FREE[name]
        if isinstance(allowed, tuple) and not set(limits[name]) <= set(allowed):
            raise ConfigError(
                f"search.only.{name}: {limits[name]} is not allowed. Allowed: {', '.join(allowed)}."
            )
    return limits


def _shapes(
    spec: ModelSpec, num_devices: int, batch: int, limits: dict[str, tuple], engine: EngineName
) -> dict[str, Array]:
    """Returns all (t, c, p, v, r, b) whose products and divisions are whole."""
    rows = []
    for t in _choice(limits, "tensor_parallel", _tensor_degrees(spec, num_devices, engine)):
        inner = divisors(num_devices // t) if "context_parallel" in limits else [1]
        for c in _choice(limits, "context_parallel", inner):
            for p in _choice(limits, "pipeline_parallel", divisors(num_devices // (t * c))):
                replicas = num_devices // (t * c * p)
                stages = _stages_of_one(spec, p, engine)
                if batch % replicas or not stages:
                    continue
                sizes = _choice(limits, "micro_batch_size", divisors(batch // replicas))
                rows += [
                    (t, c, p, v, replicas, b)
                    for v in _choice(limits, "virtual_stages", stages)
                    for b in sizes
                ]
    # Uneven ones last, since those that are evaluated beside them take longer.
    rows.sort(key=lambda row: spec.num_layers % (row[2] * row[3]) != 0)
    table = np.array(rows, dtype=float).reshape(-1, 6).T
    names = (
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "virtual_stages",
        "data_parallel",
        "micro_batch_size",
    )
    return dict(zip(names, table, strict=True))


def _stages_of_one(spec: ModelSpec, devices: int, engine: EngineName) -> list[int]:
    """Returns how many stages a device of so long a pipeline may hold: `Plan.stage_layers`."""
    if devices == 1:
        return [1]
    places = {spec.num_layers}
    if capabilities_of(engine).splits_ends_of_model:
        places.add(spec.num_layers + 2)
    return sorted(
        {v for count in places if count % devices == 0 for v in divisors(count // devices)}
    )


def _tensor_degrees(spec: ModelSpec, num_devices: int, engine: EngineName) -> list[int]:
    width = np.gcd.reduce([spec.num_heads, spec.ffn_hidden_size, spec.vocab_size, num_devices])
    # whole key/value heads too, which only engine neuron copies
    kept = {t: Plan(tensor_parallel=t, engine=engine) for t in divisors(int(width))}
    return [t for t, plan in kept.items() if spec.num_kv_heads * plan.kv_replication(spec) % t == 0]


def _modes(limits: dict[str, tuple], engine: EngineName, hybrid: bool) -> dict[str, Array]:
    """Returns all (schedule, recompute, ZeRO, sequence parallel, ZeRO inside a node only, if
    that is asked for).
    """
    schedules = [SCHEDULES.index(name) for name in _choice(limits, "schedule", SCHEDULES)]
    recompute = [RECOMPUTE.index(name) for name in _choice(limits, "recompute", RECOMPUTE)]
    stages = range(4) if "zero_stage" in limits else capabilities_of(engine).searched_zero_stages
    zero = [float(stage) for stage in _choice(limits, "zero_stage", stages)]
    sequence = _choice(limits, "sequence_parallel", (False, True))
    exchanges = (
        EXCHANGES if {"context_parallel", "context_exchange"} & limits.keys() else EXCHANGES[:1]
    )
    exchange = [EXCHANGES.index(name) for name in _choice(limits, "context_exchange", exchanges)]
    grid = np.meshgrid(
        np.array(schedules, np.int8),
        np.array(recompute, np.int8),
        np.array(zero),
        np.array(sequence, bool),
        np.array([False, True][: 1 + hybrid]),
        np.array(exchange, np.int8),
        np.array([float(count or 0) for count in limits.get("recompute_layers", (0,))]),
    )
    names = (
        "schedule",
        "recompute",
        "zero_stage",
        "sequence_parallel",
        "hybrid",
        "context_exchange",
        "recompute_layers",
    )
    is_useful = (~grid[4] | (grid[2] == 3)).ravel()
    return {name: axis.ravel()[is_useful] for name, axis in zip(names, grid, strict=True)}


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
    by = ", ".join(f"{name} in {values}" for name, values in limits.items()) or "the rules of Plan"
    return (
        f"plan: no layout of {counted(num_devices, 'device')} is left by {by}. Allow more values."
    )


def _why_none(
    spec: ModelSpec, num_devices: int, batch: int, limits: dict[str, tuple], engine: EngineName
) -> str:
    """Returns what is wrong with a device count or batch that no layout fits, and the nearest
    that work.
    """
    if limits and len(_shapes(spec, num_devices, batch, {}, engine)["tensor_parallel"]):
        return _none_left(num_devices, limits)
    replicas = {
        num_devices // (t * p)
        for t in _tensor_degrees(spec, num_devices, engine)
        for p in divisors(num_devices // t)
        if _stages_of_one(spec, p, engine)
    }
    nearest = min((max(1, round(batch / r)) * r for r in replicas), key=lambda b: abs(b - batch))
    allowed = {
        t * p * r
        for t in _tensor_degrees(spec, 0, engine)  # 0 is a multiple of each
        for p in range(1, spec.num_layers + 3)
        if _stages_of_one(spec, p, engine)
        for r in divisors(batch)
    }
    devices = min(allowed, key=lambda number: (abs(number - num_devices), number))
    return (
        f"plan.global_batch_size: {counted(batch, 'sequence')} on {counted(num_devices, 'device')}"
        f" is not allowed for {spec.name}: any layout has at least"
        f" {counted(min(replicas), 'replica')} (TP divides heads, feed-forward and"
        f" vocabulary, pipeline stages the {counted(spec.num_layers, 'layer')}), and"
        " replicas must divide the batch. The nearest that are allowed:"
        f" {counted(nearest, 'sequence')}, or {counted(devices, 'device')}."
    )
