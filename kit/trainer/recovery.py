"""What keeps a run's progress safe: its checkpoints, which all ranks save and go on from if they
are sound, and one answer of all ranks to a bad step.

A damaged checkpoint is kept aside and the one before is used. What to do about a bad step is the
recipe's choice (`kit.trainer.guard`); here all ranks agree on it and do it.
"""

import sys
import time
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
import torch.distributed as dist

from cluster.record import counted
from cluster.state import read_state, record_event
from kit.engines.engine import Engine, PortableEngine
from kit.errors import CheckpointError, DamagedCheckpointError, RunError
from kit.run import Run
from kit.run.alerts import Alert, AlertLog
from kit.run.checkpoint import Manifest
from kit.run.checkpoint_reader import CheckpointTensors, from_rank_0, raised_on_all
from kit.run.checkpoint_writer import CheckpointWriter
from kit.spec import ModelSpec
from kit.trainer.guard import Answer, Guard

if TYPE_CHECKING:
    from kit.engines.neuron.checkpoint import NxdCheckpoints

EngineCheckpoints: TypeAlias = "PortableCheckpoints | NxdCheckpoints"
ANSWERS: tuple[Answer, ...] = get_args(Answer)


class Recovery:
    """One rank's part in going on from a checkpoint, and in answering bad steps. All ranks call it
    at the same steps.

    `notice` is the last thing that people should know, on rank 0, empty if nothing happened.
    """

    def __init__(self, run: Run, *, attempt: int, group: Any) -> None:
        self.run, self.attempt, self.group = run, attempt, group
        self.guard = Guard(run.recipe, run.plan)
        self.is_first = dist.get_rank() == 0
        if self.is_first:
            run.checkpoints.recover()
        dist.barrier(group)  # what a killed attempt left is in order, before any rank looks
        self.notice = ""
        self.verdict: tuple[Answer, str] | None = None

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, the same to all ranks, of which rank 0
        alone looks.
        """
        return from_rank_0(self.run.checkpoints.steps, self.group)

    def checkpoints_of(self, engine: Engine) -> EngineCheckpoints:
        """Returns what writes and reads the checkpoints of this run's engine; NxD has own files.

        Where the recipe wants to be able to drop an update, the engine asks before each.
        """
        if self.guard.judges_before_update:
            engine.accepts = self._accepts  # pyright: ignore[reportAttributeAccessIssue] - native, as `check_recipe` holds
        run, recipe = self.run, self.run.recipe
        keep: dict[str, Any] = {
            "attempt": self.attempt,
            "keep_last": recipe.keep_last,
            "keep_every": recipe.keep_every,
        }
        if run.plan.engine == "neuron":
            from kit.engines.neuron.checkpoint import NxdCheckpoints

            return NxdCheckpoints(run.checkpoints, run.spec, engine, **keep)  # pyright: ignore[reportArgumentType]
        assert isinstance(engine, PortableEngine)
        return PortableCheckpoints(
            run, engine, CheckpointWriter(run.checkpoints, **keep), self.group
        )

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


class PortableCheckpoints:
    """Checkpoints by torch's distributed checkpoint: any layout, and any engine that has them,
    reads them.
    """

    def __init__(
        self, run: Run, engine: PortableEngine, writer: CheckpointWriter, group: Any
    ) -> None:
        self.run, self.engine, self.writer, self.group = run, engine, writer, group
        self.poll, self.finish = writer.poll, writer.finish
        self.stall_s = 0.0
        """Seconds for which training has waited for saves, since whoever records them took them."""
        engine.optimizer.register_step_pre_hook(self._wait_for_copies)

    def save(self, facts: dict[str, Any]) -> None:
        """Begins to write; returns as soon as training may go on.

        `facts` are the manifest's fields other than attempt, time and files.
        """
        self.writer.start(self.engine.state_dict(), facts)

    def _wait_for_copies(self, *_: Any) -> None:
        """Runs before the optimizer changes what is being copied, beside the forward and
        backward pass until then.
        """
        start = time.perf_counter()
        if self.writer.wait_for_copies():
            self.stall_s += time.perf_counter() - start

    def load(self, step: int) -> Manifest:
        """Fills the engine from the checkpoint at `step` and returns its manifest.

        Raises DamagedCheckpointError on all ranks if it is not as it was written: then the engine
        holds nothing useful.
        """
        described = from_rank_0(lambda: self.run.checkpoints.describe(step), self.group)
        tensors = CheckpointTensors(self.run.checkpoints, described, self.run.spec)
        manifest, _ = described
        self.engine.restore_optimizer(step - manifest.skipped)
        state = self.engine.state_dict()
        with raised_on_all(self.group):
            tensors.fill_all(state)
        self.engine.after_load()
        return manifest


def start_from(folder: str, spec: ModelSpec, engine: Engine) -> None:
    """Fills a new engine with the weights of a Hugging Face folder; each rank reads its own part of
    each.

    Raises:
        ConfigError, DataError, MissingPackageError: the folder does not hold this model.
    """
    from kit.convert.hugging_face import hugging_face_weights  # no other run needs converters

    assert isinstance(engine, PortableEngine), "`check_recipe` refuses others"
    weights = hugging_face_weights(folder, spec)
    engine.restore_optimizer(0)
    own = engine.state_dict().items()
    weights.fill(
        {name.removeprefix("model."): tensor for name, tensor in own if name.startswith("model.")}
    )
    engine.after_load()
    if dist.get_rank() == 0:
        print(f"started from the weights in {folder}", flush=True)
