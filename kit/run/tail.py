"""Reads files to which other processes append: either the lines that are new since the last call,
or the last lines.
"""

import os
from pathlib import Path
from typing import BinaryIO

from cluster.files import open_for_reading

CHUNK_BYTES = 8 << 20
"""Default of the largest number of bytes that one call reads, 8 MiB."""
FINGERPRINT_BYTES = 256
"""Number of bytes before the reading position that are compared with the file again. If they
differ, the file was replaced."""
ENDLESS_BYTES = 4 * CHUNK_BYTES
"""Number of bytes of one line after which reading stops. Such a line was not written by the kit and
may never end."""


class Tail:
    """Reads the complete lines that are appended to a file, each line once. If the file was
    truncated or replaced, it is read again from its beginning.

    Attributes:
        position: number of bytes read so far.
    """

    ENDS = b"\n"
    """Bytes that end a line. Each byte of this value ends a line."""

    def __init__(self, file: Path, position: int = 0) -> None:
        self.file = file
        self.position = position
        self._last = b""
        self._endless = 0

    def new_lines(self, limit_bytes: int = CHUNK_BYTES) -> bytes:
        """Returns the next complete lines, at most `limit_bytes` bytes. Returns b"" if there is no
        new line.

        A line without a line break is incomplete, and is returned later when its line break is in
        the file. A line longer than `limit_bytes` was not written by the kit, and is returned in
        pieces. After ENDLESS_BYTES of such a line, nothing more is returned, since the line may
        never end.
        """
        try:
            with open_for_reading(self.file) as stream:
                if not self.is_same(stream):
                    self.restart()
                stream.seek(self.position)
                text = stream.read(limit_bytes)
        # The file does not exist yet, or was deleted. Lines that were read before stay valid.
        except OSError:
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
        """Returns whether an open file is the file that was read up to `position`, judged by its
        length and by the last bytes that were read.
        """
        if stream.seek(0, os.SEEK_END) < self.position:
            return False
        stream.seek(self.position - len(self._last))
        return stream.read(len(self._last)) == self._last

    def restart(self) -> None:
        """Sets the reading position back. The next call reads the file from its beginning."""
        self.position = 0
        self._last = b""
        self._endless = 0

    @property
    def unread_bytes(self) -> int:
        """Number of bytes of the file that have not been read yet."""
        try:
            return max(0, self.file.stat().st_size - self.position)
        except OSError:
            return 0


def last_lines(file: Path, limit_bytes: int, *, follows: bool = False) -> list[bytes]:
    """Returns the lines in the last `limit_bytes` bytes of a file. If the first of these lines is
    cut off at its beginning, it is left out. Returns an empty list if the file cannot be read.

    If `follows` is True, the file may be a symbolic link. The log of an imported run is a link.
    """
    try:
        with open_for_reading(file, follows=follows) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - limit_bytes))
            lines = stream.read(limit_bytes).split(b"\n")
    except OSError:
        return []
    return lines[1:] if size > limit_bytes else lines
