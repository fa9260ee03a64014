"""Machine: what layouts are evaluated on, and their time and memory there."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.record import suggestion
from cluster.site import Site
from kit.config.plan import PLANNED_ONLY, Plan, Precision
from kit.config.spec import ModelSpec
from kit.engines.capabilities import EngineName
from kit.errors import ConfigError
from kit.estimate.choose.candidates import single_precision
from kit.estimate.fit.calibrate import Calibration, calibrate
from kit.estimate.theory.activations import Kernels, engine_kernels
from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layouts import SCHEDULES, Array, Layouts
from kit.estimate.theory.memory import (
    CODE_BASES,
    CONVENTIONS,
    CodeBase,
    Convention,
    Memory,
    memory,
)
from kit.estimate.theory.out_of_memory import RESERVE, Reserve
from kit.estimate.theory.step_time import StepTime, exposed_trips, step_time

CHUNK = 16384
"""Layouts evaluated at once: so many that numpy's calls do not count, so few that a dozen float32
arrays fit into a core's cache (1 MB: with 8,192 a fifth slower, with 32,768 a third)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What layouts are evaluated on: a site's numbers, and fitted ones."""

    site: Site
    hardware: Hardware
    calibration: Calibration
    kernels: Kernels
    reserve: Reserve
    convention: Convention = CONVENTIONS["mixed_precision"]
    """Bytes that the engine keeps of each parameter."""
    code_base: str = "kit"
    """Whose kernels and reserve these are: the kit's own engine's, or of `memory.CODE_BASES`."""

    @property
    def coefficients(self) -> Coefficients:
        """Efficiencies and latencies that step times are computed with."""
        return self.calibration.coefficients

    def step_time(self, layouts: Layouts) -> StepTime:
        """Returns modelled step times."""
        return step_time(layouts, self.hardware, self.coefficients)

    def memory(self, layouts: Layouts) -> Memory:
        """Returns modelled bytes per device."""
        return memory(
            layouts, kernels=self.kernels, convention=self.convention, reserve=self.reserve
        )

    def risk(self, used_bytes: Array) -> Array:
        """Returns the probability, 0 to 1, that devices run out of memory with so much in use."""
        return self.reserve.out_of_memory_probability(used_bytes, float(self.hardware.memory_bytes))

    def evaluate(self, layouts: Layouts) -> tuple[Array, Array]:
        """Returns (step time in seconds, used bytes of the heaviest device) of each layout,
        float32.
        """
        layouts, count = single_precision(layouts), len(layouts)
        time_s = np.empty(count, np.float32)
        used_bytes = np.empty(count, np.float32)
        for start in range(0, count, CHUNK):
            rows = slice(start, start + CHUNK)
            chunk = layouts.select(rows)
            time_s[rows] = self.step_time(chunk).total_s
            used_bytes[rows] = self.memory(chunk).used_bytes
        return time_s, used_bytes

    def most_bytes(self, max_risk: float) -> float:
        """Returns the used bytes at which the probability of running out is `max_risk`."""
        odds = max_risk / (1 - max_risk)
        return float(self.hardware.memory_bytes) * odds ** (1 / self.reserve.sharpness)

    def stage_times(
        self, spec: ModelSpec, plan: Plan, terms: Mapping[str, float]
    ) -> dict[str, Any]:
        """Returns how long a micro-batch takes on each stage, seconds, as `simulate_plan` takes it,
        from a step's terms.

        A third of the matrix products is forward, a third input gradients, a third weight
        gradients; recomputation is part of the backward pass; logits and embedding are on the last
        stage, the heavier of the two by far.
        """
        m = plan.num_microbatches
        p = plan.pipeline_parallel
        v = plan.virtual_stages
        held = np.array([len(plan.stage_layers(spec, stage)) for stage in range(p * v)])
        part = held * p / (m * spec.num_layers)
        share = {name: value * part for name, value in terms.items()}  # stage and micro-batch
        weight = share["gemm"] / 3
        forward = (
            weight
            + share["attention"] / 3.5
            + share["elementwise"] / 2.6
            + share["tensor_parallel"] / 2
            + share["context_parallel"] / 3
            + share["host_launch"] / 3
        )
        layers = (
            "gemm",
            "attention",
            "elementwise",
            "tensor_parallel",
            "context_parallel",
            "host_launch",
            "recompute",
        )
        backward = sum(share[name] for name in layers) - forward - weight
        ends = np.zeros(p * v)
        ends[-1] = terms["embedding_logits"] * p / m
        trips = exposed_trips(
            p, v, m, SCHEDULES.index(plan.schedule), self.coefficients.pipeline_exposed
        )
        send = terms["pipeline_send"] / (2 * v * float(trips))
        return {
            "forward_s": forward + ends / 3,
            "backward_input_s": backward + ends / 3,
            "backward_weight_s": weight + ends / 3,
            "send_s": send if p > 1 else 0.0,
        }


def machine_of(
    site: Site,
    calibration: Calibration | None = None,
    *,
    engine: EngineName | None = None,
    kernels: Kernels | None = None,
    precision: Precision = "bf16",
    code_base: str = "kit",
) -> Machine:
    """Returns what layouts are evaluated on; the arguments are as in `search`.

    Raises:
        ConfigError: the site lacks a number, or the code base is unknown.
    """
    if code_base not in (names := ("kit", *CODE_BASES)):
        raise ConfigError(f"--code-base: {code_base!r} is unknown. {suggestion(code_base, names)}")
    if precision not in ("bf16", *PLANNED_ONLY) or not site.device.peak_flops_per_s.get(
        precision, precision == "bf16"
    ):
        raise ConfigError(
            f"search.precision: {precision!r} is not known of {site.device.name}: site {site.name}"
            f" has no device.peak_flops_per_s.{precision}. Use 'bf16', or add it to the site file."
        )
    hardware = Hardware.of(site, precision)
    own = CodeBase(engine_kernels(engine or site.engine, site.device), RESERVE)
    base = CODE_BASES.get(code_base, own)
    return Machine(
        site=site,
        hardware=hardware,
        calibration=calibration or calibrate([], site, hardware=hardware),
        kernels=kernels or base.kernels,
        reserve=base.reserve,
        code_base=code_base,
    )
