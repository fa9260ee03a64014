"""Documents into a token file in a random order, with one block of them in memory at a time.

The set of hashes in `kit.data.corpus` that finds duplicates does grow: by about 100 bytes a document.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kit.data.token_file import TokenFileWriter

BLOCK_BYTES = 256 * 1024 * 1024
"""Of text in a block, whose tokens are sorted at once."""
HELD_BYTES = 64 * 1024 * 1024
"""Of documents of all blocks together before they go to the disk."""
RECORD = struct.Struct("<dq")


class ShuffledWriter:
    """Passes documents on to a token file in the order of the numbers that were drawn for them, once all are there."""

    def __init__(self, writer: TokenFileWriter, folder: Path, text_bytes: int) -> None:
        """Has as many blocks, files of an empty folder, as so much text needs."""
        self._writer, self._held = writer, 0
        self._blocks = {folder / f"block-{i}": bytearray() for i in range(1 + text_bytes // BLOCK_BYTES)}
        self._files = list(self._blocks)

    def add(self, tokens: Sequence[int], draw: float) -> None:
        """Takes one document; `draw` is in [0, 1)."""
        data = np.asarray(tokens, np.int32).tobytes()
        self._blocks[self._files[int(draw * len(self._files))]] += RECORD.pack(draw, len(data)) + data
        self._held += RECORD.size + len(data)
        if self._held >= HELD_BYTES:
            self._put_down()

    def finish(self) -> None:
        """Writes all documents to the token file."""
        self._put_down()
        for file in self._files:
            data, place, documents = file.read_bytes(), 0, []
            while place < len(data):
                draw, size = RECORD.unpack_from(data, place)
                documents.append((draw, place + RECORD.size, size))
                place += RECORD.size + size
            for _, begin, size in sorted(documents):
                self._writer.add(np.frombuffer(data, np.int32, size // 4, begin))
            file.unlink()

    def _put_down(self) -> None:
        for file, block in self._blocks.items():
            with file.open("ab") as stream:
                stream.write(block)
            block.clear()
        self._held = 0
