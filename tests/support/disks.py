"""What takes the room on a small disk away from a test."""

import contextlib
from pathlib import Path


def fill(filler: Path, leave: int = 0) -> None:
    """Takes all room on a file's disk, to the last byte, and gives so many bytes back."""
    with filler.open("wb", buffering=0) as stream:
        with contextlib.suppress(OSError):
            while stream.write(bytes(1 << 12)):
                pass
        stream.truncate(stream.tell() - leave)
