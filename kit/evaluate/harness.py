"""Loads tasks of lm-eval and scores a model on them, through the harness's own code."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import random
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError, MissingPackageError
from kit.evaluate import heldout
from kit.evaluate.benchmarks import BENCHMARKS, HELDOUT, TaskRequest, benchmark
from kit.evaluate.report import Metric, TaskScore
from kit.evaluate.resolver import DataSource, mirror_first, swapped

if TYPE_CHECKING:
    from kit.evaluate.adapter import DecoderLM

FEWSHOT_SEED = 1234
"""Which solved examples are drawn; the harness's own default, so that prompts equal those of its command line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A task of the harness, or a group of them that is scored as one, with its data."""

    request: TaskRequest
    definition: Any  # what the harness's manager returns: its leaves, and the groups they belong to
    num_fewshot: int
    data: tuple[DataSource, ...]

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


def require_harness() -> None:
    """Raises MissingPackageError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError("lm-eval", "eval", "Scoring a model")


def load_task(
    request: TaskRequest | str, *, mirror: Path, heldout_file: Path | None = None, download: bool = False
) -> LoadedTask:
    """Returns the harness's official task, with data from the mirror, or the held-out text of the corpus.

    A name alone asks for what the task's definition says. With `download` the hub is asked for what the mirror lacks.

    Raises:
        ConfigError: the task is unknown, or no held-out text was given for it.
        DataError: its data is not to be had, or its few-shot pool is too small.
    """
    request = TaskRequest(task=request) if isinstance(request, str) else request
    with quiet():
        if request.task == HELDOUT:
            definition, sources = _heldout(heldout_file)
        else:
            definition, sources = _official(request, mirror, download)
        loaded = LoadedTask(request=request, definition=definition, num_fewshot=_shots(request, definition),
                            data=sources)  # fmt: skip
        for task in loaded.leaves.values():
            task.set_config(key="num_fewshot", value=loaded.num_fewshot)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            if loaded.runs_code and request.samples > 1:
                task.set_config(key="repeats", value=request.samples)
                sampling = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p}
                task.set_config(key="generation_kwargs", value=sampling, update=True)
    return loaded


def _shots(request: TaskRequest, definition: Any) -> int:
    """Returns the solved examples in each prompt; as the harness does, a task that fixes zero keeps it."""
    defined = next(iter(definition["tasks"].values())).get_config("num_fewshot")
    return defined or 0 if request.shots is None or defined == 0 else request.shots


def _official(request: TaskRequest, mirror: Path, download: bool) -> tuple[Any, tuple[DataSource, ...]]:
    """Returns the definition with the mirror's data, or with the hub's where the mirror's does not do."""
    known = benchmark(request.task)
    hub_first = download and known.full_items is not None  # the mirror has a part only
    try:
        try:
            return _loaded(request, mirror, download=download, hub_only=hub_first)
        except DataError:
            if not download:
                raise
            return _loaded(request, mirror, download=True, hub_only=not hub_first)
    except DataError as error:
        if not known.files:
            raise DataError(
                f"{request.task}: {known.note} ({known.repository}). Score it once with --download (download=True) "
                f"where the hub can be reached; its cache on this machine is enough from then on."
            ) from error
        note = f" ({known.note})" if known.note else ""
        raise DataError(f"{request.task}: {error}{note}") from error


def _loaded(
    request: TaskRequest, mirror: Path, *, download: bool, hub_only: bool
) -> tuple[Any, tuple[DataSource, ...]]:
    import evaluate

    with mirror_first(mirror, download=download, hub_only=hub_only) as sources:
        # HumanEval's definition fetches its scorer from the hub and tries it; a `CodeScorer` takes its place later.
        stand_in = types.SimpleNamespace(compute=lambda **_: ({}, {}))
        with swapped(evaluate, "load", lambda *_, **__: stand_in):
            found = task_manager().load([request.task])
    for task in found["tasks"].values():
        if task.config.process_docs is not None:  # the harness does it anew whenever it looks at the documents
            task.config.process_docs = functools.cache(task.config.process_docs)
    shots = _shots(request, found)
    for task in found["tasks"].values() if shots else ():
        task.set_config(key="num_fewshot", value=shots)
        if len(task.fewshot_docs()) < shots:
            raise DataError(
                f"{shots} shots need as many solved examples, but the pool has {len(task.fewshot_docs())}. "
                f"Use --num-fewshot 0, or put the data set's training split beside the mirror's file as train.parquet "
                f"({mirror / benchmark(request.task).path}), or use --download where the hub can be reached"
            )
    return found, tuple(sources)


@functools.cache
def task_manager() -> Any:
    """Returns the harness's index of the definitions that the kit uses.

    Indexing these folders takes milliseconds; the default index of all 14,000 tasks takes ten seconds.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders: list[str | Path] = [tasks / folder for folder in sorted({b.definition for b in BENCHMARKS.values()})]
    return TaskManager(include_path=folders, include_defaults=False)


def _heldout(file: Path | None) -> tuple[Any, tuple[DataSource, ...]]:
    if file is None:
        raise ConfigError(
            "heldout: only a run has a held-out text, that of its data. Give a run, or leave out this task."
        )
    source = DataSource(origin="corpus", path=file.name, sha256=file_sha256(file) if file.exists() else None)
    return {"tasks": {HELDOUT: heldout.heldout_task(file)}}, (source,)


def score_task(
    lm: "DecoderLM", loaded: LoadedTask, *, limit: int | None = None, seed: int = 1234, scorer: Any = None
) -> TaskScore:
    """Returns the scores of one task.

    Args:
        lm, loaded: the model and the task.
        limit: at most so many items, drawn at random: the first ones of a data set are not like the rest. A group
            gives each of its tasks a share, and at least one item.
        seed: of that draw, which is the same for all models and does not depend on the other tasks.
        scorer: a `CodeScorer`, for a task that runs what the model writes.

    Raises:
        ConfigError: the task runs code and there is no scorer for it.
    """
    from lm_eval.evaluator import evaluate

    name = loaded.request.task
    if loaded.runs_code and scorer is None:
        raise ConfigError(
            f"{name}: runs programs that the model wrote, and that was not allowed. Allow it with "
            f"untrusted_code='isolated' (`kit eval --untrusted-code isolated`), or leave out this task."
        )
    with quiet(), scorer.in_place() if scorer and loaded.runs_code else contextlib.nullcontext():
        documents = {leaf: list(task.eval_docs) for leaf, task in loaded.leaves.items()}
        chosen = choose_shares(documents, limit, seed)
        lm.num_truncated = 0
        start = time.perf_counter()
        found: Any = evaluate(
            lm, loaded.definition, samples=chosen, log_samples=False, confirm_run_unsafe_code=loaded.runs_code
        )
        seconds = time.perf_counter() - start
    items = {
        counts: sum(found["n-samples"][leaf][counts] for leaf in documents) for counts in ("effective", "original")
    }
    full = None if name == HELDOUT else _full_items(loaded)
    return TaskScore(
        task=name,
        metrics=_metrics({**found["results"], **found.get("groups", {})}[name], items["effective"]),
        num_items=items["effective"],
        total_items=full or items["original"],
        limit=None if chosen is None else limit,
        seed=seed if chosen is not None or loaded.request.temperature else None,
        precision=lm.precision,
        num_truncated=lm.num_truncated,
        num_fewshot=loaded.num_fewshot,
        shots_asked=loaded.request.shots,
        num_samples=loaded.request.samples,
        temperature=loaded.request.temperature,
        top_p=loaded.request.top_p,
        chance=_chance(loaded.leaves, documents),
        task_version=str(found["versions"].get(name, loaded.task.VERSION)),
        harness_version=importlib.metadata.version("lm_eval"),
        data=loaded.data,
        seconds=round(seconds, 3),
        note=scorer.isolation if scorer and loaded.runs_code else "",
    )


def _full_items(loaded: LoadedTask) -> int | None:
    """Returns the items of the whole split where the mirror holds a part of it, and that part was scored."""
    from_mirror = any(source.origin == "mirror" for source in loaded.data)
    return benchmark(loaded.request.task).full_items if from_mirror else None


def choose_shares(documents: dict[str, list[Any]], limit: int | None, seed: int) -> dict[str, list[int]] | None:
    """Returns the items of each task of a group, in proportion to its size; None for all items."""
    total = sum(map(len, documents.values()))
    if limit is None or limit >= total:
        return None
    shares = {name: max(1, round(limit * len(items) / total)) for name, items in documents.items()}
    return {
        name: choose_items(name, len(items), shares[name], seed) or list(range(len(items)))
        for name, items in documents.items()
    }


def choose_items(task: str, total: int, limit: int | None, seed: int) -> list[int] | None:
    """Returns the sorted indices of a random subset, or None for all items."""
    if limit is None or limit >= total:
        return None
    return sorted(random.Random(f"{seed}:{task}").sample(range(total), limit))


def _metrics(found: dict[str, Any], num_items: int) -> tuple[Metric, ...]:
    """Returns the numbers of a task; the harness keys them `<metric>,<filter>`."""
    metrics = []
    for key, value in found.items():
        name, _, answer_filter = key.partition(",")
        if not answer_filter or name.endswith("_stderr"):
            continue
        stderr = found.get(f"{name}_stderr,{answer_filter}")
        stderr = float(stderr) if isinstance(stderr, float) else None
        metrics.append(Metric.of(name if answer_filter == "none" else key, float(value), stderr, num_items))
    return tuple(metrics)


def _chance(leaves: dict[str, Any], documents: dict[str, list[Any]]) -> float | None:
    """Returns the expected accuracy of guessing: the mean of one over the number of choices."""
    if any(task.OUTPUT_TYPE != "multiple_choice" for task in leaves.values()):
        return None
    chances = [1 / len(task.doc_to_choice(doc)) for name, task in leaves.items() for doc in documents[name]]
    return sum(chances) / len(chances)


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
