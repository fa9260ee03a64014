"""Tasks by lm-eval's own, unmodified definitions, with data of this machine."""

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import logging
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kit.data.dataset import VALIDATION_TEXT, Dataset
from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError, MissingPackageError
from kit.evaluate.benchmarks import BENCHMARKS, HELDOUT, TaskRequest
from kit.evaluate.report import ItemSource
from kit.evaluate.task_data import read_data

FEWSHOT_SEED = 1234
"""Which solved examples are drawn; the harness's own default, so that prompts equal those of its
command line."""


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


def tasks_of(name: str) -> list[str]:
    """Returns the tasks that a name asks for: itself, if it is a task or a group of them, or all
    tasks of a tag.

    Raises:
        ConfigError: the harness has none of that name.
    """
    ours = [*BENCHMARKS, HELDOUT]
    if name in ours:
        return [name]
    with quiet():
        index = task_manager(everything=True).task_index
    if name not in index:
        close = difflib.get_close_matches(name, ours, 1) or difflib.get_close_matches(
            name, index, 1
        )
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"tasks: {name!r} is unknown. {hint}Give names of lm-eval (`lm-eval ls tasks`), or "
            f"{', '.join(ours)}."
        )
    return sorted(index[name].tags) if index[name].kind.name == "TAG" else [name]


@functools.cache
def task_manager(everything: bool = False) -> Any:
    """Returns the harness's index of the definitions that the kit knows, or of all.

    Indexing the kit's folders takes milliseconds; `everything`, 14,000 tasks, takes seconds.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if everything:
        return TaskManager()
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders: list[str | Path] = sorted({tasks / known.definition for known in BENCHMARKS.values()})
    return TaskManager(include_path=folders, include_defaults=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the context, the harness and `datasets` print no notes and no progress bars; errors
    are still raised. A template of a task is compiled once, not anew for each item.
    """
    import datasets
    import lm_eval.api.task
    import lm_eval.utils

    logger, had_bars = logging.getLogger("lm_eval"), not datasets.are_progress_bars_disabled()
    level, templates = logger.level, lm_eval.utils.env
    datasets.disable_progress_bars()
    logger.setLevel(logging.ERROR)
    silent = functools.partial(lm_eval.api.task.tqdm, disable=True)
    try:
        with (
            patch.object(lm_eval.api.task, "tqdm", silent),
            patch.object(templates, "from_string", functools.cache(templates.from_string)),
        ):
            yield
    finally:
        logger.setLevel(level)
        if had_bars:
            datasets.enable_progress_bars()


# Definitions --------------------------------------------------------------------------------------


@quiet()
def load_task(
    request: TaskRequest | str,
    *,
    task_data: Path | None = None,
    heldout: Dataset | None = None,
    download: bool = False,
) -> LoadedTask:
    """Returns the harness's official task, with data of this machine, or the held-out text of a
    data set.

    A name alone asks for what the task's definition says. The data is that in `task_data`, or in
    the mirror, or in the hub's cache; with `download` the hub is asked for what they lack.

    Raises:
        ConfigError: the task is unknown, or no data set was given for its held-out text.
        DataError: its data is not to be had, or its few-shot pool is too small.
    """
    request = TaskRequest(task=request) if isinstance(request, str) else request
    if request.task == HELDOUT:
        definition, sources = _heldout(heldout)
    else:
        tasks_of(request.task)
        definition, sources = _official(request, task_data, download)
    tasks = definition["tasks"].values()
    shots = max(task.get_config("num_fewshot") for task in tasks)
    loaded = LoadedTask(request=request, definition=definition, num_fewshot=shots, data=sources)
    for task in tasks:
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if loaded.runs_code and request.num_samples > 1:
            task.set_config(key="repeats", value=request.num_samples)
            sampling = {
                "temperature": request.temperature,
                "top_p": request.top_p,
                "do_sample": True,
            }
            task.set_config(key="generation_kwargs", value=sampling, update=True)
    return loaded


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


def _official(
    request: TaskRequest, task_data: Path | None, download: bool
) -> tuple[Any, tuple[ItemSource, ...]]:
    """Returns the definition with data of this machine, or with the hub's where that does not
    do.
    """
    known = BENCHMARKS.get(request.task)
    note = f"{known.note}. " if known and known.note else ""
    # The mirror has a part only.
    hub_first = download and known is not None and known.full_items is not None
    refused = DataError()
    for hub_only in [hub_first, not hub_first] if download else [False]:
        try:
            with _local_data(task_data, download=download, hub_only=hub_only) as sources:
                found = _defined(request)
            _set_shots(request, found["tasks"])
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
    fetch, load_metric = ConfigurableTask.download, evaluate.load

    def fill(task: Any, dataset_kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        if callable(task.config.custom_dataset):
            return fetch(task, dataset_kwargs, **more)
        options = {**(dataset_kwargs or {})}
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
        patch.object(ConfigurableTask, "download", fill),
        patch.object(evaluate, "load", metric),
        # Both libraries read the environment variable once, at import.
        patch.object(datasets.config, "HF_HUB_OFFLINE", offline),
        patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", offline),
    ):
        yield sources


def _defined(request: TaskRequest) -> Any:
    """Returns the definition as the harness reads it, with the task's data.

    Raises:
        ConfigError: the kit cannot score such a task, or it is a group without a number.
        DataError: the definition does not fit the data.
    """
    try:
        found = task_manager(everything=request.task not in BENCHMARKS).load([request.task])
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
    setattr(task, "test_docs" if task.has_test_docs() else "validation_docs", lambda: documents)


def _set_shots(request: TaskRequest, tasks: dict[str, Any]) -> None:
    """Has each prompt show as many solved examples as asked; refuses where there are fewer.

    As the harness does, a task that fixes zero keeps it.
    """
    for task in tasks.values():
        defined, path = task.get_config("num_fewshot"), task.config.dataset_path
        is_fixed = request.num_fewshot is None or defined == 0
        shots = defined or 0 if is_fixed else request.num_fewshot
        task.set_config(key="num_fewshot", value=shots)
        if shots and (pool := len(task.fewshot_docs())) < shots:
            raise DataError(
                f"{shots} shots need as many solved examples, but the pool has {pool}. Use --set"
                f" num_fewshot=0, or bring the training split of {path} in a folder, as"
                f" FOLDER/{path}/{task.config.dataset_name or 'default'}/train.parquet or .jsonl,"
                " with --task-data FOLDER, or use --set download=true where the hub can be reached"
            )
