"""How the state of an engine gets into a run's checkpoints and back.

Every rank has one `EngineCheckpoints`, and all call it at the same steps.
"""

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

from kit.convert.hugging_face import hugging_face_weights
from kit.engines.engine import Engine, PortableEngine
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.run.checkpoint_reader import CheckpointTensors, alike, told_by_first
from kit.run.checkpoint_writer import CheckpointWriter
from kit.spec import ModelSpec

if TYPE_CHECKING:
    from kit.engines.neuron.checkpoint import NxdCheckpoints

EngineCheckpoints: TypeAlias = "PortableCheckpoints | NxdCheckpoints"


def engine_checkpoints(engine: Engine, run: Run, attempt: int, group: Any) -> EngineCheckpoints:
    """Returns what writes and reads the checkpoints of this run's engine; `group` is on the CPU.
    NxD has own files.
    """
    recipe = run.recipe
    keep: dict[str, Any] = {
        "attempt": attempt,
        "keep_last": recipe.keep_last,
        "keep_every": recipe.keep_every,
    }
    if run.plan.engine == "neuron":
        from kit.engines.neuron.checkpoint import NxdCheckpoints

        return NxdCheckpoints(run.checkpoints, run.spec, engine, **keep)  # pyright: ignore[reportArgumentType]
    assert isinstance(engine, PortableEngine)
    return PortableCheckpoints(run, engine, CheckpointWriter(run.checkpoints, **keep), group)


def start_from(folder: str, spec: ModelSpec, engine: Engine) -> None:
    """Fills a new engine with the weights of a Hugging Face folder; each rank reads its own part of
    each.

    Raises:
        ConfigError, DataError, MissingPackageError: the folder does not hold this model.
    """
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
        described = told_by_first(lambda: self.run.checkpoints.describe(step), self.group)
        tensors = CheckpointTensors(self.run.checkpoints, described, self.run.spec)
        manifest, _ = described
        self.engine.restore_optimizer(step - manifest.skipped)
        state = self.engine.state_dict()
        with alike(self.group):
            tensors.fill_all(state)
        self.engine.after_load()
        return manifest
