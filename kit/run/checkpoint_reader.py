"""Reads torch's distributed checkpoints without running code that a file may hold.

Torch describes such a checkpoint in a pickled `.metadata`, and unpickles objects that are no tensors too.
Here the description may name only the classes that torch itself writes for tensors, so whatever else it asks for is
refused before it runs; objects that are no tensors are refused with it. Tensors are read by torch with `weights_only`,
once their bytes were held to the CRC-32 that torch saves with them and does not look at.
"""

import gc
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from cluster.record import check_file_name
from kit.errors import DamagedCheckpointError

METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    (METADATA, "Metadata"),
    (METADATA, "TensorStorageMetadata"),
    (METADATA, "TensorProperties"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}
"""What torch 2.11 to 2.14 write; all of them only hold values."""


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
        gc.disable()  # it would look for cycles among a million small objects, for 7 times as long as making them takes
        try:
            metadata = _TensorsOnlyUnpickler(io.BytesIO(self.description)).load()
        finally:
            gc.enable()
        _check(metadata)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        """Returns the bytes of one tensor, a zip archive. Raises DamagedCheckpointError if they have changed."""
        file.seek(sinfo.offset)
        found = io.BytesIO(file.read(sinfo.length))
        try:
            changed = zipfile.ZipFile(found).testzip()
        except Exception as error:  # a flipped bit makes zipfile raise EOFError, zlib's error and others too
            changed = str(error) or type(error).__name__
        if changed is not None:
            raise DamagedCheckpointError(
                f"{file.name} is damaged: a tensor's checksum is not that of its bytes ({changed}). Restore the file, "
                f"or move its folder away to continue from an earlier checkpoint."
            )
        found.seek(0)
        return found


class _TensorsOnlyUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("pathlib._local", "pathlib")  # so Python 3.13 calls it, and no other
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"its .metadata asks for {module}.{name}, which no description of tensors needs; nothing was run"
            )
        return super().find_class(module, name)


def _check(metadata: Any) -> None:
    """Raises UnpicklingError for a description of something else, ConfigError for one of files in other folders."""
    tensors = isinstance(metadata, Metadata) and all(
        isinstance(value, TensorStorageMetadata) for value in metadata.state_dict_metadata.values()
    )
    if not tensors:
        raise pickle.UnpicklingError("its .metadata describes something else than tensors")
    for place in metadata.storage_data.values():
        check_file_name(str(place.relative_path), "its .metadata")
