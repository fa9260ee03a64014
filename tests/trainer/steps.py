"""Creates finished training steps in the form that trainer callbacks receive."""

from typing import Any

from kit.trainer.callback import Step


def done(step_time_s: float = 1.0, number: int = 1, **row: Any) -> Step:
    row = {"step": number, "loss": 2.0, "grad_norm": 1.0, "step_time_s": step_time_s, **row}
    return Step(
        number=number,
        samples=8,
        learning_rate=0.1,
        start=0.0,
        data_s=0.0,
        launch_s=step_time_s,
        busy_s=step_time_s,
        result=None,
        row=row,
    )
