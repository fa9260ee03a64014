"""A folder that is there whole or not at all, whatever ends the program that writes it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kit.errors import ConfigError


def refuse_occupied(folder: Path) -> None:
    """Raises ConfigError unless a folder is absent or empty: asked before the work, not after."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not empty. Give a new folder.")


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Within the context, files are written into the path that it gives; at its end that becomes
    `folder`.

    After an exception inside nothing is left. Both are on one file system, so that the last step is
    one renaming.

    Raises:
        ConfigError: the folder holds something.
    """
    refuse_occupied(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        part = Path(scratch) / "folder"
        part.mkdir()
        yield part
        try:
            os.replace(part, folder)  # over an empty one too
        except OSError:
            refuse_occupied(folder)  # somebody else was faster
            raise
