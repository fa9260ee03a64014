"""Reads torch's distributed checkpoints without running code that a file may hold.

Torch describes such a checkpoint in a pickled `.metadata`, and unpickles objects that are no
tensors too. Here the description may name only the classes that torch itself writes for tensors, so
whatever else it asks for is refused before it runs; objects that are no tensors are refused with
it. Tensors are read by torch with `weights_only`, once their bytes were held to the CRC-32 that
torch saves with them and does not look at.

Each tensor is read, and checked, alone, however large the checkpoint is.
"""

import argparse
import gc
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from cluster.record import check_file_name
from kit.config.spec import ModelSpec
from kit.errors import CheckpointError, DamagedCheckpointError, kit_command
from kit.run.checkpoint import Checkpoints, Manifest
from kit.run.plain_pickle import check_pickle
from kit.torch_private import StorageInfo

METADATA = "torch.distributed.checkpoint.metadata"
UNUSED = {
    (METADATA, "TensorProperties"),
    (METADATA, "StorageMeta"),
    (METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""What torch 2.11 to 2.14 write besides `KEPT`, and no reader asks for."""
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
        if not manifest.plan.capabilities.portable_checkpoints:
            weights = kit_command(
                "export",
                checkpoints.directory.parent,
                "--format",
                "hf",
                "--step",
                str(manifest.step),
            )
            raise CheckpointError(f"{self.path} holds NxD's files. Its weights alone: `{weights}`.")
        self._reader = TensorsOnlyReader(self.path, description)
        try:
            self._metadata = self._reader.read_metadata()
        except FAULTS as error:
            raise self._unreadable(error) from error
        for place in self._metadata.storage_data.values():
            # The manifest's files are known to be plain files of their sizes.
            if place.relative_path not in manifest.files:
                raise self._unreadable(
                    ValueError(f"its manifest does not list {place.relative_path}")
                )
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
            what = ""
            if len(state) == 1:
                what = f"{next(iter(state))}: "
            raise self._unreadable(error, what) from error

    def _unreadable(self, error: Exception, what: str = "") -> CheckpointError:
        text = next(iter(str(error).splitlines()), type(error).__name__)
        # Bits have flipped in an archive's directory, which has no checksum: torch's own reader
        # stumbles over it.
        kind = DamagedCheckpointError if "failed reading zip archive" in text else CheckpointError
        return kind(
            f"{self.path} cannot be read: {what}{text}. Move it away to use an earlier checkpoint."
        )


class PlainUnpickler(pickle.Unpickler):
    """Makes a pickle's numbers, texts, lists and tables. It runs nothing, and knows no classes but
    those in `kept`. The bytes are checked first: see `check_pickle`.

    An object of any other class is empty. Each object is of a subclass that this load alone has,
    and that cannot be changed: a pickle may set attributes of what it names, and a class is shared
    by the whole process. Only objects of the classes in `keys` can be keys of a table, since the
    hash of other objects may take time without limit.

    Raises:
        pickle.UnpicklingError: the bytes do not pass the check.
    """

    kept: ClassVar[dict[tuple[str, str], type]] = {("argparse", "Namespace"): argparse.Namespace}
    keys: ClassVar[tuple[type, ...]] = ()

    def __init__(self, data: bytes) -> None:
        check_pickle(data)
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        base = self.kept.get((module, name), _EmptyObject)
        attributes = {} if base in self.keys else {"__hash__": None}
        return _FrozenType(base.__name__, (base,), attributes)

    def persistent_load(self, pid: Any) -> None:
        return None


class _FrozenType(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it would change {cls.__name__}.{name}")


class _EmptyObject(dict):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None: ...


class TensorsOnlyReader(FileSystemReader):
    """`FileSystemReader` for checkpoints of unknown origin: tensors, and nothing that could run.

    `description` is the content of the checkpoint's `.metadata`.
    """

    def __init__(self, path: Path, description: bytes) -> None:
        super().__init__(path)
        self.description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the description of the checkpoint.

        Raises:
            pickle.UnpicklingError: it asks for anything but tensors.
            ConfigError: it names a file of another folder.
        """
        # it would look for cycles among a million small objects, for 7 times as long as making them
        # takes
        gc.disable()
        try:
            metadata = _MetadataUnpickler(self.description).load()
        except Exception as error:  # a stranger's bytes may lead to any
            raise pickle.UnpicklingError(f"its .metadata cannot be read: {error}") from error
        finally:
            gc.enable()
        _check(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        """Returns the bytes of one tensor, a zip archive.

        Raises DamagedCheckpointError if they have changed.
        """
        file.seek(sinfo.offset)
        found = io.BytesIO(file.read(sinfo.length))
        try:
            changed = zipfile.ZipFile(found).testzip()
        except (
            Exception
        ) as error:  # a flipped bit makes zipfile raise EOFError, zlib's error and others too
            changed = str(error) or type(error).__name__
        if changed is not None:
            raise DamagedCheckpointError(
                f"{file.name} is damaged: a tensor's checksum is not that of its bytes ({changed})."
                " Restore the file, or move its folder away to continue from an earlier"
                " checkpoint."
            )
        found.seek(0)
        return found


class _Index(MetadataIndex):
    """Equal to torch's own of the same tensor, by which a reader looks for it."""

    def __hash__(self) -> int:
        # Of nested objects, each of which is used twice, a hash would take 2^depth steps.
        if type(self.fqn) is not str or not isinstance(self.offset, torch.Size | None):
            raise pickle.UnpicklingError("it has an index that is no name and offset of a tensor")
        return super().__hash__()

    def __eq__(self, other: Any) -> bool:
        return (self.fqn, self.offset) == (other.fqn, other.offset)


class _MetadataUnpickler(PlainUnpickler):
    kept: ClassVar = {
        (METADATA, "Metadata"): Metadata,
        (METADATA, "MetadataIndex"): _Index,
        (METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
        (METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    }
    keys: ClassVar = (_Index,)

    def find_class(self, module: str, name: str) -> Any:
        # So Python 3.13 calls it, and no other.
        asked = (
            module.replace("pathlib._local", "pathlib"),
            name,
        )
        if asked == ("torch", "Size"):
            return torch.Size  # which nobody can change
        # Of torch, dtypes, which none asks for.
        if module != "torch" and asked not in UNUSED and asked not in self.kept:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no description of tensors needs; nothing"
                " was run"
            )
        return super().find_class(*asked)


def _check(metadata: Any) -> None:
    """Raises UnpicklingError for a description of something else, ConfigError for one of files
    in other folders.
    """
    tables = isinstance(metadata, Metadata) and (
        metadata.state_dict_metadata,
        metadata.storage_data,
    )
    if not (
        tables
        and all(type(table) is dict for table in tables)
        and all(isinstance(value, TensorStorageMetadata) for value in tables[0].values())
        and all(
            isinstance(place, StorageInfo) and type(place.relative_path) is str
            for place in tables[1].values()
        )
    ):
        raise pickle.UnpicklingError("its .metadata describes something else than tensors")
    for place in metadata.storage_data.values():
        check_file_name(place.relative_path, "its .metadata")
