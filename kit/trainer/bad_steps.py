"""The reaction to a bad step: a step whose loss or gradient norm is not finite, or whose loss is a
spike.

The recipe chooses one of three reactions.

stop        nothing is written after the bad step, so the newest checkpoint is older than this step.
            A GPU may already compute the next step, whose result is not read.
skip        the update is dropped and training continues with the next batch (native engine)
roll_back   weights and optimizer return to the newest checkpoint, and the data since this
            checkpoint is left out (native engine)

With each reaction the step number grows, every step reads a new batch, and every step has a row in
metrics.jsonl. The column `skipped` has the number of dropped updates. AdamW counts only the applied
updates: the number of steps minus the number of dropped updates. The authors of PaLM also rolled
back and left out data (arXiv 2204.02311, section 5.1). For `skip` and `roll_back`, the host waits
for the GPU after each step.
"""

import math
import statistics
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from cluster.record import counted
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.errors import RunError
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.trainer.callback import Step
from kit.trainer.checkpoints import CheckpointManager
from kit.trainer.heartbeat import Notices
from kit.trainer.spikes import WINDOW, is_spike
from kit.trainer.watchdog import Watchdog

MAX_BAD_STEPS = 10
"""Number of consecutive bad steps after which training ends with an error, since dropping updates
did not help."""

Reaction = Literal["go on", "stop", "skip", "roll_back"]
"""Reactions to a step, from mildest to strongest. "go on" is the reaction to a good step."""
REACTIONS: tuple[Reaction, ...] = get_args(Reaction)


class StepJudge:
    """Judges the steps of one attempt by their loss and gradient norm.

    All ranks see the same losses, so all ranks reach the same result, unless a fault affects only
    one rank.
    """

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe = recipe
        self.recent: tuple[float, ...] = ()
        """Finite losses of the last steps, oldest first, with which the next loss is compared
        (`kit.trainer.spikes`). A loss that equals the loss before it is left out."""
        self.bad_in_a_row = 0
        # In fp16, an overflow of the gradient is normal: the engine lowers the loss scale and
        # itself skips the update of this step.
        self.judges_gradient_norm = plan.precision != "fp16"

    def judge(self, loss: float, grad_norm: float) -> tuple[Reaction, str]:
        """Returns (reaction, problem). The problem is a text that says what is wrong with the step,
        empty for a good step. Does not change the object.
        """
        if not math.isfinite(loss):
            return self.recipe.on_nan, f"the loss is {loss}"
        if self.judges_gradient_norm and not math.isfinite(grad_norm):
            return self.recipe.on_nan, f"the gradient norm is {grad_norm}"
        if self.recipe.on_spike != "ignore" and is_spike(loss, self.recent):
            median = statistics.median(self.recent)
            problem = f"the loss of {loss:.4g} is a spike (median before {median:.4g})"
            return self.recipe.on_spike, problem
        return "go on", ""

    def record(self, reaction: Reaction, problem: str, loss: float) -> None:
        """Records the loss and the reaction of a judged step, since later steps are compared with
        them.

        Raises:
            RunError: MAX_BAD_STEPS consecutive steps were bad.
        """
        if math.isfinite(loss) and loss not in self.recent[-1:]:
            self.recent = (*self.recent, loss)[-WINDOW:]
        if reaction == "go on":
            self.bad_in_a_row = 0
            return
        self.bad_in_a_row += 1
        if self.bad_in_a_row >= MAX_BAD_STEPS:
            raise RunError(
                f"{self.bad_in_a_row} bad steps in a row, the last because {problem}: {reaction}"
                " does not help. The newest checkpoint is older than these steps or contains none"
                " of their updates. Lower recipe.learning_rate, or look at the data."
            )


class BadStepPolicy:
    """Reacts to bad steps. Every rank has a BadStepPolicy, and all ranks react together.

    Args:
        run: run that is trained.
        checkpoints: manager that loads the checkpoint of a rollback.
        group: CPU process group of all ranks.
        watchdog: watchdog that is paused while a checkpoint is loaded.
        notices: object that receives a report of each skipped step and rollback.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: CheckpointManager,
        group: Any,
        *,
        watchdog: Watchdog,
        notices: Notices,
    ) -> None:
        self.run = run
        self.checkpoints = checkpoints
        self.group = group
        self.watchdog = watchdog
        self.notices = notices
        self.judge = StepJudge(run.recipe, run.plan)
        self.skipped = 0
        """Number of steps of the run so far whose update was dropped."""
        self.verdict: tuple[Reaction, str] | None = None
        """(reaction, problem) of the step that the engine computes now, if `_accepts` judged it
        before its update. None otherwise."""
        reactions = {run.recipe.on_nan, run.recipe.on_spike}
        self.continues_after_bad_step = bool(reactions & {"skip", "roll_back"})
        """Whether training may continue after a bad step. If True, all ranks must agree on each
        reaction."""
        self.accepts = self._accepts if "skip" in reactions else None
        """Function that the engine calls before each update and that returns whether to apply the
        update. None if the recipe never skips an update."""

    def restore(self, manifest: Manifest) -> None:
        """Restores from a manifest the state that `manifest_fields` returned when the checkpoint
        was saved.
        """
        self.judge.recent = manifest.recent_losses
        self.skipped = manifest.skipped

    def manifest_fields(self) -> dict[str, Any]:
        """Returns the fields of a checkpoint's manifest from which `restore` restores this
        object.
        """
        return {"skipped": self.skipped, "recent_losses": self.judge.recent}

    def after_step(self, step: Step) -> None:
        """Reacts to a bad step as the recipe says. All ranks must call it.

        If the step is bad, adds the column `skipped`, the number of updates that were dropped, to
        `step.row`.

        Raises:
            RunError: The recipe says to stop, there is no checkpoint to roll back to, or
                MAX_BAD_STEPS consecutive steps were bad.
        """
        loss = step.row["loss"]
        # If updates can be skipped, the ranks agreed on the verdict before the update.
        verdict = self.verdict or self._agree(loss, step.row["grad_norm"])
        self.verdict = None
        reaction, problem = verdict
        if reaction != "go on":
            with self.watchdog.paused():
                self._react(reaction, problem, step)
        self.judge.record(reaction, problem, loss)

    def _react(self, reaction: Reaction, problem: str, step: Step) -> None:
        if reaction == "stop":
            self.checkpoints.finish()
            raise RunError(_stop_message(self.run, step.number, problem))
        skipped_before = self.skipped
        if reaction == "roll_back":
            result = self._roll_back(step.number)
        else:
            self.skipped += 1
            result = "its update was dropped"
        step.row["skipped"] = self.skipped - skipped_before
        self.notices.add("guard", f"step {step.number}: {problem}; {result}", step.number)

    def _roll_back(self, step: int) -> str:
        """Loads the newest checkpoint. Returns a description of the rollback for the notice to
        users.
        """
        self.checkpoints.finish()
        manifest = self.checkpoints.load_latest()
        if manifest is None:
            raise RunError(
                f"step {step} is bad and there is no checkpoint to roll back to. Set"
                " recipe.checkpoint_every."
            )
        self.restore(manifest)
        left_out = step - manifest.step
        self.skipped += left_out
        return (
            f"rolled back to the checkpoint of step {manifest.step}, the data of"
            f" {counted(left_out, 'step')} is left out"
        )

    def _accepts(self, loss: float, grad_norm: float) -> bool:
        """Returns whether a step may update the weights, as agreed by all ranks. The engine calls
        it before the update. It stores the verdict, which `after_step` uses later.
        """
        self.verdict = self._agree(loss, grad_norm)
        return self.verdict[0] != "skip"

    def _agree(self, loss: float, grad_norm: float) -> tuple[Reaction, str]:
        """Returns (reaction, problem) for a step, in the form of `StepJudge.judge`.

        If training may continue after a bad step, all ranks must call this method. Each rank then
        returns the strongest reaction of any rank, so that all ranks react equally. Otherwise a
        rank returns its own reaction, since a bad step on one rank ends training.
        """
        reaction, problem = self.judge.judge(loss, grad_norm)
        if self.continues_after_bad_step:
            # A fault may affect only one rank.
            strongest = torch.tensor([REACTIONS.index(reaction)])
            dist.all_reduce(strongest, dist.ReduceOp.MAX, group=self.group)
            reaction = REACTIONS[int(strongest)]
            problem = problem or "another rank reports a bad step"
        return reaction, problem


def _stop_message(run: Run, step: int, problem: str) -> str:
    newest = max(run.checkpoints.steps(), default=None)
    checkpoint = "There is no checkpoint yet"
    if newest:
        checkpoint = f"The checkpoint of step {newest} is from before it"
    return (
        f"stopped at step {step}: {problem}. {checkpoint}; nothing was overwritten. Look at data"
        " and learning rate. To continue past this step, launch again with recipe.on_nan or"
        " recipe.on_spike 'skip' or 'roll_back', which need the native engine."
    )
