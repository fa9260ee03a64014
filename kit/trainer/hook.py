"""A researcher's own numbers of each step: a Python file with `on_step(state) -> dict[str,
float]`.
"""

import dataclasses
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster.record import ConfigError
from kit.engines.engine import Engine
from kit.parallel.groups import raised_on_all
from kit.run import HOOK, Run
from kit.trainer.callback import Callback, Step
from kit.trainer.heartbeat import Notices


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepState:
    """What a hook may look at, once the step is done and the next has not begun; it may change
    nothing.
    """

    step: int
    tokens: int  # of the run so far
    loss: float  # nats per token
    grad_norm: float  # before clipping
    learning_rate: float
    rank: int
    num_ranks: int
    parts: tuple[torch.nn.Module, ...]  # of engine native: what this rank holds, after the update


class Hook(Callback):
    """The copy of a hook in a run directory, on one rank.

    Every rank calls it after every step, so it may communicate; rank 0's numbers are recorded as
    `hook/NAME`, with its own time, which no step's holds, as `hook/seconds`. An exception on any
    rank, or what is no dict of numbers, turns it off on all for the rest of the attempt, with an
    alert, and training goes on. Ranks that wait in a collective of the hook for one that failed
    before it are ended by the watchdog.

    Raises:
        ConfigError: the file is damaged or has no `on_step`.
    """

    needs_each_result = True  # it sees the step's own weights

    def __init__(self, run: Run, engine: Engine, group: Any, notices: Notices) -> None:
        self.run = run
        self.engine = engine
        self.group = group
        self.notices = notices
        self.file = run.directory / HOOK
        self.is_on = True
        # Modules beside the user's own file can be imported. Last in sys.path, they shadow none.
        if (folder := str(Path(str(run.recipe.hook)).parent)) not in sys.path:
            sys.path.append(folder)
        try:
            self.on_step = runpy.run_path(str(self.file))["on_step"]
        except Exception as error:
            raise ConfigError(
                f"recipe.hook: {self._located(error)}. Give a file with on_step(state) -> dict."
            ) from error

    def after_step(self, step: Step) -> None:
        """Adds the hook's numbers to the row, or turns it off on all ranks and says why."""
        if not self.is_on:
            return
        state = StepState(
            step=step.number,
            loss=step.row["loss"],
            grad_norm=step.row["grad_norm"],
            learning_rate=step.learning_rate,
            tokens=step.samples * self.run.spec.sequence_length,
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            parts=tuple(self.engine.decoders),
        )
        try:
            with raised_on_all(self.group):
                numbers = self._numbers(state)
            step.row |= numbers
        except ConfigError as error:
            self.is_on = False
            why = f"the hook is off from here on, and training goes on: {error}"
            self.notices.add("hook", why, step.number)

    def _numbers(self, state: StepState) -> dict[str, float]:
        start = time.perf_counter()
        try:
            found = _checked(self.on_step(state))
        except Exception as error:
            traceback.print_exc()
            raise ConfigError(f"rank {state.rank}: {self._located(error)}") from error
        seconds = round(time.perf_counter() - start, 6)
        return {f"hook/{name}": value for name, value in found.items()} | {"hook/seconds": seconds}

    def _located(self, error: Exception) -> str:
        """Returns file, line and error; of a line elsewhere the one in the file that led to it."""
        calls = reversed(traceback.extract_tb(error.__traceback__))
        ours = next((call.lineno for call in calls if call.filename == str(self.file)), None)
        line = getattr(error, "lineno", None) or ours
        place = f"{HOOK}, line {line}" if line else HOOK
        return f"{place}: {type(error).__name__}: {error}"


def _checked(numbers: Any) -> dict[str, float]:
    """Returns numbers, tensors and NumPy's of one element too, as floats."""
    if not isinstance(numbers, dict):
        raise TypeError(
            f"on_step returned {type(numbers).__name__}, not a dict of numbers; {{}} says nothing"
        )
    found = {}
    for name, value in numbers.items():
        if (
            not isinstance(name, str)
            or not name
            or isinstance(value, bool | str)
            or not hasattr(value, "__float__")
        ):
            raise TypeError(f"on_step gave {name!r} = {value!r}; give names with numbers")
        found[name] = float(value)
    return found
