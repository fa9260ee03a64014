"""Items of real benchmarks, and what models answer. `python -m tests.evaluate.real_items` pins
SmolLM2's answers.

The pinned file holds numbers of items, not their texts, except for sentences of BLiMP (CC-BY 4.0,
Warstadt et al. 2020, arXiv 1912.00582, github.com/alexwarstadt/blimp): one pair of each of its
terms.
"""

import functools
import json
from pathlib import Path
from typing import Any

from lm_eval.evaluator import evaluate

from kit.evaluate.harness import choose_items
from kit.evaluate.tasks import load_task, quiet
from tests.evaluate.conftest import asked

TASKS = ("piqa", "arc_easy", "hellaswag")
ITEMS = 8
PINNED = Path(__file__).parent / "data" / "smollm2_items.json"


@functools.cache
def task_of(name: str) -> Any:
    """Returns a benchmark, loaded once: that takes longer than a small model's answers."""
    return load_task(name).task


def answers(lm: Any, task_name: str, items: list[int] | None = None) -> list[tuple[float, bool]]:
    """Returns log-likelihood and greedy choice of each continuation of items (default: eight)."""
    task = task_of(task_name)
    if items is None:
        items = choose_items(task_name, len(task.eval_docs), ITEMS, seed=1234)
    with quiet():
        found: Any = evaluate(
            lm,
            {"tasks": {task_name: task}},
            samples={task_name: items},
            log_samples=True,
            bootstrap_iters=0,
        )
    return [
        tuple(response[0]) for sample in found["samples"][task_name] for response in sample["resps"]
    ]


def sentence_answers(lm: Any, sentences: list[str]) -> list[tuple[float, bool]]:
    """Returns the same for whole sentences, as BLiMP scores them."""
    with quiet():
        return lm.loglikelihood(asked("loglikelihood", [("", text) for text in sentences]), True)


def main() -> None:
    """Writes the file again, from its sentences and the items of the mirror."""
    from kit.convert.smollm2 import load_smollm2
    from kit.evaluate.benchmarks import Options
    from kit.evaluate.loading import decoder_lm

    lm = decoder_lm(*load_smollm2(), 2048, Options(), "cpu")
    old = json.loads(PINNED.read_text())
    tasks = {name: [round(value, 4) for value, _ in answers(lm, name)] for name in TASKS}
    pairs = old["blimp"]["pairs"]
    scores = sentence_answers(lm, [text for pair in pairs for text in pair])
    old |= {
        "tasks": tasks,
        "blimp": {"pairs": pairs, "log_likelihoods": [round(value, 4) for value, _ in scores]},
    }
    PINNED.write_text(json.dumps(old, indent=1) + "\n")


if __name__ == "__main__":
    main()
