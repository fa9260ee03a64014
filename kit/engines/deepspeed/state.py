"""Weights and AdamW moments of a DeepSpeed engine, a parameter at a time, whatever its ZeRO
stage made of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedState:
    """Access to what the replicas of one engine of DeepSpeed's share, and to torch's AdamW that
    it steps.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self.stage = engine.zero_optimization_stage()

    def read(self, parameter: Parameter) -> dict[str, Tensor]:
        """Returns `weight` and, once there are any, the moments of a parameter: fp32, in its shape.

        All replicas must call it, in the same order. Below ZeRO 1 these are the tensors themselves,
        else copies.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            moments = self.optimizer.state.get(parameter, {})
            return {
                "weight": parameter.detach(),
                **{name: moments[name] for name in MOMENTS if name in moments},
            }
        values: dict[str, Any] = {"weight": safe_get_full_fp32_param(parameter)}
        if any(self.optimizer.state.get(flat) for flat in self._flat()):
            values |= {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
        return {name: value.detach() for name, value in values.items()}

    @torch.no_grad()
    def write(self, parameter: Parameter, values: dict[str, Tensor]) -> None:
        """Takes over what `read` gives, from the same values on all replicas; all must call it,
        in the same order.
        """
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        # The weights that compute; where there are fp32 ones beside them, those follow.
        with deepspeed.zero.GatheredParameters(
            [parameter], modifier_rank=0, enabled=self.stage == 3
        ):
            parameter.data.copy_(values["weight"])
        if self.stage == 0:
            for name in MOMENTS:
                self.optimizer.state[parameter][name].copy_(values[name])
            return
        safe_set_full_fp32_param(parameter, values["weight"])
        for name in MOMENTS:
            safe_set_full_optimizer_state(parameter, values[name], name)

    def allocate_moments(self, step: int) -> None:
        """Gives every weight the AdamW state that it has after `step` steps, with moments of
        zero.
        """
        for flat in self._flat():
            zeros = {name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS}
            self.optimizer.state[flat] = {
                "step": torch.tensor(float(step), device=flat.device),
                **zeros,
            }
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()  # what its first step does

    def _flat(self) -> list[Tensor]:
        """Returns the tensors that AdamW steps: this replica's parts of the parameters, strung
        together.
        """
        if self.stage == 3:  # only during a step does the optimizer hold them
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
