"""The interface of extensions of the training loop, and the record of a step that they receive."""

import dataclasses
from typing import Any

from kit.engines.engine import StepResult


@dataclasses.dataclass(kw_only=True)
class Step:
    """One optimizer step on this rank, from its launch until its row is in metrics.jsonl."""

    number: int
    samples: int
    """Number of samples (sequences) that the run has trained on, this step included."""
    learning_rate: float
    start: float
    """Time at which the host began the step, in seconds of `time.perf_counter`."""
    data_s: float
    """Seconds for which the host waited for the data of the batch."""
    launch_s: float
    """Seconds from the start of the launch until it returned. On a CPU, the step has been computed
    by then."""
    busy_s: float
    """Seconds, within `launch_s`, in which the training thread computed or waited for a CPU
    core."""
    result: StepResult
    """Loss and gradient norm of the step. Reading them waits for the device."""
    work_s: float | None = None
    """Seconds in which this rank worked without waiting for other ranks. On a GPU, the seconds of
    the newest speed probe. None if unknown."""
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Row of this step in metrics.jsonl, as values by column. Empty until the step is finished."""


class Callback:
    """An extension of the training loop. All ranks call each method at the same point of
    the loop.
    """

    needs_each_result = False
    """Whether the loop must read the result of each step before it launches the next step."""

    def needs_finished_steps(self, step: int) -> bool:
        """Returns whether the loop must read the results of all earlier steps before it launches
        `step`.
        """
        return False

    def on_start(self) -> None:
        """Called before the first step, after the engine's weights are set."""

    def before_step(self, step: int) -> None:
        """Called before a step is launched. A GPU may still compute the previous step."""

    def after_step(self, step: Step) -> None:
        """Called when the result of a step has been read. May add columns to `step.row`."""

    def on_end(self) -> None:
        """Called after the last step. Not called if an error ends training."""
