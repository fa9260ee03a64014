"""Single tensors out of a checkpoint: each is read, and checked, alone, however large the
checkpoint is.
"""

import pickle

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from kit.errors import CheckpointError, DamagedCheckpointError, kit_command
from kit.run.checkpoint import Checkpoints, Manifest
from kit.run.checkpoint_reader import TensorsOnlyReader
from kit.spec import ModelSpec

FAULTS = (RuntimeError, ValueError, LookupError, AssertionError, EOFError, pickle.UnpicklingError)
"""What reading a tensor that is not there, not a tensor or of another shape can raise."""


class CheckpointTensors:
    """The tensors of one complete checkpoint by their names in it, such as `model.norm.weight`."""

    def __init__(
        self, checkpoints: Checkpoints, described: tuple[Manifest, bytes], spec: ModelSpec
    ) -> None:
        """Takes what `Checkpoints.describe` gives, and reads no tensor.

        Raises:
            CheckpointError: the checkpoint is of another model than `spec`, or NxD's, or its
                description is damaged.
        """
        manifest, description = described
        self.path = checkpoints.path(manifest.step)
        checkpoints.check_model(manifest, spec)
        if manifest.plan.engine == "neuron":
            weights = kit_command(
                "export-hf", checkpoints.directory.parent, str(manifest.step), "OUT"
            )
            raise CheckpointError(f"{self.path} holds NxD's files. Its weights alone: `{weights}`.")
        self._reader = TensorsOnlyReader(self.path, description)
        try:
            self._metadata = self._reader.read_metadata()
        except FAULTS as error:
            raise self._unreadable(error) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def fill_all(self, state: dict[str, Tensor]) -> None:
        """Writes tensors into those of their names in `state`, which have their shapes and any
        dtypes and strides.

        Of a DTensor this rank's part is written, and no other rank need call this. Each file is
        opened once.

        Raises:
            DamagedCheckpointError: the bytes of one have changed since they were written.
            CheckpointError: there is none of such a name and shape.
            OSError: a file cannot be read now.
        """
        planner = DefaultLoadPlanner()
        try:
            planner.set_up_planner(state, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except (DamagedCheckpointError, OSError):
            raise
        except FAULTS as error:
            raise self._unreadable(
                error, f"{next(iter(state))}: " if len(state) == 1 else ""
            ) from error

    def _unreadable(self, error: Exception, what: str = "") -> CheckpointError:
        text = str(error).splitlines()[0]
        # Bits have flipped in an archive's directory, which has no checksum: torch's own reader
        # stumbles over it.
        kind = DamagedCheckpointError if "failed reading zip archive" in text else CheckpointError
        return kind(
            f"{self.path} cannot be read: {what}{text}. Move it away to use an earlier checkpoint."
        )
