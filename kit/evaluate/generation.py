"""Continues prompts with a decoder: batched, each token run once, greedy or sampled.

Shape letters: B prompts, R tokens of the prompts beyond what all share, V vocabulary.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from kit.errors import ConfigError
from kit.model import Decoder, Past
from kit.model.key_value_cache import KeyValueCache

DEFAULT_NEW_TOKENS = 256
"""Tokens to generate where a task does not say; the value of the harness's own Hugging Face
model."""
CACHE_BYTES = 2**30
"""Keys and values of one batch; at least one prompt is always run."""
LOGITS = 2**23
"""Logits that exist at once: 32 MiB in fp32. Without a bound they would be most of the memory."""
LIKELY = 256
"""Tokens among which a nucleus is looked for first."""

Tokens = list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """How a task wants its prompts continued."""

    stops: tuple[str, ...]
    max_new_tokens: int
    temperature: float = 0.0  # zero takes the most likely token
    top_p: float = 1.0
    top_k: int | None = None

    @classmethod
    def from_request(cls, options: dict[str, Any]) -> Self:
        """Returns what the harness's `generation_kwargs` ask for.

        Raises:
            ConfigError: an option is unknown, or out of its range.
        """
        from lm_eval.models.utils import normalize_gen_kwargs

        known: dict[str, Any] = dict(normalize_gen_kwargs(options, DEFAULT_NEW_TOKENS))
        sampled, temperature = known.pop("do_sample", False), float(known.pop("temperature", 0.0))
        found = cls(
            stops=tuple(stop for stop in known.pop("until") if stop),
            max_new_tokens=known.pop("max_gen_toks"),
            temperature=temperature if sampled else 0.0,
            top_p=float(known.pop("top_p", 1.0)),
            top_k=known.pop("top_k", None),
        )
        if known:
            raise ConfigError(
                f"generation: {', '.join(known)} is not known. Allowed: until, max_gen_toks,"
                " do_sample, temperature, top_p, top_k."
            )
        if sampled and found.temperature == 0:
            raise ConfigError(
                "generation: do_sample is true, but temperature is 0 or not given. Give a"
                " temperature above 0, or set do_sample to false."
            )
        if (
            found.temperature < 0
            or not 0 < found.top_p <= 1
            or (found.top_k is not None and found.top_k < 1)
        ):
            raise ConfigError(
                f"generation: temperature {found.temperature}, top_p {found.top_p}, top_k"
                f" {found.top_k} are not allowed. Give a temperature from 0, a top_p above 0 up to"
                " 1, and a top_k from 1 or none."
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, and the source of its random numbers: its own, so that batches do not change
    what is drawn.
    """

    index: int
    tokens: tuple[int, ...]
    random: random.Random


def batches(decoder: Decoder, prompts: list[Prompt], options: Generation) -> Iterator[list[Prompt]]:
    """Yields prompts of like length, equal ones together, as many as the cache and the logits of
    a token hold.
    """
    spec, weight = decoder.spec, next(decoder.parameters())
    bytes_per_token = (
        2 * spec.num_layers * spec.num_kv_heads * spec.head_size * weight.element_size()
    )
    left = sorted(prompts, key=lambda prompt: (len(prompt.tokens), prompt.tokens), reverse=True)
    while left:
        in_cache = CACHE_BYTES // (bytes_per_token * (len(left[0].tokens) + options.max_new_tokens))
        count = max(1, min(in_cache, LOGITS // spec.vocab_size))
        yield left[:count]
        left = left[count:]


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompts: list[Prompt],
    options: Generation,
    *,
    is_last: Callable[[Tokens], bool],
    batch_tokens: int = 4096,
) -> list[Tokens]:
    """Returns the new tokens of each prompt, up to and with the first for which `is_last` is true.

    The prompts run as one batch, see `batches`; `is_last` is asked with the new tokens of one
    prompt, after each. `batch_tokens` limits the tokens of prompts in one forward pass (at least
    one of each different prompt).
    """
    device = next(decoder.parameters()).device
    cache = KeyValueCache(max(len(prompt.tokens) for prompt in prompts) + options.max_new_tokens)
    logits_BV = _read(decoder, [prompt.tokens for prompt in prompts], cache, batch_tokens)
    lengths_B = torch.tensor([len(prompt.tokens) for prompt in prompts], device=device)
    new: list[Tokens] = [[] for _ in prompts]
    running = list(range(len(prompts)))  # which prompt each row of the cache belongs to
    done = [False] * len(prompts)
    for count in range(1, options.max_new_tokens + 1):
        tokens_B = choose(logits_BV, options, [prompts[i].random for i in running])
        for i, token in zip(running, tokens_B.tolist(), strict=True):
            if not done[i]:
                new[i].append(token)
                done[i] = is_last(new[i])
        if all(done) or count == options.max_new_tokens:
            break
        rows = [row for row, i in enumerate(running) if not done[i]]
        if 2 * len(rows) <= len(running):  # to drop rows copies the cache, so only when it halves
            rows_B = torch.tensor(rows, device=device)
            cache.take(rows_B)
            running, lengths_B, tokens_B = (
                [running[row] for row in rows],
                lengths_B[rows_B],
                tokens_B[rows_B],
            )
        x_B1H = decoder.hidden(tokens_B[:, None], Past.cached(cache, lengths_B[:, None]))
        logits_BV = decoder.output(x_B1H[:, 0])  # type: ignore[misc]
        lengths_B = lengths_B + 1
    return new


def _read(
    decoder: Decoder, prompts: list[tuple[int, ...]], cache: KeyValueCache, batch_tokens: int
) -> Tensor:
    """Fills the cache with the prompts and returns logits_BV after each.

    What all begin with is run once, and of equal prompts one.
    """
    weight = next(decoder.parameters())
    device = weight.device
    different = list(dict.fromkeys(prompts))
    shared = _shared(different) if len(different) > 1 else 0
    if shared:
        tokens_1T = torch.tensor([different[0][:shared]], device=device)
        decoder.hidden(tokens_1T, Past.cached(cache, torch.arange(shared, device=device)[None]))
        cache.take(torch.zeros(len(different), dtype=torch.long, device=device))
    longest = max(map(len, different))
    tokens_BT = torch.tensor(
        [[*row, *[0] * (longest - len(row))] for row in different], device=device
    )
    last_B = torch.tensor([len(row) - 1 for row in different], device=device)
    last_BH = torch.empty(
        len(different), decoder.spec.hidden_size, dtype=weight.dtype, device=device
    )
    columns = max(1, batch_tokens // len(different))
    for start in range(shared, longest, columns):
        part_BR = tokens_BT[:, start : start + columns]
        positions_BR = torch.arange(start, start + part_BR.shape[1], device=device).expand(
            len(different), -1
        )
        x_BRH = decoder.hidden(part_BR, Past.cached(cache, positions_BR))
        rows = ((last_B >= start) & (last_B < start + columns)).nonzero()[:, 0]
        last_BH[rows] = x_BRH[rows, last_B[rows] - start]
    logits_BV: Tensor = decoder.output(last_BH)  # type: ignore[misc]
    if len(different) == len(prompts):
        return logits_BV
    places = {prompt: row for row, prompt in enumerate(different)}
    rows = torch.tensor([places[prompt] for prompt in prompts], device=device)
    cache.take(rows)
    return logits_BV[rows]


def choose(logits_BV: Tensor, options: Generation, sources: list[random.Random]) -> Tensor:
    """Returns the next token of each row, int64 [B].

    Sampling keeps the `top_k` most likely tokens, of these the fewest that together have `top_p`
    (nucleus sampling, arXiv 1904.09751), and takes the one where the cumulative probability passes
    the row's random number.
    """
    if options.temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / options.temperature
    u_B1 = torch.tensor([[source.random()] for source in sources], device=logits_BV.device)
    size = logits_BV.shape[1]
    if options.top_k is not None:
        values_BK, tokens_BK = logits_BV.topk(min(options.top_k, size))
        return _draw(values_BK.softmax(-1), tokens_BK, u_B1, options.top_p)
    # To sort the whole vocabulary takes longer than a small model's step, and few rows need it.
    values_BK, tokens_BK = logits_BV.topk(min(LIKELY, size))
    p_BK = (values_BK - logits_BV.logsumexp(-1, keepdim=True)).exp()
    chosen_B = _draw(p_BK, tokens_BK, u_B1, options.top_p)
    flat = (p_BK.sum(-1) < options.top_p).nonzero()[:, 0] if size > LIKELY else ()
    if len(flat):
        values_BV, tokens_BV = logits_BV[flat].sort(descending=True, stable=True)
        chosen_B[flat] = _draw(values_BV.softmax(-1), tokens_BV, u_B1[flat], options.top_p)
    return chosen_B


def _draw(p_BK: Tensor, tokens_BK: Tensor, u_B1: Tensor, top_p: float) -> Tensor:
    before_BK = p_BK.cumsum(-1) - p_BK
    p_BK = p_BK.masked_fill(before_BK >= top_p, 0)
    passed_BK = p_BK.cumsum(-1) > u_B1 * p_BK.sum(-1, keepdim=True)
    return tokens_BK.gather(1, passed_BK.int().argmax(-1, keepdim=True))[:, 0]


def prompt_random(seed: int, prompt: tuple[int, ...], repeat: int) -> random.Random:
    """Returns the random numbers of the `repeat`-th continuation of a prompt."""
    return random.Random(f"{seed}:{repeat}:{prompt}")


def _shared(prompts: list[tuple[int, ...]]) -> int:
    """Returns how many first tokens all have in common, less than the shortest has: the last is
    to be run.
    """
    low, high, shortest = min(prompts), max(prompts), min(map(len, prompts))
    return next((i for i in range(shortest - 1) if low[i] != high[i]), max(0, shortest - 1))
