"""Search: the fastest layout of a model on a machine whose risk of running out of memory is low
enough.

All candidates are evaluated, in chunks that stay in a core's cache. What may be trusted about the
answer, and what would change it, is in `explain.py`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
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
from kit.estimate.theory.memory import CODE_BASES, CodeBase, Convention
from kit.estimate.theory.state import convention_of
from kit.show.table import Table

NOT_OURS = " (not by the kit's engines)"
EXACT_LAYOUTS = 2000
"""Number of the fastest feasible layouts whose time and memory are computed again in float64.
Float32 is precise enough to find these layouts. With float64, an answer shows the values that
`step_time`, `memory` and the panel give for the same plan."""
NOTABLE = 1.1
"""Smallest ratio of training speeds at which another batch is recommended."""
COLUMNS: tuple[str, ...] = ("layout", "s/step", "90 % interval", "GiB", "risk", "MFU")
"""Headers of the cells that `cells` returns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """Everything of a search that does not depend on devices, batch and allowed values."""

    spec: ModelSpec
    machine: Machine
    max_risk: float
    engine: EngineName
    precision: Precision
    code_base: CodeBase | None
    """Another code base whose layouts are searched, or None for the kit's engine."""
    has_kit_kernels: bool
    """Whether the layouts run the kit's own decoder in torch on GPUs."""
    kernels: Mapping[str, Any]
    """Columns of `Layouts` for the kernels of the code base."""


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
    setup: SearchSetup = dataclasses.field(repr=False, compare=False)

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

    def with_changes(
        self,
        *,
        devices: int | None = None,
        batch: int | None = None,
        only: Mapping[str, Iterable[Any]] | None = None,
    ) -> "Search | None":
        """Searches again with other devices, batch or allowed values. Returns None if no layout
        fits.
        """
        try:
            found = evaluate_layouts(
                self.setup,
                self.num_devices if devices is None else devices,
                self.global_batch_size if batch is None else batch,
                self.only if only is None else only,
            )
        except ConfigError:
            return None
        return found if found.feasible.any() else None

    def advise_batch(self) -> str | None:
        """Searches with nearby batches and returns a recommendation, if the batch allows few
        replicas and another batch trains clearly faster. The number of replicas divides both the
        batch and the devices.
        """
        most_replicas = math.gcd(self.num_devices, self.global_batch_size)
        if self.best.data_parallel < most_replicas:
            return None
        best = self
        for batch in nearby_batches(self.global_batch_size, self.num_devices):
            other = self.with_changes(batch=batch)
            if other is not None and other.sequences_per_s > best.sequences_per_s:
                best = other
        speedup = best.sequences_per_s / self.sequences_per_s
        if speedup < NOTABLE:
            return None
        layout = describe_layout(best.row(int(best.order[0])))
        return (
            f"{counted(self.global_batch_size, 'sequence')} on {self.num_devices:,} devices leave"
            f" at most {counted(most_replicas, 'replica')}, which must divide both. With"
            f" {best.global_batch_size:,} sequences {layout} trains {speedup:.1f} times as many"
            " tokens/s."
        )

    @property
    def sequences_per_s(self) -> float:
        """Sequences per second of the fastest feasible layout."""
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
        time_s = self.step_time_s[rows]
        used_bytes = self.used_bytes[rows]
        is_equal = np.isclose(time_s[1:], time_s[:-1], rtol=1e-6) & np.isclose(
            used_bytes[1:], used_bytes[:-1], rtol=1e-6
        )
        is_new = np.concatenate(([True], ~is_equal))
        return rows[is_new][:count]

    def plan(self, index: int) -> Plan:
        """Returns one layout as a Plan for the engine, on GPUs with their defaults, in the
        precision asked for.
        """
        plan = self.layouts.plan(index, self.engine)
        if self.machine.site.device.is_gpu:
            plan = plan.replace(**plan.gpu_defaults)
        return plan.replace(precision=self.precision)

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
    machine = machine_of(
        site,
        calibration,
        engine=engine,
        kernels=kernels,
        precision=precision,
        code_base=code_base,
    )
    engine = engine or site.engine
    check_site(spec, Plan(engine=engine), site)
    other_code_base = CODE_BASES.get(code_base)
    has_kit_kernels = (
        kernels is None
        and other_code_base is None
        and capabilities_of(engine).is_torch_native
        and site.device.is_gpu
    )
    if other_code_base is None:
        columns = {"native": has_kit_kernels, "cast_bytes": cast_bytes(precision, has_kit_kernels)}
    else:
        has_blocks = "mxfp8" in site.device.peak_flops_per_s
        columns = other_code_base.columns(precision, has_blocks)
    setup = SearchSetup(
        spec=spec,
        machine=machine,
        max_risk=max_risk,
        engine=engine,
        precision=precision,
        code_base=other_code_base,
        has_kit_kernels=has_kit_kernels,
        kernels={**columns, **layout_kernels},
    )
    found = evaluate_layouts(setup, num_devices, global_batch_size, only or {})
    if not found.feasible.any():
        raise ConfigError(_none_fits(found))
    return found


def evaluate_layouts(
    setup: SearchSetup,
    num_devices: int,
    global_batch_size: int,
    only: Mapping[str, Iterable[Any]],
) -> Search:
    """Returns the layouts of a setup for a number of devices and a batch, with time and memory,
    whether they fit or not.

    Raises:
        ConfigError: the site lacks a number, or no layout fits devices, batch and `only`.
    """
    site = setup.machine.site
    check_numbers(site, "bf16", num_devices)
    machine = dataclasses.replace(setup.machine, convention=_convention(setup.engine, only))
    allowed = dict(only)
    if setup.code_base is not None:
        allowed = {"schedule": setup.code_base.schedules, **only}
    layouts = candidates(
        setup.spec,
        num_devices,
        global_batch_size,
        engine=setup.engine,
        only=allowed,
        node_devices=site.devices_per_node,
        **setup.kernels,
    )
    if setup.has_kit_kernels:
        # Blocks are compiled wherever `Plan.gpu_defaults` compiles them.
        is_split = layouts.is_one_of("schedule", *SPLIT_SCHEDULES)
        has_pipeline = layouts.pipeline_parallel > 1
        layouts = dataclasses.replace(layouts, compiled=~(is_split & has_pipeline))
    time_s, used_bytes = machine.evaluate(layouts)
    most_bytes = machine.most_bytes(setup.max_risk)
    is_recomputation_fixed = "recompute" in only or "recompute_layers" in only
    if capabilities_of(setup.engine).recomputes_some_blocks and not is_recomputation_fixed:
        layouts, time_s, used_bytes = with_some_recomputed(
            layouts,
            time_s,
            used_bytes,
            machine.evaluate,
            most_bytes,
            equal_stages=setup.code_base is not None,
        )
    time_s, used_bytes = _fastest_in_float64(machine, layouts, time_s, used_bytes, most_bytes)
    return Search(
        spec=setup.spec,
        machine=machine,
        num_devices=num_devices,
        global_batch_size=global_batch_size,
        max_risk=setup.max_risk,
        engine=setup.engine,
        precision=setup.precision,
        only=only,
        layouts=layouts,
        step_time_s=time_s,
        used_bytes=used_bytes,
        setup=setup,
    )


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
    """Returns how far the layout with the least memory is from fitting, and with which nearest
    devices, batch and options one fits.
    """
    site = found.machine.site
    least = found.row(int(found.used_bytes.argmin()))
    devices = nearby_devices(found.num_devices, site.devices_per_node)
    batches = nearby_batches(found.global_batch_size, found.num_devices)
    changes = [
        [{"devices": number} for number in devices],
        [{"batch": number} for number in batches],
        [{"only": {}}] if found.only else [],
        [{"only": {**found.only, "context_parallel": [degree]}} for degree in (2, 4, 8)],
    ]
    texts = []
    for alternatives in changes:
        for change in alternatives:
            other = found.with_changes(**change)
            if other is not None:
                texts.append(_describe_search(other))
                break
    optimizer_bytes = found.machine.memory(found.layouts).terms()["optimizer"]
    most_bytes = found.machine.most_bytes(found.max_risk)
    if (found.used_bytes - optimizer_bytes).min() <= most_bytes:
        texts.append(f"optimizer states in host memory{NOT_OURS}")
    return (
        f"plan: no layout of {found.spec.name} on {counted(found.num_devices, 'device')} of"
        f" {site.name} fits in memory with a risk of at most {found.max_risk:.0%}."
        f" The leanest needs {least['used_bytes'] / 2**30:.1f} GiB of"
        f" {float(found.machine.hardware.memory_bytes) / 2**30:.1f} GiB per device"
        f" ({describe_layout(least)}). What fits: {'; '.join(texts) or 'nothing nearby'}. Else use"
        " a smaller model or sequence length, or accept more risk."
    )


def _describe_search(search: Search) -> str:
    """Returns devices, batch and the fastest layout of a search in a line."""
    devices = counted(search.num_devices, "device")
    sequences = counted(search.global_batch_size, "sequence")
    layout = describe_layout(search.row(int(search.order[0])))
    note = NOT_OURS if search.best.context_parallel > 1 else ""
    return f"{devices} with {sequences}: {layout}{note}"


def describe_layout(row: Mapping[str, Any]) -> str:
    """Returns one layout in a line: `TP8+SP PP16x2 interleaved DP24 ZeRO1 micro 1 recompute none`.

    `ZeRO3/8`: over groups of 8 replicas. `recompute full (3 a device)`: 3 of its blocks.
    """
    tensor = f"TP{row['tensor_parallel']}"
    if row["sequence_parallel"]:
        tensor += "+SP"
    parts = [tensor]
    if row["context_parallel"] > 1:
        parts.append(f"CP{row['context_parallel']}")
    if row["context_exchange"] == "all_to_all":
        parts.append("all-to-all")
    pipeline = f"PP{row['pipeline_parallel']}"
    if row["pipeline_parallel"] > 1:
        if row["virtual_stages"] > 1:
            pipeline += f"x{row['virtual_stages']}"
        pipeline += f" {row['schedule']}"
    zero = f"ZeRO{row['zero_stage']}"
    if row["shard_size"]:
        zero += f"/{row['shard_size']}"
    recompute = f"recompute {row['recompute']}"
    if row["recompute_layers"]:
        recompute += f" ({row['recompute_layers']} a device)"
    parts += [
        pipeline,
        f"DP{row['data_parallel']}",
        zero,
        f"micro {row['micro_batch_size']}",
        recompute,
    ]
    return " ".join(parts)


def seconds_text(value_s: float, digits: int = 4) -> str:
    """Returns seconds as text with thousands separators: `9.944`, `1,074`."""
    if value_s >= 1000:
        return f"{value_s:,.0f}"
    return f"{value_s:.{digits}g}"


def interval_text(row: Mapping[str, Any]) -> str:
    """Returns the 90 % interval of one layout's step time as text: `8.61 to 11.5`."""
    low = seconds_text(row["step_time_low_s"], 3)
    high = seconds_text(row["step_time_high_s"], 3)
    return f"{low} to {high}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns one row as short text, in the order of `COLUMNS`."""
    return (
        describe_layout(row),
        seconds_text(row["step_time_s"]),
        interval_text(row),
        f"{row['used_bytes'] / 2**30:.1f}",
        f"{row['out_of_memory_probability']:.1%}",
        f"{row['mfu']:.1%}",
    )
