"""The interface of every engine: an optimizer step that returns its loss and gradient norm, and,
for portable engines, the state for checkpoints.
"""

import abc
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import Parameter

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.config.weight_groups import learning_rate_factor, weight_decay, weight_group
from kit.engines.muon import MOMENTUM
from kit.parallel.gradients import group_parameters
from kit.parallel.groups import build_mesh, data_rank

Accepts: TypeAlias = Callable[[float, float], bool]
"""Function that takes the loss and the gradient norm of a step as arguments. It returns whether the
step may update the weights."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's two moments in the optimizer state of torch's AdamW."""
PHASES = ("forward_backward_s", "reduction_s", "optimizer_s")
"""Phases of a step, as names of columns of metrics.jsonl. Each column has the seconds of a phase on
rank 0. `reduction_s` covers the gradient norm, clipping, and the part of the gradient reduction
that does not overlap with the backward pass."""


class StepResult:
    """Loss, gradient norm and further numbers of one step, which are copied to the host
    asynchronously. `read` waits until the copy has arrived.

    The step begins when the object is made. The object also records the times at which the phases
    of the step end. Recording does not delay the step: on a CPU the host's clock is read, and on a
    GPU an event is recorded that nothing waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Records the end of one of PHASES. The engine calls it at the end of each phase. On a GPU,
        the recorded time is the time at which the GPU reaches this point of its stream.
        """
        self.marks.append(self._now())

    def take(self, loss: Tensor | float, norm: Tensor | float, **more: Tensor) -> None:
        """Starts the asynchronous copy of loss, gradient norm and further numbers to the host. All
        must be on the same device. The further numbers are passed by the name of their column in
        metrics.jsonl.
        """
        self.names = ("loss", "grad_norm", *more)
        numbers = (torch.as_tensor(loss), torch.as_tensor(norm), *more.values())
        # The copy of GPU values is asynchronous and goes to pinned host memory.
        self.values = torch.stack(numbers).to("cpu", non_blocking=True)
        self.arrived = self._now()

    def read(self) -> tuple[float, float]:
        """Returns (loss, gradient norm). Waits until both are in host memory."""
        numbers = self.numbers()
        return numbers["loss"], numbers["grad_norm"]

    def numbers(self) -> dict[str, float]:
        """Returns the numbers of the step by the names of their columns in metrics.jsonl. Waits
        until they are in host memory.
        """
        if self.is_gpu:
            self.arrived.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase that has ended, by the phase's name in PHASES. Must be
        called after `read`, since a GPU has passed the recorded points only then.
        """
        over = [mark for mark in self.marks if not self.is_gpu or mark.query()]
        phases = {}
        for name, (begin, end) in zip(PHASES, pairwise(over), strict=False):
            seconds = begin.elapsed_time(end) / 1e3 if self.is_gpu else end - begin
            phases[name] = round(seconds, 6)
        return phases

    def _now(self) -> Any:
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Engine(abc.ABC):
    """An engine on one rank: trains the part of the model that this rank holds. `build_engine`
    makes it.
    """

    data_rank: int
    """Index of the data-parallel replica that this rank belongs to. The index selects the part of
    each global batch that this rank reads."""
    decoders: Sequence[Any] = ()
    """Decoder modules of the kit that this rank holds, one per virtual pipeline stage. Empty on
    engines other than native."""
    optimizer: Any
    """Optimizer of this rank's parameters. During training, weights and moments change only from
    the beginning of its step on."""

    def __init__(self, spec: ModelSpec, plan: Plan, recipe: Recipe, device: torch.device) -> None:
        self.spec = spec
        self.plan = plan
        self.recipe = recipe
        self.device = device

    @property
    def optimizers(self) -> Sequence[Any]:
        """Optimizers that update the weights in a step, in their order. The first is
        `optimizer`.
        """
        return [self.optimizer]

    @abc.abstractmethod
    def begin_step(
        self, samples: Tensor, learning_rate: float, accepts: Accepts | None = None
    ) -> StepResult:
        """Begins one optimizer step. Returns its loss and gradient norm, which are equal on all
        ranks.

        The native engine may return while a GPU still computes the step. The engines deepspeed and
        neuron return when the step is complete, and never call `accepts`.

        Args:
            samples: this replica's sequences, int64 of shape [num_microbatches x micro_batch_size,
                T + 1]. T is the sequence length. Each sequence has one more token, the target of
                the last position.
            learning_rate: learning rate of the update.
            accepts: function that is called before the weights are updated. If it returns False,
                the weights are not updated. If `accepts` is None, the weights are always updated.
        """

    def train_step(self, samples: Tensor, learning_rate: float) -> tuple[float, float]:
        """Runs one optimizer step and waits for its end. Returns (loss, gradient norm before
        clipping).
        """
        return self.begin_step(samples, learning_rate).read()

    @abc.abstractmethod
    def validation_loss(self, samples: Tensor) -> float:
        """Returns the mean loss in nats per token, equal on all ranks.

        `samples` are sequences of token numbers, int64 of shape [number of sequences, T + 1] with
        sequence length T. Engine neuron needs as many sequences as one training step reads. Other
        engines also accept fewer micro-batches.
        """

    def loss_scaling(self) -> dict[str, float]:
        """Returns columns of metrics.jsonl about loss scaling in fp16. `loss_scale` is the scale of
        the next step's loss. `skipped_steps` is the number of steps so far whose gradients
        overflowed. In bf16 and fp32 the result is empty.
        """
        return {}

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the next update."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group.get("learning_rate_factor", 1.0)


class PortableEngine(Engine):
    """An engine whose checkpoints can be read by every portable engine on any layout."""

    optimizer: torch.optim.Optimizer

    def __init__(self, spec: ModelSpec, plan: Plan, recipe: Recipe, device: torch.device) -> None:
        super().__init__(spec, plan, recipe, device)
        self.mesh = build_mesh(plan, device.type)
        self.data_rank = data_rank(self.mesh)
        self.tensor_mesh = self.mesh["tensor"] if plan.tensor_parallel > 1 else None
        self.pipeline_group = None
        if plan.pipeline_parallel > 1:
            self.pipeline_group = self.mesh["pipeline"].get_group()

    @abc.abstractmethod
    def named_parameters(self) -> dict[str, Parameter]:
        """Returns this rank's parameters by their names in the complete model. If the output weight
        is tied to the embedding, the output weight is listed under the name of the embedding's
        weight.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Returns weights and AdamW moments in fp32, by the names that `state_key` makes. The names
        depend neither on the layout nor on the engine.
        """

    @abc.abstractmethod
    def load(self, fill: Callable[[dict[str, Tensor]], None], *, num_updates: int) -> None:
        """Replaces weights and AdamW moments. All ranks must call it.

        Args:
            fill: function that is called once with the tensors that this rank needs, by the names
                of `state_dict`. It writes the new values into these tensors. A weight that `fill`
                does not write keeps its value. A moment that `fill` does not write is zero.
            num_updates: number of updates that the loaded moments contain, for AdamW's bias
                correction.
        """

    def loss_context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context manager in which the loss and its backward pass must run: torch's
        `loss_parallel` with tensor parallelism, otherwise an empty context.
        """
        return loss_parallel() if self.tensor_mesh is not None else contextlib.nullcontext()

    def micro_batches(self, samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (inputs, targets) of each micro-batch, both of shape [micro_batch_size, T] on the
        device.
        """
        for part in samples.to(self.device, non_blocking=True).split(self.plan.micro_batch_size):
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()

    def mean_over_replicas(self, loss: Tensor) -> Tensor:
        """Returns the mean of the loss over all replicas, on all ranks. On ranks without the last
        pipeline stage, `loss` must be zero. All tensor parallel ranks of a replica must pass equal
        values of `loss`.
        """
        loss = loss / (self.plan.data_parallel * self.plan.tensor_parallel)
        dist.all_reduce(loss)
        return loss


def state_key(kind: str, name: str) -> str:
    """Returns the name under which a checkpoint stores a tensor of a parameter. `kind` is "weight",
    one of MOMENTS, or MOMENTUM.

    Examples: `model.layers.3.attention.query.weight`, `adamw.exp_avg.layers.3...`,
    `muon.momentum_buffer.layers.3...`.
    """
    if kind == "weight":
        return f"model.{name}"
    return f"muon.{kind}.{name}" if kind == MOMENTUM else f"adamw.{kind}.{name}"


def optimizer_groups(
    named: Iterable[tuple[str, Parameter]], recipe: Recipe, spec: ModelSpec
) -> list[dict[str, Any]]:
    """Returns parameter groups in torch's format, with the learning-rate factor and the weight
    decay that the recipe gives to each weight. `named` has each parameter with its name in the
    complete model.

    Parameters of one group have equal mesh and placement, since torch's fused and foreach kernels
    cannot mix plain tensors and DTensors.
    """
    settings: dict[tuple[float, float], list[Parameter]] = {}
    for name, parameter in named:
        group = weight_group(name, parameter.ndim)
        key = learning_rate_factor(recipe, spec, group), weight_decay(recipe, group)
        settings.setdefault(key, []).append(parameter)
    return [
        {"params": placed, "learning_rate_factor": factor, "weight_decay": decay}
        for (factor, decay), parameters in settings.items()
        for placed in group_parameters(parameters)
    ]


def adamw(parameters: Iterable[Any], recipe: Recipe) -> torch.optim.AdamW:
    """Returns torch's fused AdamW with the recipe's options. `parameters` are parameters or
    parameter groups in torch's format.
    """
    return torch.optim.AdamW(
        parameters,
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


def adamw_state(parameter: Tensor, step: int) -> dict[str, Tensor]:
    """Returns AdamW's state of a parameter after `step` updates, with moments of zero. The caller
    then fills the moments from a checkpoint.
    """
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
    return {"step": torch.tensor(float(step), device=parameter.device), **moments}
