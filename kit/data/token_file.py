"""Token files in Megatron's format: `.bin` (the tokens, flat) and `.idx` (the index of the
documents).

`TokenFileWriter` writes them, and `TokenFile` reads them.

Layout of `.idx`, little-endian: magic, u64 version 1, u8 type code, u64 number of sequences, u64
length of the document index. i32 lengths and i64 byte offsets of the sequences follow. The i64
document index is last: the first sequence of each document, and finally the number of sequences. In
files of the kit, every document is one sequence.

Source: megatron-core, `megatron/core/datasets/indexed_dataset.py`. The files equal megatron-core's
own files byte for byte.
"""

import array
import functools
import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from kit.errors import DataError, kit_command

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPE_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""NumPy type of a stored token, by the type code in Megatron's index file."""
LARGEST_UINT16_VOCAB = 65_536
"""Largest vocabulary whose token ids fit in uint16."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the NumPy type that stores a token: uint16 if the vocabulary fits, else int32."""
    if vocab_size <= LARGEST_UINT16_VOCAB:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def rebuild_hint(directory: Path) -> str:
    """Returns the last sentence of an error message about a damaged dataset: the command that
    builds it again.
    """
    return (
        f"Build it again: {kit_command('data', 'build', directory, '--overwrite')} (and the options"
        " of then)"
    )


class TokenFileWriter:
    """Writes `PREFIX.bin` document by document and, when it is closed, `PREFIX.idx`. Tokens must be
    below `vocab_size`.

    It is a context manager. After an exception in the `with` block, no file is left. Memory: 4
    bytes per document, and 30 bytes per document when it is closed.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self._bin, self._idx = _paths(Path(prefix))
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._lengths = array.array("i")
        self.num_tokens = 0
        self._stream = self._bin.open("wb")

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document.

        Raises:
            DataError: A token is negative, or not below `vocab_size`.
        """
        found = np.asarray(tokens)
        lowest = found.min(initial=0)
        highest = found.max(initial=0)
        if lowest < 0 or highest >= self._vocab_size:
            outside = lowest if lowest < 0 else highest
            raise DataError(
                f"{self._bin.name}: token {outside} in document {len(self._lengths)} is not in the"
                f" vocabulary of {self._vocab_size:,}. Use the tokenizer that this vocabulary size"
                " belongs to."
            )
        self._stream.write(found.astype(self._dtype, copy=False).tobytes())
        self._lengths.append(found.size)
        self.num_tokens += found.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        if error_type is not None:
            self._bin.unlink()
            return
        lengths = np.array(self._lengths, "<i4")
        size = lengths * np.int64(self._dtype.itemsize)
        code = next(code for code, dtype in TYPE_CODES.items() if dtype == self._dtype)
        with self._idx.open("wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, code, lengths.size, lengths.size + 1))
            index.write(lengths.tobytes())
            index.write((np.cumsum(size) - size).astype("<i8").tobytes())
            index.write(np.arange(lengths.size + 1, dtype="<i8").tobytes())


class TokenFile:
    """Reads a token file in Megatron's format. `read` returns tokens from any position. `tokens` is
    a memory-mapped array of all tokens.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Checks header and sizes of `PREFIX.bin` and `PREFIX.idx`. Neither file is mapped or kept
        open before its first read.

        Raises:
            DataError: A file is missing, empty, truncated, too long, or not in this format.
        """
        self.prefix = Path(prefix)
        self._bin, self._idx = _paths(self.prefix)
        idx = self._idx
        size = _size(idx, at_least=HEADER.size)
        with idx.open("rb") as stream:
            magic, version, code, num_sequences, index_length = HEADER.unpack(
                stream.read(HEADER.size)
            )
        if magic != MAGIC or version != VERSION or code not in TYPE_CODES:
            raise DataError(
                f"{idx}: not a Megatron index: found magic {magic!r}, version {version}, type code"
                f" {code}; expected {MAGIC!r}, {VERSION}, one of {sorted(TYPE_CODES)}."
                f" {rebuild_hint(idx.parent)}"
            )
        expected = HEADER.size + 12 * num_sequences + 8 * index_length
        if size != expected:
            raise _wrong_size(idx, f"{expected:,}", size)
        if num_sequences == 0 or index_length == 0:
            raise DataError(f"{idx}: holds no documents. {rebuild_hint(idx.parent)}")
        self.dtype = np.dtype(TYPE_CODES[code])
        self.num_documents = index_length - 1
        last = HEADER.size + 4 * num_sequences - 4
        length = int(np.fromfile(idx, "<i4", 1, offset=last)[0])
        offset = int(np.fromfile(idx, "<i8", 1, offset=last + 8 * num_sequences - 4)[0])
        expected = offset + length * self.dtype.itemsize
        if (size := _size(self._bin, at_least=1)) != expected or size % self.dtype.itemsize:
            raise _wrong_size(self._bin, f"{expected:,}", size)
        self.num_tokens = size // self.dtype.itemsize

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All tokens as a memory-mapped array. Pages that were read count towards the resident
        memory of the process.
        """
        return np.memmap(self._bin, dtype=self.dtype, mode="r")

    @functools.cached_property
    def _handle(self) -> int:
        handle = os.open(self._bin, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        return handle

    def read(self, begin: int, count: int) -> np.ndarray:
        """Returns `count` tokens from position `begin` on, by one request to the file system.

        Raises:
            DataError: The file is shorter than when it was opened.
        """
        data = os.pread(self._handle, count * self.dtype.itemsize, begin * self.dtype.itemsize)
        if len(data) != count * self.dtype.itemsize:
            raise _wrong_size(
                self._bin, f"{self.num_tokens * self.dtype.itemsize:,}", self._bin.stat().st_size
            )
        return np.frombuffer(data, self.dtype)

    def counts(self, vocab_size: int) -> np.ndarray:
        """Returns the number of occurrences of each token: int64 [vocab_size].

        Raises:
            DataError: The file holds a token that is not in the vocabulary.
        """
        chunk = 1 << 22
        counts = np.zeros(vocab_size, np.int64)
        for begin in range(0, self.num_tokens, chunk):
            piece = self.tokens[begin : begin + chunk]
            if piece.min() < 0 or piece.max() >= vocab_size:
                raise DataError(
                    f"{self._bin}: damaged: holds a token outside its vocabulary of {vocab_size:,}."
                    f" {rebuild_hint(self._bin.parent)}"
                )
            counts += np.bincount(piece, minlength=vocab_size)
        return counts


def _paths(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def _size(file: Path, at_least: int) -> int:
    try:
        size = file.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file. {rebuild_hint(file.parent)}") from error
    if size < at_least:
        raise _wrong_size(file, f"at least {at_least:,}", size)
    return size


def _wrong_size(file: Path, expected: str, found: int) -> DataError:
    return DataError(
        f"{file}: truncated or damaged: expected {expected} bytes, found {found:,}."
        f" {rebuild_hint(file.parent)}"
    )
