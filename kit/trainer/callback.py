"""What is done beside the steps is a callback: all are called at the same four moments."""

import dataclasses
from typing import Any

from kit.engines.engine import StepResult


@dataclasses.dataclass(kw_only=True)
class Step:
    """One step of this rank, from its launch until its row is in the metrics."""

    number: int
    samples: int  # of the run so far, with this step's
    learning_rate: float
    start: float  # of time.perf_counter
    data_s: float  # until its batch was there
    launch_s: float  # then, until its launch returned: on a CPU it is computed by then
    busy_s: float  # of these, in which this thread computed or waited for a core
    begun: StepResult  # its loss and gradient norm, once they are there
    work_s: float | None = None  # of this rank alone, where that is known
    row: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the metrics


class Callback:
    """Something that is done beside the steps; every rank calls it at the same moments."""

    needs_each_result = False
    """Whether no step may be launched before it has seen what the one before gave."""

    def on_start(self) -> None:
        """Called before the first step, once the engine has its weights."""

    def before_step(self, step: int) -> None:
        """Called before a step is launched; a GPU may still be at the step before."""

    def after_step(self, step: Step) -> None:
        """Called once the result of a step is there; may add to its row."""

    def on_end(self) -> None:
        """Called after the last step, unless an error ends training."""
