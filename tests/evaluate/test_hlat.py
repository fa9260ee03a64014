"""HLAT's tables as printed in the paper. Measured scores are added to a column only if they are
complete.
"""

import math
from typing import Any

import pytest

from kit.errors import ConfigError
from kit.evaluate.benchmarks import SUITES
from kit.evaluate.hlat import TABLES, compare, published_table
from kit.evaluate.report import EvalReport, Metric, TaskScore, wilson
from tests.evaluate.conftest import task_score


def score(task: str, shots: int, values: dict[str, float], **fields: Any) -> TaskScore:
    metrics = tuple(Metric(name=n, value=v, stderr=0.03) for n, v in values.items())
    given = {"num_items": 100, "total_items": 100, "num_fewshot": shots, **fields}
    if "temperature" in fields:
        given["top_p"] = 0.95
    return task_score(task, metrics=metrics, **given)


def report(*scores: TaskScore) -> EvalReport:
    return EvalReport(name="mine", tokenizer_sha256="00", scores=scores)


def test_hlat_tables_hold_the_printed_numbers():
    rows = {(row["model"], row["size"]): row for row in published_table("II").rows}
    assert len(rows) == 12
    assert rows["HLAT", "70B"]["mmlu"] == 65.1 and rows["HLAT", "7B"]["average"] == 44.6
    assert "code_pass_10" not in rows["LLaMA-1", "65B"], "empty in the paper"
    assert rows["HLAT", "7B"]["stderr"]["mmlu"] == 3.6
    assert {row["sequence_length"] for row in published_table("I").rows} == {2048, 4096}
    assert len(published_table("IV").rows) == 3 and len(published_table("V").rows) == 8
    columns = {request.column for request in SUITES["hlat"] if request.column}
    assert columns | {"average"} == {*TABLES["II"].columns, *TABLES["V"].columns}
    with pytest.raises(ConfigError, match="table: 'III' is unknown"):
        published_table("III")
    with pytest.raises(ConfigError, match="'IV' cannot be compared with"):
        compare(report(), "IV")


def test_notes_on_the_papers_errors_are_true_and_shown():
    """The notes state errors in the paper's tables. Each note is checked against the numbers of its
    table.
    """
    rows = {(row["model"], row["size"]): row for row in published_table("II").rows}
    assert rows["LLaMA-2", "13B"]["mmlu"] == rows["LLaMA-2", "7B"]["mmlu"]
    alike = dict.fromkeys(("mmlu", "reading", "math", "code_pass_1"), 1)
    weights = {**alike, "commonsense": 6, "world_knowledge": 2}
    for size, expected in (("70B", 60.9), ("7B", 47.1)):
        row = rows["HLAT", size]
        mean = sum(weight * row[name] for name, weight in weights.items()) / sum(weights.values())
        assert round(mean, 1) == expected
    swapped, right = published_table("IV").rows[-1], rows["HLAT", "70B"]
    assert (swapped["reading"], swapped["commonsense"]) == (right["commonsense"], right["reading"])
    for name in ("II", "IV"):
        text = published_table(name).to_text()
        assert all(note in text for note in published_table(name).notes)
    assert "swapped" in published_table("IV")._repr_html_()


def test_table_column_is_mean_of_complete_data_sets():
    names = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")
    scores = [score(name, 0, {"acc": 0.1, "acc_norm": 0.6}) for name in names]
    found = compare(report(*scores, score("winogrande", 0, {"acc": 0.9})))
    (own,) = found.own
    downs = [value - wilson(value, 100)[0] for value in (0.6, 0.6, 0.6, 0.6, 0.6, 0.9)]
    down = math.hypot(*downs) / 6
    assert own["commonsense"].startswith(f"65.0 ({65 - 100 * down:.1f}–"), "(5 x 60 + 90) / 6"
    assert own["mmlu"] == "" and "mine, column mmlu: mmlu with 5 shots (not scored)" in found.notes
    assert found.texts()[0]["made"] == "measured here" and found.texts()[1]["made"] == "published"
    assert own["average"] == ""
    without = compare(report(*scores)).own[0]
    assert without["commonsense"] == ""


def test_code_columns_need_the_published_sampling():
    """LLaMA's paper samples programs for pass@1 at temperature 0.1, and for its other metrics at
    0.8.
    """
    cold = score("humaneval", 0, {"pass@1,create_test": 0.1}, num_samples=5, temperature=0.1)
    values = {"pass@1,create_test": 0.05, "pass@10,create_test": 0.2}
    hot = score("humaneval", 0, values, num_samples=20, temperature=0.8)
    (own,) = compare(report(cold, hot)).own
    assert own["code_pass_1"].startswith("10.0 (5.5–")
    assert own["code_pass_10"].startswith("20.0 (13.3–")
    one_greedy = score("humaneval", 0, {"pass@1,create_test": 0.1})
    for another in (one_greedy, hot):
        assert compare(report(another)).own[0]["code_pass_1"] == ""
    text = compare(report(cold, hot)).to_text()
    assert "temperature 0.1" in text and "95 % interval" in text and "strict-match" in text


CHAINED = score(
    "gsm8k_cot", 8, {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.9}
)
PLAIN = score("gsm8k", 8, {"exact_match,strict-match": 0.5})


@pytest.mark.parametrize(
    ("scores", "table", "column", "expected"),
    [
        ([score("mmlu", 5, {"acc": 0.5}, num_items=20)], "II", "mmlu", ""),
        ([score("boolq", 2, {"acc": 0.7})], "II", "reading", ""),
        ([score("boolq", 0, {"acc": 0.0})], "II", "reading", "0.0 (0.0–3.7)"),
        ([score("boolq", 0, {"acc": 1.0})], "II", "reading", "100.0 (96.3–100.0)"),
        ([CHAINED], "II", "math", "25.0 (17.5–34.3)"),
        ([CHAINED, PLAIN], "II", "math", "50.0 (40.4–59.6)"),
        ([score("truthfulqa_mc1", 0, {"acc": 0.25})], "V", "truthfulqa_mc1", "25.0 (17.5–34.3)"),
    ],
    ids=["a part", "other shots", "none right", "all right", "one way", "the first way", "Table V"],
)
def test_table_column_needs_all_items_and_papers_shots(scores, table, column, expected):
    """Of several tasks on the same data, the table uses the first task that has a score."""
    found = compare([report(*scores)], table)
    assert found.own[0][column] == expected
    missing = "mine, column mmlu: mmlu with 5 shots (partial: 20 of 100 items)"
    assert (missing in found.notes) == (column == "mmlu")
    assert "measured here" in found.to_text() and "published" in found._repr_html_()
