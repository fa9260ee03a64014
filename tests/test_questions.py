"""docs/questions-to-the-planner.md: the page has what its commands print today."""

import re

import pytest

from tests.questions import PAGE, QUESTIONS, page

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
"""Matches a number outside of names, such as 12.45 or 8.15e+11."""


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "").rstrip(".")) for found in NUMBER.findall(text)]


@pytest.mark.slow
def test_page_has_what_the_commands_print() -> None:
    """If this test fails, run `python -m tests.questions`. Numbers may differ by 2 %, since other
    versions of NumPy round differently.
    """
    kept, new = PAGE.read_text(encoding="utf-8"), page()
    form = [re.sub(r"\s+", " ", NUMBER.sub("0", text)) for text in (kept, new)]
    assert form[0] == form[1]
    assert numbers(kept) == pytest.approx(numbers(new), rel=0.02, abs=0.11)


def test_page_answers_every_question() -> None:
    text = PAGE.read_text(encoding="utf-8")
    answers = re.split(r"^## \d+\. ", text, flags=re.M)[1:]
    assert [answer.splitlines()[0] for answer in answers] == [each.title for each in QUESTIONS]
    assert len(QUESTIONS) == 12
    for question, answer in zip(QUESTIONS, answers, strict=True):
        block, meaning = answer.split("```")[1:]
        assert "Traceback" not in block and meaning.strip() == question.meaning
        unknown = set(numbers(meaning)) - set(numbers(block + question.title)) - {6, 70, 16384}
        assert not unknown, question.title
