"""Bits per byte of the right answer: what a multiple-choice task says of a model that still
guesses.
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any

from kit.evaluate.report import ANSWER_BITS, Metric


def answer_bits(tasks: Iterable[Any]) -> tuple[Metric, ...]:
    """Returns the metric of multiple-choice tasks that the harness has just scored, over all their
    items; or nothing.

    -log2 p(right answer | prompt) over the answer's bytes in UTF-8, without what the task puts
    between prompt and answer; of several right answers the most likely; then the mean over the
    items. Source: `bpb` of OLMo's olmo/eval/downstream.py (github.com/allenai/OLMo), which Bhagia
    et al. 2024 (arXiv 2412.04403) predict accuracy from. A task that judges answers by a program of
    its own does not say which is right.
    """
    items = [bits for task in tasks for bits in _task_bits(task)]
    if not items:
        return ()
    stderr = statistics.stdev(items) / math.sqrt(len(items)) if len(items) > 1 else None
    return (Metric.of(ANSWER_BITS, statistics.fmean(items), stderr, len(items)),)


def _task_bits(task: Any) -> list[float]:
    if task.OUTPUT_TYPE != "multiple_choice" or callable(task.config.process_results):
        return []
    by_item: dict[int, list[Any]] = {}
    for request in task.instances:
        by_item.setdefault(request.doc_id, []).append(request)
    found = []
    for requests in by_item.values():
        document = requests[0].doc
        # As the harness: where choices are different prompts, what is right is told in place of the
        # prompt.
        right = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        rights, choices = (
            right if isinstance(right, list) else [right],
            task.doc_to_choice(document),
        )
        places = [choices.index(one) if one in choices else one for one in rights]
        bits = [
            _bits(task, request) for request in requests[: len(choices)] if request.idx in places
        ]
        found += [min(bits)] if bits else []
    return found


def _bits(task: Any, request: Any) -> float:
    answer = request.args[1].removeprefix(task.config.target_delimiter)
    return -request.resps[0][0] / math.log(2) / max(1, len(answer.encode()))
