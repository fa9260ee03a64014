"""How the state of an engine gets into a run's checkpoints and back."""

from typing import Any, Protocol

from kit.engines import Engine, PortableEngine
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.run.checkpoint_writer import CheckpointWriter


class EngineCheckpoints(Protocol):
    """Writes and reads the checkpoints of one attempt; every rank has one, and all call it at the same steps."""

    def save(self, facts: dict[str, Any]) -> None:
        """Begins to write; returns as soon as training may go on.

        `facts` are the manifest's fields other than attempt, time and files.
        """
        ...

    def poll(self) -> None:
        """Completes the pending checkpoint if it is written. Call it once a step."""
        ...

    def finish(self) -> None:
        """Waits for the pending checkpoint, if any, and makes it complete."""
        ...

    def load(self, step: int) -> Manifest:
        """Fills the engine from the checkpoint at `step` and returns its manifest."""
        ...


def engine_checkpoints(engine: Engine, run: Run, attempt: int) -> EngineCheckpoints:
    """Returns what writes and reads the checkpoints of this run's engine: NxD has files of its own."""
    recipe = run.recipe
    keep: dict[str, Any] = {"attempt": attempt, "keep_last": recipe.keep_last, "keep_every": recipe.keep_every}
    if run.plan.engine == "neuron":
        from kit.engines.neuron.checkpoint import NxdCheckpoints

        return NxdCheckpoints(run.checkpoints, run.spec, engine, **keep)  # pyright: ignore[reportArgumentType]
    assert isinstance(engine, PortableEngine)
    return PortableCheckpoints(run, engine, CheckpointWriter(run.checkpoints, **keep))


class PortableCheckpoints:
    """Checkpoints by torch's distributed checkpoint: any layout, and any engine that has them, reads them."""

    def __init__(self, run: Run, engine: PortableEngine, writer: CheckpointWriter) -> None:
        self.run, self.engine, self.writer = run, engine, writer
        self.poll, self.finish = writer.poll, writer.finish

    def save(self, facts: dict[str, Any]) -> None:
        self.writer.start(self.engine.state_dict(), facts)

    def load(self, step: int) -> Manifest:
        self.engine.restore_optimizer(step - self.run.checkpoints.manifest(step).skipped)
        manifest = self.run.checkpoints.load(step, self.engine.state_dict(), spec=self.run.spec, distributed=True)
        self.engine.after_load()
        return manifest
