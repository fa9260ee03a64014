"""Loads the unmodified task definitions of lm-eval, and gives the tasks data from this machine."""

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
    """A task of lm-eval, or a group of tasks that is scored as one task, with its data."""

    request: TaskRequest
    definition: Any  # Result of lm-eval's `TaskManager.load`: tasks, and groups of tasks.
    num_fewshot: int
    data: tuple[ItemSource, ...]

    @property
    def leaves(self) -> dict[str, Any]:
        """Dict from name to task object of lm-eval: the tasks of the group, or the single task."""
        return self.definition["tasks"]

    @property
    def task(self) -> Any:
        """First task of the group, or the single task."""
        return next(iter(self.leaves.values()))

    @property
    def runs_code(self) -> bool:
        """Whether the score comes from running the code that the model writes."""
        return bool(getattr(self.task, "UNSAFE_CODE", False))


# Names --------------------------------------------------------------------------------------------


def require_harness() -> None:
    """Raises MissingPackageError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError("lm-eval", "eval", "Scoring a model")


PATTERN = re.compile(r"[*?\[]")
"""Pattern that finds `*`, `?` or `[` in a task name. Such a name is itself a pattern, as in
lm-eval."""
DEFINITION = (".yaml", ".yml")
"""Extensions of files that define a task of lm-eval."""


def requests_of(name: str, include_path: Path | None = None) -> list[TaskRequest]:
    """Returns a request for each task that a name means, by the rules of lm-eval's option
    `--tasks`.

    The name is that of a task, a group or a tag (all its tasks), or a pattern such as `arc_*`. It
    may also be a file with a definition, a pattern of such files, or a folder with such files.
    Raises: ConfigError: lm-eval has no task, group or tag of that name, or a file is not a
    definition.
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
        index = task_manager(all_tasks=True, include_path=include_path).task_index
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
    """Returns the tasks of a tag. For a task or a group, returns its name alone."""
    if name in index and index[name].kind.name == "TAG":
        return sorted(index[name].tags)
    return [name]


def _requests_of_files(name: str) -> list[TaskRequest]:
    """Returns a request for each definition in a file, in the files that match a pattern, or in a
    folder.
    """
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
        except Exception as error:
            # Reading a user's YAML file, or a file that it includes, can raise any exception.
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


def task_manager(all_tasks: bool = False, include_path: Path | None = None) -> Any:
    """Returns lm-eval's index of task definitions, with the definitions in a user's folder.

    By default, the index has only the definitions of BENCHMARKS, which takes milliseconds. With
    `everything` it has all 14,000 tasks, which takes seconds. Each index is made once.
    """
    # `functools.cache` would keep a second index for arguments that are given by keyword.
    return _task_manager(all_tasks, include_path)


@functools.cache
def _task_manager(everything: bool, include_path: Path | None) -> Any:
    import lm_eval
    from lm_eval.tasks import TaskManager

    if everything:
        return TaskManager(include_path=include_path)
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders: list[str | Path] = sorted({tasks / known.definition for known in BENCHMARKS.values()})
    if include_path is not None:
        folders.append(include_path)  # lm-eval prefers the definitions of the last folder.
    return TaskManager(include_path=folders, include_defaults=False)


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Silences the notes and progress bars of lm-eval and of `datasets` within the context. Errors
    are still raised. Each template of a task is compiled once, and not for each item.
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
            # Jinja caches templates that a loader reads, but not templates of `from_string`.
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
    """Returns a task of lm-eval or of the user, with data from this machine. The task `heldout`
    scores the validation text of the data set `heldout`.

    If `request` is a name, the settings are those of the task's definition. The data is read from
    `task_data`, or from the mirror, or from the hub's cache. With `download`, missing data is
    fetched from the hub. Definitions in `include_path` take precedence over lm-eval's own. `seed`
    selects the solved examples in prompts.

    Raises:
        ConfigError: The task is unknown, or `heldout` is requested without a data set.
        DataError: The task's data is not available, or its few-shot pool is too small.
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
    """Returns the generation arguments in a text, which is `key=value,key=value`, as lm-eval reads
    it, or a JSON object.

    Raises:
        ConfigError: The text has neither form.
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
    """Returns (task definition, sources) for scoring each validation document from its first token
    to its last.

    bits_per_byte is the negative log2-likelihood of all documents, divided by their number of UTF-8
    bytes. A division by the number of tokens would depend on the tokenizer. byte_perplexity is 2 to
    the power of bits_per_byte.
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
    """Returns the path of the user's file that defines a task, or None if lm-eval defines it."""
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
    """Returns (definition of a task, sources of its items). The data is read from this machine. If
    this machine has no suitable data and `download` is True, the data is downloaded from the
    Hugging Face hub.
    """
    own = user_definition(request, include_path)
    known = BENCHMARKS.get(request.task)
    if own is not None or known is None:
        note = ""
        is_part = False
    else:
        note = f"{known.note}. " if known.note else ""
        is_part = known.full_items is not None
    # With `download`, the hub is tried after the mirror. If the mirror has only a part of the data,
    # the hub is tried first.
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
    """Makes lm-eval's tasks read their data by `read_data` within the context. Without `download`,
    no connection is opened and no program from the hub runs.

    Yields:
        List of the sources of items. Each task that is loaded within the context appends its
            sources.
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
        # HumanEval's definition fetches its scorer from the hub and calls it once. This scorer does
        # nothing, and a `CodeScorer` replaces it before scoring.
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
        # A definition's public option `custom_dataset` gives no access to the data set that a task
        # of a group reads.
        patch.object(ConfigurableTask, "download", fill),
        # lm-eval has no option for the metrics that it fetches from the hub.
        patch.object(evaluate, "load", metric),
        # Both libraries read the environment variable HF_HUB_OFFLINE once, at import.
        # `datasets.load_dataset` has no option that prevents connections.
        patch.object(datasets.config, "HF_HUB_OFFLINE", offline),
        patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", offline),
    ):
        yield sources


def _manager_of(request: TaskRequest, include_path: Path | None) -> Any:
    """Returns the smallest index of task definitions with which a task can be loaded. A group needs
    the index of all tasks, because its members may be in any folder.
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
    return task_manager(all_tasks=True, include_path=include_path)


def _defined(request: TaskRequest, include_path: Path | None) -> Any:
    """Returns the definition as lm-eval loads it, with the task's data. Raises: ConfigError: The
    kit cannot score a task of this kind, or the group has no score of its own. DataError: The
    definition does not fit the data.
    """
    try:
        manager = _manager_of(request, include_path)
        found = manager.load([request.definition or request.task])
    except DataError:  # DataError is a ValueError, so it is handled before ValueError.
        raise
    # Definitions may contain Python code, which raises its own errors.
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
    """Stores the scored documents of a task as a list. Without the list, lm-eval reads, decodes and
    processes all documents again for each access, which takes longer than the answers of a small
    model.
    """
    documents = list(task.eval_docs)
    if task.has_test_docs():
        task.test_docs = lambda: documents
    else:
        task.validation_docs = lambda: documents


def _set_shots(request: TaskRequest, tasks: dict[str, Any]) -> None:
    """Sets the number of solved examples in each prompt. A task that defines zero keeps zero, as in
    lm-eval. Raises: DataError: The few-shot pool has fewer solved examples than the prompts need.
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
