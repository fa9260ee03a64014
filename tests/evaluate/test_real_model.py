"""A real pretrained model scores real items. The results are compared with stored numbers and with
the harness's own model.

`python -m tests.evaluate.test_real_model` computes and stores the numbers again. The only texts in
the stored file are sentences of BLiMP (CC-BY 4.0, Warstadt et al. 2020, arXiv 1912.00582), one pair
for each of its linguistic terms.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import evaluate

from kit.errors import DataError
from kit.evaluate.benchmarks import Options
from kit.evaluate.loading import decoder_lm
from kit.evaluate.packed import HFLM, PackedLM
from kit.evaluate.task_data import build_mirror
from kit.evaluate.tasks import load_task, quiet_harness
from kit.interop.weights.smollm2 import load_smollm2
from tests.evaluate.conftest import asked

pytestmark = [pytest.mark.download, pytest.mark.slow, pytest.mark.thorough]
TASKS = ("piqa", "arc_easy", "hellaswag")
ITEMS = 8
PINNED_FILE = Path(__file__).parent / "data" / "smollm2_items.json"
PINNED = json.loads(PINNED_FILE.read_text())
PAIRS = PINNED["blimp"]["pairs"]
EQUAL = 1e-4
"""Largest difference of an item's log-likelihood to the harness's own model in nats, in fp32 on one
machine."""
FP32_SUM = 2**-22
"""Relative precision of fp32 sums. It limits the comparison of log-likelihoods of thousands of
nats."""
SAME_FILE = 5e-3
"""Largest difference of an item's log-likelihood to the stored number in nats. Another type of
processor rounds differently."""
Answers = dict[str, list[tuple[float, bool]]]


@functools.cache
def task_of(name: str) -> Any:
    """Returns a benchmark task. The result is cached, because loading a task takes longer than
    scoring it with a small model.
    """
    return load_task(name).task


def answers(lm: Any) -> Answers:
    """Returns a dict from the task to (log-likelihood, whether it is the greedy choice) of each
    continuation. Eight items per task are scored. The sentences of BLiMP are scored as whole texts.
    """
    told: Answers = {}
    with quiet_harness():
        for name in TASKS:
            rng = random.Random(f"1234:{name}")
            items = sorted(rng.sample(range(len(task_of(name).eval_docs)), ITEMS))
            given: dict[str, Any] = {"tasks": {name: task_of(name)}}
            found: Any = evaluate(
                lm, given, samples={name: items}, log_samples=True, bootstrap_iters=0
            )
            samples = found["samples"][name]
            told[name] = [tuple(each[0]) for sample in samples for each in sample["resps"]]
        sentences = [("", text) for pair in PAIRS for text in pair]
        told["blimp"] = lm.loglikelihood(asked("loglikelihood", sentences), True)
    return told


def load() -> PackedLM:
    decoder, tokenizer = load_smollm2()
    return decoder_lm(decoder, tokenizer, decoder.spec.sequence_length, Options(), "cpu")


@pytest.fixture(scope="module")
def lm() -> PackedLM:
    try:
        build_mirror()
        return load()
    except DataError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def found(lm) -> Answers:
    return answers(lm)


def test_smollm2_log_likelihoods_equal_pinned_values(found):
    for name, pinned in (PINNED["tasks"] | {"blimp": PINNED["blimp"]["log_likelihoods"]}).items():
        values = [value for value, _ in found[name]]
        assert values == pytest.approx(pinned, abs=SAME_FILE, rel=0), name
    sentences = [value for value, _ in found["blimp"]]
    right = sum(good > bad for good, bad in zip(sentences[::2], sentences[1::2], strict=True))
    assert right > 0.6 * len(PAIRS), "a pretrained model tells most good sentences from bad ones"


def test_smollm2_equals_the_harness_on_every_item(lm, found):
    reference = HFLM(lm.model, tokenizer=lm.tokenizer, batch_size=8, max_length=lm.max_length)
    for name, expected in answers(reference).items():
        values, theirs = ([value for value, _ in each] for each in (found[name], expected))
        assert len(values) > 10 and values == pytest.approx(theirs, abs=EQUAL, rel=FP32_SUM), name
        assert [greedy for _, greedy in found[name]] == [greedy for _, greedy in expected]
        different = {round(value, 2) for value in values}
        assert len(different) > 0.8 * len(values), "items must differ to mean anything"
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = ("The capital of France is", "Water boils when", "def add(a, b):")
    requests = asked("generate_until", [(text, options) for text in prompts])
    texts = lm.generate_until(requests)
    assert texts == reference.generate_until(requests, disable_tqdm=True) and "Paris" in texts[0]


def main() -> None:
    """Computes the numbers again and stores them, for the sentences in the stored file and the
    items of the benchmark mirror.
    """
    told = {name: [round(value, 4) for value, _ in each] for name, each in answers(load()).items()}
    blimp = {"pairs": PAIRS, "log_likelihoods": told.pop("blimp")}
    pinned = PINNED | {"tasks": told, "blimp": blimp}
    PINNED_FILE.write_text(json.dumps(pinned, indent=1) + "\n")


if __name__ == "__main__":
    main()
