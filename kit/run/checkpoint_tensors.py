"""Single tensors out of a checkpoint: each is read, and checked, alone, however large the checkpoint is."""

import io
import pickle
import zipfile
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from kit.errors import CheckpointError, kit_command
from kit.run.checkpoint import MANIFEST, Checkpoints, checksum
from kit.run.checkpoint_reader import TensorsOnlyReader
from kit.spec import ModelSpec

DAMAGE = (OSError, RuntimeError, ValueError, LookupError, AssertionError, zipfile.BadZipFile, pickle.UnpicklingError)
"""What reading a tensor that is not there, not whole or of another shape can raise."""
METADATA = ".metadata"


class CheckpointTensors:
    """The tensors of one complete checkpoint by their names in it, such as `model.norm.weight`."""

    def __init__(self, checkpoints: Checkpoints, step: int, spec: ModelSpec) -> None:
        """Reads what describes the checkpoint, and no tensor.

        Raises:
            CheckpointError: there is no complete checkpoint of `spec` at this step, or NxD wrote it.
        """
        self.path, manifest = checkpoints.path(step), checkpoints.manifest(step)
        checkpoints.check_model(manifest, spec)
        if manifest.plan.engine == "neuron":
            weights = kit_command("export-hf", checkpoints.directory.parent, str(step), "OUT")
            raise CheckpointError(f"{self.path} holds NxD's files. Its weights alone: `{weights}`.")
        self._reader = _CheckedReader(self.path)
        try:
            if checksum(self.path / METADATA) != manifest.checksums.get(METADATA, checksum(self.path / METADATA)):
                raise OSError(f"its checksum is not that of {MANIFEST}")
            self._metadata = self._reader.read_metadata()
        except DAMAGE as error:
            raise self._damaged(METADATA, error) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def fill(self, name: str, target: Tensor) -> None:
        """Writes the tensor of that name into `target`, which has its shape and any dtype and strides.

        Of a DTensor this rank's part is written, and no other rank need call this.

        Raises:
            CheckpointError: there is none of this name and shape, or its bytes have changed since they were written.
        """
        planner = DefaultLoadPlanner()
        try:
            planner.set_up_planner({name: target}, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except DAMAGE as error:
            raise self._damaged(name, error) from error

    def _damaged(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged: {what}: {str(error).splitlines()[0]}. Restore its files, or move it away to use "
            f"an earlier checkpoint."
        )


class _CheckedReader(TensorsOnlyReader):
    """Checks each tensor before it is read: torch saves it as a zip archive, with a CRC-32 that it does not look at."""

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        found = io.BytesIO(file.read(sinfo.length))
        if zipfile.ZipFile(found).testzip() is not None:
            raise OSError(f"its bytes in {sinfo.relative_path} are not those that were written")
        found.seek(0)
        return found
