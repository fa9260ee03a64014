"""Files that others append to: what was added since the last look, and the last lines."""

import os
from pathlib import Path
from typing import BinaryIO

from cluster.files import opened

CHUNK_BYTES = 8 << 20
FINGERPRINT_BYTES = 256
ENDLESS_BYTES = 4 * CHUNK_BYTES


class Tail:
    """Reads the whole lines that are appended to a file, each once; a file that was cut or replaced
    is read afresh.

    Attributes:
        position: bytes read so far.
    """

    ENDS = b"\n"
    """The bytes that each end a line."""

    def __init__(self, file: Path, position: int = 0) -> None:
        self.file = file
        self.position = position
        self._last = b""
        self._endless = 0

    def new_lines(self, limit_bytes: int = CHUNK_BYTES) -> bytes:
        """Returns the next lines, at most so many bytes of them; empty where nothing is new.

        A line without its end waits for the next call, unless it is longer than the limit: then it
        is none of ours, and comes in pieces, up to ENDLESS_BYTES: what is longer ends the
        reading, since it may have no end.
        """
        try:
            with opened(self.file) as stream:
                if not self.is_same(stream):
                    self.restart()
                stream.seek(self.position)
                text = stream.read(limit_bytes)
        except OSError:  # not there yet, or removed while it was followed: what was read stays
            return b""
        whole = text[: max(map(text.rfind, self.ENDS)) + 1]
        self._endless = 0 if whole else self._endless
        if not whole and len(text) == limit_bytes and self._endless < ENDLESS_BYTES:
            whole = text
            self._endless = self._endless + len(text)
        self.position += len(whole)
        self._last = (self._last + whole)[-FINGERPRINT_BYTES:]
        return whole

    def is_same(self, stream: BinaryIO) -> bool:
        """Returns whether an open file is still the one that was read up to `position`."""
        if stream.seek(0, os.SEEK_END) < self.position:
            return False
        stream.seek(self.position - len(self._last))
        return stream.read(len(self._last)) == self._last

    def restart(self) -> None:
        """Forgets what was read."""
        self.position = 0
        self._last = b""
        self._endless = 0

    @property
    def unread_bytes(self) -> int:
        """How much of the file waits to be read."""
        try:
            return max(0, self.file.stat().st_size - self.position)
        except OSError:
            return 0


def last_lines(file: Path, limit_bytes: int, *, follows: bool = False) -> list[bytes]:
    """Returns the lines in the last bytes of a file, without one whose beginning is cut off; none
    if there is none.

    `follows` takes a link too, as the log of an imported run is one.
    """
    try:
        with opened(file, follows=follows) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            lines = stream.read(limit_bytes).split(b"\n")
    except OSError:
        return []
    return lines[1:] if size > limit_bytes else lines
