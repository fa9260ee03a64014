"""The DeepSpeed engine: data parallelism with ZeRO 0-3, or pipeline parallelism with DeepSpeed's
PipelineModule. Both can be combined with tensor parallelism.

The combination of tensor, pipeline and data parallelism with ZeRO 1 is the recipe of the Frontier
paper (arXiv 2312.12705).
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
    """The DeepSpeed engine on one rank: trains the part of the model that this rank holds.
    `build_engine` makes it.

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
        """Returns an object with the methods of Megatron's `mpu`, from which DeepSpeed reads its
        groups of ranks. Returns None if DeepSpeed needs no `mpu`.

        `mpu` is needed only for tensor parallelism without a pipeline, since PipelineModule makes
        its own groups. `mpu` is left out without tensor parallelism: with a model parallel group of
        one rank, DeepSpeed's bf16 optimizer would sum the gradient norm over the replicas.
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
        """Returns this rank's parameters. A weight that embedding and output share is
        listed once.
        """
        return list(self.module.parameters())

    # Steps ----------------------------------------------------------------------------------------

    def begin_step(
        self, samples: Tensor, learning_rate: float, accepts: Accepts | None = None
    ) -> StepResult:
        """Runs one optimizer step. Returns its loss and its gradient norm before clipping.

        If gradients overflow in fp16, the step does not change the weights and the returned
        gradient norm is infinite.
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
        """Returns columns of metrics.jsonl about loss scaling in fp16. `loss_scale` is the scale of
        the next step's loss. `skipped_steps` is the number of steps so far whose gradients
        overflowed. In bf16 and fp32 the result is empty.
        """
        if self.plan.precision != "fp16":
            return {}
        return {
            "loss_scale": float(self.engine.optimizer.cur_scale),
            "skipped_steps": self.engine.skipped_steps,
        }

    @torch.no_grad()
    def validation_loss(self, samples: Tensor) -> float:
        """Returns the mean loss of the sequences in nats per token, over all replicas."""
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
        """Computes the gradient norm and clips the gradients. It is a hook that runs before the
        optimizer's step at ZeRO stage 0, since DeepSpeed does not report the norm at this stage.
        """
        total = torch.zeros((), device=self.device)
        # Weights that are split over the tensor ranks come first: their squared norms are summed
        # over these ranks. Weights that are not split are equal on these ranks, so each rank adds
        # their squared norms without a sum over the ranks.
        for is_cut in (True, False):
            # DeepSpeed marks the last stage's copy of a tied weight. A tied weight must count once
            # in the gradient norm, so the copy is left out.
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
        """Returns this rank's parameters by their names in the complete model. If the output weight
        is tied to the embedding, the output weight is listed under the name of the embedding's
        weight.
        """
        if self.pipeline_group is None:
            return dict(self.module.named_parameters())
        from kit.engines.deepspeed.layers import PipelineLayer

        layers = (module for module in self.module.modules() if isinstance(module, PipelineLayer))
        return {name: parameter for layer in layers for name, parameter in layer.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns weights and moments by their names in the complete model, gathered from the
        shards of all replicas. Each tensor is in the result of one replica only, so that a
        checkpoint contains each tensor once.
        """
        return self._gathered(of_all=False)

    def _gathered(self, of_all: bool) -> dict[str, Tensor]:
        """Returns weights and moments by their names in the complete model, gathered from the
        shards of all replicas. If `of_all` is False, only the tensors that this replica saves are
        returned. All replicas must call this method.
        """
        state: dict[str, Tensor] = {}
        for number, (name, parameter) in enumerate(self.named_parameters().items()):
            values = self.state.read(parameter)
            if of_all or number % self.plan.data_parallel == self.data_rank:
                for kind, value in values.items():
                    state[state_key(kind, name)] = self._whole(value, name)
        return state

    def _whole(self, value: Tensor, name: str) -> Tensor:
        """Returns the value as a DTensor, which knows its position in the full tensor, if the
        parameter is split over the tensor ranks. Otherwise returns the value itself.
        """
        dim = split_dim(name)
        if self.tensor_mesh is None or dim is None:
            return value
        return DTensor.from_local(value, self.tensor_mesh, (Shard(dim),), run_check=False)

    def load(self, fill: Callable[[dict[str, Tensor]], None], *, num_updates: int) -> None:
        """Replaces weights and AdamW moments. All ranks must call it. `fill` writes the new values
        into the tensors that it receives, and `num_updates` is the number of updates that the
        moments contain.
        """
        self.state.allocate_moments(num_updates)
        tensors = self._gathered(of_all=True)
        fill(tensors)
        for name, parameter in self.named_parameters().items():
            values = {kind: local(tensors[state_key(kind, name)]) for kind in ("weight", *MOMENTS)}
            self.state.write(parameter, values)


class ShardedState:
    """Reads and writes weights and AdamW moments of a DeepSpeed engine, which ZeRO shards over the
    replicas. `engine` is DeepSpeed's engine, and `optimizer` is torch's AdamW that DeepSpeed calls.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.stage = engine.zero_optimization_stage()

    def read(self, parameter: Parameter) -> dict[str, Tensor]:
        """Returns the `weight` of a parameter and, if they exist already, its moments (MOMENTS), in
        fp32 and in the parameter's shape.

        All replicas must call this method, for all parameters in the same order. At ZeRO stage 0
        the results are the tensors that training uses. At higher stages they are copies.
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
        """Replaces weight and moments of a parameter. `values` has the names and shapes of the
        result of `read`, and must be equal on all replicas.

        All replicas must call it, for all parameters in the same order.
        """
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        # This statement replaces the weights of the forward pass. The separate fp32 master weights
        # are replaced below.
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
        """Sets AdamW's state of every weight to the state after `step` updates, with moments of
        zero.
        """
        for flat in self._flat():
            self.optimizer.state[flat] = adamw_state(flat, step)
        if self.stage in (1, 2):
            # DeepSpeed calls this method in its first step. It gives each parameter access to its
            # part of the flattened moments.
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[Tensor]:
        """Returns the tensors that AdamW updates. With ZeRO, each tensor is this replica's shard of
        several parameters, flattened and concatenated.
        """
        if self.stage == 3:  # AdamW's groups contain these tensors only during a step.
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
