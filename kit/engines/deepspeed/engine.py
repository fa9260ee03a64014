"""The DeepSpeed engine: ZeRO 0-3 with data parallelism, or its PipelineModule; tensor parallelism
in both.

With tensor, pipeline and data parallelism and ZeRO 1 this is the Frontier paper's recipe (arXiv
2312.12705).
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
    """This rank's part of one model in training, made by `build_engine`.

    Raises:
        ConfigError: DeepSpeed would train on other batches than it says.
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
        """Returns Megatron's `mpu`, by which DeepSpeed asks for groups of ranks.

        Only where matrices are shared, and the pipeline brings its own: a model parallel group of
        one would make its bf16 optimizer add up the gradient norm over the replicas.
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
        """Returns this rank's parameters, a tied one once."""
        return list(self.module.parameters())

    # Steps ----------------------------------------------------------------------------------------

    def begin_step(
        self, samples: Tensor, learning_rate: float, accepts: Accepts | None = None
    ) -> StepResult:
        """Returns the loss and the gradient norm before clipping, of the step that it makes.

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
        """Returns in fp16 what the next loss is scaled by and how many steps were skipped so
        far, by its metrics.
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
        """Computes the gradient norm and clips by it, before a step at ZeRO stage 0, where
        DeepSpeed tells no norm.
        """
        total = torch.zeros((), device=self.device)
        # Cut weights first: only of them does each tensor rank have squares of its own.
        for is_cut in (True, False):
            # DeepSpeed marks the copy of a tied weight on the last stage.
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
        """Returns this rank's parameters by global name; a tied output goes by the embedding's
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
        """Returns weights and moments by global name, gathered over the replicas: all of them, or
        those that this replica saves. All replicas must call it.
        """
        state: dict[str, Tensor] = {}
        for number, (name, parameter) in enumerate(self.named_parameters().items()):
            values = self.state.read(parameter)
            if of_all or number % self.plan.data_parallel == self.data_rank:
                for kind, value in values.items():
                    state[state_key(kind, name)] = self._whole(value, name)
        return state

    def _whole(self, value: Tensor, name: str) -> Tensor:
        """Returns a tensor that knows its place in the whole one, where tensor ranks share it."""
        dim = split_dim(name)
        if self.tensor_mesh is None or dim is None:
            return value
        return DTensor.from_local(value, self.tensor_mesh, (Shard(dim),), run_check=False)

    def load(self, fill: Callable[[dict[str, Tensor]], None], *, num_updates: int) -> None:
        """Replaces weights and AdamW moments, as `PortableEngine.load` says."""
        self.state.allocate_moments(num_updates)
        tensors = self._gathered(of_all=True)
        fill(tensors)
        for name, parameter in self.named_parameters().items():
            values = {kind: local(tensors[state_key(kind, name)]) for kind in ("weight", *MOMENTS)}
            self.state.write(parameter, values)


class ShardedState:
    """Access to what the replicas of one engine of DeepSpeed's share, and to torch's AdamW that
    it steps.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.engine = engine
        self.optimizer = optimizer
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
            self.optimizer.state[flat] = adamw_state(flat, step)
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()  # what its first step does

    def _flat(self) -> list[Tensor]:
        """Returns the tensors that AdamW steps: this replica's parts of the parameters, strung
        together.
        """
        if self.stage == 3:  # only during a step does the optimizer hold them
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
