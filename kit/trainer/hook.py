"""Runs a user's hook after each step: a Python file with `on_step(state) -> dict[str, float]` that
computes additional numbers for metrics.jsonl.
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
    """State after a step, which a hook may read but must not change. The next step has not
    begun.
    """

    step: int
    tokens: int  # number of tokens that the run has trained on
    loss: float  # nats per token
    grad_norm: float  # gradient norm before clipping
    learning_rate: float
    rank: int
    num_ranks: int
    parts: tuple[torch.nn.Module, ...]  # this rank's modules after the update (only engine native)


class Hook(Callback):
    """Calls a user's hook on one rank. The run directory contains a copy of the hook's file.

    Every rank calls the hook after every step, so the hook may use collectives. The numbers of rank
    0 are recorded as columns `hook/NAME`. The time of the hook is recorded as `hook/seconds`, and
    is not part of a step's time.

    If the hook raises an exception on any rank, or does not return a dict of numbers, it is turned
    off on all ranks for the rest of the attempt. An alert is added, and training continues. If the
    hook fails on one rank before a collective, the other ranks wait in the collective until the
    watchdog ends them.

    Raises:
        ConfigError: The file is damaged or has no `on_step`.
    """

    needs_each_result = True  # The hook reads the weights directly after the step.

    def __init__(self, run: Run, engine: Engine, group: Any, notices: Notices) -> None:
        self.run = run
        self.engine = engine
        self.group = group
        self.notices = notices
        self.file = run.directory / HOOK
        self.is_on = True
        # The hook may import modules from the folder of the user's file. The folder is last in
        # sys.path, so that its modules do not hide installed modules.
        if (folder := str(Path(str(run.recipe.hook)).parent)) not in sys.path:
            sys.path.append(folder)
        try:
            self.on_step = runpy.run_path(str(self.file))["on_step"]
        except Exception as error:
            raise ConfigError(
                f"recipe.hook: {self._located(error)}. Give a file with on_step(state) -> dict."
            ) from error

    def after_step(self, step: Step) -> None:
        """Adds the hook's numbers to the row of the step. If the hook fails, turns it off on all
        ranks and reports the reason.
        """
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
            why = f"the hook is off until the attempt ends, and training continues: {error}"
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
        """Returns a text with file, line and error. If another file raised the error, the line is
        the line of the hook that called it.
        """
        calls = reversed(traceback.extract_tb(error.__traceback__))
        ours = next((call.lineno for call in calls if call.filename == str(self.file)), None)
        line = getattr(error, "lineno", None) or ours
        place = f"{HOOK}, line {line}" if line else HOOK
        return f"{place}: {type(error).__name__}: {error}"


def _checked(numbers: Any) -> dict[str, float]:
    """Returns the hook's numbers as floats. Tensors and NumPy arrays with one element are
    accepted.
    """
    if not isinstance(numbers, dict):
        raise TypeError(
            f"on_step returned {type(numbers).__name__}, not a dict of numbers. Return {{}} for"
            " none."
        )
    found = {}
    for name, value in numbers.items():
        if (
            not isinstance(name, str)
            or not name
            or isinstance(value, bool | str)
            or not hasattr(value, "__float__")
        ):
            raise TypeError(
                f"on_step gave {name!r} = {value!r}. Return a dict from name to number."
            )
        found[name] = float(value)
    return found
