"""Reads torch's distributed checkpoints without running code that a file may hold.

Torch describes such a checkpoint in a pickled `.metadata`, and unpickles objects that are no
tensors too. Here the description may name only the classes that torch itself writes for tensors, so
whatever else it asks for is refused before it runs; objects that are no tensors are refused with
it. Tensors are read by torch with `weights_only`, once their bytes were held to the CRC-32 that
torch saves with them and does not look at.
"""

import argparse
import gc
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from cluster.record import check_file_name
from kit.errors import DamagedCheckpointError
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


class Values(pickle.Unpickler):
    """Makes a pickle's numbers, texts, lists and tables. It runs nothing, and knows no classes but
    those in `kept`.

    An object of any other is empty. Each is made of a subclass of this load's own, which cannot be
    changed: a pickle may set attributes of what it names, and a class is shared by the whole
    process.
    """

    kept: ClassVar[dict[tuple[str, str], type]] = {("argparse", "Namespace"): argparse.Namespace}

    def find_class(self, module: str, name: str) -> Any:
        base = self.kept.get((module, name), _Nothing)
        return _Unchanging(base.__name__, (base,), {})

    def persistent_load(self, pid: Any) -> None:
        return None


class _Unchanging(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it would change {cls.__name__}.{name}")


class _Nothing(dict):
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
            metadata = _Description(io.BytesIO(self.description)).load()
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

    __hash__ = MetadataIndex.__hash__

    def __eq__(self, other: Any) -> bool:
        return (self.fqn, self.offset) == (other.fqn, other.offset)


class _Description(Values):
    kept: ClassVar = {
        (METADATA, "Metadata"): Metadata,
        (METADATA, "MetadataIndex"): _Index,
        (METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
        (METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    }

    def find_class(self, module: str, name: str) -> Any:
        asked = (
            module.replace("pathlib._local", "pathlib"),
            name,
        )  # so Python 3.13 calls it, and no other
        if asked == ("torch", "Size"):
            return torch.Size  # which nobody can change
        if (
            module != "torch" and asked not in UNUSED and asked not in self.kept
        ):  # of torch, dtypes, which none asks for
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
