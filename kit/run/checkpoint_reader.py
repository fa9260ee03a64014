"""Reads torch's distributed checkpoints without running code that a checkpoint may contain.

Torch describes a distributed checkpoint in a pickled file `.metadata`. Unpickling an untrusted file
can run any code, and torch also unpickles saved objects that are not tensors. This reader accepts
only the classes that torch itself writes for tensors. If the description names another class or an
object that is not a tensor, it is rejected before any code runs. Torch reads the tensors with
`weights_only`. Before that, this reader compares the bytes of each tensor with the CRC-32 that
torch saves but does not check.

Tensors are read and checked one by one, so that memory does not depend on the size of the
checkpoint.
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
"""(module, name) of classes that torch 2.11 to 2.14 write to `.metadata` but that are not needed to
read tensors. They are accepted, and their objects are loaded as empty objects."""
FAULTS = (RuntimeError, ValueError, LookupError, AssertionError, EOFError, pickle.UnpicklingError)
"""Exceptions that torch's reader can raise if the checkpoint has no tensor of a name, or has
another object or another shape under this name."""


class CheckpointTensors:
    """The tensors of one complete checkpoint. They are found by their names in the checkpoint, such
    as `model.norm.weight`.
    """

    def __init__(
        self, checkpoints: Checkpoints, described: tuple[Manifest, bytes], spec: ModelSpec
    ) -> None:
        """Reads the description of the checkpoint but no tensor.

        Args:
            checkpoints: checkpoints of the run.
            described: result of `Checkpoints.describe`: (manifest, content of `.metadata`).
            spec: model that the checkpoint must have.

        Raises:
            CheckpointError: The checkpoint has another model than `spec`, was written by NxD, or
                has a damaged description.
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
            # For the files in the manifest, `Checkpoints.manifest` has checked that each is a plain
            # file of the recorded size. Other files are unchecked, so they are not read.
            if place.relative_path not in manifest.files:
                raise self._unreadable(
                    ValueError(f"its manifest does not list {place.relative_path}")
                )
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def fill_all(self, state: dict[str, Tensor]) -> None:
        """Copies tensors of the checkpoint into the tensors of equal name in `state`. Shapes must
        be equal. Dtypes and strides may differ.

        For a DTensor, only this rank's shard is filled, and the other ranks need not call this
        method. Each file is opened once.

        Raises:
            DamagedCheckpointError: The bytes of a tensor have changed since they were written.
            CheckpointError: The checkpoint has no tensor of the name and shape of a tensor in
                `state`.
            OSError: A file cannot be read at present.
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
        # The directory of a zip archive has no checksum. If bits of the directory are flipped,
        # torch's own reader reports this message.
        kind = DamagedCheckpointError if "failed reading zip archive" in text else CheckpointError
        return kind(
            f"{self.path} cannot be read: {what}{text}. Move it away to use an earlier checkpoint."
        )


class PlainUnpickler(pickle.Unpickler):
    """Unpickles numbers, texts, lists, dictionaries and objects of the classes in
    `allowed_classes`, without running code of the pickle. `check_pickle` first checks the bytes.

    Objects of other classes are loaded as empty objects. A pickle could set attributes of a class
    that it names, and the whole process shares the class. Therefore each load makes new subclasses
    that only this load uses and whose attributes cannot be set. Only objects of the classes in
    `allowed_keys` may be keys of a dictionary, since computing the hash of another object may take
    unlimited time.

    Attributes:
        allowed_classes: classes whose objects are loaded, by (module, name) in the pickle.
        allowed_keys: classes of `allowed_classes` whose objects may be keys of a dictionary.

    Raises:
        pickle.UnpicklingError: The bytes do not pass the check.
    """

    allowed_classes: ClassVar[dict[tuple[str, str], type]] = {
        ("argparse", "Namespace"): argparse.Namespace
    }
    allowed_keys: ClassVar[tuple[type, ...]] = ()

    def __init__(self, data: bytes) -> None:
        check_pickle(data)
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        base = self.allowed_classes.get((module, name), _EmptyObject)
        attributes = {} if base in self.allowed_keys else {"__hash__": None}
        return _FrozenType(base.__name__, (base,), attributes)

    def persistent_load(self, pid: Any) -> None:
        return None


class _FrozenType(type):
    """Metaclass of the classes that the unpickler makes. A pickle cannot set attributes of these
    classes.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it would change {cls.__name__}.{name}")


class _EmptyObject(dict):
    """Empty object that replaces an object of an unknown class. It ignores its arguments and its
    state.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None: ...


class TensorsOnlyReader(FileSystemReader):
    """Torch's `FileSystemReader` for untrusted checkpoints. Reads only tensors, and runs no code of
    the checkpoint.

    `description` is the content of the checkpoint's file `.metadata`.
    """

    def __init__(self, path: Path, description: bytes) -> None:
        super().__init__(path)
        self.description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the description of the checkpoint.

        Raises:
            pickle.UnpicklingError: The description contains objects other than tensors.
            ConfigError: The description names a file in another folder.
        """
        # Garbage collection is turned off. It would search a million small objects for reference
        # cycles, which takes 7 times as long as the unpickling.
        gc.disable()
        try:
            metadata = _MetadataUnpickler(self.description).load()
        except Exception as error:  # Untrusted bytes may raise any exception.
            raise pickle.UnpicklingError(f"its .metadata cannot be read: {error}") from error
        finally:
            gc.enable()
        _check(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        """Returns a stream with the bytes of one tensor, which form a zip archive.

        Raises:
            DamagedCheckpointError: The bytes have changed since they were written.
        """
        file.seek(sinfo.offset)
        found = io.BytesIO(file.read(sinfo.length))
        try:
            changed = zipfile.ZipFile(found).testzip()
        except (
            Exception
        ) as error:  # After a bit flip, zipfile may raise EOFError, zlib.error and others.
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
    """Replaces torch's `MetadataIndex`, which is the key under which the position of a tensor in
    the files is stored.

    It is equal to torch's index of the tensor, so that torch's reader finds the position. Computing
    its hash takes little time whatever an untrusted file contains.
    """

    def __hash__(self) -> int:
        # A file could nest tuples so that each tuple contains the next one twice. Computing the
        # hash would then take 2^depth steps.
        if type(self.fqn) is not str or not isinstance(self.offset, torch.Size | None):
            raise pickle.UnpicklingError("it has an index that is no name and offset of a tensor")
        return super().__hash__()

    def __eq__(self, other: Any) -> bool:
        return (self.fqn, self.offset) == (other.fqn, other.offset)


class _MetadataUnpickler(PlainUnpickler):
    """Unpickles `.metadata`. Rejects a pickle that names a class that torch does not write."""

    allowed_classes: ClassVar = {
        (METADATA, "Metadata"): Metadata,
        (METADATA, "MetadataIndex"): _Index,
        (METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
        (METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    }
    allowed_keys: ClassVar = (_Index,)

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 alone writes `pathlib._local` as the module of PosixPath.
        asked = (
            module.replace("pathlib._local", "pathlib"),
            name,
        )
        if asked == ("torch", "Size"):
            return torch.Size  # This is a built-in type, whose attributes cannot be set.
        # Other names in the module `torch` are dtypes, which are not needed to read tensors.
        if module != "torch" and asked not in UNUSED and asked not in self.allowed_classes:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no description of tensors needs; nothing"
                " was run"
            )
        return super().find_class(*asked)


def _check(metadata: Any) -> None:
    """Raises an error unless an unpickled description describes only tensors in files of the
    checkpoint's own folder.

    Raises:
        pickle.UnpicklingError: The description contains objects other than tensors.
        ConfigError: The description names a file in another folder.
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
