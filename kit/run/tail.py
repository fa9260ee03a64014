"""Readers of files to which other processes append: the lines since the last call, and the last
lines.
"""

import os
from pathlib import Path
from typing import BinaryIO

from cluster.files import opened

CHUNK_BYTES = 8 << 20
"""Default for the largest number of bytes that one call reads."""
FINGERPRINT_BYTES = 256
"""Number of the last read bytes that are compared to find out whether a file was replaced."""
ENDLESS_BYTES = 4 * CHUNK_BYTES
"""Bytes of one line after which the reading stops, since the line may have no end."""


class Tail:
    """Reads the whole lines that are appended to a file, each once. A file that was truncated or
    replaced is read again from its beginning.

    Attributes:
        position: number of bytes read so far.
    """

    ENDS = b"\n"
    """Line ends: each byte in this value ends a line."""

    def __init__(self, file: Path, position: int = 0) -> None:
        self.file = file
        self.position = position
        self._last = b""
        self._endless = 0

    def new_lines(self, limit_bytes: int = CHUNK_BYTES) -> bytes:
        """Returns the next whole lines, at most `limit_bytes`. Empty if there is no new line.

        A line without its end waits for the next call. A line longer than `limit_bytes` was not
        written by the kit, and is returned in pieces. After ENDLESS_BYTES of one line the reading
        stops, since the line may have no end.
        """
        try:
            with opened(self.file) as stream:
                if not self.is_same(stream):
                    self.restart()
                stream.seek(self.position)
                text = stream.read(limit_bytes)
        except OSError:  # The file does not exist yet, or was removed. Lines read before stay.
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
        """Returns whether an open file is the file that was read up to `position`."""
        if stream.seek(0, os.SEEK_END) < self.position:
            return False
        stream.seek(self.position - len(self._last))
        return stream.read(len(self._last)) == self._last

    def restart(self) -> None:
        """Resets the position. The next call reads the file from its beginning."""
        self.position = 0
        self._last = b""
        self._endless = 0

    @property
    def unread_bytes(self) -> int:
        """Number of bytes of the file that are not read yet."""
        try:
            return max(0, self.file.stat().st_size - self.position)
        except OSError:
            return 0


def last_lines(file: Path, limit_bytes: int, *, follows: bool = False) -> list[bytes]:
    """Returns the lines in the last `limit_bytes` of a file, without a first line whose beginning
    is missing. Returns an empty list if the file cannot be read.

    With `follows`, the file may be a symbolic link. The log of an imported run is a link.
    """
    try:
        with opened(file, follows=follows) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            lines = stream.read(limit_bytes).split(b"\n")
    except OSError:
        return []
    return lines[1:] if size > limit_bytes else lines
