"""A machine, and functions that compute the step time and the memory of layouts on the machine."""

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
"""Number of layouts that are evaluated at once. With this number the overhead of NumPy calls is
small, and a dozen float32 arrays fit into a core's cache of 1 MB. Chunks of 8,192 layouts are a
fifth slower. Chunks of 32,768 layouts are a third slower."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """All numbers from which the step time and the memory of a layout are computed: data of the
    site, properties of the training code, and efficiencies that are fitted to measured runs.
    """

    site: Site
    hardware: Hardware
    calibration: Calibration
    kernels: Kernels
    reserve: Reserve
    convention: Convention = CONVENTIONS["mixed_precision"]
    """Bytes per parameter that the engine keeps for weights, gradients and optimizer states."""
    code_base: str = "kit"
    """Name of the training code that is assumed to run the layouts: `kit`, or a name in
    `memory.CODE_BASES`. The training code determines the kernels and the memory reserve."""

    @property
    def coefficients(self) -> Coefficients:
        """Efficiencies and latencies, fitted to runs, from which step times are computed."""
        return self.calibration.coefficients

    def step_time(self, layouts: Layouts) -> StepTime:
        """Returns the modelled step time of each layout, divided into computation, communication
        and other terms.
        """
        return step_time(layouts, self.hardware, self.coefficients)

    def memory(self, layouts: Layouts) -> Memory:
        """Returns the modelled memory of each layout in bytes per device, divided into weights,
        gradients, optimizer states, activations and other terms.
        """
        return memory(
            layouts, kernels=self.kernels, convention=self.convention, reserve=self.reserve
        )

    def risk(self, used_bytes: Array) -> Array:
        """Returns the probability, 0 to 1, that a device of this machine runs out of memory if the
        modelled memory of a layout is `used_bytes`.
        """
        return self.reserve.out_of_memory_probability(used_bytes, float(self.hardware.memory_bytes))

    def evaluate(self, layouts: Layouts) -> tuple[Array, Array]:
        """Returns (step time in seconds, used bytes of the device that needs most memory), two
        float32 arrays with one element per layout.
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

    def max_used_bytes(self, max_risk: float) -> float:
        """Returns the largest modelled memory in bytes per device for which the probability of
        running out of memory is at most `max_risk`.
        """
        odds = max_risk / (1 - max_risk)
        return float(self.hardware.memory_bytes) * odds ** (1 / self.reserve.sharpness)

    def stage_times(
        self, spec: ModelSpec, plan: Plan, terms: Mapping[str, float]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of `simulate_plan`: the seconds that one micro-batch needs
        on each stage for the forward pass, input gradients and weight gradients, and the seconds of
        one send. `terms` maps each term of the step time to seconds per step.

        A third of the matrix products belongs to the forward pass, a third to input gradients and a
        third to weight gradients. Recomputation is part of the backward pass. Logits and embedding
        are both counted on the last stage, since the logits need far more time.
        """
        m = plan.num_microbatches
        p = plan.pipeline_parallel
        v = plan.virtual_stages
        held = np.array([len(plan.stage_layers(spec, stage)) for stage in range(p * v)])
        part = held * p / (m * spec.num_layers)
        # Seconds of each term per micro-batch, one element per stage.
        share = {name: value * part for name, value in terms.items()}
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
    """Returns a `Machine`: a site with all numbers from which the step time and the memory of
    layouts are computed.

    `engine` trains the layouts. `kernels` describes the tensors that are saved for backward.
    `code_base` names the training code. By default, these are the engine of the site and the
    kernels of the code base.

    Raises:
        ConfigError: The site lacks a number, the code base is unknown, or the site has no peak for
            the precision.
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
