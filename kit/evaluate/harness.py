"""Loads tasks of lm-eval and scores a model on them, through the harness's own code."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError, DataError, MissingPackageError
from kit.evaluate import heldout
from kit.evaluate.report import Metric, TaskScore
from kit.evaluate.resolver import DataSource, mirror_first, swapped
from kit.evaluate.task_data import benchmark, file_sha256

if TYPE_CHECKING:
    from kit.evaluate.adapter import DecoderLM

FEWSHOT_SEED = 1234
"""Which solved examples are drawn; the harness's own default, so that prompts equal those of its command line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A task of the harness with its data."""

    name: str
    task: Any
    num_fewshot: int
    data: tuple[DataSource, ...]


def require_harness() -> None:
    """Raises MissingPackageError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError("lm-eval", "eval", "Scoring a model")


def load_task(
    name: str,
    *,
    mirror: Path,
    heldout_file: Path | None = None,
    num_fewshot: int | None = None,
    download: bool = False,
) -> LoadedTask:
    """Returns the harness's official task, with data from the mirror, or the held-out text of the corpus.

    Args:
        name: of a benchmark, or `heldout`.
        mirror: folder of the benchmark data.
        heldout_file: `validation.jsonl` of the corpus, for `heldout`.
        download: may the hub be asked for what the mirror lacks?
        num_fewshot: solved examples in the prompt; None for the number in the task's definition, or zero.

    Raises:
        ConfigError: the task is unknown, or no held-out text was given for it.
        DataError: its data is not to be had, or its few-shot pool is too small.
    """
    with quiet():
        if name == heldout.NAME:
            task, sources = _heldout(heldout_file)
        else:
            task, sources = _official(name, mirror, download)
        shots = task.get_config("num_fewshot")
        if num_fewshot is not None and shots != 0:  # as the harness does: a task that fixes zero keeps it
            shots = num_fewshot
        task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if shots and len(task.fewshot_docs()) < shots:
            raise DataError(
                f"{name}: {shots} shots need as many solved examples, but the pool has {len(task.fewshot_docs())}. "
                f"Use num_fewshot=0, or put the data set's training split beside the mirror's file as train.parquet "
                f"({mirror / benchmark(name).path})."
            )
    return LoadedTask(name=name, task=task, num_fewshot=shots or 0, data=sources)


def _official(name: str, mirror: Path, download: bool) -> tuple[Any, tuple[DataSource, ...]]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    # Indexing one folder takes milliseconds; the default index of all 14,000 tasks takes ten seconds.
    folder = Path(lm_eval.__file__).parent / "tasks" / benchmark(name).definition
    manager = TaskManager(include_path=folder, include_defaults=False)
    with mirror_first(mirror, download=download) as sources:
        return manager.load([name])["tasks"][name], tuple(sources)


def _heldout(file: Path | None) -> tuple[Any, tuple[DataSource, ...]]:
    if file is None:
        raise ConfigError("heldout: no held-out text was given. Name a validation.jsonl, or leave out this task.")
    task = heldout.heldout_task(file)
    return task, (DataSource(origin="corpus", path=file.name, sha256=file_sha256(file)),)


def score_task(lm: "DecoderLM", loaded: LoadedTask, *, limit: int | None = None, seed: int = 1234) -> TaskScore:
    """Returns the scores of one task.

    Args:
        lm: the model.
        loaded: the task.
        limit: at most so many items, drawn at random: the first ones of a data set are not like the rest.
        seed: of that draw, which is the same for all models and does not depend on the other tasks.
    """
    from lm_eval.evaluator import evaluate

    name, task = loaded.name, loaded.task
    with quiet():
        documents = list(task.eval_docs)
        chosen = choose_items(name, len(documents), limit, seed)
        samples = None if chosen is None else {name: chosen}
        lm.num_truncated = 0
        start = time.perf_counter()
        found: Any = evaluate(lm, {"tasks": {name: task}}, samples=samples, log_samples=False)
        seconds = time.perf_counter() - start
        counts = found["n-samples"][name]
    return TaskScore(
        task=name,
        metrics=_metrics(found["results"][name]),
        num_items=counts["effective"],
        total_items=counts["original"],
        seed=None if chosen is None else seed,
        num_truncated=lm.num_truncated,
        num_fewshot=loaded.num_fewshot,
        chance=_chance(task, documents),
        task_version=str(task.VERSION),
        harness_version=importlib.metadata.version("lm_eval"),
        data=loaded.data,
        seconds=round(seconds, 3),
    )


def choose_items(task: str, total: int, limit: int | None, seed: int) -> list[int] | None:
    """Returns the sorted indices of a random subset, or None for all items."""
    if limit is None or limit >= total:
        return None
    return sorted(random.Random(f"{seed}:{task}").sample(range(total), limit))


def _metrics(found: dict[str, Any]) -> tuple[Metric, ...]:
    """Returns the numbers of a task; the harness keys them `<metric>,<filter>`."""
    metrics = []
    for key, value in found.items():
        name, _, answer_filter = key.partition(",")
        if not answer_filter or name.endswith("_stderr"):
            continue
        stderr = found[f"{name}_stderr,{answer_filter}"]
        metrics.append(
            Metric(
                name=name if answer_filter == "none" else key,
                value=float(value),
                stderr=float(stderr) if isinstance(stderr, float) else None,
            )
        )
    return tuple(metrics)


def _chance(task: Any, documents: list[Any]) -> float | None:
    """Returns the expected accuracy of guessing: the mean of one over the number of choices."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    return sum(1 / len(task.doc_to_choice(document)) for document in documents) / len(documents)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the context, the harness and `datasets` print no notes and no progress bars; errors are still raised."""
    import datasets
    import lm_eval.api.task

    bars = datasets.are_progress_bars_disabled()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    datasets.disable_progress_bars()
    logger.setLevel(logging.ERROR)
    silent = functools.partial(lm_eval.api.task.tqdm, disable=True)
    try:
        with swapped(lm_eval.api.task, "tqdm", silent):
            yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
