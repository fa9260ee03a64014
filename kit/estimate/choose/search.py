"""Search for the fastest layout of a model on a machine. Only layouts with a low risk of running
out of memory are feasible.

All candidates are evaluated, in chunks that fit into the cache of a core. `explain.py` explains how
reliable the predicted step time of a layout is, and on which changed machines another layout would
be the fastest.
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
from kit.config.recipe import Optimizer
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
from kit.estimate.theory.out_of_memory import MAX_RISK
from kit.estimate.theory.state import convention_of
from kit.show.table import Table

NOT_OURS = " (not by the kit's engines)"
EXACT_LAYOUTS = 2000
"""Number of the fastest feasible layouts whose time and memory are computed again in float64.
Float32 is precise enough to find these layouts. With float64, a report shows exactly the values
that `step_time`, `memory` and the notebook panel compute for the plan."""
CONTEXT_DEGREES = (2, 4, 8)
"""Context parallel degrees that are tried if the user names none, where no layout without context
parallelism fits in memory or sequences are long."""
BELIEVABLE_SHARE = 0.9
"""Largest believable ratio of the FLOP/s that a layout executes, with recomputation, to the FLOP/s
of the best matrix product ever measured on the device. A step also has work other than large matrix
products. None of the 1,507 packaged runs in bf16 or fp16 on such devices executes more."""
NOTABLE = 1.1
"""Smallest speedup at which another batch is recommended: sequences per second with the other
batch, divided by sequences per second with the present batch."""
COLUMNS: tuple[str, ...] = ("layout", "s/step", "90 % interval", "GiB", "risk", "MFU")
"""Column headers of a table of layouts. The function `cells` returns the cells of one row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """Inputs of a search without the number of devices, the batch and the allowed values. These
    inputs stay unchanged if the search is repeated with other devices or another batch.
    """

    spec: ModelSpec
    machine: Machine
    max_risk: float
    engine: EngineName
    precision: Precision
    code_base: CodeBase | None
    """Training code whose layouts are searched, e.g. Megatron-LM, or None for the kit's engine."""
    has_kit_kernels: bool
    """Whether the layouts run on GPUs with the torch decoder and the kernels of the kit."""
    kernels: Mapping[str, Any]
    """Maps columns of `Layouts` to values that describe the kernels of the training code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """All layouts of a model for a number of devices and a batch, with the modelled step time and
    memory of each layout.
    """

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
    """Seconds per step of each layout, computed in closed form without a simulation. Layouts are
    ranked by this time. It is shown to the user and is the centre of the 90 % interval."""
    used_bytes: Array
    """Bytes of each layout on the device that needs most memory."""
    setup: SearchSetup = dataclasses.field(repr=False, compare=False)

    @cached_property
    def feasible(self) -> Array:
        """Boolean mask with one element per layout. It is True if the probability of running out of
        memory is at most `max_risk`.
        """
        return self.used_bytes <= self.machine.max_used_bytes(self.max_risk)

    @cached_property
    def order(self) -> Array:
        """Indices of the feasible layouts, fastest first. Of equally fast layouts, the layout with
        the least memory comes first. A layout is not ranked as faster than `believable_step_s`.
        """
        rows = np.flatnonzero(self.feasible)
        time_s = np.maximum(self.step_time_s[rows], self.believable_step_s[rows])
        return rows[np.lexsort((self.used_bytes[rows], self.step_time_s[rows], time_s))]

    @cached_property
    def believable_step_s(self) -> Array:
        """Seconds per step of layouts that are predicted as faster than believable. Their devices
        would execute more than BELIEVABLE_SHARE of the FLOP/s of the best matrix product ever
        measured on such a device. The value is the step time at this share. For all other layouts
        it is 0, and also if no product was measured or products are narrower than bf16.
        """
        ceiling = self.machine.site.device.matmul_flops_per_s.get("bf16")
        seconds = np.zeros(len(self.layouts))
        if ceiling is None or self.machine.hardware.is_narrow:
            return seconds
        tokens = self.global_batch_size * self.spec.sequence_length
        tokens_per_flop_s = tokens / (self.num_devices * BELIEVABLE_SHARE * ceiling.value)
        most_flops = self.spec.hardware_flops_per_token("full", whole=True)
        for index in np.flatnonzero(self.step_time_s < most_flops * tokens_per_flop_s):
            least_s = self.executed_flops_per_token(int(index)) * tokens_per_flop_s
            seconds[index] = least_s if self.step_time_s[index] < least_s else 0.0
        return seconds

    @cached_property
    def pareto(self) -> Array:
        """Indices of the Pareto-optimal layouts, fastest first. No other layout needs both less
        time and less memory. Layouts that do not fit in memory are included.
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
        """Returns a new search with another number of devices, another batch or other allowed
        values. Returns None if no layout exists or none fits in memory.
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

    def with_context_parallel(self) -> "Search | None":
        """Returns a new search of layouts with context parallelism. Returns None if none fits in
        memory, or if `only` names context parallelism already.
        """
        if "context_parallel" in self.only:
            return None
        return self.with_changes(only={**self.only, "context_parallel": CONTEXT_DEGREES})

    def advise_batch(self) -> str | None:
        """Returns a text that recommends another batch, or None if no other batch is much faster.
        The method searches again for each of up to four nearby batches.

        The number of replicas must divide both the batch and the devices. Other batches are
        searched only if the fastest layout has as many replicas as the present batch allows.
        Another batch is recommended only if its fastest layout trains at least NOTABLE times as
        many sequences per second.
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
        """Plan of the fastest feasible layout, with all settings that the engine needs."""
        return self.plan(int(self.order[0]))

    def fastest(self, count: int) -> Array:
        """Returns the indices of the fastest feasible layouts, fastest first, at most `count`
        indices. If several layouts have equal time and memory, only the first is returned.

        For example, a pipeline with ZeRO 2 needs as much time and memory as a pipeline with ZeRO 1.
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
        """Returns the plan of one layout, with the engine and the precision of the search. On GPUs,
        blocks are compiled unless this makes steps slower (`Plan.gpu_defaults`).
        """
        plan = self.layouts.plan(index, self.engine)
        if self.machine.site.device.is_gpu:
            plan = plan.replace(**plan.gpu_defaults)
        return plan.replace(precision=self.precision)

    def risk(self, index: int) -> float:
        """Returns the probability, 0 to 1, that one layout runs out of memory."""
        return float(self.machine.risk(self.used_bytes[index].astype(float)))

    @property
    def peak_flops_per_s(self) -> float:
        """Peak FLOP/s of one device in the precision of the search, from which MFU is computed."""
        return self.machine.site.device.peak_flops_per_s[self.precision].value

    def mfu(self, index: int) -> float:
        """Returns the modelled MFU of one layout, as a fraction of the peak in the precision of the
        search. MFU of a run is a fraction of this peak too (`Metrics.mfu`).
        """
        tokens = self.global_batch_size * self.spec.sequence_length
        peak = self.num_devices * self.peak_flops_per_s
        return tokens * self.spec.flops_per_token() / (float(self.step_time_s[index]) * peak)

    def executed_flops_per_token(self, index: int) -> float:
        """Returns the FLOPs per token that devices execute with one layout, with recomputation, as
        its step time assumes (`LayerTime.recompute_s`).

        Only blocks of the native engine that are not compiled are assumed to stop full
        recomputation before their last matrix product. The step times of other engines and code
        bases are fitted to runs of Megatron, which repeats whole blocks.
        """
        plan = self.plan(index)
        is_native = bool(np.broadcast_to(self.layouts.native, self.layouts.shape)[index])
        return self.spec.hardware_flops_per_token(
            plan.recompute,
            whole=plan.recomputes_whole or not is_native,
            layers=plan.recomputed_layers(self.spec),
            attention=plan.recomputes_attention,
        )

    def prediction(self, index: int) -> Prediction:
        """Returns the predicted step time of one layout in seconds, with its 90 % interval and
        warnings.
        """
        layout = self.layouts.select(np.array([index]))
        return self.machine.calibration.predict(layout, self.machine.hardware)

    def row(self, index: int) -> dict[str, Any]:
        """Returns the numbers of one layout by name: fields of the plan, step time in seconds with
        its 90 % interval, used bytes, probability of running out of memory, and MFU.
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
        """Title of a table of the layouts, in one line: model, machine, batch, number of compared
        layouts, and number of runs on which the step times are calibrated.
        """
        precision = "" if self.precision == "bf16" else f" in {self.precision}"
        if np.any(self.layouts.muon):
            precision += " with Muon"
        return (
            f"{self.spec.name} on {counted(self.num_devices, 'device')} of {self.machine.site.name}"
            f" with engine {self.engine}{precision}, {counted(self.global_batch_size, 'sequence')}"
            f" of {self.spec.sequence_length:,} tokens: {len(self.order):,} of"
            f" {len(self.layouts):,} layouts have at most {self.max_risk:.0%} risk of"
            f" running out of memory; {self.machine.calibration.label}"
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
    max_risk: float = MAX_RISK,
    engine: EngineName | None = None,
    precision: Precision = "bf16",
    calibration: Calibration | None = None,
    kernels: Kernels | None = None,
    code_base: str = "kit",
    optimizer: Optimizer = "adamw",
    only: Mapping[str, Iterable[Any]] | None = None,
    **layout_kernels: Any,
) -> Search:
    """Returns all layouts that the engine can train on the devices, with the modelled step time and
    memory of each layout.

    Args:
        spec: Model to train.
        site: Machine to train on.
        num_devices: Number of devices. Each layout uses all of them.
        global_batch_size: Sequences in one optimizer step.
        max_risk: Highest accepted probability of running out of memory, between 0 and 1.
        engine: Engine that would train the layouts. The default is the engine of the site.
        precision: Precision of matrix products. The kit plans fp8, mxfp8 and nvfp4, but trains
            none of them.
        calibration: Efficiencies and latencies fitted to runs, e.g. `published_calibration(site)`.
            By default, the average efficiencies of published machines are used.
        kernels: Description of the tensors that the kernels save for backward. By default, the
            kernels of `code_base` are described.
        code_base: Training code whose kernels, schedules and overlap are assumed: `kit`, or a name
            in `theory.memory.CODE_BASES`.
        optimizer: Optimizer whose memory and time are assumed, as in `Recipe.optimizer`.
        only: Maps fields of Plan to allowed values, e.g. `{"schedule": ["1f1b"]}`. The kit does not
            train context parallelism. It is searched if it is named, e.g. with
            `{"context_parallel": [1, 2, 4]}`, or if no layout without it fits in memory.
        layout_kernels: Keyword arguments of `Layouts.of`: `flash_attention`, `fused_norm`,
            `data_overlap`, `tensor_overlap` and others.

    Raises:
        ConfigError: An argument is not allowed, or the site lacks a number or the devices of the
            engine. Or no layout fits devices and batch, or none of them fits in memory.
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
    if optimizer == "muon" and not capabilities_of(engine).gathers_matrices:
        raise ConfigError(
            f"search.optimizer: 'muon' is not allowed with engine {engine!r}, which updates each"
            " shard by itself. Give 'adamw', or engine 'native'."
        )
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
        kernels={**columns, "muon": optimizer == "muon", **layout_kernels},
    )
    found = evaluate_layouts(setup, num_devices, global_batch_size, only or {})
    if found.feasible.any():
        return found
    by_context = found.with_context_parallel()
    if by_context is None:
        raise ConfigError(_none_fits(found))
    return by_context


def evaluate_layouts(
    setup: SearchSetup,
    num_devices: int,
    global_batch_size: int,
    only: Mapping[str, Iterable[Any]],
) -> Search:
    """Returns a search with all layouts for a number of devices and a batch, and with the modelled
    step time and memory of each layout. Layouts that do not fit in memory are included. `setup` has
    the model, the machine and the engine.

    Raises:
        ConfigError: The site lacks a number, or no layout fits devices, batch and `only`.
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
        # `Plan.gpu_defaults` compiles the blocks of these layouts. Blocks are not compiled in a
        # pipeline whose schedule splits the backward pass.
        is_split = layouts.is_one_of("schedule", *SPLIT_SCHEDULES)
        has_pipeline = layouts.pipeline_parallel > 1
        layouts = dataclasses.replace(layouts, compiled=~(is_split & has_pipeline))
    time_s, used_bytes = machine.evaluate(layouts)
    max_used_bytes = machine.max_used_bytes(setup.max_risk)
    is_recomputation_fixed = "recompute" in only or "recompute_layers" in only
    if capabilities_of(setup.engine).recomputes_some_blocks and not is_recomputation_fixed:
        layouts, time_s, used_bytes = with_some_recomputed(
            layouts,
            time_s,
            used_bytes,
            machine.evaluate,
            max_used_bytes,
            equal_stages=setup.code_base is not None,
        )
    time_s, used_bytes = _fastest_in_float64(machine, layouts, time_s, used_bytes, max_used_bytes)
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
    """Returns the bytes per parameter of weights, gradients and optimizer states. One search needs
    one number of bytes for all its layouts.

    Raises:
        ConfigError: The engine is neuron, and `only` allows ZeRO stage 0 together with other ZeRO
            stages. At stage 0 the engine keeps fewer bytes per parameter.
    """
    allowed = only.get("zero_stage", ())
    stages = {allowed} if isinstance(allowed, int) else set(allowed)
    if capabilities_of(engine).pure_bf16_without_zero and 0 in stages and len(stages) > 1:
        raise ConfigError(
            f"plan.zero_stage: {tuple(sorted(stages))} is not allowed with"
            f" engine {engine!r}, which keeps no fp32 master weights at stage 0. Name stage 0 or"
            " the others."
        )
    return convention_of("bf16", engine, min(stages, default=1))


def _fastest_in_float64(
    machine: Machine, layouts: Layouts, time_s: Array, used_bytes: Array, max_used_bytes: float
) -> tuple[Array, Array]:
    """Returns (step time in seconds, used bytes) of all layouts as float64 arrays. Only the values
    of the EXACT_LAYOUTS fastest feasible layouts are computed in float64. All other values are
    converted from float32.
    """
    time_s = time_s.astype(np.float64)
    used_bytes = used_bytes.astype(np.float64)
    rows = np.flatnonzero(used_bytes <= max_used_bytes)
    if len(rows) > EXACT_LAYOUTS:
        rows = rows[np.argpartition(time_s[rows], EXACT_LAYOUTS)[:EXACT_LAYOUTS]]
    if len(rows):
        chosen = layouts.select(rows)
        time_s[rows] = machine.step_time(chosen).total_s
        used_bytes[rows] = machine.memory(chosen).used_bytes
    return time_s, used_bytes


def _none_fits(found: Search) -> str:
    """Returns the error message for a search in which no layout fits in memory. The message states
    the memory of the smallest layout, and the nearest number of devices, the nearest batch and
    other options with which a layout fits.
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
    max_used_bytes = found.machine.max_used_bytes(found.max_risk)
    if (found.used_bytes - optimizer_bytes).min() <= max_used_bytes:
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
    """Returns a text of one line with the number of devices, the batch and the fastest layout of a
    search.
    """
    devices = counted(search.num_devices, "device")
    sequences = counted(search.global_batch_size, "sequence")
    layout = describe_layout(search.row(int(search.order[0])))
    note = NOT_OURS if search.best.context_parallel > 1 else ""
    return f"{devices} with {sequences}: {layout}{note}"


def describe_layout(row: Mapping[str, Any]) -> str:
    """Returns a text of one line that describes a layout, e.g.
    `TP8+SP PP16x2 interleaved DP24 ZeRO1 micro 1 recompute none`.

    `PP16x2` is a pipeline of 16 devices with 2 stages each. `ZeRO3/8` shards over groups of 8
    replicas. `recompute full (3 blocks a device)` recomputes 3 blocks of each pipeline device.
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
        recompute += f" ({counted(row['recompute_layers'], 'block')} a device)"
    parts += [
        pipeline,
        f"DP{row['data_parallel']}",
        zero,
        f"micro {row['micro_batch_size']}",
        recompute,
    ]
    return " ".join(parts)


def seconds_text(value_s: float, digits: int = 4) -> str:
    """Returns seconds as text with thousands separators and without unit: `9.944`, `1,074`."""
    if value_s >= 1000:
        return f"{value_s:,.0f}"
    return f"{value_s:.{digits}g}"


def interval_text(row: Mapping[str, Any]) -> str:
    """Returns the 90 % interval of a layout's step time in seconds as text: `8.61 to 11.5`."""
    low = seconds_text(row["step_time_low_s"], 3)
    high = seconds_text(row["step_time_high_s"], 3)
    return f"{low} to {high}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the table cells of one layout as short texts, in the order of `COLUMNS`. `row` maps
    names to the layout's numbers, as `Search.row` returns them.
    """
    return (
        describe_layout(row),
        seconds_text(row["step_time_s"]),
        interval_text(row),
        f"{row['used_bytes'] / 2**30:.1f}",
        f"{row['out_of_memory_probability']:.1%}",
        f"{row['mfu']:.1%}",
    )
