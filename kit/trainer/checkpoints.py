"""Saves and loads the checkpoints of a run while it trains.

`kit.run.checkpoint` defines when a checkpoint is complete and how it is checked. All ranks save and
load together, and checkpoints are written in the background. A damaged checkpoint is renamed, never
deleted, and an older checkpoint is loaded instead.
"""

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from kit.config.spec import ModelSpec
from kit.engines.engine import Engine, PortableEngine
from kit.errors import CheckpointError, DamagedCheckpointError
from kit.parallel.groups import from_rank_0, raised_on_all
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.run.checkpoint_reader import CheckpointTensors
from kit.run.checkpoint_writer import CheckpointWriter
from kit.trainer.heartbeat import Notices

if TYPE_CHECKING:
    from kit.engines.neuron.checkpoint import NxdCheckpoints

CheckpointFormat: TypeAlias = "PortableCheckpoints | NxdCheckpoints"
"""Object that writes and reads the checkpoints of an engine, in the format of the engine."""


class CheckpointManager:
    """Saves checkpoints, loads the newest valid one, and keeps as many as the recipe says.

    Every rank has a CheckpointManager, and all ranks call its methods together.

    Args:
        run: run that is trained.
        engine: engine whose weights and optimizer states are saved and loaded.
        group: CPU process group of all ranks.
        attempt: number of the attempt.
        notices: object that receives reports of damaged checkpoints and of checkpoints that cannot
            be deleted.
    """

    def __init__(
        self, run: Run, engine: Engine, group: Any, *, attempt: int, notices: Notices
    ) -> None:
        self.run = run
        self.engine = engine
        self.group = group
        self.attempt = attempt
        self.notices = notices
        self.format = checkpoint_format(run, engine, group, attempt=attempt)
        self.save_s = 0.0
        """Seconds that calls of `save` took since the last call of `take_stall_s`."""
        self.has_reported_undeleted = False

    def save(self, step: int, samples: int, fields: dict[str, Any]) -> None:
        """Starts writing a checkpoint. Returns as soon as training may continue.

        Args:
            step: number of steps of the run so far.
            samples: number of samples of the run so far.
            fields: fields of the manifest that restore the policy for bad steps.

        Raises:
            CheckpointError: This or the previous checkpoint could not be written. Older checkpoints
                are intact.
        """
        start = time.perf_counter()
        facts = {
            "step": step,
            "samples": samples,
            "tokens": samples * self.run.spec.sequence_length,
            "seed": self.run.recipe.seed,
            "spec": self.run.spec,
            "plan": self.run.plan,
        }
        self.format.save(facts | fields)
        self.save_s += time.perf_counter() - start

    def load_latest(self) -> Manifest | None:
        """Loads the newest checkpoint that all ranks can read into the engine. Returns the manifest
        of this checkpoint, or None if there are no checkpoints.

        Damaged checkpoints are reported and renamed, never deleted.

        Raises:
            CheckpointError: There are checkpoints, but all of them are damaged. Nothing is renamed.
        """
        problems: dict[int, str] = {}
        for step in reversed(from_rank_0(self.run.checkpoints.steps, self.group)):
            try:
                manifest = self.format.load(step)
            except DamagedCheckpointError as error:
                problems[step] = str(error)
                continue
            if problems and dist.get_rank() == 0:
                self._set_aside(problems, loaded=step)
            return manifest
        if problems:
            raise CheckpointError(
                f"All checkpoints of {self.run.directory} are damaged, nothing was changed."
                f" {' '.join(problems.values())} To start from the beginning, use another run"
                " directory."
            )
        return None

    def _set_aside(self, problems: dict[int, str], loaded: int) -> None:
        """Renames damaged checkpoints and reports them. The keys of `problems` are the steps of the
        checkpoints, and the values are error messages. `loaded` is the step of the checkpoint that
        was loaded instead.
        """
        sentences = []
        for step, problem in problems.items():
            kept = self.run.checkpoints.set_aside(step, self.attempt)
            sentences.append(
                f"the checkpoint of step {step} is damaged and kept as {kept.name}"
                f" ({problem.partition('. ')[0]})"
            )
        notice = f"{'; '.join(sentences)}; went on from step {loaded}"
        self.notices.add("checkpoint", notice, loaded)

    def poll(self, step: int) -> None:
        """Raises CheckpointError if the checkpoint that is being written has failed. Never waits.
        Must be called after each step.
        """
        self.format.poll()
        self._report_undeleted(step)

    def finish(self) -> None:
        """Waits until the checkpoint that is being written, if there is one, is complete.

        Raises:
            CheckpointError: The checkpoint could not be written. Older checkpoints are intact.
        """
        self.format.finish()

    def end(self) -> None:
        """Waits at the end of training until the last checkpoint is complete."""
        self.finish()
        self._report_undeleted(max(self.run.checkpoints.steps(), default=0))

    def take_stall_s(self) -> float:
        """Returns the seconds for which training has waited for saves since the last call."""
        stall_s = self.save_s + self.format.take_stall_s()
        self.save_s = 0.0
        return stall_s

    def _report_undeleted(self, step: int) -> None:
        """Adds a notice, once per attempt, if an old checkpoint could not be deleted."""
        problem = self.run.checkpoints.undeleted
        if problem and not self.has_reported_undeleted:
            self.has_reported_undeleted = True
            self.notices.add("disk", problem, step)


def checkpoint_format(run: Run, engine: Engine, group: Any, *, attempt: int) -> CheckpointFormat:
    """Returns the object that writes and reads the checkpoints of an engine: in the format of
    torch's distributed checkpoint, or as NxD's files.
    """
    if isinstance(engine, PortableEngine):
        return PortableCheckpoints(run, engine, group, attempt=attempt)
    from kit.engines.neuron.checkpoint import NxdCheckpoints

    return NxdCheckpoints(run, engine, attempt=attempt)  # pyright: ignore[reportArgumentType]


class PortableCheckpoints(CheckpointWriter):
    """Writes and reads checkpoints in the format of torch's distributed checkpoint. Every portable
    engine can read them with any layout (degrees of parallelism).

    The state is copied while the next forward and backward pass run. The next optimizer step waits
    until the copy is complete.
    """

    def __init__(self, run: Run, engine: PortableEngine, group: Any, *, attempt: int) -> None:
        super().__init__(
            run.checkpoints,
            attempt=attempt,
            keep_last=run.recipe.keep_last,
            keep_every=run.recipe.keep_every,
        )
        self.spec = run.spec
        self.engine = engine
        self.control = group
        engine.optimizer.register_step_pre_hook(lambda *_: self.wait_for_copies())

    def save(self, facts: dict[str, Any]) -> None:
        """Starts writing a checkpoint. Returns as soon as training may continue.

        `facts` has the fields of the manifest except attempt, time and files.
        """
        self.start(self.engine.state_dict(), facts)

    def load(self, step: int) -> Manifest:
        """Loads the checkpoint of `step` into the engine and returns its manifest.

        Raises:
            DamagedCheckpointError: The checkpoint has changed since it was written. The error is
                raised on all ranks, and the engine's state is then undefined.
        """
        described = from_rank_0(lambda: self.checkpoints.describe(step), self.control)
        tensors = CheckpointTensors(self.checkpoints, described, self.spec)
        manifest, _ = described

        def fill(state: dict[str, Tensor]) -> None:
            with raised_on_all(self.control):
                tensors.fill_all(state)

        self.engine.load(fill, num_updates=step - manifest.skipped)
        return manifest


def load_initial_weights(folder: str, spec: ModelSpec, engine: Engine) -> None:
    """Loads the weights of a Hugging Face folder into a new engine. Each rank reads only its own
    part of each tensor.

    Raises:
        ConfigError, DataError, MissingPackageError: The folder does not contain this model, or a
            package to read the folder is missing.
    """
    # Only this function needs the converters, so other runs do not import them.
    from kit.interop.weights.hugging_face import hugging_face_weights

    assert isinstance(engine, PortableEngine), "`check_recipe` refuses others"
    weights = hugging_face_weights(folder, spec)

    def fill(state: dict[str, Tensor]) -> None:
        own = {}
        for name, tensor in state.items():
            if name.startswith("model."):
                own[name.removeprefix("model.")] = tensor
        weights.fill(own)

    engine.load(fill, num_updates=0)
    if dist.get_rank() == 0:
        print(f"started from the weights in {folder}", flush=True)
