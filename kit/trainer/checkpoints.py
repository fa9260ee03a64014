"""Saving and loading the checkpoints of a run while it trains.

`kit.run.checkpoint` defines when a checkpoint is complete and how it is checked. All ranks save and
load together. Writing happens in the background. A damaged checkpoint is renamed, never deleted,
and the previous checkpoint is loaded.
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
"""Writer and reader of the checkpoints of one kind of engine."""


class CheckpointManager:
    """Saves checkpoints, loads the newest valid one, and keeps as many as the recipe says.

    Every rank has one, and all ranks call its methods together.

    Args:
        run: the run that is trained.
        engine: engine whose weights and optimizer states are saved and loaded.
        group: group of all ranks, on the CPU.
        attempt: number of the attempt.
        notices: receive reports of damaged checkpoints and of checkpoints that cannot be deleted.
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
        """Seconds that calls of `save` took since `take_stall_s` was called."""
        self.has_reported_undeleted = False

    def save(self, step: int, samples: int, fields: dict[str, Any]) -> None:
        """Begins to write a checkpoint. Returns as soon as training may continue.

        Args:
            step: steps of the run so far.
            samples: samples of the run so far.
            fields: fields of the manifest from the policy for bad steps.

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
        """Fills the engine from the newest checkpoint that all ranks can read. Returns the
        checkpoint's manifest, or None if there are no checkpoints.

        Damaged checkpoints are reported and renamed, never deleted.

        Raises:
            CheckpointError: There are checkpoints and all of them are damaged. Nothing is renamed.
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
        """Renames damaged checkpoints and reports them. `problems` maps each step to an error
        message.
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
        Called after each step.
        """
        self.format.poll()
        self._report_undeleted(step)

    def finish(self) -> None:
        """Waits until the checkpoint that is being written, if any, is valid.

        Raises:
            CheckpointError: The checkpoint could not be written. Older checkpoints are intact.
        """
        self.format.finish()

    def end(self) -> None:
        """Waits for the last checkpoint at the end of training."""
        self.finish()
        self._report_undeleted(max(self.run.checkpoints.steps(), default=0))

    def take_stall_s(self) -> float:
        """Returns the seconds for which training has waited for saves since the last call."""
        stall_s = self.save_s + self.format.take_stall_s()
        self.save_s = 0.0
        return stall_s

    def _report_undeleted(self, step: int) -> None:
        """Warns, once per attempt, that an old checkpoint could not be deleted."""
        problem = self.run.checkpoints.undeleted
        if problem and not self.has_reported_undeleted:
            self.has_reported_undeleted = True
            self.notices.add("disk", problem, step)


def checkpoint_format(run: Run, engine: Engine, group: Any, *, attempt: int) -> CheckpointFormat:
    """Returns the writer and reader of an engine's checkpoints, for torch's distributed checkpoint
    or for NxD's files.
    """
    if isinstance(engine, PortableEngine):
        return PortableCheckpoints(run, engine, group, attempt=attempt)
    from kit.engines.neuron.checkpoint import NxdCheckpoints

    return NxdCheckpoints(run, engine, attempt=attempt)  # pyright: ignore[reportArgumentType]


class PortableCheckpoints(CheckpointWriter):
    """Checkpoints in the format of torch's distributed checkpoint. Portable engines read them on
    any layout.

    The state is copied while the next forward and backward pass run. The optimizer step waits until
    the state is copied.
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
        """Begins to write. Returns as soon as training may continue.

        `facts` are the fields of the manifest other than attempt, time and files.
        """
        self.start(self.engine.state_dict(), facts)

    def load(self, step: int) -> Manifest:
        """Fills the engine from the checkpoint of `step` and returns its manifest.

        Raises:
            DamagedCheckpointError: The checkpoint has changed since it was written. The error is
                raised on all ranks, and the state of the engine is undefined.
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
    """Fills a new engine with the weights of a Hugging Face folder. Each rank reads its own part of
    each tensor.

    Raises:
        ConfigError, DataError, MissingPackageError: The folder does not hold this model, or a
            package to read the folder is missing.
    """
    # Imported here, since no other run needs the converters.
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
