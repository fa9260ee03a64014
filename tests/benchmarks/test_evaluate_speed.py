"""The benchmark of scoring: ratios of totals within a round, and no speed of two that disagree."""

import pytest

from kit.data.tokenizer import train_tokenizer
from kit.model import build_decoder
from tests.benchmarks.evaluate import TASKS, Subject, _check_same, _ratios, _speeds


@pytest.fixture
def subject(llama_spec) -> Subject:
    tokenizer = train_tokenizer(["a line of text"], 257)
    return Subject(
        name="tiny",
        decoder=build_decoder(llama_spec),
        tokenizer=tokenizer,
        items=10,
        rounds=3,
        batch_size=8,
    )


def test_ratios_are_of_totals_within_a_round(subject: Subject) -> None:
    times = {
        "kit": {task: [1.0, 2.0, 4.0] for task in TASKS},
        "HFLM": {task: [2.0, 6.0 + (task == "piqa") * 6, 4.0] for task in TASKS},
    }
    rows = {row.name: row for row in _ratios(subject, times)}
    assert rows["kit / HFLM, tiny, piqa"].value == 2 and rows["kit / HFLM, tiny, piqa"].ok is None
    whole = rows["kit / HFLM, tiny, all"]
    assert (whole.value, whole.ok, whole.note) == (2, True, "median of 3 rounds, 1.00 to 4.00")
    speeds = {row.name: row.value for row in _speeds(subject, times)}
    assert speeds == {"kit, tiny": 5, "HFLM, tiny": 2.5}


def test_two_that_disagree_are_not_compared() -> None:
    _check_same({"kit": [-1.0, -2.0], "HFLM": [-1.0, -2.0005]}, "piqa")
    with pytest.raises(RuntimeError, match="differs by 0.002 nats"):
        _check_same({"kit": [-1.0, -2.0], "HFLM": [-1.0, -2.002]}, "piqa")
