"""Objectives of a hyperparameter search: the tokens per second of a layout, either estimated by the
planner or measured in a real run.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.record import ConfigError, counted
from cluster.state import JobState
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.estimate.choose.machine import Machine
from kit.estimate.theory.layouts import Array, Layouts
from kit.estimate.tuning.tune import Parameters, TrialFailure

FRONTIER_SPACE: dict[str, tuple] = {
    "pipeline_parallel": (1, 2, 4, 8, 12, 16),
    "tensor_parallel": (4, 8),
    "micro_batch_size": tuple(range(4, 21)),
    "num_microbatches": (5, 10),
    "zero_stage": (0, 1),
    "num_nodes": (12, 16),
}
"""Maps each parameter to its allowed values in the study of a 175B model on Frontier (arXiv
2312.12705, section IV). The values come from a quotation and were not checked against the paper."""


def plan_of_trial(
    parameters: Mapping[str, Any], *, devices_per_node: int, base: Plan | None = None
) -> Plan:
    """Returns the plan that the parameters of a trial describe. The plan uses all devices of its
    nodes.

    Parameters are fields of Plan, and `num_nodes` and `num_microbatches` (gradient accumulation
    steps), whose defaults are 1. Fields of Plan that are not given are copied from `base`. The data
    parallel degree is computed from the number of nodes. The global batch size is computed from the
    number of micro-batches.

    Raises:
        ConfigError: Tensor x pipeline parallelism does not divide the devices, or the plan breaks a
            rule.
    """
    fields = {**(base or Plan()).to_dict(), **parameters}
    devices = fields.pop("num_nodes", 1) * devices_per_node
    held = fields["tensor_parallel"] * fields["pipeline_parallel"]
    if devices % held:
        raise ConfigError(f"plan: tensor x pipeline = {held} devices do not divide {devices}.")
    fields["data_parallel"] = devices // held
    count = fields.pop("num_microbatches", 1)
    return Plan.from_dict(
        {
            **fields,
            "global_batch_size": count * fields["micro_batch_size"] * fields["data_parallel"],
        }
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EstimatedRate:
    """Objective of a search: the planner's estimate of tokens per second per device. A trial fails
    if its layout runs out of memory with a probability above `max_risk`.
    """

    spec: ModelSpec
    machine: Machine
    devices_per_node: int
    base: Plan = dataclasses.field(default_factory=lambda: Plan(precision="bf16"))
    max_risk: float = 0.1

    def __call__(self, parameters: Parameters) -> float:
        """Returns the estimated tokens per second per device of the layout that the parameters
        describe.

        Raises:
            ConfigError: The parameters describe no plan that can train this model.
            TrialFailure: The layout runs out of memory with a probability above `max_risk`.
        """
        risk, rate = self._risk_and_rate([self._plan(parameters)])
        if risk.item() > self.max_risk:
            raise TrialFailure(f"out of memory (probability {risk.item():.2f})")
        return rate.item()

    def rates(self, space: Mapping[str, Sequence]) -> Array:
        """Returns the estimated tokens per second per device for all combinations of a search
        space, as an array with one axis per parameter. Elements are NaN for impossible plans and
        for layouts whose risk of running out of memory is above `max_risk`.
        """
        plans: list[tuple[int, Plan]] = []
        for number, choice in enumerate(itertools.product(*space.values())):
            with contextlib.suppress(ConfigError):
                plans.append((number, self._plan(dict(zip(space, choice, strict=True)))))
        grid = np.full([len(choices) for choices in space.values()], np.nan)
        if not plans:
            return grid
        risk, rate = self._risk_and_rate([plan for _, plan in plans])
        grid.flat[[number for number, _ in plans]] = np.where(risk > self.max_risk, np.nan, rate)
        return grid

    def _plan(self, parameters: Parameters) -> Plan:
        plan = plan_of_trial(parameters, devices_per_node=self.devices_per_node, base=self.base)
        plan.check(self.spec)
        return plan

    def _risk_and_rate(self, plans: list[Plan]) -> tuple[Array, Array]:
        layouts = Layouts.of(self.spec, plans)
        risk = self.machine.risk(self.machine.memory(layouts).used_bytes)
        return risk, self.machine.step_time(layouts).tokens_per_s / layouts.num_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """Objective of a search, measured in real runs of the kit: tokens per second, summed over all
    devices, as the median over the steps. The first `warm_up` steps are ignored.

    Each trial has a run directory below `directory`. The name of the run directory contains the
    parameters of the trial. If the run of a trial has ended, it is not repeated. A killed search
    may leave an active run, and the next search waits for this run.
    """

    spec: ModelSpec
    recipe: Recipe
    directory: Path
    num_devices: int = 2
    site: str = "laptop"
    base: Plan = dataclasses.field(default_factory=Plan)
    warm_up: int = 2
    """Number of steps at the start of a run whose rates are ignored."""
    timeout_s: float = 600.0

    def __call__(self, parameters: Parameters) -> float:
        """Returns the tokens per second of the run of a trial, summed over all devices, as the
        median over the steps. If the run does not exist, it is launched. The method waits until
        the run has ended.

        Raises:
            ConfigError, DataError, RunError: The plan cannot run.
            TrialFailure: The run failed, took longer than `timeout_s`, or has no steps after the
                warm-up.
        """
        from kit.launcher import launch
        from kit.run import Run

        plan = plan_of_trial(parameters, devices_per_node=self.num_devices, base=self.base)
        directory = Path(self.directory) / "-".join(
            f"{name}_{value}" for name, value in sorted(parameters.items())
        )
        run = Run.open(directory) if (directory / "job.json").exists() else None
        if run is None or run.job.status().state is JobState.LOST:
            run = launch(directory, spec=self.spec, plan=plan, recipe=self.recipe, site=self.site)
        try:
            status = run.job.wait(timeout_s=self.timeout_s)
        except TimeoutError as error:
            run.job.cancel()
            raise TrialFailure(f"no end after {self.timeout_s:.0f} s") from error
        if status.state is not JobState.DONE:
            raise TrialFailure(f"{status.state}: {status.reason}")
        rates = run.metrics().tokens_per_s[self.warm_up :]
        if not rates.size:
            raise TrialFailure(
                f"only {counted(len(run.metrics()), 'step')}, of which {self.warm_up} are warm-up"
            )
        return float(np.median(rates))
