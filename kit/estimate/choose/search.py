"""Search: the fastest layout of a model on a machine whose risk of running out of memory is low
enough.

All candidates are evaluated, in chunks that stay in a core's cache. What may be trusted about the
answer, and what would change it, is in `explain.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from cluster.record import counted
from cluster.site import Site
from kit.config.plan import Plan, Precision
from kit.config.rules import SPLIT_SCHEDULES
from kit.config.spec import ModelSpec
from kit.engines.build import check_site
from kit.engines.capabilities import EngineName, capabilities_of
from kit.errors import ConfigError
from kit.estimate.choose.candidates import candidates, nearby_batches, nearby_devices
from kit.estimate.choose.machine import Machine, machine_of
from kit.estimate.choose.recomputed import with_some_recomputed
from kit.estimate.fit.calibrate import Calibration, Prediction
from kit.estimate.theory.activations import Kernels
from kit.estimate.theory.hardware import check_numbers
from kit.estimate.theory.layouts import Array, Layouts, cast_bytes
from kit.estimate.theory.memory import CODE_BASES, Convention
from kit.estimate.theory.state import convention_of
from kit.show.table import Table

NOT_OURS = " (not by the kit's engines)"
EXACT_LAYOUTS = 2000
"""Number of the fastest feasible layouts whose time and memory are computed again in float64.
Float32 is precise enough to find these layouts. With float64, an answer shows the values that
`step_time`, `memory` and the panel give for the same plan."""
NOTABLE = 1.1
"""How many times as fast another batch must train to be named."""
COLUMNS: tuple[str, ...] = ("layout", "s/step", "90 % interval", "GiB", "risk", "MFU")
"""Short names of what `cells` returns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """All layouts of a model, device count and batch on a machine, with time and memory of each."""

    spec: ModelSpec
    machine: Machine
    num_devices: int
    global_batch_size: int
    max_risk: float
    engine: EngineName
    precision: Precision
    only: Mapping[str, Iterable[Any]]
    layouts: Layouts
    step_time_s: Array
    """Seconds per step of each layout, in closed form. Layouts are ranked by this step time, and it
    is the number that is shown and the centre of the interval."""
    used_bytes: Array
    """Bytes of the heaviest device of each layout."""
    on: Callable[..., "Search"] = dataclasses.field(repr=False, compare=False)
    """Returns this search with other `devices`, `batch` or `only`."""

    @cached_property
    def feasible(self) -> Array:
        """Which layouts run out of memory with a probability of at most `max_risk`, bool."""
        return self.used_bytes <= self.machine.most_bytes(self.max_risk)

    @cached_property
    def order(self) -> Array:
        """Indices of the feasible layouts, fastest first; equally fast ones by memory."""
        rows = np.flatnonzero(self.feasible)
        return rows[np.lexsort((self.used_bytes[rows], self.step_time_s[rows]))]

    @cached_property
    def pareto(self) -> Array:
        """Indices of the layouts that no other beats in both time and memory, fastest first,
        feasible or not.
        """
        rows = np.lexsort((self.used_bytes, self.step_time_s))
        used = self.used_bytes[rows]
        least_before = np.minimum.accumulate(np.concatenate(([np.inf], used[:-1])))
        return rows[used < least_before]

    def changed(self, **fields: Any) -> "Search | None":
        """Returns this search with other `devices`, `batch` or `only`, if a layout fits there."""
        try:
            found = self.on(**fields)
        except ConfigError:
            return None
        return found if found.feasible.any() else None

    @cached_property
    def batch_limit(self) -> str | None:
        """What another batch would do, where replicas, which divide batch and devices, are few."""
        most = math.gcd(self.num_devices, self.global_batch_size)
        batches = nearby_batches(self.global_batch_size, self.num_devices)
        if self.best.data_parallel < most:
            return None
        found = [other for batch in batches if (other := self.changed(batch=batch))]
        best = max([self, *found], key=lambda search: search.sequences_per_s)
        faster = best.sequences_per_s / self.sequences_per_s
        if faster < NOTABLE:
            return None
        return (
            f"{counted(self.global_batch_size, 'sequence')} on {self.num_devices:,} devices leave"
            f" at most {counted(most, 'replica')}, which must divide both. With"
            f" {best.global_batch_size:,} sequences {describe(best.row(int(best.order[0])))} trains"
            f" {faster:.1f} times as many tokens/s."
        )

    @property
    def sequences_per_s(self) -> float:
        """Of the fastest feasible layout."""
        return self.global_batch_size / float(self.step_time_s[self.order[0]])

    @property
    def best(self) -> Plan:
        """The fastest feasible layout, as the engine takes it."""
        return self.plan(int(self.order[0]))

    def fastest(self, count: int) -> Array:
        """Returns indices of the fastest feasible layouts, leaving out what equals another in time
        and memory.

        Under a pipeline ZeRO 2 is ZeRO 1, for example.
        """
        rows = self.order[: 20 * count]
        columns = (self.step_time_s[rows], self.used_bytes[rows])
        is_equal = [np.isclose(each[1:], each[:-1], rtol=1e-6) for each in columns]
        return rows[np.concatenate(([True], ~(is_equal[0] & is_equal[1])))][:count]

    def plan(self, index: int) -> Plan:
        """Returns one layout as a Plan for the engine, on GPUs with their defaults, in the
        precision asked for.
        """
        plan = self.layouts.plan(index, self.engine)
        defaults = plan.gpu_defaults if self.machine.site.device.is_gpu else {}
        return plan.replace(**{**defaults, "precision": self.precision})

    def risk(self, index: int) -> float:
        """Returns the probability, 0 to 1, that one layout runs out of memory."""
        return float(self.machine.risk(self.used_bytes[index].astype(float)))

    def mfu(self, index: int) -> float:
        """Returns the modelled MFU of one layout, of the peak in bf16: narrower products may
        pass 1.
        """
        tokens = self.global_batch_size * self.spec.sequence_length
        peak = self.num_devices * float(self.machine.hardware.peak_flops_per_s)
        return tokens * self.spec.flops_per_token() / (float(self.step_time_s[index]) * peak)

    def prediction(self, index: int) -> Prediction:
        """Returns the step time of one layout, as the engine runs it, with interval and
        warnings.
        """
        layout = self.layouts.select(np.array([index]))
        return self.machine.calibration.predict(layout, self.machine.hardware)

    def row(self, index: int) -> dict[str, Any]:
        """Returns one layout as a row of a table: the plan's fields, seconds with interval,
        bytes, risk, MFU.
        """
        plan = self.plan(index).to_dict()
        for name in ("compile", "precision", "global_batch_size"):
            del plan[name]
        predicted = self.prediction(index)
        return plan | {
            "step_time_s": float(self.step_time_s[index]),
            "step_time_low_s": float(predicted.low_s.item()),
            "step_time_high_s": float(predicted.high_s.item()),
            "used_bytes": float(self.used_bytes[index]),
            "out_of_memory_probability": self.risk(index),
            "mfu": self.mfu(index),
        }

    @property
    def title(self) -> str:
        """Model, machine, batch, how many layouts were compared, and on how many runs the times
        are calibrated.
        """
        precision = "" if self.precision == "bf16" else f" in {self.precision}"
        return (
            f"{self.spec.name} on {counted(self.num_devices, 'device')} of {self.machine.site.name}"
            f" with engine {self.engine}{precision}, {counted(self.global_batch_size, 'sequence')}"
            f" of {self.spec.sequence_length:,} tokens: {len(self.order):,} of"
            f" {len(self.layouts):,} layouts within risk {self.max_risk:.0%};"
            f" {self.machine.calibration.label}"
        )

    def _repr_html_(self) -> str:
        rows = [
            dict(zip(COLUMNS, cells(self.row(int(index))), strict=True))
            for index in self.fastest(5)
        ]
        return Table(rows, self.title)._repr_html_()


def search(
    spec: ModelSpec,
    site: Site,
    num_devices: int,
    global_batch_size: int,
    *,
    max_risk: float = 0.05,
    engine: EngineName | None = None,
    precision: Precision = "bf16",
    calibration: Calibration | None = None,
    kernels: Kernels | None = None,
    code_base: str = "kit",
    only: Mapping[str, Iterable[Any]] | None = None,
    **layout_kernels: Any,
) -> Search:
    """Returns every layout that the engine trains, with modelled time and memory, and the fastest
    that fits.

    Args:
        spec, site: the model and the machine.
        num_devices: all are used.
        global_batch_size: sequences in one optimizer step.
        max_risk: highest accepted probability of running out of memory, between 0 and 1.
        engine: what would run them; default: the site's.
        precision: of matrix products: bf16, or fp8, mxfp8 and nvfp4, which the kit plans and does
            not train.
        calibration: fitted efficiencies, e.g. `published_calibration(site)`; default: none, the
            average of published machines.
        kernels: what the code base keeps for the backward pass; default: the engine's.
        code_base: whose kernels, schedules and overlap are assumed: `kit`'s or those of a name of
            `theory.memory.CODE_BASES`.
        only: allowed values by name of a Plan's field, e.g. `{"schedule": ["1f1b"]}`. Context
            parallelism, which the kit does not train, is offered where it is named:
            `{"context_parallel": [1, 2, 4]}`.
        layout_kernels: `flash_attention`, `fused_norm`, `data_overlap`, `tensor_overlap` and
            others, as in `Layouts.of`.

    Raises:
        ConfigError: the site lacks a number or the engine's devices, no layout fits devices and
            batch, or none fits in memory.
    """
    if not 0 < max_risk < 1:
        raise ConfigError(
            f"search.max_risk: {max_risk!r} is not allowed. Give a probability between 0 and 1,"
            " e.g. 0.05."
        )
    check_numbers(site, "bf16", num_devices)
    site_machine = machine_of(
        site,
        calibration,
        engine=engine,
        kernels=kernels,
        precision=precision,
        code_base=code_base,
    )
    engine = engine or site.engine
    check_site(spec, Plan(engine=engine), site)
    base = CODE_BASES.get(code_base)
    can_recompute_some = capabilities_of(engine).recomputes_some_blocks
    is_native = capabilities_of(engine).is_torch_native
    ours = kernels is None and base is None and is_native and site.device.is_gpu
    kept: Mapping[str, Iterable[Any]] = {"schedule": base.schedules} if base else {}
    columns = {"native": ours, "cast_bytes": cast_bytes(precision, ours)}
    if base:
        columns = base.columns(precision, "mxfp8" in site.device.peak_flops_per_s)

    def on(
        devices: int = num_devices,
        batch: int = global_batch_size,
        only: Mapping[str, Iterable[Any]] = only or {},
    ) -> Search:
        check_numbers(site, "bf16", devices)
        machine = dataclasses.replace(site_machine, convention=_convention(engine, only))
        layouts = candidates(
            spec,
            devices,
            batch,
            engine=engine,
            only={**kept, **only},
            node_devices=site.devices_per_node,
            **columns | layout_kernels,
        )
        if ours:  # as `Plan.gpu_defaults` has it
            cut = layouts.is_one_of("schedule", *SPLIT_SCHEDULES)
            layouts = dataclasses.replace(
                layouts, compiled=~(cut & (layouts.pipeline_parallel > 1))
            )
        evaluated = layouts, *machine.evaluate(layouts)
        if can_recompute_some and not {"recompute", "recompute_layers"} & only.keys():
            most_bytes = machine.most_bytes(max_risk)
            alike = base is not None
            evaluated = with_some_recomputed(*evaluated, machine.evaluate, most_bytes, alike)
        layouts, time_s, used_bytes = evaluated
        time_s, used_bytes = _fastest_in_float64(
            machine, layouts, time_s, used_bytes, machine.most_bytes(max_risk)
        )
        return Search(
            spec=spec,
            machine=machine,
            num_devices=devices,
            global_batch_size=batch,
            max_risk=max_risk,
            engine=engine,
            precision=precision,
            only=only,
            layouts=layouts,
            step_time_s=time_s,
            used_bytes=used_bytes,
            on=on,
        )

    found = on()
    if not found.feasible.any():
        raise ConfigError(_none_fits(found))
    return found


def _convention(engine: EngineName, only: Mapping[str, Iterable[Any]]) -> Convention:
    """Returns the bytes per parameter, which must be equal for all layouts of a search.

    Raises:
        ConfigError: the engine is neuron, and `only` allows ZeRO stage 0 beside other stages. At
            stage 0 the engine keeps fewer bytes per parameter.
    """
    allowed = only.get("zero_stage", ())
    stages = {allowed} if isinstance(allowed, int) else set(allowed)
    if capabilities_of(engine).pure_bf16_without_zero and 0 in stages and len(stages) > 1:
        raise ConfigError(
            f"search.only.zero_stage: {tuple(sorted(stages))} is not allowed with"
            f" engine {engine!r}, which keeps no fp32 master weights at stage 0. Name stage 0 or"
            " the others."
        )
    return convention_of("bf16", engine, min(stages, default=1))


def _fastest_in_float64(
    machine: Machine, layouts: Layouts, time_s: Array, used_bytes: Array, most_bytes: float
) -> tuple[Array, Array]:
    """Returns (step time in seconds, used bytes) of all layouts as float64 arrays. For the
    EXACT_LAYOUTS fastest feasible layouts the values are computed again in float64.
    """
    time_s = time_s.astype(np.float64)
    used_bytes = used_bytes.astype(np.float64)
    rows = np.flatnonzero(used_bytes <= most_bytes)
    if len(rows) > EXACT_LAYOUTS:
        rows = rows[np.argpartition(time_s[rows], EXACT_LAYOUTS)[:EXACT_LAYOUTS]]
    if len(rows):
        chosen = layouts.select(rows)
        time_s[rows] = machine.step_time(chosen).total_s
        used_bytes[rows] = machine.memory(chosen).used_bytes
    return time_s, used_bytes


def _none_fits(found: Search) -> str:
    """Returns how far the leanest layout is from fitting, and with which nearest devices, batch and
    options one fits.
    """
    leanest = found.row(int(found.used_bytes.argmin()))
    changes = (
        [
            {"devices": n}
            for n in nearby_devices(found.num_devices, found.machine.site.devices_per_node)
        ],
        [{"batch": n} for n in nearby_batches(found.global_batch_size, found.num_devices)],
        [{"only": {}}] if found.only else [],
        [{"only": {**found.only, "context_parallel": [n]}} for n in (2, 4, 8)],
    )
    texts = []
    for each in changes:
        other = next(filter(None, (found.changed(**change) for change in each)), None)
        if other is not None:
            note = NOT_OURS if other.best.context_parallel > 1 else ""
            texts.append(
                f"{counted(other.num_devices, 'device')} with"
                f" {counted(other.global_batch_size, 'sequence')}:"
                f" {describe(other.row(int(other.order[0])))}{note}"
            )
    optimizer = found.machine.memory(found.layouts).terms()["optimizer"]
    if (found.used_bytes - optimizer).min() <= found.machine.most_bytes(found.max_risk):
        texts.append(f"optimizer states in host memory{NOT_OURS}")
    return (
        f"plan: no layout of {found.spec.name} on {counted(found.num_devices, 'device')} of"
        f" {found.machine.site.name} fits in memory with a risk of at most {found.max_risk:.0%}."
        f" The leanest needs {leanest['used_bytes'] / 2**30:.1f} GiB of"
        f" {float(found.machine.hardware.memory_bytes) / 2**30:.1f} GiB per device"
        f" ({describe(leanest)}). What fits: {'; '.join(texts) or 'nothing nearby'}. Else use a"
        " smaller model or sequence length, or accept more risk."
    )


def describe(row: Mapping[str, Any]) -> str:
    """Returns one layout in a line: `TP8+SP PP16x2 interleaved DP24 ZeRO1 micro 1 recompute none`.

    `ZeRO3/8`: over groups of 8 replicas. `recompute full (3 a device)`: 3 of its blocks.
    """
    sequence = "+SP" if row["sequence_parallel"] else ""
    virtual = f"x{row['virtual_stages']}" if row["virtual_stages"] > 1 else ""
    pipeline = (
        f"PP{row['pipeline_parallel']}{virtual} {row['schedule']}"
        if row["pipeline_parallel"] > 1
        else "PP1"
    )
    context = f" CP{row['context_parallel']}" if row["context_parallel"] > 1 else ""
    context += " all-to-all" if row["context_exchange"] == "all_to_all" else ""
    over = f"/{row['shard_size']}" if row["shard_size"] else ""
    blocks = f" ({row['recompute_layers']} a device)" if row["recompute_layers"] else ""
    return (
        f"TP{row['tensor_parallel']}{sequence}{context} {pipeline} DP{row['data_parallel']}"
        f" ZeRO{row['zero_stage']}{over} micro {row['micro_batch_size']} recompute"
        f" {row['recompute']}{blocks}"
    )


def seconds(value: float, digits: int = 4) -> str:
    """Returns a time as people read it: `9.944`, `1,074`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def interval(row: Mapping[str, Any]) -> str:
    """Returns the 90 % interval of one layout's step time: `8.61 to 11.5`."""
    return f"{seconds(row['step_time_low_s'], 3)} to {seconds(row['step_time_high_s'], 3)}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns one row as short text, in the order of `COLUMNS`."""
    return (
        describe(row),
        seconds(row["step_time_s"]),
        interval(row),
        f"{row['used_bytes'] / 2**30:.1f}",
        f"{row['out_of_memory_probability']:.1%}",
        f"{row['mfu']:.1%}",
    )
