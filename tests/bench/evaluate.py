"""Scoring speed on this machine: the evaluation harness with the kit's packing of requests,
compared with the harness's own Hugging Face model.

Weights, tokenizer and items of the smoke suite's tasks are equal. Each contestant runs in one
process with one thread in fp32. The contestants alternate, and both score the same new items in
each round. The time includes the complete path of the harness, from building prompts to metrics.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kit.config.spec import ModelSpec
from kit.data import Dataset
from kit.data.tokenizer import Tokenizer
from kit.evaluate.task_data import build_mirror
from kit.interop.weights.smollm2 import load_smollm2
from kit.model import Decoder, build_decoder
from kit.show.results import Row
from tests.bench.turns import median_row, ratio_row, take_turns

TASKS = ("piqa", "arc_easy", "winogrande")
TARGET = 2.0
SCORERS = {"kit": "the kit", "HFLM": "lm-eval's `HFLM`"}
"""Name of each contestant in the rows of the table."""
SAME_NATS = 1e-3
"""Largest difference of two log-likelihoods in nats. Above this limit the two contestants do not
score equal inputs."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to score, and the number of items that are scored per task and round."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    items: int
    rounds: int
    batch_size: int  # Batch size of the harness's own model, which does not pack requests.


def measure(workplace: Path, dataset: Dataset) -> list[Row]:
    """Returns items per second of both contestants and the kit's ratio to the harness, for the demo
    model and SmolLM2-135M.

    Raises:
        DataError: The benchmarks or SmolLM2 can neither be found nor downloaded.
        RuntimeError: The two contestants give different log-likelihoods for an item.
    """
    build_mirror()
    torch.set_num_threads(1)
    demo = build_decoder(ModelSpec.preset("demo").replace(init_std=0.1)).eval()
    smollm2, tokenizer = load_smollm2()
    subjects = (
        Subject("demo model", demo, dataset.tokenizer(), items=30, rounds=4, batch_size=32),
        Subject("SmolLM2-135M", smollm2, tokenizer, items=6, rounds=3, batch_size=8),
    )
    return [each for subject in subjects for each in compare(subject)]


def compare(subject: Subject) -> list[Row]:
    """Returns the result rows of one model."""
    from kit.evaluate.benchmarks import Options
    from kit.evaluate.loading import decoder_lm
    from kit.evaluate.packed import HFLM
    from kit.evaluate.tasks import load_task

    length = min(1024, subject.decoder.spec.sequence_length)
    ours = decoder_lm(subject.decoder, subject.tokenizer, length, Options(), "cpu")
    options: Any = {"batch_size": subject.batch_size, "max_length": length}
    theirs = HFLM(ours.model, tokenizer=ours.tokenizer, **options)
    tasks = {name: load_task(name).task for name in TASKS}

    def scoring(lm: Any, name: str) -> Any:
        def score(number: int) -> tuple[float, list[float]]:
            items = list(range(number * subject.items, (number + 1) * subject.items))
            return _score(lm, name, tasks[name], items)

        return score

    times = {}
    with _silent():
        for name in TASKS:
            ways = {"kit": scoring(ours, name), "HFLM": scoring(theirs, name)}
            found = take_turns(ways, subject.rounds)
            check_same(found, name)
            times[name] = {
                who: [seconds for seconds, _ in answers] for who, answers in found.items()
            }
    return judged(subject, times)


def _score(lm: Any, name: str, task: Any, items: list[int]) -> tuple[float, list[float]]:
    """Returns (seconds of the harness, log-likelihood of each continuation)."""
    from lm_eval.evaluator import evaluate

    start = time.perf_counter()
    found: Any = evaluate(
        lm, {"tasks": {name: task}}, samples={name: items}, log_samples=True, bootstrap_iters=0
    )
    seconds = time.perf_counter() - start
    return seconds, [
        response[0][0] for sample in found["samples"][name] for response in sample["resps"]
    ]


def check_same(found: dict[str, list[tuple[float, list[float]]]], task: str) -> None:
    for (_, ours), (_, theirs) in zip(found["kit"], found["HFLM"], strict=True):
        worst = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
        if worst > SAME_NATS:
            raise RuntimeError(
                f"{task}: an item's log-likelihood differs by {worst:.2g} nats, so speeds do not"
                " compare."
            )


def judged(subject: Subject, times: dict[str, dict[str, list[float]]]) -> list[Row]:
    """Returns rows with items per second of both contestants and the kit's ratio. `times` maps task
    and contestant to the seconds of each round.
    """
    whole = {
        who: [sum(rounds) for rounds in zip(*(times[task][who] for task in TASKS), strict=True)]
        for who in ("kit", "HFLM")
    }
    items, rows = subject.items * len(TASKS), []
    for who, batch in {"kit": "", "HFLM": f"batch size {subject.batch_size}"}.items():
        rates = [items / seconds for seconds in whole[who]]
        name = f"scoring by {SCORERS[who]}, {subject.name}"
        rows.append(median_row(name, rates, "items/s", note=batch))
    for label, taken in {**times, "all tasks": whole}.items():
        least = TARGET if label == "all tasks" else None
        name = f"speed of the kit / speed of HFLM, {subject.name}, {label}"
        rows.append(ratio_row(name, taken["HFLM"], taken["kit"], at_least=least))
    return rows


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Within the context, the harness and its model print no notes and no progress bars."""
    import lm_eval.api.model
    from lm_eval.models import huggingface

    from kit.evaluate.tasks import quiet_harness

    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_harness())
        for module in (lm_eval.api.model, huggingface):
            stack.enter_context(
                patch.object(module, "tqdm", functools.partial(module.tqdm, disable=True))
            )
        yield
