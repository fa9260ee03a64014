"""The default corpus: Python's language reference and standard library.

Every Python installation has this text, so nothing is downloaded. Its bytes depend only on the
version of Python, so two users with the same version of Python get equal losses.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DEFAULT_BYTES = 24_000_000
"""Largest size of the default corpus in bytes. The text of Python 3.11 has 12 MB, which are about
3.5 million tokens. It is built in some ten seconds on one core."""
EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "testing",
    "__pycache__",
    "site-packages",
    "dist-packages",
}
"""Names of folders of the standard library that are left out."""


def installed_files(max_bytes: int = DEFAULT_BYTES) -> list[tuple[str, list[tuple[Path, str]]]]:
    """Returns the default corpus as (group, [(path, name), ...]), with at most `max_bytes` in all
    groups together.

    Files of a group are ordered by the hash of their name, not by the alphabet. So a small
    `max_bytes` selects files from all parts of the library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    topics = library / "pydoc_data" / "topics.py"
    reference = []
    if topics.exists():
        reference = [(topics, "pydoc_data/topics.py")]
    modules = [(path, name) for path, name in _sources(library) if path != topics]
    groups = []
    room = max_bytes
    for group, files in (("language reference", reference), ("standard library", modules)):
        chosen = []
        for path, name in sorted(files, key=_hash_of_name):
            size = path.stat().st_size
            if size <= room:
                chosen.append((path, name))
                room -= size
        if chosen:
            groups.append((group, chosen))
    return groups


def _hash_of_name(file: tuple[Path, str]) -> bytes:
    return hashlib.sha256(file[1].encode()).digest()


def _sources(root: Path) -> Iterator[tuple[Path, str]]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        for file in files:
            path = Path(folder, file)
            # This file depends on the machine, not only on the version of Python.
            made_by_the_build = file.startswith("_sysconfigdata")
            if file.endswith(".py") and path.is_file() and not made_by_the_build:
                yield path, path.relative_to(root).as_posix()
