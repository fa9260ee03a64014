"""What every engine offers: a step, its loss and norm, and, where it can, portable checkpoints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Engine(Protocol):
    """One rank's part of a model in training."""

    data_rank: int
    """Which replica this rank belongs to: it reads that part of each global batch."""
    decoders: Sequence[Any] = ()
    """What this rank holds of the model, where that is the kit's own modules."""

    def train_step(self, samples: "Tensor", learning_rate: float) -> tuple[float, float]:
        """Runs one optimizer step and returns the loss and the gradient norm before clipping, the
        same on all ranks.

        `samples` are this replica's sequences [num_microbatches x micro_batch_size, T + 1], int64.
        """
        ...

    def begin_step(self, samples: "Tensor", learning_rate: float) -> Any:
        """Begins a step and returns what `end_step` takes, for a device that works ahead; here
        the step is over, and its loss and norm are there.
        """
        return self.train_step(samples, learning_rate)

    def end_step(self, begun: Any) -> tuple[float, float, dict[str, float]]:
        """Returns loss, gradient norm and, where they are known, the seconds of the phases of a
        step, once they are there.
        """
        return (*begun, {})

    def validation_loss(self, samples: "Tensor") -> float:
        """Returns the mean loss in nats per token, the same on all ranks; shapes as in
        `train_step`.

        Engine neuron apart, there may be fewer micro-batches.
        """
        ...

    def loss_scaling(self) -> dict[str, float]:
        """Returns in fp16 `loss_scale`, of the next step, and `skipped_steps` so far, which
        overflowed.
        """
        return {}


@runtime_checkable
class PortableEngine(Engine, Protocol):
    """One whose checkpoints are read by any other on any layout."""

    optimizer: "torch.optim.Optimizer"
    """What alone changes weights and moments."""

    def state_dict(self) -> "dict[str, Tensor]":
        """Returns weights and AdamW moments, fp32, by names that depend neither on the layout
        nor on the engine.
        """
        ...

    def restore_optimizer(self, step: int) -> None:
        """Prepares to be loaded: every weight gets the AdamW state of `step` steps; `state_dict`
        is filled next.
        """
        ...

    def after_load(self) -> None:
        """Takes over what was loaded into `state_dict`."""
        ...
