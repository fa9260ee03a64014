"""Data sets of tasks in a folder of the user, in the forms that they are handed about in."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.errors import DataError

READERS = {".parquet": "parquet", ".jsonl": "json"}
"""Endings of data files, and what `datasets` calls their reader."""


def read_folder(
    folder: Path, path: str, name: str | None, scored: str | None, **options: Any
) -> tuple[dict[str, Any], list[Path]]:
    """Returns the splits of the data set `path` (owner/name), configuration `name`, and their
    files; none: not here.

    It is looked for as a copy of its repository, `owner/name` with its card; else as files
    `owner/name/CONFIG/SPLIT.jsonl` or `.parquet` (or `SPLIT-00000-of-00002.parquet` and so on);
    else as one file `CONFIG.jsonl` (`name.jsonl` where there is no configuration), which is the
    split `scored`. All are read by `datasets`, into memory; `options` are what a task gives it, for
    a copy.

    Raises:
        DataError: a file is damaged, or a card or a link leads out of the folder.
    """
    import datasets
    from datasets import data_files
    from datasets.exceptions import DatasetGenerationError
    from datasets.features.features import require_decoding

    root, resolve = folder.resolve(), data_files.resolve_pattern

    def below(pattern: str, *where: Any, **more: Any) -> list[str]:
        found = [pattern] if "://" in pattern else resolve(pattern, *where, **more)
        for file in found:
            if "://" in file or not Path(file).resolve().is_relative_to(root):
                raise DataError(
                    f"{folder / path}: asks for {file}; only what is below {folder} is read. Copy"
                    " it there."
                )
        return found

    for words, own in _forms(folder, path, name, scored, options):
        with tempfile.TemporaryDirectory() as cache:  # for as long as it takes to read
            try:
                with swapped(data_files, "resolve_pattern", below):  # all names go through it
                    builder = datasets.load_dataset_builder(*words, cache_dir=cache, **own)
            except DataError:  # which is a ValueError
                raise
            # No such configuration, or a script, which never runs.
            except (ValueError, FileNotFoundError, RuntimeError):
                continue
            files: Any = builder.config.data_files
            try:
                builder.download_and_prepare()
            except (DatasetGenerationError, ValueError) as error:
                raise DataError(
                    f"{path}: one of {files} is damaged: {error.__cause__ or error}"
                ) from error
            if require_decoding(dict(builder.info.features or {})):
                raise DataError(
                    f"{folder / path}: holds pictures or sound, whose files may lie anywhere. Give"
                    " texts."
                )
            rows: Any = builder.as_dataset(in_memory=True)
            return rows, [Path(file) for split in files.values() for file in split]
    return {}, []


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, `owner.name` is `value`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def read_snapshot(path: str, name: str | None, **options: Any) -> dict[str, Any]:
    """Returns the splits of a copy in the hub's cache, as `hf download` leaves it, which
    `datasets` passes over; none: there is no copy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        copy = Path(snapshot_download(path, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return {}
    whole = copy.parents[1]  # a copy consists of links to files beside it
    return read_folder(whole, str(copy.relative_to(whole)), name, None, **options)[0]


def _forms(
    folder: Path, path: str, name: str | None, scored: str | None, options: dict[str, Any]
) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """Yields what may be given to `datasets` to read it, by place and by keyword."""
    here = folder / path
    if (here / "README.md").is_file():
        yield (str(here), name), options
    for place in [here / name] if name else [here / "default", here, here / "data"]:
        for ending, reader in READERS.items():
            splits: dict[str, list[str]] = {}
            for file in sorted(place.glob(f"*{ending}")):
                splits.setdefault(re.sub(r"-\d+-of-\d+.*", "", file.stem), []).append(str(file))
            if splits:
                yield (reader,), {"data_files": splits}
    for ending, reader in READERS.items():
        for file in (place / f"{name or Path(path).name}{ending}" for place in (here, folder)):
            if scored and file.is_file():
                yield (reader,), {"data_files": {scored: [str(file)]}}
