"""Generation with a cache continues as generation without one does, and draws what was asked
for.
"""

import random
from collections import Counter

import pytest
import torch
from lm_eval.api.instance import Instance

from kit.evaluate import generation
from kit.evaluate.adapter import DecoderLM
from kit.evaluate.generation import Generation, Prompt, batches, choose, generate, prompt_random
from kit.model import Decoder, build_decoder

GREEDY = Generation(stops=(), max_new_tokens=8)


def prompts_of(*tokens: tuple[int, ...]) -> list[Prompt]:
    return [
        Prompt(index=i, tokens=each, random=prompt_random(0, each, i))
        for i, each in enumerate(tokens)
    ]


@torch.inference_mode()
def uncached(decoder: Decoder, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module", params=["llama_spec", "gpt_spec"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    # Tied, a random model repeats its last token for ever.
    changes = {"init_std": 0.3, "sequence_length": 32, "tied_embeddings": False}
    return build_decoder(request.getfixturevalue(request.param).replace(**changes)).eval()


def test_greedy_tokens_equal_those_without_a_cache(decoder: Decoder) -> None:
    draw = random.Random(1)
    stem = tuple(draw.choices(range(128), k=6))
    tokens = [stem + tuple(draw.choices(range(128), k=k)) for k in (1, 1, 5, 9, 17)] + [(3,)]
    expected = {prompt: uncached(decoder, prompt, 8) for prompt in tokens}
    assert len({token for new in expected.values() for token in new}) > 5
    for group in (tokens[:5], tokens, tokens[:1], [tokens[0], tokens[0]]):
        found = generate(decoder, prompts_of(*group), GREEDY, is_last=lambda new: False)
        assert found == [expected[prompt] for prompt in group]


def test_rows_that_end_early_do_not_change_the_others(decoder: Decoder) -> None:
    tokens = [(5, 2 * i, i) for i in range(1, 8)]
    whole = [uncached(decoder, prompt, 8) for prompt in tokens]
    lengths = {tuple(new[:k]): k for new, k in zip(whole, (1, 2, 3, 1, 8, 1, 5), strict=True)}
    found = generate(
        decoder, prompts_of(*tokens), GREEDY, is_last=lambda new: tuple(new) in lengths
    )
    for new, expected in zip(found, whole, strict=True):
        assert new == expected[: len(new)]
        assert len(new) == 8 or tuple(new) in lengths
    if decoder.spec.family == "llama":  # the random GPT says the same after every prompt
        assert len({len(new) for new in found}) > 2


def test_what_all_prompts_begin_with_is_run_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, hidden = [], decoder.hidden
    monkeypatch.setattr(
        decoder, "hidden", lambda x, past: seen.append(tuple(x.shape)) or hidden(x, past)
    )
    generate(
        decoder,
        prompts_of((1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 3, 4)),
        GREEDY,
        is_last=lambda new: True,
    )
    assert seen == [(1, 3), (2, 2)]  # the stem, then each different prompt


def test_long_prompts_are_read_in_parts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [(7, 3, 1), (7, 3, 2, 5, 11, 4, 8, 9), (7, 6, 2, 5, 11), (7, 3, 1)]
    expected = [uncached(decoder, prompt, 8) for prompt in tokens]
    seen, hidden = [], decoder.hidden
    monkeypatch.setattr(
        decoder, "hidden", lambda x, past: seen.append(tuple(x.shape)) or hidden(x, past)
    )
    found = generate(
        decoder, prompts_of(*tokens), GREEDY, is_last=lambda new: False, batch_tokens=9
    )
    assert found == expected
    assert seen[:4] == [
        (1, 1),
        (3, 3),
        (3, 3),
        (3, 1),
    ]  # the stem; then three columns of three prompts at a time


def test_batches_hold_what_the_cache_holds(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(*[(9,) * (3 + i % 5) + (i,) for i in range(20)])
    spec = decoder.spec
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * 4
    monkeypatch.setattr(generation, "CACHE_BYTES", 3 * 16 * per_token)
    found = list(batches(decoder, prompts, GREEDY))
    assert sorted(prompt.index for batch in found for prompt in batch) == list(range(20))
    assert max(map(len, found)) == 3
    monkeypatch.setattr(generation, "LOGITS", 2 * spec.vocab_size + 1)
    assert max(map(len, batches(decoder, prompts, GREEDY))) == 2


def test_samples_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    options = Generation(stops=(), max_new_tokens=1, temperature=0.7)
    source = random.Random(0)
    drawn = Counter(choose(logits.expand(20_000, -1), options, [source] * 20_000).tolist())
    for token, probability in enumerate((logits / 0.7).softmax(-1).tolist()):
        assert drawn[token] / 20_000 == pytest.approx(
            probability, abs=4 * (probability / 20_000) ** 0.5
        )


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_unlikely_tokens_are_left_out(limits: dict, kept: set[int]) -> None:
    logits = torch.tensor([0.6, 0.2, 0.15, 0.05]).log()
    options = Generation(stops=(), max_new_tokens=1, temperature=1.0, **limits)
    source = random.Random(0)
    assert set(choose(logits.expand(2000, -1), options, [source] * 2000).tolist()) == kept


def test_a_nucleus_is_found_without_sorting_all_as_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows between certain and flat: some need the whole vocabulary, some do not."""
    logits = torch.linspace(0.1, 3, 60)[:, None] * torch.randn(
        60, 500, generator=torch.Generator().manual_seed(0)
    )
    options = Generation(stops=(), max_new_tokens=1, temperature=0.8, top_p=0.9)

    def drawn(likely: int) -> list[int]:
        monkeypatch.setattr(generation, "LIKELY", likely)
        return choose(logits, options, [random.Random(i) for i in range(60)]).tolist()

    assert drawn(40) == drawn(500)
    masses = (logits / 0.8).softmax(-1).topk(40).values.sum(-1)
    assert 10 < (masses < 0.9).sum() < 50


def test_samples_of_a_prompt_differ_and_depend_on_the_seed_only(tokenizer) -> None:
    from kit.spec import ModelSpec

    spec = ModelSpec.llama(
        name="tiny",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=64,
        vocab_size=400,
        sequence_length=64,
        init_std=0.3,
    )
    decoder = build_decoder(spec).eval()
    options = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "max_gen_toks": 6,
        "until": ["zz"],
    }
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(text, options), idx=0)
        for text in ("import the", "import the", "import the", "a module")
    ]

    def sample(seed: int, order: list[int]) -> list[str]:
        lm = DecoderLM(
            decoder, tokenizer, sequence_length=64, seed=seed, batch_tokens=4 if seed == 2 else 4096
        )
        return lm.generate_until([requests[i] for i in order])

    first = sample(1, [0, 1, 2, 3])
    assert len(set(first)) == 4
    assert sample(1, [0, 1, 2, 3]) == first
    assert sample(1, [3]) == first[3:]
    assert sample(3, [0, 1, 2, 3]) != first
