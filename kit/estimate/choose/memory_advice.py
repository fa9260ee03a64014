"""Warning before a launch whose layout probably needs too much memory. Advice for a run that has
run out of memory: changes of its plan that need less memory according to the planner's estimate.
This module does not import torch.

`python -m kit.estimate.choose.memory_advice RUN` prints the advice. A rank that ran out of memory
starts this command as a child process.
"""

import contextlib
import dataclasses
import itertools
import sys
from typing import Any

import numpy as np

from cluster.site import Device
from kit.config.plan import Plan
from kit.config.recipe import Optimizer
from kit.config.spec import ModelSpec
from kit.errors import ConfigError, kit_command
from kit.estimate.theory.activations import engine_kernels
from kit.estimate.theory.layouts import RECOMPUTE, Layouts
from kit.estimate.theory.memory import STATE, memory
from kit.estimate.theory.out_of_memory import MAX_RISK, RESERVE
from kit.estimate.theory.state import convention_of
from kit.run import Run

NO_RESERVE = RESERVE.replace(
    factor=1.0, extra_bytes=0.0, source="of a CPU the kit has no measured runs"
)
SHOWN = 3


@dataclasses.dataclass(frozen=True)
class PlanChange:
    """A change of the plan. `used_bytes` is the estimated memory of the changed plan on the device
    that needs most memory.
    """

    changes: dict[str, Any]
    used_bytes: float

    @property
    def settings(self) -> str:
        """Command line options of `kit resume` that make the change, e.g.
        `--set plan.zero_stage=2`.
        """
        values = {name: "null" if value is None else value for name, value in self.changes.items()}
        return " ".join(f"--set plan.{name}={value}" for name, value in values.items())

    def __str__(self) -> str:
        return f"{self.settings} ({self.used_bytes / 2**30:.2f} GiB)"


def memory_advice(run: Run) -> str:
    """Returns one line of advice for a run that ran out of memory. It states the estimated memory
    of the plan in GiB per device, and up to three changes that need at least 5 % less memory. Each
    change is followed by the estimated memory.
    """
    now, smaller = _smaller_options(run.spec, run.plan, run.site.device, run.recipe.optimizer)
    memory_bytes = run.site.device.memory_bytes
    limit = memory_bytes and memory_bytes.value
    fits = [option for option in smaller if limit is None or option.used_bytes <= limit]
    has = "" if limit is None else f" of {limit / 2**30:.2f} GiB"
    need = f"Out of memory. Estimated need of a device: {now.used_bytes / 2**30:.2f} GiB{has}."
    if not fits:
        return (
            f"{need} No change of micro-batch, recomputation or ZeRO stage fits: use more devices"
            " (`kit plan`)."
        )
    which = "would fit" if limit is not None and now.used_bytes > limit else "need less"
    return (
        f"{need} These {which}: {'; '.join(map(str, fits[:SHOWN]))}. Resume with one of them:"
        f" `{kit_command('resume', run.directory)} {fits[0].settings}`."
    )


def memory_warning(
    spec: ModelSpec, plan: Plan, device: Device, *, optimizer: Optimizer = "adamw"
) -> str | None:
    """Returns a warning if a device runs out of memory with a probability above MAX_RISK according
    to the planner's estimate. The warning names up to three changes of the plan that fit. Returns
    None for other plans, for CPUs, and for devices whose memory is unknown.
    """
    if device.memory_bytes is None or not (device.is_gpu or device.trainium):
        return None
    limit = device.memory_bytes.value
    (now,) = estimate_options(spec, plan, [{}], device, optimizer=optimizer)
    risk = _risk(now, limit)
    if risk <= MAX_RISK:
        return None
    _, smaller = _smaller_options(spec, plan, device, optimizer)
    fits = [option for option in smaller if _risk(option, limit) <= MAX_RISK]
    advice = (
        "No change of micro-batch, recomputation or ZeRO stage fits. Use more devices (`kit plan`)"
    )
    if fits:
        advice = f"These changes fit: {'; '.join(map(str, fits[:SHOWN]))}"
    likely = "probably runs" if risk > 0.5 else "may run"
    return (
        f"WARNING: this layout {likely} out of memory. The predicted memory of a device is"
        f" {now.used_bytes / 2**30:.2f} GiB of {limit / 2**30:.2f} GiB, with a probability of"
        f" {risk:.0%} of running out. {advice}."
    )


def _risk(option: PlanChange, device_bytes: float) -> float:
    return float(RESERVE.out_of_memory_probability(np.array(option.used_bytes), device_bytes))


def _smaller_options(
    spec: ModelSpec, plan: Plan, device: Device, optimizer: Optimizer
) -> tuple[PlanChange, list[PlanChange]]:
    """Returns (the unchanged plan with its estimated memory, the changes of the plan that need at
    least 5 % less memory).
    """
    tried = [{}, *memory_saving_changes(spec, plan)]
    now, *options = estimate_options(spec, plan, tried, device, optimizer=optimizer)
    return now, [option for option in options if option.used_bytes < 0.95 * now.used_bytes]


def memory_saving_changes(spec: ModelSpec, plan: Plan) -> list[dict[str, Any]]:
    """Returns changes of the plan that save memory without more devices. Each change maps fields of
    the plan to new values. Changes of one field come first, then changes of two and of three
    fields.

    Only changes that the rules of plans allow are returned. Their memory is not estimated.
    """
    smaller = [2**power for power in range(15, -1, -1) if 2**power < plan.micro_batch_size]
    values = {
        "micro_batch_size": [size for size in smaller if plan.micro_batch_size % size == 0],
        "recompute": RECOMPUTE[RECOMPUTE.index(plan.recompute) + 1 :],
        "recompute_layers": [None] if plan.recompute_layers else [],
        "shard_size": [None] if plan.shard_size else [],
        "zero_stage": range(plan.zero_stage + 1, 4) if plan.data_parallel > 1 else [],
    }
    combinations = itertools.chain.from_iterable(
        itertools.combinations(values, count) for count in (1, 2, 3)
    )
    found = []
    for fields in combinations:
        for chosen in itertools.product(*(values[name] for name in fields)):
            change = dict(zip(fields, chosen, strict=True))
            with contextlib.suppress(ConfigError):
                plan.replace(**change).check(spec)
                found.append(change)
    return found


def estimate_options(
    spec: ModelSpec,
    plan: Plan,
    tried: list[dict[str, Any]],
    device: Device,
    *,
    optimizer: Optimizer = "adamw",
) -> list[PlanChange]:
    """Returns one option per change in `tried`, with the estimated bytes of the device that needs
    most memory with an optimizer.

    The planner models bf16. For fp32, the bytes of tensors that are allocated and freed in each
    step are doubled.
    """
    plans = [plan.replace(**change) for change in tried]
    layouts = Layouts.of(spec, plans, muon=optimizer == "muon")
    is_fp32 = plan.precision == "fp32"
    conventions = {
        convention_of(layout.precision, layout.engine, layout.zero_stage) for layout in plans
    }
    if len(conventions) > 1:
        return [
            option
            for change in tried
            for option in estimate_options(spec, plan, [change], device, optimizer=optimizer)
        ]
    (convention,) = conventions
    reserve = NO_RESERVE if "CPU" in device.name else RESERVE
    kernels = engine_kernels(plan.engine, device)
    # In fp32 the shards are the weights themselves. A bf16 copy does not exist.
    kernels = kernels.replace(fully_sharded=kernels.fully_sharded and not is_fp32)
    terms = memory(layouts, kernels=kernels, convention=convention, reserve=reserve).terms()
    used_bytes: Any = 0
    for name, value in terms.items():
        is_temporary = name not in (*STATE, "reserve")
        width = 2 if is_fp32 and is_temporary else 1
        used_bytes = used_bytes + np.asarray(value) * width
    return [
        PlanChange(change, float(option_bytes))
        for change, option_bytes in zip(tried, np.ravel(used_bytes), strict=True)
    ]


if __name__ == "__main__":
    print(memory_advice(Run.open(sys.argv[1])))
