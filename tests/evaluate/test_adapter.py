"""The adapter gives the harness's own numbers."""

import logging
import math
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from kit.convert.hugging_face import import_hugging_face
from kit.data.tokenizer import BytePairTokenizer
from kit.errors import ConfigError, DataError
from kit.evaluate.adapter import DecoderLM
from kit.evaluate.harness import load_task, quiet
from kit.model import Decoder, build_decoder
from kit.spec import ModelSpec

SEQUENCE_LENGTH = 64


@pytest.fixture(scope="module")
def reference(llama: Any, tokenizer: BytePairTokenizer) -> Any:
    """The harness's own Hugging Face model over the same weights and tokenizer."""
    import tokenizers
    from lm_eval.models import huggingface
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    model: Any = huggingface.HFLM
    return model(pretrained=llama, tokenizer=wrapped, max_length=SEQUENCE_LENGTH, batch_size=7)


@pytest.fixture(scope="module")
def decoder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """The same Llama as the kit's decoder."""
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    return import_hugging_face(folder).decoder()


@pytest.fixture
def decoder_lm(decoder: Decoder, tokenizer: BytePairTokenizer) -> DecoderLM:
    return DecoderLM(decoder, tokenizer, sequence_length=SEQUENCE_LENGTH, batch_tokens=300)


def responses(lm: Any, name: str, task: Any) -> list[Any]:
    with quiet():
        found: Any = evaluate(lm, {"tasks": {name: task}}, log_samples=True)
    return [response[0] for sample in found["samples"][name] for response in sample["resps"]]


@pytest.mark.parametrize("name", ["piqa", "arc_easy", "boolq"])
def test_log_likelihoods_equal_those_of_the_harness(name, reference, decoder_lm, mirror):
    task = load_task(name, mirror=mirror).task
    expected, found = responses(reference, name, task), responses(decoder_lm, name, task)
    assert len(found) == len(expected) >= 60
    for (value, greedy), (expected_value, expected_greedy) in zip(found, expected, strict=True):
        assert value == pytest.approx(expected_value, abs=1e-4)
        assert greedy == expected_greedy
    assert len({round(value, 3) for value, _ in found}) > 30, (
        "the items must differ for this to mean anything"
    )


def test_prompts_of_the_comparison_are_truncated(decoder_lm, mirror):
    responses(decoder_lm, "piqa", load_task("piqa", mirror=mirror).task)
    assert decoder_lm.num_truncated == 6  # three items with a long goal, two choices each


def test_rolling_log_likelihoods_equal_those_of_the_harness(
    reference, decoder_lm, mirror, heldout_file
):
    task = load_task("heldout", mirror=mirror, heldout_file=heldout_file).task
    expected, found = responses(reference, "heldout", task), responses(decoder_lm, "heldout", task)
    assert len(found) == 13
    assert found == pytest.approx(expected, abs=1e-3, rel=1e-6)  # sums over up to a thousand tokens


def test_generations_equal_those_of_the_harness(reference, decoder_lm):
    prompts = [f"Item {i}: import the module and" for i in range(6)]
    task = ConfigurableTask(
        config={
            "task": "continue",
            "custom_dataset": lambda **_: {"test": _dataset(prompts)},
            "output_type": "generate_until",
            "test_split": "test",
            "doc_to_text": "prompt",
            "doc_to_target": "prompt",
            "generation_kwargs": {"until": ["e", "zz"], "max_gen_toks": 12},
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
            "num_fewshot": 0,
        }
    )
    expected = responses(reference, "continue", task)
    assert responses(decoder_lm, "continue", task) == expected
    assert len(set(expected)) > 1


def _dataset(prompts: list[str]) -> Any:
    import datasets

    return datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def test_batches_and_parts_do_not_change_scores(
    decoder, tokenizer, decoder_lm, mirror, monkeypatch
):
    single = DecoderLM(decoder, tokenizer, sequence_length=SEQUENCE_LENGTH, batch_tokens=1)
    task = load_task("arc_easy", mirror=mirror).task
    many = responses(decoder_lm, "arc_easy", task)
    monkeypatch.setattr("kit.evaluate.adapter.PART", 7)
    one = responses(single, "arc_easy", task)
    assert [value for value, _ in one] == pytest.approx([value for value, _ in many], abs=1e-4)


def test_one_token_answers_share_a_row_and_batches_keep_their_budget(
    decoder, tokenizer, monkeypatch
):
    shapes, hidden = [], decoder.hidden

    def recorded(tokens_BT: torch.Tensor, past: Any = None) -> torch.Tensor:
        shapes.append(tuple(tokens_BT.shape))
        return hidden(tokens_BT, past)

    monkeypatch.setattr(decoder, "hidden", recorded)
    lm = DecoderLM(decoder, tokenizer, sequence_length=SEQUENCE_LENGTH, batch_tokens=100)
    scores = lm._loglikelihood_tokens(
        [(("", ""), [1, 2, 3], [token]) for token in range(tokenizer.vocab_size)]
    )
    assert shapes == [(1, 3)]
    assert math.fsum(math.exp(value) for value, _ in scores) == pytest.approx(1, abs=1e-4)
    assert sum(greedy for _, greedy in scores) == 1
    shapes.clear()
    lm._loglikelihood_tokens([(("", ""), [i, *range(1, 3 + i)], [5, 6]) for i in range(20)])
    assert all(rows * length <= 100 for rows, length in shapes)
    assert sum(rows * length for rows, length in shapes) >= sum(3 + i + 1 for i in range(20))
    shapes.clear()
    lm._loglikelihood_tokens(
        [(("", ""), list(range(1, 31)), [40 + i, 50 + i, 7]) for i in range(8)]
    )
    assert sum(rows * length for rows, length in shapes) == 30 + 8 * 2, (
        "what continuations share is run once"
    )


def test_a_continuation_longer_than_the_model_is_scored_in_windows(decoder_lm):
    tokens = [(7 * i) % 400 for i in range(150)]
    start = decoder_lm.prefix_token_id
    ((whole, _),) = decoder_lm._loglikelihood_tokens([(("", ""), [start], tokens)])
    ((head, _),) = decoder_lm._loglikelihood_tokens([(("", ""), [start], tokens[:64])])
    ((middle, _),) = decoder_lm._loglikelihood_tokens(
        [(("", ""), [start, *tokens[:64]], tokens[64:128])]
    )
    ((tail, _),) = decoder_lm._loglikelihood_tokens(
        [(("", ""), [start, *tokens[:128]], tokens[128:])]
    )
    assert whole == pytest.approx(head + middle + tail, abs=1e-3)


def test_a_gpt_decoder_is_scored(tokenizer, mirror):
    spec = ModelSpec.gpt(
        name="tiny", num_layers=2, hidden_size=32, num_heads=4, vocab_size=512, sequence_length=64
    )
    lm = DecoderLM(build_decoder(spec).eval(), tokenizer, sequence_length=64)
    scores = responses(lm, "boolq", load_task("boolq", mirror=mirror).task)
    surprise = math.log(512)  # per token: an untrained model knows nothing
    for (value, _), text in zip(scores, [" no", " yes"] * 30, strict=True):
        assert -value == pytest.approx(len(tokenizer.encode(text)) * surprise, rel=0.1)


def test_a_sequence_longer_than_the_model_is_refused(tokenizer):
    spec = ModelSpec.gpt(
        name="tiny", num_layers=1, hidden_size=32, num_heads=4, vocab_size=512, sequence_length=64
    )
    with pytest.raises(ConfigError, match="sequence_length: the model cannot run 65 tokens"):
        DecoderLM(build_decoder(spec), tokenizer, sequence_length=65)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer):
    spec = ModelSpec.gpt(
        name="tiny", num_layers=1, hidden_size=32, num_heads=4, vocab_size=399, sequence_length=64
    )
    with pytest.raises(
        ConfigError, match="tokenizer: it has 400 tokens but the model has 399 logits"
    ):
        DecoderLM(build_decoder(spec), tokenizer, sequence_length=64)


@pytest.mark.parametrize("bad", [{"sequence_length": 0}, {"sequence_length": 8, "batch_tokens": 0}])
def test_sizes_below_one_are_refused(decoder, tokenizer, bad):
    with pytest.raises(ConfigError, match="0 is not allowed"):
        DecoderLM(decoder, tokenizer, **bad)


def test_an_empty_continuation_is_refused(decoder_lm):
    with pytest.raises(DataError, match="no token of its own: '' after 'Why'"):
        decoder_lm._loglikelihood_tokens([(("Why", ""), [1], [])])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gen_toks": 64}, "leave no room for a prompt"),
        ({"do_sample": True}, "temperature is 0 or not given"),
        ({"do_sample": True, "temperature": 0.5, "top_p": 1.5}, "top_p above 0 up to 1"),
        ({"num_beams": 4}, "num_beams is not known. Allowed: until"),
    ],
)
def test_generation_that_cannot_be_done_is_refused(decoder_lm, options, message):
    request = Instance(request_type="generate_until", doc={}, arguments=("Why", options), idx=0)
    with pytest.raises(ConfigError, match=message):
        decoder_lm.generate_until([request])


def test_options_of_greedy_tasks_are_understood(decoder_lm):
    options = {"until": ["zz"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 3}
    (text,) = decoder_lm.generate_until(
        [Instance(request_type="generate_until", doc={}, arguments=("Why", options), idx=0)]
    )
    assert text


def test_the_harness_log_level_is_restored(mirror):
    logger = logging.getLogger("lm_eval")
    before = logger.level
    load_task("piqa", mirror=mirror)
    assert logger.level == before
