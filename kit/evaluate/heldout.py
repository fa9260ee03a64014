"""Held-out text of the corpus as a task of the harness: bits per byte, which no tokenizer can
flatter.
"""

import json
from pathlib import Path
from typing import Any

from kit.errors import DataError
from kit.evaluate.benchmarks import HELDOUT


def read_documents(file: Path) -> list[str]:
    """Returns the texts of a `validation.jsonl`, whose rows have at least `text`.

    Raises:
        DataError: the file is missing, empty, or has a row without text.
    """
    if not file.exists():
        raise DataError(
            f"{file}: no such file. Build the data set with `kit data build`, or leave out task"
            f" {HELDOUT!r}."
        )
    texts = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)["text"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise DataError(
                    f"{file}, line {number}: expected a JSON object with a key 'text'."
                ) from error
            if text:
                texts.append(text)
    if not texts:
        raise DataError(
            f"{file}: holds no text. Build the data set again with more held-out documents."
        )
    return texts


def heldout_task(file: Path) -> Any:
    """Returns the harness's task that scores each document of `file` from its first token to its
    last.

    bits_per_byte is the documents' whole negative log2-likelihood over their UTF-8 bytes;
    byte_perplexity is two to that power. Raises as `read_documents`.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    documents = datasets.Dataset.from_list([{"text": text} for text in read_documents(file)])
    metrics = [
        {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        {
            "metric": "byte_perplexity",
            "aggregation": "weighted_perplexity",
            "higher_is_better": False,
        },
    ]
    config = {
        "task": HELDOUT,
        "custom_dataset": lambda **_: {"validation": documents},
        "output_type": "loglikelihood_rolling",
        "validation_split": "validation",
        "doc_to_text": "",
        "doc_to_target": "text",
        "num_fewshot": 0,
        "metric_list": metrics,
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config=config)
