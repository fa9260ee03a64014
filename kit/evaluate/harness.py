"""Loads tasks of lm-eval and scores a model on them, through the harness's own code."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import random
import statistics
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError
from kit.evaluate import heldout
from kit.evaluate.answer_bits import answer_bits
from kit.evaluate.benchmarks import BENCHMARKS, HELDOUT, TaskRequest
from kit.evaluate.report import Metric, TaskScore
from kit.evaluate.resolver import DataSource, local_first
from kit.evaluate.task_folder import swapped
from kit.evaluate.task_index import quiet, task_manager, tasks_of

if TYPE_CHECKING:
    from kit.evaluate.packed import PackedLM

FEWSHOT_SEED = 1234
"""Which solved examples are drawn; the harness's own default, so that prompts equal those of its
command line."""


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


def load_task(
    request: TaskRequest | str,
    *,
    mirror: Path,
    task_data: Path | None = None,
    heldout_file: Path | None = None,
    download: bool = False,
) -> LoadedTask:
    """Returns the harness's official task, with data of this machine, or the held-out text of the
    corpus.

    A name alone asks for what the task's definition says. The data is that in `task_data`, or in
    the mirror, or in the hub's cache; with `download` the hub is asked for what they lack.

    Raises:
        ConfigError: the task is unknown, or no held-out text was given for it.
        DataError: its data is not to be had, or its few-shot pool is too small.
    """
    request = TaskRequest(task=request) if isinstance(request, str) else request
    with quiet():
        if request.task == HELDOUT:
            definition, sources = _heldout(heldout_file)
        else:
            definition, sources = _official(request, mirror, task_data, download)
        shots = max(_shots(request, task) for task in definition["tasks"].values())
        loaded = LoadedTask(request=request, definition=definition, num_fewshot=shots, data=sources)
        for task in loaded.leaves.values():
            task.set_config(key="num_fewshot", value=_shots(request, task))
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            if loaded.runs_code and request.samples > 1:
                task.set_config(key="repeats", value=request.samples)
                sampling = {
                    "do_sample": True,
                    "temperature": request.temperature,
                    "top_p": request.top_p,
                }
                task.set_config(key="generation_kwargs", value=sampling, update=True)
    return loaded


def _shots(request: TaskRequest, task: Any) -> int:
    """Returns the solved examples in each prompt; as the harness does, a task that fixes zero
    keeps it.
    """
    defined = task.get_config("num_fewshot")
    return defined or 0 if request.shots is None or defined == 0 else request.shots


def _official(
    request: TaskRequest, mirror: Path, task_data: Path | None, download: bool
) -> tuple[Any, tuple[DataSource, ...]]:
    """Returns the definition with data of this machine, or with the hub's where that does not
    do.
    """
    tasks_of(request.task)
    known = BENCHMARKS.get(request.task)
    note = f"{known.note}. " if known and known.note else ""
    # The mirror has a part only.
    hub_first = download and known is not None and known.full_items is not None
    try:
        try:
            return _loaded(request, mirror, task_data, download=download, hub_only=hub_first)
        except DataError:
            if not download:
                raise
            return _loaded(request, mirror, task_data, download=True, hub_only=not hub_first)
    except DataError as error:
        raise DataError(f"{request.task}: {note}{error}") from error


def _loaded(
    request: TaskRequest, mirror: Path, task_data: Path | None, *, download: bool, hub_only: bool
) -> tuple[Any, tuple[DataSource, ...]]:
    import evaluate

    manager, load_metric = task_manager(everything=request.task not in BENCHMARKS), evaluate.load

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

    with local_first(mirror, folder=task_data, download=download, hub_only=hub_only) as sources:
        with swapped(evaluate, "load", metric):
            try:
                found = manager.load([request.task])
            except DataError:
                raise
            except (
                ImportError,
                KeyError,
                TypeError,
                ValueError,
            ) as error:  # a definition is a program of its own
                told = f"{type(error).__name__}: {error}"
                raise DataError(
                    f"lm-eval's definition could not be loaded with this data: {told}"
                ) from error
    _check_scorable(request, found)
    for task in found["tasks"].values():
        # The harness does it anew whenever it looks at the documents.
        if task.config.process_docs is not None:
            task.config.process_docs = functools.cache(task.config.process_docs)
    for task in found["tasks"].values():
        _check_pool(task, _shots(request, task), task_data or mirror)
    return found, tuple(sources)


def _check_pool(task: Any, shots: int, folder: Path) -> None:
    if not shots:
        return
    task.set_config(key="num_fewshot", value=shots)
    if len(task.fewshot_docs()) < shots:
        raise DataError(
            f"{shots} shots need as many solved examples, but the pool has"
            f" {len(task.fewshot_docs())}. Use --set num_fewshot=0, or put the training split of"
            f" {task.config.dataset_path} beside its other file in {folder} as train.parquet, or"
            " use --set download=true where the hub can be reached"
        )


def _check_scorable(request: TaskRequest, found: Any) -> None:
    """Refuses what the kit cannot score, and a group that has no number."""
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


def _heldout(file: Path | None) -> tuple[Any, tuple[DataSource, ...]]:
    if file is None:
        raise ConfigError(
            "heldout: only a run has a held-out text, that of its data. Give a run, or leave out"
            " this task."
        )
    source = DataSource(
        origin="corpus", path=file.name, sha256=file_sha256(file) if file.exists() else None
    )
    return {"tasks": {HELDOUT: heldout.heldout_task(file)}}, (source,)


def score_task(
    lm: "PackedLM",
    loaded: LoadedTask,
    *,
    limit: int | None = None,
    seed: int = 1234,
    scorer: Any = None,
) -> TaskScore:
    """Returns the scores of one task.

    Args:
        lm, loaded: the model and the task.
        limit: at most so many items, drawn at random: the first ones of a data set are not like the
            rest. A group gives each of its tasks a share, and at least one item.
        seed: of that draw, which is the same for all models and does not depend on the other tasks;
            and of sampled texts, which depend on how many are drawn at once, too.
        scorer: a `CodeScorer`, for a task that runs what the model writes.

    Raises:
        ConfigError: the task runs code and there is no scorer for it.
    """
    import torch
    from lm_eval.evaluator import evaluate

    name = loaded.request.task
    if loaded.runs_code and scorer is None:
        raise ConfigError(
            f"{name}: runs programs that the model wrote, and that was not allowed. Allow it with"
            " untrusted_code='isolated' (`kit eval --untrusted-code isolated`), or leave out this"
            " task."
        )
    with quiet(), scorer.in_place() if scorer and loaded.runs_code else contextlib.nullcontext():
        documents = {leaf: list(task.eval_docs) for leaf, task in loaded.leaves.items()}
        chosen = choose_shares(documents, limit, seed)
        lm.num_truncated = 0
        start = time.perf_counter()
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            found: Any = evaluate(
                lm,
                loaded.definition,
                samples=chosen,
                log_samples=False,
                confirm_run_unsafe_code=loaded.runs_code,
            )
        seconds = time.perf_counter() - start
    sizes, total = (
        {leaf: found["n-samples"][leaf][counts] for leaf in documents}
        for counts in ("effective", "original")
    )
    group = loaded.definition.get("groups", {}).get(name)
    alike = (
        {part.metric for part in group.aggregate_metric_list if not part.weight_by_size}
        if group
        else set()
    )
    metrics = _metrics({**found["results"], **found.get("groups", {})}[name], sizes, alike)
    return TaskScore(
        task=name,
        metrics=metrics + answer_bits(loaded.leaves.values()),
        num_items=sum(sizes.values()),
        total_items=_full_items(loaded) or sum(total.values()),
        limit=None if chosen is None else limit,
        seed=seed if chosen is not None or loaded.request.temperature else None,
        precision=lm.precision,
        num_truncated=lm.num_truncated,
        num_fewshot=loaded.num_fewshot,
        shots_asked=loaded.request.shots,
        num_samples=loaded.request.samples,
        temperature=loaded.request.temperature,
        top_p=loaded.request.top_p,
        chance=_chance(loaded.leaves, documents, chosen, alike),
        task_version=str(found["versions"].get(name, loaded.task.VERSION)),
        harness_version=importlib.metadata.version("lm_eval"),
        data=loaded.data,
        seconds=round(seconds, 3),
        note=scorer.isolation if scorer and loaded.runs_code else "",
    )


def _full_items(loaded: LoadedTask) -> int | None:
    """Returns the items of the whole split where the mirror holds a part of it, and that part
    was scored.
    """
    from_mirror = any(source.origin == "mirror" for source in loaded.data)
    known = BENCHMARKS.get(loaded.request.task)
    return known.full_items if known and from_mirror else None


def choose_shares(
    documents: dict[str, list[Any]], limit: int | None, seed: int
) -> dict[str, list[int]] | None:
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


def _metrics(found: dict[str, Any], sizes: dict[str, int], alike: set[str]) -> tuple[Metric, ...]:
    """Returns the numbers of a task or a group; the harness keys them `<metric>,<filter>`.

    `sizes` are the items of each task, `alike` the metrics for which each task of the group counts
    alike.
    """
    metrics = []
    for key, value in found.items():
        name, _, answer_filter = key.partition(",")
        if not answer_filter or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = found.get(f"{name}_stderr,{answer_filter}")
        stderr = float(stderr) if isinstance(stderr, float) else None
        items = _effective_items(sizes, value, stderr) if name in alike else sum(sizes.values())
        metrics.append(
            Metric.of(name if answer_filter == "none" else key, float(value), stderr, items)
        )
    return tuple(metrics)


def _effective_items(sizes: dict[str, int], share: float, stderr: float | None) -> float:
    """Returns of how many items, each of which counts alike, a share would vary as much as this
    mean of tasks does.

    Its variance is taken as if all tasks had the mean's share, or as the harness's error says,
    whichever is more: few items that all are right would have none. Source: L. Kish, "Survey
    Sampling", 1965, on effective sample sizes.
    """
    items = len(sizes) ** 2 / sum(1 / number for number in sizes.values())
    return min(items, share * (1 - share) / stderr**2) if stderr and 0 < share < 1 else items


def _chance(
    leaves: dict[str, Any],
    documents: dict[str, list[Any]],
    chosen: dict[str, list[int]] | None,
    alike: set[str],
) -> float | None:
    """Returns the expected accuracy of guessing, or None where it cannot be known.

    The task's own code judges each choice as if the model gave it all probability: the mean of that
    is what guessing scores, whether one answer is right, several are, or the score is the
    probability of the right ones.
    """
    chances = {}
    for name, task in leaves.items():
        items = (
            documents[name] if chosen is None else [documents[name][item] for item in chosen[name]]
        )
        try:
            chances[name] = [_guessed(task, item) for item in items]
        # A definition is a program of its own, which may want other answers than these.
        except Exception:
            return None
    means = [statistics.fmean(each) for each in chances.values()]
    chance = statistics.fmean(
        means if alike else [value for each in chances.values() for value in each]
    )
    return chance if math.isfinite(chance) else None


def _guessed(task: Any, item: Any) -> float:
    if task.OUTPUT_TYPE != "multiple_choice":
        raise TypeError(f"{task.OUTPUT_TYPE}: nothing to choose from")
    places = range(len(task.doc_to_choice(item)))
    # The same, and a thousand times faster.
    if not callable(task.config.process_results) and not task.multiple_target:
        return 1 / len(places)
    scores = [
        task.process_results(item, [(0.0 if i == place else -1e4, False) for i in places])
        for place in places
    ]
    return statistics.fmean(
        score["acc"] if "acc" in score else score["acc_norm"] for score in scores
    )
