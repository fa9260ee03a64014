"""Fills a small disk for a test."""

import contextlib
from pathlib import Path


def fill(filler: Path, leave: int = 0) -> None:
    """Fills the disk that holds the file `filler` by writing this file, and then frees `leave`
    bytes.
    """
    with filler.open("wb", buffering=0) as stream:
        with contextlib.suppress(OSError):
            while stream.write(bytes(1 << 12)):
                pass
        stream.truncate(stream.tell() - leave)
