"""Extensions of the training loop, and the step that they see."""

import dataclasses
from typing import Any

from kit.engines.engine import StepResult


@dataclasses.dataclass(kw_only=True)
class Step:
    """One optimizer step of this rank, from its launch until its row is in the metrics."""

    number: int
    samples: int
    """Samples of the run so far, this step included."""
    learning_rate: float
    start: float
    """Time at which the host began the step, by `time.perf_counter`."""
    data_s: float
    """Seconds for which the host waited for the batch."""
    launch_s: float
    """Seconds until the launch returned. On a CPU the step is computed by then."""
    busy_s: float
    """Seconds of `launch_s` in which this thread computed or waited for a core."""
    begun: StepResult
    """Loss and gradient norm. Reading them waits for the device."""
    work_s: float | None = None
    """Seconds of this rank's own work, without waits for other ranks. On a GPU, seconds of the
    newest speed probe. None if unknown."""
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Row of the metrics. Empty until the step is finished."""


class Callback:
    """An extension of the training loop. All ranks call it at the same moments."""

    needs_each_result = False
    """Whether the result of each step must be known before the next step is launched."""

    def needs_finished_steps(self, step: int) -> bool:
        """Returns whether all results must be known before `step` is launched."""
        return False

    def on_start(self) -> None:
        """Called before the first step, when the engine has its weights."""

    def before_step(self, step: int) -> None:
        """Called before a step is launched. A GPU may still work on the previous step."""

    def after_step(self, step: Step) -> None:
        """Called when the result of a step is known. May add to `step.row`."""

    def on_end(self) -> None:
        """Called after the last step, unless an error ends training."""
