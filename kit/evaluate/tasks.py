"""Tasks by lm-eval's own, unmodified definitions, with data of this machine."""

import contextlib
import dataclasses
import fnmatch
import functools
import glob
import importlib.util
import json
import logging
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kit.data.dataset import VALIDATION_TEXT, Dataset
from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError, MissingPackageError, did_you_mean
from kit.evaluate.benchmarks import BENCHMARKS, DEFAULT_SEED, HELDOUT, TaskRequest
from kit.evaluate.report import ItemSource
from kit.evaluate.task_data import read_data

LIST_TASKS = "`lm-eval ls tasks` lists all."


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A task of the harness, or a group of them that is scored as one, with its data."""

    request: TaskRequest
    definition: Any  # what the harness's manager returns: its leaves, and the groups they belong to
    num_fewshot: int
    data: tuple[ItemSource, ...]

    @property
    def leaves(self) -> dict[str, Any]:
        """The tasks of a group, or the task itself."""
        return self.definition["tasks"]

    @property
    def task(self) -> Any:
        """The first leaf, which is the task itself unless it is a group."""
        return next(iter(self.leaves.values()))

    @property
    def runs_code(self) -> bool:
        """True if its score comes from running what the model writes."""
        return bool(getattr(self.task, "UNSAFE_CODE", False))


# Names --------------------------------------------------------------------------------------------


def require_harness() -> None:
    """Raises MissingPackageError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError("lm-eval", "eval", "Scoring a model")


PATTERN = re.compile(r"[*?\[]")
"""Characters that make a pattern of a task's name, as in lm-eval."""
DEFINITION = (".yaml", ".yml")
"""Suffixes of files with the definition of a task."""


def requests_of(name: str, include_path: Path | None = None) -> list[TaskRequest]:
    """Returns a request for each task that a name stands for, as in lm-eval's `--tasks`.

    The name may be that of a task, a group or a tag (all its tasks), a pattern such as `arc_*`, a
    file with a definition, a pattern of such files, or a folder with such files.

    Raises:
        ConfigError: the harness has no task, group or tag of that name, or a file is no definition.
    """
    ours = [*BENCHMARKS, HELDOUT]
    if name in ours and include_path is None:
        return [TaskRequest(task=name)]
    if name.endswith(DEFINITION) or os.sep in name or name.startswith("."):
        return _requests_of_files(name)
    with quiet_harness():
        near = task_manager(include_path=include_path).task_index
        if name in near and near[name].kind.name == "TASK":
            return [TaskRequest(task=name)]
        index = task_manager(everything=True, include_path=include_path).task_index
    if PATTERN.search(name):
        found = [each for each in sorted({*index, *ours}) if fnmatch.fnmatch(each, name)]
        if not found:
            raise ConfigError(
                f"tasks: no task, group or tag of lm-eval matches {name!r}. {LIST_TASKS}"
            )
        names = []
        for each in found:
            names += _members(each, index)
    elif name in (*index, HELDOUT):
        names = _members(name, index)
    elif Path(name).is_dir():
        return _requests_of_files(name)
    else:
        close = did_you_mean(name, ours) or did_you_mean(name, index)
        raise ConfigError(
            f"tasks: {name!r} is unknown. {close}Give names of lm-eval (`lm-eval ls tasks`), or "
            f"{', '.join(ours)}. A definition of your own is given by its file (FILE.yaml), or"
            " by its name with --include-path FOLDER."
        )
    return [TaskRequest(task=task) for task in dict.fromkeys(names)]


def _members(name: str, index: Any) -> list[str]:
    """Returns the tasks of a tag, or else the name of a task or group itself."""
    if name in index and index[name].kind.name == "TAG":
        return sorted(index[name].tags)
    return [name]


def _requests_of_files(name: str) -> list[TaskRequest]:
    """Returns a request for each definition in a file, in files of a pattern, or in a folder."""
    from lm_eval.tasks._index import TaskIndex

    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in DEFINITION)
    else:
        files = [Path(each) for each in sorted(glob.glob(str(path)))]
    if not files:
        raise ConfigError(
            f"tasks: {name!r}: no such file, or no definition (*.yaml) in it. {LIST_TASKS}"
        )
    requests = []
    for file in files:
        try:
            entry = TaskIndex.entry_from_path(file)
        except Exception as error:  # YAML of another's: any error of its parser or of an include
            raise ConfigError(
                f"tasks: {file}: is no definition of lm-eval: {type(error).__name__}: {error}"
            ) from error
        if entry is None or not isinstance(entry.name, str):
            raise ConfigError(
                f"tasks: {file}: is no definition of lm-eval: it names no task or group. Add a line"
                " `task: NAME`."
            )
        requests.append(TaskRequest(task=entry.name, definition=str(file.resolve())))
    return requests


def task_manager(everything: bool = False, include_path: Path | None = None) -> Any:
    """Returns the harness's index of the definitions that the kit knows, or of all definitions,
    with those in a folder of the user.

    Indexing the kit's folders takes milliseconds. Indexing all 14,000 tasks takes seconds. An index
    is made once.
    """
    # `functools.cache` would keep a second index for arguments that are given by keyword.
    return _task_manager(everything, include_path)


@functools.cache
def _task_manager(everything: bool, include_path: Path | None) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    if everything:
        return TaskManager(include_path=include_path)
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders: list[str | Path] = sorted({tasks / known.definition for known in BENCHMARKS.values()})
    if include_path is not None:
        folders.append(include_path)  # the last one counts where names are equal
    return TaskManager(include_path=folders, include_defaults=False)


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Within the context, the harness and `datasets` print no notes and no progress bars. Errors
    are still raised. A template of a task is compiled once, and not for each item.
    """
    import datasets
    import lm_eval.api.task
    import lm_eval.utils

    logger = logging.getLogger("lm_eval")
    had_bars = not datasets.are_progress_bars_disabled()
    level = logger.level
    templates = lm_eval.utils.env
    datasets.disable_progress_bars()
    logger.setLevel(logging.ERROR)
    silent = functools.partial(lm_eval.api.task.tqdm, disable=True)
    try:
        with (
            # lm-eval has no option for the progress bar of `build_all_requests`, and tqdm reads
            # TQDM_DISABLE only when it is imported.
            patch.object(lm_eval.api.task, "tqdm", silent),
            # Jinja caches templates that a loader reads, but not those of `from_string`.
            patch.object(templates, "from_string", functools.cache(templates.from_string)),
        ):
            yield
    finally:
        logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


# Definitions --------------------------------------------------------------------------------------


@quiet_harness()
def load_task(
    request: TaskRequest | str,
    *,
    task_data: Path | None = None,
    heldout: Dataset | None = None,
    download: bool = False,
    include_path: Path | None = None,
    seed: int = DEFAULT_SEED,
) -> LoadedTask:
    """Returns a task of the harness or of the user, with data of this machine, or the held-out text
    of a data set.

    A name alone asks for what the task's definition says. The data is that in `task_data`, or in
    the mirror, or in the hub's cache; with `download` the hub is asked for what they lack.
    Definitions in `include_path` are loaded before the harness's own. `seed` draws the solved
    examples of prompts.

    Raises:
        ConfigError: the task is unknown, or no data set was given for its held-out text.
        DataError: its data is not to be had, or its few-shot pool is too small.
    """
    if isinstance(request, str):
        request = TaskRequest(task=request)
    if request.task == HELDOUT:
        definition, sources = _heldout(heldout)
    else:
        if request.definition is None:
            requests_of(request.task, include_path)
        definition, sources = _official(request, task_data, download, include_path)
    tasks = definition["tasks"].values()
    loaded = LoadedTask(
        request=request,
        definition=definition,
        num_fewshot=max(task.get_config("num_fewshot") for task in tasks),
        data=sources,
    )
    for task in tasks:
        task.set_fewshot_seed(seed=seed)
        if request.gen_kwargs and task.OUTPUT_TYPE == "generate_until":
            wanted = generation_arguments(request.gen_kwargs)
            task.set_config(key="generation_kwargs", value=wanted, update=True)
        if loaded.runs_code and request.num_samples > 1:
            task.set_config(key="repeats", value=request.num_samples)
            sampling = {
                "temperature": request.temperature,
                "top_p": request.top_p,
                "do_sample": True,
            }
            task.set_config(key="generation_kwargs", value=sampling, update=True)
    return loaded


def generation_arguments(text: str) -> dict[str, Any]:
    """Returns arguments of generation from `key=value,key=value`, as lm-eval reads it, or JSON.

    Raises:
        ConfigError: the text is neither.
    """
    from lm_eval.utils import simple_parse_args_string

    found = {}
    try:
        if text.lstrip().startswith("{"):
            found = json.loads(text)
        elif all("=" in part for part in text.split(",")):
            found = simple_parse_args_string(text)
    except ValueError:
        pass
    if not found:
        raise ConfigError(
            f"gen_kwargs: {text!r} is not allowed. Give key=value,key=value, for example"
            " max_gen_toks=64,temperature=0.8, or a JSON object."
        )
    return found


def _heldout(dataset: Dataset | None) -> tuple[Any, tuple[ItemSource, ...]]:
    """Returns the task that scores each held-out document from its first token to its last.

    bits_per_byte is the documents' whole negative log2-likelihood over their UTF-8 bytes, which no
    tokenizer can flatter; byte_perplexity is two to that power.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    if dataset is None:
        raise ConfigError(
            "heldout: only a run has a held-out text, that of its data. Give a run, or leave out"
            " this task."
        )
    texts = [{"text": document.text} for document in dataset.validation_documents()]
    documents = datasets.Dataset.from_list(texts)
    aggregations = {"bits_per_byte": "bits_per_byte", "byte_perplexity": "weighted_perplexity"}
    config = {
        "task": HELDOUT,
        "custom_dataset": lambda **_: {"validation": documents},
        "output_type": "loglikelihood_rolling",
        "validation_split": "validation",
        "doc_to_text": "",
        "doc_to_target": "text",
        "num_fewshot": 0,
        "metric_list": [
            {"metric": name, "aggregation": how, "higher_is_better": False}
            for name, how in aggregations.items()
        ],
        "metadata": {"version": 1.0},
    }
    digest = file_sha256(dataset.directory / VALIDATION_TEXT)
    source = ItemSource(origin="corpus", path=VALIDATION_TEXT, sha256=digest)
    return {"tasks": {HELDOUT: ConfigurableTask(config=config)}}, (source,)


def user_definition(request: TaskRequest, include_path: Path | None) -> Path | None:
    """Returns the file of the user that defines a task, None if the definition is lm-eval's."""
    if request.definition is not None:
        return Path(request.definition)
    if include_path is None:
        return None
    entry = task_manager(include_path=include_path).task_index.get(request.task)
    if entry is None or entry.yaml_path is None:
        return None
    if not entry.yaml_path.is_relative_to(include_path):
        return None
    return entry.yaml_path


def _official(
    request: TaskRequest, task_data: Path | None, download: bool, include_path: Path | None
) -> tuple[Any, tuple[ItemSource, ...]]:
    """Returns (definition of a task, sources of its items). The data is that of this machine, or of
    the hub where this machine has none that fits.
    """
    own = user_definition(request, include_path)
    known = BENCHMARKS.get(request.task)
    if own is not None or known is None:
        note = ""
        is_part = False
    else:
        note = f"{known.note}. " if known.note else ""
        is_part = known.full_items is not None
    # With `download` the hub is asked after the mirror, or before it if the mirror has only a part.
    tries = [False]
    if download:
        tries = [is_part, not is_part]
    refused = DataError()
    for hub_only in tries:
        try:
            with _local_data(task_data, download=download, hub_only=hub_only) as sources:
                found = _defined(request, include_path)
            _set_shots(request, found["tasks"])
            if own is not None:
                path = str(own)
                sources.append(ItemSource(origin="definition", path=path, sha256=file_sha256(own)))
            return found, tuple(sources)
        except DataError as error:
            refused = error
    raise DataError(f"{request.task}: {note}{refused}") from refused


@contextlib.contextmanager
def _local_data(
    folder: Path | None, *, download: bool, hub_only: bool = False
) -> Iterator[list[ItemSource]]:
    """Within the context, a task of the harness gets its data by `read_data`, and no connection is
    opened and no program of the hub runs without `download`.

    Yields:
        The sources read so far, in order.
    """
    import datasets.config
    import evaluate
    import huggingface_hub.constants
    from lm_eval.api.task import ConfigurableTask

    sources: list[ItemSource] = []
    fetch = ConfigurableTask.download
    load_metric = evaluate.load

    def fill(task: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        if callable(task.config.custom_dataset):
            return fetch(task, dataset_kwargs, **more)
        options = dict(dataset_kwargs or {})
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
    with (
        # The public option of a definition, `custom_dataset`, does not say which data set a task of
        # a group reads.
        patch.object(ConfigurableTask, "download", fill),
        # lm-eval has no option for the metrics that it fetches from the hub.
        patch.object(evaluate, "load", metric),
        # Both libraries read the environment variable HF_HUB_OFFLINE once, at import, and
        # `datasets.load_dataset` has no option of its own that opens no connection.
        patch.object(datasets.config, "HF_HUB_OFFLINE", offline),
        patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", offline),
    ):
        yield sources


def _manager_of(request: TaskRequest, include_path: Path | None) -> Any:
    """Returns the smallest index with which a task can be loaded. A group needs the full index,
    because its members may be anywhere.
    """
    near = task_manager(include_path=include_path)
    if request.definition is not None:
        from lm_eval.tasks._index import TaskIndex

        entry = TaskIndex.entry_from_path(Path(request.definition))
    else:
        entry = near.task_index.get(request.task)
        if include_path is None and request.task in BENCHMARKS:
            return near
    if entry is not None and entry.kind.name == "TASK":
        return near
    return task_manager(everything=True, include_path=include_path)


def _defined(request: TaskRequest, include_path: Path | None) -> Any:
    """Returns the definition as the harness reads it, with the task's data.

    Raises:
        ConfigError: the kit cannot score such a task, or it is a group without a number.
        DataError: the definition does not fit the data.
    """
    try:
        manager = _manager_of(request, include_path)
        found = manager.load([request.definition or request.task])
    except DataError:  # which is a ValueError
        raise
    # A definition is a program of its own.
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            "lm-eval's definition could not be loaded with this data:"
            f" {type(error).__name__}: {error}"
        ) from error
    group = found.get("groups", {}).get(request.task)
    if group is not None and not group.has_aggregation:
        raise ConfigError(
            f"{request.task}: this group has no score of its own. Give its tasks: "
            f"{', '.join(group.child_names)}."
        )
    for name, task in found["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and request.task not in BENCHMARKS:
            raise ConfigError(
                f"{name}: runs programs that the model wrote. Of such tasks the kit has a sandbox"
                " for humaneval only. Leave it out."
            )
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(
                f"{name}: has pictures or sound, and the kit's models read text. Leave it out."
            )
        _hold_documents(task)
    return found


def _hold_documents(task: Any) -> None:
    """Keeps what is scored as a list: the harness reads, decodes and processes all documents anew
    whenever it looks at some, which takes longer than a small model's answers.
    """
    documents = list(task.eval_docs)
    if task.has_test_docs():
        task.test_docs = lambda: documents
    else:
        task.validation_docs = lambda: documents


def _set_shots(request: TaskRequest, tasks: dict[str, Any]) -> None:
    """Has each prompt show as many solved examples as asked; refuses where there are fewer.

    As the harness does, a task that fixes zero keeps it.
    """
    for task in tasks.values():
        defined = task.get_config("num_fewshot")
        path = task.config.dataset_path
        shots = request.num_fewshot
        if shots is None or defined == 0:
            shots = defined or 0
        task.set_config(key="num_fewshot", value=shots)
        if shots == 0:
            continue
        pool = len(task.fewshot_docs())
        if pool < shots:
            raise DataError(
                f"{shots} shots need as many solved examples, but the pool has {pool}. Use"
                f" --num-fewshot 0, or bring the training split of {path} in a folder, as"
                f" FOLDER/{path}/{task.config.dataset_name or 'default'}/train.parquet or .jsonl,"
                " with --task-data FOLDER, or use --set download=true where the hub can be reached"
            )
