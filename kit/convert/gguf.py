"""Reads GGUF, the file format of llama.cpp: facts, tokenizer and weights, dequantised to fp32.

Source: docs/gguf.md and `dequantize_row_q4_1`, `dequantize_row_q8_0` of ggml (github.com/ggml-org/ggml). Only what one
real small model needs is here, about 60 lines, so that the kit does not depend on a package for it.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from kit.errors import DataError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters for the types of facts; 8 is text and 9 an array."""
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK = 32
"""Weights that share a scale in the quantised types."""
DAMAGE = (struct.error, ValueError, KeyError, TypeError, ArithmeticError, RecursionError, OSError)
"""What reading the head of a file that is cut short or is not what it says can raise."""
BLOCK_BYTES = {Q4_1: 2 + 2 + BLOCK // 2, Q8_0: 2 + BLOCK}


class GgufFile:
    """A GGUF file; `facts` is its metadata by key."""

    def __init__(self, file: Path) -> None:
        """Reads everything but the weights.

        Raises:
            DataError: the file is not GGUF of version 3, or is damaged.
        """
        self.file = file
        try:
            with file.open("rb") as stream:
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_head()
        except DAMAGE as error:
            raise DataError(f"{file}: damaged ({type(error).__name__}: {error}). Copy it again.") from error

    def _read_head(self) -> None:
        file, self._place = self.file, 0
        if self._bytes[:4] != b"GGUF" or struct.unpack_from("<I", self._bytes, 4)[0] != 3:
            raise DataError(f"{file}: not a GGUF file of version 3. Copy it again.")
        self._place = 8
        num_tensors, num_facts = self._scalar("Q"), self._scalar("Q")
        self.facts: dict[str, Any] = {self._text(): self._value(self._scalar("I")) for _ in range(num_facts)}
        entries = {}
        for _ in range(num_tensors):
            name = self._text()
            shape = [self._scalar("Q") for _ in range(self._scalar("I"))]
            entries[name] = (shape[::-1], self._scalar("I"), self._scalar("Q"))  # fastest dimension last, as in torch
        self._entries = entries
        alignment = self.facts.get("general.alignment", 32)
        self._weights_start = -(-self._place // alignment) * alignment

    def names(self) -> list[str]:
        """Returns the names of all weights."""
        return list(self._entries)

    def weight(self, name: str) -> np.ndarray:
        """Returns one weight as fp32.

        Raises:
            DataError: there is none, or it is of a type that is not read here.
        """
        if name not in self._entries:
            raise DataError(f"{self.file}: has no weight {name!r}.")
        shape, kind, offset = self._entries[name]
        start, count = self._weights_start + offset, math.prod(shape)
        if kind not in (F32, *BLOCK_BYTES):
            raise DataError(f"{self.file}: {name} is of ggml type {kind}; read here are F32, Q4_1 and Q8_0.")
        size = 4 * count if kind == F32 else count // BLOCK * BLOCK_BYTES[kind]
        if start + size > len(self._bytes) or (kind != F32 and count % BLOCK):
            raise DataError(f"{self.file}: damaged: {name} ends behind the end of the file. Copy it again.")
        if kind == F32:
            return np.frombuffer(self._bytes, "<f4", count, start).reshape(shape).copy()
        blocks = np.frombuffer(self._bytes, np.uint8, size, start)
        return dequantised(blocks.reshape(-1, BLOCK_BYTES[kind]), kind).reshape(shape)

    def _scalar(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self._bytes, self._place)
        self._place += struct.calcsize("<" + letter)
        return value

    def _text(self) -> str:
        length = self._scalar("Q")
        self._place += length
        return self._bytes[self._place - length : self._place].decode()

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._text()
        if kind == 9:
            inner = self._scalar("I")
            return [self._value(inner) for _ in range(self._scalar("Q"))]
        return self._scalar(SCALARS[kind])


def dequantised(blocks: np.ndarray, kind: int) -> np.ndarray:
    """Returns fp32 [blocks, 32]: scale x quantum (+ minimum), from the bytes of Q4_1 or Q8_0 blocks.

    A Q4_1 block is scale and minimum in fp16, then 16 bytes whose low halves are the first 16 weights and whose high
    halves the others; a Q8_0 block is a scale and 32 signed bytes.
    """
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == Q8_0:
        return scale * blocks[:, 2:].copy().view(np.int8)
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    quanta = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1)
    return scale * quanta + minimum
