"""What keeps a run's progress safe: all ranks go on from a checkpoint that is sound, and answer bad
steps alike.

A damaged checkpoint is kept aside and the one before is used. What to do about a bad step is the
recipe's choice (`kit.trainer.guard`); here all ranks agree on it and do it.
"""

import sys
import time
from typing import Any, get_args

import torch
import torch.distributed as dist

from cluster.record import counted
from cluster.state import read_state, record_event
from kit.engines.engine import Engine
from kit.errors import CheckpointError, DamagedCheckpointError, RunError
from kit.run import Run
from kit.run.alerts import Alert, AlertLog
from kit.run.checkpoint import Manifest
from kit.run.checkpoint_reader import told_by_first
from kit.trainer.checkpoints import EngineCheckpoints
from kit.trainer.guard import Answer, Guard

ANSWERS: tuple[Answer, ...] = get_args(Answer)


class Recovery:
    """One rank's part in going on from a checkpoint, and in answering bad steps. All ranks call it
    at the same steps.

    `notice` is the last thing that people should know, on rank 0, empty if nothing happened.
    """

    def __init__(self, run: Run, *, attempt: int, group: Any) -> None:
        """Raises ConfigError if the recipe asks for what the plan's engine cannot do."""
        self.run, self.attempt, self.group = run, attempt, group
        self.guard = Guard(run.recipe, run.plan)
        self.is_first = dist.get_rank() == 0
        self.notice = ""
        self.verdict: tuple[Answer, str] | None = None

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the same to all ranks, of which rank 0
        alone looks.
        """
        return told_by_first(self.run.checkpoints.steps, self.group)

    def load_newest(self, checkpoints: EngineCheckpoints) -> Manifest | None:
        """Fills the engine from the newest checkpoint that all ranks can read; returns its
        manifest, None if none is.

        The guard gets back its recent losses, and how many updates were dropped so far. Damaged
        checkpoints are told of and renamed, never deleted.

        Raises:
            CheckpointError: there are checkpoints and all of them are damaged; they are left where
                they are.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                manifest = checkpoints.load(step)
            except DamagedCheckpointError as error:
                damaged[step] = str(error)
                continue
            if damaged and self.is_first:
                told = [self._set_aside(bad, problem) for bad, problem in damaged.items()]
                self.tell("checkpoint", f"{'; '.join(told)}; went on from step {step}", step)
            self.guard.recent, self.guard.skipped = manifest.recent_losses, manifest.skipped
            return manifest
        if damaged:
            raise CheckpointError(
                f"All checkpoints of {self.run.directory} are damaged, nothing was changed."
                f" {' '.join(damaged.values())} To start from the beginning, use another run"
                " directory."
            )
        return None

    def _set_aside(self, step: int, problem: str) -> str:
        kept = self.run.checkpoints.set_aside(step, self.attempt)
        return (
            f"the checkpoint of step {step} is damaged and kept as {kept.name}"
            f" ({problem.partition('. ')[0]})"
        )

    def watch(self, engine: Engine) -> None:
        """Makes an engine ask before each update, where the recipe wants to be able to drop it."""
        if self.guard.judges_before_update:
            engine.accepts = self._accepts  # pyright: ignore[reportAttributeAccessIssue] - native, as the guard checked

    def respond(self, row: dict[str, Any], checkpoints: EngineCheckpoints) -> None:
        """Does what the recipe says about a bad step: nothing, drop its update, roll back, or stop.

        The step's row for the metrics gets `skipped`, the number of updates that were dropped.

        Raises:
            RunError: the recipe says to stop, or there is no checkpoint to roll back to.
        """
        # Where updates can be dropped, the engine has asked before this one, and the ranks have
        # agreed then.
        answer, what = self.verdict or self._agree(row["loss"], row["grad_norm"])
        self.verdict = None
        if answer == "stop":
            checkpoints.finish()
            raise RunError(_stopped(self.run, row["step"], what))
        before = self.guard.skipped
        if answer == "skip":
            self.guard.skipped += 1
            done = "its update was dropped"
        elif answer == "roll_back":
            done = self._roll_back(row["step"], checkpoints)
        if answer != "go on":
            row["skipped"] = self.guard.skipped - before
            self.tell("guard", f"step {row['step']}: {what}; {done}", row["step"])
        self.guard.note(answer, what, row["loss"])

    def _roll_back(self, step: int, checkpoints: EngineCheckpoints) -> str:
        checkpoints.finish()
        manifest = self.load_newest(checkpoints)
        if manifest is None:
            raise RunError(
                f"step {step} is bad and there is no checkpoint to roll back to. Set"
                " recipe.checkpoint_every."
            )
        good = manifest.step
        self.guard.skipped += step - good
        return (
            f"rolled back to the checkpoint of step {good}, the data of"
            f" {counted(step - good, 'step')} is left out"
        )

    def _accepts(self, loss: float, grad_norm: float) -> bool:
        self.verdict = self._agree(loss, grad_norm)
        return self.verdict[0] != "skip"

    def _agree(self, loss: float, grad_norm: float) -> tuple[Answer, str]:
        answer, what = self.guard.judge(loss, grad_norm)
        if self.guard.goes_on_after_bad:
            # Of any rank: a fault may be seen by one alone.
            strongest = torch.tensor([ANSWERS.index(answer)])
            dist.all_reduce(strongest, dist.ReduceOp.MAX, group=self.group)
            answer = ANSWERS[int(strongest)]
            what = what or "another rank says so"
        return answer, what

    def tell(self, kind: str, notice: str, step: int) -> None:
        """Says it in the log, the state, the history and the alerts, of rank 0: nothing that was
        lost or left out goes unsaid.
        """
        if not self.is_first:
            return
        self.notice = notice
        print(f"WARNING: {notice}", file=sys.stderr, flush=True)
        level = "error" if kind == "checkpoint" else "warning"
        alert = Alert(
            kind=kind,
            level=level,
            message=notice,
            attempt=self.attempt,
            step=step,
            time=time.time(),
        )
        AlertLog(self.run.directory / "alerts.jsonl").add([alert])
        state = read_state(self.run.directory)
        if state is not None and state.attempt == self.attempt:
            record_event(self.run.directory, state.replace(reason=notice))


def _stopped(run: Run, step: int, what: str) -> str:
    newest = max(run.checkpoints.steps(), default=None)
    kept = (
        f"The checkpoint of step {newest} is from before it"
        if newest
        else "There is no checkpoint yet"
    )
    return (
        f"stopped at step {step}: {what}. {kept}; nothing was overwritten. Look at data and"
        " learning rate; to go on past it, launch again with recipe.on_nan or on_spike 'skip' or"
        " 'roll_back' (engine native)."
    )
