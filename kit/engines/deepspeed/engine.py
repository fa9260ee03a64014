"""The DeepSpeed engine: data parallelism with ZeRO 0-3, or DeepSpeed's PipelineModule. Both can be
combined with tensor parallelism.

With tensor, pipeline and data parallelism and ZeRO 1 this is the recipe of the Frontier paper
(arXiv 2312.12705).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.deepspeed.configuration import check_batch, deepspeed_config
from kit.engines.deepspeed.start import import_deepspeed, quiet
from kit.engines.engine import (
    MOMENTS,
    Accepts,
    PortableEngine,
    StepResult,
    adamw,
    adamw_state,
    state_key,
)
from kit.parallel.gradients import clip, local
from kit.parallel.groups import data_axis
from kit.parallel.linear import split_dim
from kit.parallel.tensor import cross_entropy


class DeepSpeedEngine(PortableEngine):
    """The DeepSpeed engine on one rank. It trains this rank's part of a model. `build_engine` makes
    it.

    Raises:
        ConfigError: DeepSpeed would train on batch sizes other than the plan's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        recipe: Recipe,
        device: torch.device,
        *,
        initialise: bool = True,
        config: dict[str, Any] | None = None,
    ) -> None:
        deepspeed = import_deepspeed(device)
        from kit.engines.deepspeed.layers import LayerBuilder

        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend)
        super().__init__(spec, plan, recipe, device)
        self.tensor_group = self.tensor_mesh.get_group() if self.tensor_mesh is not None else None
        seed = recipe.seed if initialise else None
        layers = LayerBuilder(spec, plan, self.tensor_group, device, seed)
        if self.pipeline_group is None:
            self.module = layers.decoder()
        else:
            self.module = layers.pipeline(self._loss)
        self.optimizer = adamw(self.parameters(), recipe)
        with quiet():
            self.engine, *_ = deepspeed.initialize(
                model=self.module,
                optimizer=self.optimizer,
                config=config or deepspeed_config(plan, recipe),
                mpu=self._groups(),
                dist_init_required=False,
            )
        reported = {
            "micro_batch_size": self.engine.train_micro_batch_size_per_gpu(),
            "num_microbatches": self.engine.gradient_accumulation_steps(),
            "global_batch_size": self.engine.train_batch_size(),
        }
        check_batch(plan, reported)
        self.norm = torch.zeros((), device=device)
        if plan.zero_stage == 0:
            self.optimizer.register_step_pre_hook(self._clip)
        self.state = ShardedState(self.engine, self.optimizer)

    def _groups(self) -> SimpleNamespace | None:
        """Returns Megatron's `mpu`, an object from which DeepSpeed gets groups of ranks, or None if
        DeepSpeed needs no `mpu`.

        `mpu` is needed only with tensor parallelism and without a pipeline, since PipelineModule
        has its own groups. With a model parallel group of one rank, DeepSpeed's bf16 optimizer
        would sum the gradient norm over the replicas.
        """
        if self.tensor_group is None or self.pipeline_group is not None:
            return None
        replicas = data_axis(self.mesh, self.plan).get_group()
        return SimpleNamespace(
            get_data_parallel_group=lambda: replicas,
            get_data_parallel_rank=replicas.rank,
            get_data_parallel_world_size=replicas.size,
            get_model_parallel_group=lambda: self.tensor_group,
            get_model_parallel_rank=self.tensor_group.rank,
            get_model_parallel_world_size=self.tensor_group.size,
        )

    def parameters(self) -> list[Parameter]:
        """Returns this rank's parameters. A tied parameter is listed once."""
        return list(self.module.parameters())

    # Steps ----------------------------------------------------------------------------------------

    def begin_step(
        self, samples: Tensor, learning_rate: float, accepts: Accepts | None = None
    ) -> StepResult:
        """Runs one optimizer step. Returns its loss and its gradient norm before clipping.

        In fp16, a step whose gradients overflow changes no weight, and its norm is infinite.
        """
        result = StepResult(self.device)
        self.set_learning_rate(learning_rate)
        batches = self.micro_batches(samples)
        loss = torch.zeros((), device=self.device)
        with self.loss_context():
            if self.pipeline_group is not None:
                loss = self.engine.train_batch(batches)
            else:
                for x_BT, y_BT in batches:
                    micro_loss = self._loss(self.engine(x_BT), y_BT)
                    self.engine.backward(micro_loss)
                    self.engine.step()
                    loss += micro_loss.detach()
                loss = self.mean_over_replicas(loss / self.plan.num_microbatches)
        norm = self.norm if self.plan.zero_stage == 0 else self.engine.get_global_grad_norm()
        result.take(float(loss), float(norm))
        return result

    def loss_scaling(self) -> dict[str, float]:
        """Returns metrics columns about loss scaling in fp16: `loss_scale`, the scale of the next
        step's loss, and `skipped_steps`, the number of steps so far that overflowed. Empty in other
        precisions.
        """
        if self.plan.precision != "fp16":
            return {}
        return {
            "loss_scale": float(self.engine.optimizer.cur_scale),
            "skipped_steps": self.engine.skipped_steps,
        }

    @torch.no_grad()
    def validation_loss(self, samples: Tensor) -> float:
        """Returns the mean loss in nats per token."""
        count = len(samples) // self.plan.micro_batch_size
        batches = self.micro_batches(samples)
        loss = torch.zeros((), device=self.device)
        with self.loss_context():
            if self.pipeline_group is not None:
                return float(self.engine.eval_batch(batches, num_micro_batches=count))
            self.engine.eval()
            for x_BT, y_BT in batches:
                loss += self._loss(self.engine(x_BT), y_BT)
        self.engine.train()
        return float(self.mean_over_replicas(loss / count))

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return cross_entropy(logits_BTV, targets_BT, self.tensor_mesh)

    def _clip(self, *_: Any) -> None:
        """Computes the gradient norm and clips the gradients before a step at ZeRO stage 0, at
        which DeepSpeed does not report the norm.
        """
        total = torch.zeros((), device=self.device)
        # Split weights first: only their squares are summed over the tensor ranks.
        for is_cut in (True, False):
            # DeepSpeed marks the copy of a tied weight on the last stage, which is left out.
            own = [
                p.grad
                for name, p in self.named_parameters().items()
                if (split_dim(name) is not None) == is_cut
                and p.grad is not None
                and not getattr(p, "ds_pipe_replicated", False)
            ]
            total += torch.nn.utils.get_total_norm(own) ** 2
            if is_cut and self.tensor_group is not None:
                dist.all_reduce(total, group=self.tensor_group)
        if self.pipeline_group is not None:
            dist.all_reduce(total, group=self.pipeline_group)
        self.norm = total.sqrt()
        if self.recipe.gradient_clip is not None:
            clip(self.parameters(), self.norm, self.recipe.gradient_clip)

    # Checkpoints ----------------------------------------------------------------------------------

    def named_parameters(self) -> dict[str, Parameter]:
        """Returns this rank's parameters by global name. A tied output weight has the embedding's
        name.
        """
        if self.pipeline_group is None:
            return dict(self.module.named_parameters())
        from kit.engines.deepspeed.layers import PipelineLayer

        layers = (module for module in self.module.modules() if isinstance(module, PipelineLayer))
        return {name: parameter for layer in layers for name, parameter in layer.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns weights and moments by global name, gathered over the replicas. Each tensor is
        returned by one replica only.
        """
        return self._gathered(of_all=False)

    def _gathered(self, of_all: bool) -> dict[str, Tensor]:
        """Returns weights and moments by global name, gathered over the replicas. If `of_all` is
        False, only the tensors that this replica saves are returned. All replicas must call it.
        """
        state: dict[str, Tensor] = {}
        for number, (name, parameter) in enumerate(self.named_parameters().items()):
            values = self.state.read(parameter)
            if of_all or number % self.plan.data_parallel == self.data_rank:
                for kind, value in values.items():
                    state[state_key(kind, name)] = self._whole(value, name)
        return state

    def _whole(self, value: Tensor, name: str) -> Tensor:
        """Returns the value as a DTensor, which knows its place in the whole tensor, if tensor
        ranks share the parameter. Otherwise returns the value itself.
        """
        dim = split_dim(name)
        if self.tensor_mesh is None or dim is None:
            return value
        return DTensor.from_local(value, self.tensor_mesh, (Shard(dim),), run_check=False)

    def load(self, fill: Callable[[dict[str, Tensor]], None], *, num_updates: int) -> None:
        """Replaces weights and AdamW moments, as described in `PortableEngine.load`."""
        self.state.allocate_moments(num_updates)
        tensors = self._gathered(of_all=True)
        fill(tensors)
        for name, parameter in self.named_parameters().items():
            values = {kind: local(tensors[state_key(kind, name)]) for kind in ("weight", *MOMENTS)}
            self.state.write(parameter, values)


class ShardedState:
    """Reads and writes weights and AdamW moments of a DeepSpeed engine, which ZeRO shards over the
    replicas. `optimizer` is the AdamW of torch that DeepSpeed calls.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.stage = engine.zero_optimization_stage()

    def read(self, parameter: Parameter) -> dict[str, Tensor]:
        """Returns `weight` and, once they exist, the moments of a parameter, in fp32 and in the
        parameter's shape.

        All replicas must call it, for all parameters in the same order. At ZeRO stage 0 the tensors
        themselves are returned, at higher stages copies.
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
        """Replaces weight and moments of a parameter. `values` has the names and shapes that `read`
        returns, and must be equal on all replicas.

        All replicas must call it, for all parameters in the same order.
        """
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        # The weights used in the forward pass. Separate fp32 weights are replaced below.
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
        """Gives every weight the AdamW state of `step` steps, with moments of zero."""
        for flat in self._flat():
            self.optimizer.state[flat] = adamw_state(flat, step)
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()  # As in its first step.

    def _flat(self) -> list[Tensor]:
        """Returns the tensors that AdamW updates: this replica's parts of the parameters, flattened
        and joined.
        """
        if self.stage == 3:  # AdamW has these tensors only during a step.
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
