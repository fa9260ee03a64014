"""What keeps a run's progress safe: its checkpoints, which all ranks save and go on from if they
are sound, and one answer of all ranks to a bad step.

A damaged checkpoint is kept aside and the one before is used. What to do about a bad step is the
recipe's choice (`kit.trainer.guard`); here all ranks agree on it and do it.
"""

import time
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
import torch.distributed as dist

from cluster.record import counted
from kit.config.spec import ModelSpec
from kit.engines.engine import Engine, PortableEngine
from kit.errors import CheckpointError, DamagedCheckpointError, RunError
from kit.parallel.groups import from_rank_0, raised_on_all
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.run.checkpoint_reader import CheckpointTensors
from kit.run.checkpoint_writer import CheckpointWriter
from kit.trainer.callback import Callback, Step
from kit.trainer.guard import Answer, Guard
from kit.trainer.heartbeat import Notices
from kit.trainer.watchdog import Watchdog

if TYPE_CHECKING:
    from kit.engines.neuron.checkpoint import NxdCheckpoints

EngineCheckpoints: TypeAlias = "PortableCheckpoints | NxdCheckpoints"
ANSWERS: tuple[Answer, ...] = get_args(Answer)


def checkpoints_of(run: Run, engine: Engine, group: Any, *, attempt: int) -> EngineCheckpoints:
    """Returns what writes and reads the checkpoints of a run's engine; NxD has own files."""
    if isinstance(engine, PortableEngine):
        return PortableCheckpoints(run, engine, group, attempt=attempt)
    from kit.engines.neuron.checkpoint import NxdCheckpoints

    return NxdCheckpoints(run, engine, attempt=attempt)  # pyright: ignore[reportArgumentType]


class Recovery(Callback):
    """One rank's part in saving, in going on from a checkpoint, and in answering bad steps."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        group: Any,
        *,
        attempt: int,
        watchdog: Watchdog,
        notices: Notices,
    ) -> None:
        self.run, self.engine, self.group, self.attempt = run, engine, group, attempt
        self.watchdog, self.notices = watchdog, notices
        self.guard = Guard(run.recipe, run.plan)
        # All ranks must agree that a step was bad after which training goes on.
        self.needs_each_result = self.guard.goes_on_after_bad
        self.accepts = self._accepts if self.guard.judges_before_update else None
        """What the engine asks before each update, where the recipe wants to be able to drop it."""
        self.checkpoints = checkpoints_of(run, engine, group, attempt=attempt)
        self.verdict: tuple[Answer, str] | None = None
        self.has_reported_undeleted = False

    def resume(self) -> tuple[int, int]:
        """Fills the engine from the newest checkpoint, or from the weights that the recipe names;
        returns the steps and samples so far.
        """
        manifest = self.load_newest()
        if manifest is None:
            if self.run.recipe.init_from:
                start_from(self.run.recipe.init_from, self.run.spec, self.engine)
            return 0, 0
        if dist.get_rank() == 0:
            saved, now = counted(manifest.plan.num_devices, "device"), self.run.plan.num_devices
            print(f"resumed from step {manifest.step} (written on {saved}, now {now})", flush=True)
        return manifest.step, manifest.samples

    def load_newest(self) -> Manifest | None:
        """Fills the engine from the newest checkpoint that all ranks can read; returns its
        manifest, None if none is.

        The guard gets back its recent losses, and how many updates were dropped so far. Damaged
        checkpoints are told of and renamed, never deleted.

        Raises:
            CheckpointError: there are checkpoints and all of them are damaged; they are left where
                they are.
        """
        damaged: dict[int, str] = {}
        for step in reversed(from_rank_0(self.run.checkpoints.steps, self.group)):
            try:
                manifest = self.checkpoints.load(step)
            except DamagedCheckpointError as error:
                damaged[step] = str(error)
                continue
            if damaged and dist.get_rank() == 0:
                told = [self._set_aside(bad, problem) for bad, problem in damaged.items()]
                notice = f"{'; '.join(told)}; went on from step {step}"
                self.notices.add("checkpoint", notice, step)
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

    def after_step(self, step: Step) -> None:
        """Does what the recipe says about a bad step: nothing, drop its update, roll back, or stop.

        The step's row for the metrics gets `skipped`, the number of updates that were dropped, and
        `checkpoint_s`, for how long it has waited for a save.

        Raises:
            RunError: the recipe says to stop, or there is no checkpoint to roll back to.
            CheckpointError: a checkpoint could not be written.
        """
        if self.checkpoints.stall_s:
            step.row["checkpoint_s"], self.checkpoints.stall_s = self.checkpoints.stall_s, 0.0
        # Where updates can be dropped, the engine has asked before this one, and the ranks have
        # agreed then.
        loss = step.row["loss"]
        answer, what = self.verdict or self._agree(loss, step.row["grad_norm"])
        self.verdict = None
        if answer != "go on":
            with self.watchdog.paused():
                self._respond(answer, what, step)
        self.guard.note(answer, what, loss)
        self.checkpoints.poll()
        self._report_undeleted(step.number)

    def _respond(self, answer: Answer, what: str, step: Step) -> None:
        before = self.guard.skipped
        if answer == "stop":
            self.checkpoints.finish()
            raise RunError(_stopped(self.run, step.number, what))
        if answer == "roll_back":
            done = self._roll_back(step.number)
        else:
            self.guard.skipped += 1
            done = "its update was dropped"
        step.row["skipped"] = self.guard.skipped - before
        self.notices.add("guard", f"step {step.number}: {what}; {done}", step.number)

    def _roll_back(self, step: int) -> str:
        self.checkpoints.finish()
        manifest = self.load_newest()
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

    def save(self, step: int, samples: int) -> None:
        """Begins to write a checkpoint of a step, and of so many samples of the run so far."""
        facts = {
            "step": step,
            "samples": samples,
            "tokens": samples * self.run.spec.sequence_length,
            "seed": self.run.recipe.seed,
            "spec": self.run.spec,
            "plan": self.run.plan,
            # What a resumed guard judges by.
            "skipped": self.guard.skipped,
            "recent_losses": self.guard.recent,
        }
        start = time.perf_counter()
        with self.watchdog.paused():
            self.checkpoints.save(facts)
        self.checkpoints.stall_s += time.perf_counter() - start  # of the next step

    def on_end(self) -> None:
        """Waits until the last checkpoint is complete."""
        with self.watchdog.paused():
            self.checkpoints.finish()
        self._report_undeleted(max(self.run.checkpoints.steps(), default=0))

    def _report_undeleted(self, step: int) -> None:
        """Warns, once per attempt, that an old checkpoint could not be deleted."""
        problem = self.run.checkpoints.undeleted
        if problem and not self.has_reported_undeleted:
            self.has_reported_undeleted = True
            self.notices.add("disk", problem, step)

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


class PortableCheckpoints(CheckpointWriter):
    """Checkpoints by torch's distributed checkpoint: any layout, and any engine that has them,
    reads them.

    What is being copied is waited for before the optimizer changes it, beside the forward and
    backward pass until then.
    """

    def __init__(self, run: Run, engine: PortableEngine, group: Any, *, attempt: int) -> None:
        keep_last, keep_every = run.recipe.keep_last, run.recipe.keep_every
        super().__init__(
            run.checkpoints, attempt=attempt, keep_last=keep_last, keep_every=keep_every
        )
        self.spec, self.engine, self.control = run.spec, engine, group
        engine.optimizer.register_step_pre_hook(lambda *_: self.wait_for_copies())

    def save(self, facts: dict[str, Any]) -> None:
        """Begins to write; returns as soon as training may go on.

        `facts` are the manifest's fields other than attempt, time and files.
        """
        self.start(self.engine.state_dict(), facts)

    def load(self, step: int) -> Manifest:
        """Fills the engine from the checkpoint at `step` and returns its manifest.

        Raises DamagedCheckpointError on all ranks if it is not as it was written: then the engine
        holds nothing useful.
        """
        described = from_rank_0(lambda: self.checkpoints.describe(step), self.control)
        tensors = CheckpointTensors(self.checkpoints, described, self.spec)
        manifest, _ = described
        self.engine.restore_optimizer(step - manifest.skipped)
        state = self.engine.state_dict()
        with raised_on_all(self.control):
            tensors.fill_all(state)
        self.engine.after_load()
        return manifest


def start_from(folder: str, spec: ModelSpec, engine: Engine) -> None:
    """Fills a new engine with the weights of a Hugging Face folder; each rank reads its own part of
    each.

    Raises:
        ConfigError, DataError, MissingPackageError: the folder does not hold this model.
    """
    from kit.interop.weights.hugging_face import (
        hugging_face_weights,  # no other run needs converters
    )

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
