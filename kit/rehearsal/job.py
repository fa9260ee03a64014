"""What is rehearsed, and what several stages need to know of it."""

import dataclasses
from functools import cached_property

from cluster.render import nodes_for
from cluster.site import Site
from kit.estimate.choose.search import Machine
from kit.estimate.fit.calibrate import published_calibration
from kit.estimate.theory.activations import engine_kernels
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import CONVENTIONS, memory
from kit.estimate.theory.out_of_memory import RESERVE
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run.checkpoint import BYTES_PER_PARAM
from kit.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its layout and training, on as many devices of a site as the layout has."""

    spec: ModelSpec
    plan: Plan
    recipe: Recipe
    site: Site
    hours_between_failures: float | None

    @cached_property
    def num_nodes(self) -> int:
        """Nodes of the site that it fills."""
        return nodes_for(self.plan.num_devices, self.site)

    @cached_property
    def layout(self) -> Layouts:
        """The plan, as the equations take it."""
        return Layouts.of(self.spec, [self.plan])

    @cached_property
    def machine(self) -> Machine:
        """The site with what published runs tell about it."""
        hardware, calibration = Hardware.of(self.site, "bf16"), published_calibration(self.site)
        kernels = engine_kernels(self.plan.engine, self.site.device)
        return Machine(
            site=self.site,
            hardware=hardware,
            calibration=calibration,
            kernels=kernels,
            reserve=RESERVE,
        )

    @cached_property
    def used_bytes(self) -> float:
        """Modelled bytes of the fullest device."""
        plan = self.plan
        is_pure = plan.engine == "neuron" and plan.precision == "bf16" and plan.zero_stage == 0
        convention = CONVENTIONS["pure_bf16" if is_pure else "mixed_precision"]
        return memory(
            self.layout, kernels=self.machine.kernels, convention=convention
        ).used_bytes.item()

    @cached_property
    def step_s(self) -> tuple[float, float, float]:
        """Modelled seconds of a step, and the ends of their 90 % interval."""
        found = self.machine.calibration.predict(self.layout)
        return found.total_s.item(), found.low_s.item(), found.high_s.item()

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        return BYTES_PER_PARAM * self.spec.num_params

    @property
    def between_checkpoints_s(self) -> float:
        """Modelled seconds of training between two."""
        return (self.recipe.checkpoint_every or self.recipe.num_steps) * self.step_s[0]
