"""A real pretrained model on real items: pinned numbers, and those of the harness's own model."""

import json
from typing import Any

import pytest

from kit.convert.smollm2 import load_smollm2
from kit.data.tokenizer import Tokenizer
from kit.errors import DataError
from kit.evaluate.benchmarks import Options
from kit.evaluate.loading import decoder_lm
from kit.evaluate.packed import HFLM, PackedLM
from kit.evaluate.task_data import build_mirror
from kit.model import Decoder
from tests.evaluate.conftest import asked
from tests.evaluate.real_items import PINNED, TASKS, answers, sentence_answers

pytestmark = [pytest.mark.download, pytest.mark.slow]
EQUAL = 1e-4
"""Nats by which an item may differ from the harness's own model, in fp32 on one machine."""
FP32_SUM = 2**-22
"""Relative: in fp32 sums, thousands of nats cannot be told apart any better."""
SAME_FILE = 5e-3
"""Nats by which another processor's rounding may move an item from the pinned numbers."""


SENTENCES = [text for pair in json.loads(PINNED.read_text())["blimp"]["pairs"] for text in pair]


@pytest.fixture(autouse=True, scope="module")
def mirror() -> None:
    try:
        build_mirror()
    except DataError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def lm(mirror) -> PackedLM:
    try:
        return ours(*load_smollm2())
    except DataError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def of_smollm2(lm) -> dict[str, list[tuple[float, bool]]]:
    """What our model says of all items, by task, and of BLiMP's sentences."""
    found = {name: answers(lm, name) for name in TASKS}
    return found | {"blimp": sentence_answers(lm, SENTENCES)}


def ours(decoder: Decoder, tokenizer: Tokenizer) -> PackedLM:
    return decoder_lm(decoder, tokenizer, decoder.spec.sequence_length, Options(), "cpu")


def theirs(lm: PackedLM) -> Any:
    """Returns the harness's own class over the same model."""
    return HFLM(lm.model, tokenizer=lm.tokenizer, batch_size=8, max_length=lm.max_length)


def assert_equal(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert len(found) == len(expected) > 10
    values = [value for value, _ in found]
    assert values == pytest.approx([value for value, _ in expected], abs=EQUAL, rel=FP32_SUM)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    different = {round(value, 2) for value in values}
    assert len(different) > 0.8 * len(found), "items must differ to mean anything"


@pytest.mark.thorough
def test_items_of_smollm2_have_their_pinned_log_likelihoods(of_smollm2):
    pinned = json.loads(PINNED.read_text())
    for name in TASKS:
        found = [value for value, _ in of_smollm2[name]]
        assert found == pytest.approx(pinned["tasks"][name], abs=SAME_FILE, rel=0), name
    pairs = pinned["blimp"]["pairs"]
    found = [value for value, _ in of_smollm2["blimp"]]
    assert found == pytest.approx(pinned["blimp"]["log_likelihoods"], abs=SAME_FILE, rel=0)
    right = sum(good > bad for good, bad in zip(found[::2], found[1::2], strict=True))
    assert right > 0.6 * len(pairs), "a pretrained model tells most good sentences from bad ones"


@pytest.mark.thorough
def test_smollm2_equals_the_harness_on_every_item(lm, of_smollm2):
    reference = theirs(lm)
    for name in TASKS:
        assert_equal(of_smollm2[name], answers(reference, name))
    assert_equal(of_smollm2["blimp"], sentence_answers(reference, SENTENCES))
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = ("The capital of France is", "Water boils when", "def add(a, b):")
    requests = asked("generate_until", [(text, options) for text in prompts])
    found = lm.generate_until(requests)
    assert found == reference.generate_until(requests, disable_tqdm=True)
    assert "Paris" in found[0]
