"""What every engine offers: a step, its loss and norm, and, where it can, portable checkpoints."""

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
from kit.parallel.groups import build_mesh, data_rank

Accepts: TypeAlias = Callable[[float, float], bool]
"""Returns whether a step of this loss and gradient norm may update the weights."""
MOMENTS = ("exp_avg", "exp_avg_sq")
PHASES = ("forward_backward_s", "reduction_s", "optimizer_s")
"""Columns of the metrics, of rank 0. Reduction is what is left of it after the backward pass, with
gradient norm and clipping."""


class StepResult:
    """Loss and gradient norm of a step that begins now, on their way into memory; a GPU is waited
    for when they are read.

    It knows when the phases of the step ended, at no cost: by the host's clock, or by events of a
    GPU that nobody waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Ends one of PHASES, where the GPU gets to it; called at the end of each."""
        self.marks.append(self._now())

    def take(self, loss: Tensor | float, norm: Tensor | float) -> None:
        """Sends both on their way, of one device."""
        both = torch.stack((torch.as_tensor(loss), torch.as_tensor(norm)))
        self.values = both.to("cpu", non_blocking=True)  # from a GPU: pinned
        self.arrived = self._now()

    def read(self) -> tuple[float, float]:
        """Returns loss and norm once they are there."""
        if self.is_gpu:
            self.arrived.synchronize()
        loss, norm = self.values.tolist()
        return loss, norm

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the phases that are over, by name; to be asked after `read`."""
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
    """One rank's part of a model in training, made by `build_engine`."""

    data_rank: int
    """Which replica this rank belongs to: it reads that part of each global batch."""
    decoders: Sequence[Any] = ()
    """What this rank holds of the model, where that is the kit's own modules."""
    optimizer: Any
    """What alone changes weights and moments."""

    def __init__(self, spec: ModelSpec, plan: Plan, recipe: Recipe, device: torch.device) -> None:
        self.spec = spec
        self.plan = plan
        self.recipe = recipe
        self.device = device

    @abc.abstractmethod
    def begin_step(
        self, samples: Tensor, learning_rate: float, accepts: Accepts | None = None
    ) -> StepResult:
        """Begins one optimizer step and returns what it is going to give, the same on all ranks.

        `samples` are this replica's sequences [num_microbatches x micro_batch_size, T + 1], int64.
        The native engine alone lets a GPU work ahead, and asks `accepts`, if there is one, before
        it updates the weights; of the others the step is over.
        """

    def train_step(self, samples: Tensor, learning_rate: float) -> tuple[float, float]:
        """Returns the loss and the gradient norm before clipping, of a step once it is over."""
        return self.begin_step(samples, learning_rate).read()

    @abc.abstractmethod
    def validation_loss(self, samples: Tensor) -> float:
        """Returns the mean loss in nats per token, the same on all ranks; shapes as in
        `train_step`.

        Engine neuron apart, there may be fewer micro-batches.
        """

    def loss_scaling(self) -> dict[str, float]:
        """Returns in fp16 `loss_scale`, of the next step, and `skipped_steps` so far, which
        overflowed.
        """
        return {}

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets that of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate


class PortableEngine(Engine):
    """One whose checkpoints are read by any other on any layout."""

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
        """Returns this rank's parameters by global name; a tied output goes by the embedding's
        name.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Returns weights and AdamW moments, fp32, by names (`state_key`) that depend neither on
        the layout nor on the engine.
        """

    @abc.abstractmethod
    def load(self, fill: Callable[[dict[str, Tensor]], None], *, num_updates: int) -> None:
        """Replaces weights and AdamW moments. All ranks must call it.

        Args:
            fill: is called once with the tensors that this rank needs, by the names of
                `state_dict`. It writes the new values into them. Tensors that it leaves out keep
                their weights, or moments of zero.
            num_updates: updates that the moments have taken, for AdamW's bias correction.
        """

    def loss_context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns what the loss and its backward pass are computed in."""
        return loss_parallel() if self.tensor_mesh is not None else contextlib.nullcontext()

    def micro_batches(self, samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs and targets of each, on the device."""
        for part in samples.to(self.device, non_blocking=True).split(self.plan.micro_batch_size):
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()

    def mean_over_replicas(self, loss: Tensor) -> Tensor:
        """Returns the mean of replicas' losses, of which ranks without a last stage hold zero, and
        all tensor parallel ranks of a replica the same.
        """
        loss = loss / (self.plan.data_parallel * self.plan.tensor_parallel)
        dist.all_reduce(loss)
        return loss


def state_key(kind: str, name: str) -> str:
    """Returns the name in a checkpoint of a parameter's `weight`, or of one of its MOMENTS:
    `model.layers.3.attention.query.weight`, `adamw.exp_avg.layers.3...`.
    """
    return f"model.{name}" if kind == "weight" else f"adamw.{kind}.{name}"


def adamw(parameters: Iterable[Any], recipe: Recipe) -> torch.optim.AdamW:
    """Returns torch's fused AdamW over parameters, or over groups of them as torch takes them."""
    return torch.optim.AdamW(
        parameters,
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


def adamw_state(parameter: Tensor, step: int) -> dict[str, Tensor]:
    """Returns what AdamW keeps of a parameter after `step` steps, with moments of zero, to be
    loaded.
    """
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
    return {"step": torch.tensor(float(step), device=parameter.device), **moments}
