"""The default corpus: the language reference and the standard library, which every Python
installation already has, so nothing is fetched.

Its bytes depend on the version of Python alone, so that two readers with the same version see the
same losses.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DEFAULT_BYTES = 24_000_000
"""Largest size of the default corpus. Python 3.11's text has 12 MB: about 3.5 million tokens,
built in some ten seconds on one core."""
EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "testing",
    "__pycache__",
    "site-packages",
    "dist-packages",
}


def installed_files(max_bytes: int = DEFAULT_BYTES) -> list[tuple[str, list[tuple[Path, str]]]]:
    """Returns the files of the default corpus by group, each as (path, name), at most `max_bytes`
    in all.

    Within a group the order is by the hash of the name, so that a small corpus is a sample of
    everything and not of the letter A.
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
            made_by_the_build = file.startswith("_sysconfigdata")  # of this machine, not of Python
            if file.endswith(".py") and path.is_file() and not made_by_the_build:
                yield path, path.relative_to(root).as_posix()
