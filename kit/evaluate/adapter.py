"""The harness's language-model interface over the kit's decoder.

Shape letters: P continuations, N places whose next token is asked for, H hidden, V vocabulary.
Needs torch and lm-eval at import.
"""

import collections
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm

from kit.data.tokenizer import Tokenizer
from kit.errors import ConfigError, DataError
from kit.evaluate import packing
from kit.evaluate.generation import LOGITS, Generation, Prompt, batches, generate, prompt_random
from kit.evaluate.ranks import DTYPES, Stage
from kit.model import Decoder

PART = 1024
"""Continuations that are encoded and scored at once: the prompts of MMLU, encoded together,
would be many gigabytes."""


class DecoderLM(TemplateLM):
    """Scores and continues text with a decoder.

    Numbers equal those of the harness's own `HFLM` on the same weights: documents start after the
    end-of-text token, and prompts that are too long lose tokens on the left (`num_truncated` counts
    them).

    Args:
        decoder: a whole one, or one stage of it, on each of whose stages the same calls must be
            made.
        tokenizer, sequence_length, device: as in `evaluate_model`.
        batch_tokens: tokens in one forward pass, padding included (at least one sequence is always
            run).
        seed: of sampled continuations.
        group: ranks that hold the same weights. All must make the same calls; the work is shared
            out, and every rank gets all results.

    Raises:
        ConfigError: the model is shorter than that, or has a smaller vocabulary than the tokenizer.
    """

    def __init__(
        self,
        decoder: Decoder | Stage,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        batch_tokens: int = 4096,
        device: str | torch.device = "cpu",
        seed: int = 1234,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("sequence_length", sequence_length), ("batch_tokens", batch_tokens)):
            if value < 1:
                raise ConfigError(f"{name}: {value} is not allowed. Give a whole number from 1.")
        _check_fits(decoder, tokenizer, sequence_length)
        self._decoder: Any = decoder
        self._tokenizer, self._seed, self._group = tokenizer, seed, group
        self._stage = decoder if isinstance(decoder, Stage) else None
        self.max_length, self.batch_tokens = sequence_length, batch_tokens
        self._device = torch.device(device)
        self.num_truncated = 0  # prompts cut so far

    @property
    def precision(self) -> str:
        """Of the weights: `fp32` or `bf16`; scores of one are not those of the other."""
        dtype = next(self._decoder.parameters()).dtype
        return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.start_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self._tokenizer.encode(string)

    def _encode_all(self, texts: list[str]) -> dict[str, list[int]]:
        """Returns the tokens of each text; one that comes more than once is encoded once."""
        different = list(dict.fromkeys(texts))
        return dict(zip(different, self._tokenizer.encode_batch(different), strict=True))

    # Scoring --------------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Returns for each (context, continuation) its log-likelihood in nats, and whether it is
        the greedy choice.
        """
        found = []
        with tqdm(total=len(requests), desc="log-likelihoods", disable=None, leave=False) as bar:
            for start in range(0, len(requests), PART):
                found += self._loglikelihood(requests[start : start + PART])
                bar.update(len(found) - bar.n)
        return found

    def _loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        pairs = []
        for request in requests:
            context, text = request.arguments
            stripped = (
                context.rstrip()
            )  # as the harness does: spaces at the end belong to the continuation
            pairs.append((stripped, context[len(stripped) :] + text))
        tokens = self._encode_all(
            [text for context, end in pairs for text in (context, context + end)]
        )
        split = []
        for context, end in pairs:
            whole, num_context = tokens[context + end], len(tokens[context])
            if not context and whole[:1] != [self.prefix_token_id]:
                whole, num_context = [self.prefix_token_id, *whole], 1
            split.append(
                ((context, end), whole[:num_context] or whole[:1], whole[max(num_context, 1) :])
            )
        return self._loglikelihood_tokens(split)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Returns the log-likelihood of each text in nats, from its first token to its last."""
        texts = [request.args[0] for request in requests]
        tokens = self._encode_all(texts)
        return [
            value
            for value, _ in self._score_all(
                [([self.prefix_token_id], tokens[text]) for text in texts]
            )
        ]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for (context, text), context_tokens, tokens in requests:
            if not tokens:
                raise DataError(
                    f"A continuation has no token of its own: {text!r} after {context[-60:]!r}."
                )
            self.num_truncated += len(context_tokens) + len(tokens) - 1 > self.max_length
        return self._score_all([(context, continuation) for _, context, continuation in requests])

    @torch.no_grad()
    def _score_all(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        # Equal inputs, such as those of one-token answers to one question, are one sequence.
        targets: dict[packing.Sequence, list[tuple[int, list[int]]]] = collections.defaultdict(list)
        for index, pair in enumerate(pairs):
            for sequence, target in self._windows(*pair):
                targets[sequence].append((index, target))
        num_places = {
            sequence: max(len(target) for _, target in asked) for sequence, asked in targets.items()
        }
        # Sums of each continuation: log-likelihood, and how many of its tokens are not the most
        # likely ones.
        totals_P2 = torch.zeros(len(pairs), 2, dtype=torch.float64, device=self._device)
        rows = packing.pack(num_places, longest=min(self.batch_tokens, self.max_length))
        for batch in self._mine(list(packing.batches(rows, self.batch_tokens))):
            self._score_batch(batch, targets, totals_P2)
        if self._group is not None:
            dist.all_reduce(totals_P2, group=self._group)
        if self._stage is not None:
            self._stage.tell(totals_P2)
        return [(value, misses == 0) for value, misses in totals_P2.tolist()]

    def _score_batch(self, rows: list[packing.Row], targets: dict, totals_P2: Tensor) -> None:
        """Adds what the tokens asked for in these rows contribute."""
        tokens_BT, past = packing.tensors(rows, self._device)
        asked = [
            (row_number * tokens_BT.shape[1] + place, token, index)
            for row_number, row in enumerate(rows)
            for sequence, places in row.places.items()
            for index, target in targets[sequence]
            for place, token in zip(places[len(places) - len(target) :], target, strict=True)
        ]
        place, token, index = torch.tensor(asked, device=self._device).T
        place_N, which = place.unique(return_inverse=True)
        x_NH = self._decoder.hidden(tokens_BT, past).flatten(0, 1)[place_N]
        if self._stage is not None and not self._stage.is_last:
            return  # to go on with the next batch, while stages behind it work at this one
        output: Any = (self._stage.part if self._stage else self._decoder).output
        chunk = max(1, LOGITS // self._decoder.spec.vocab_size)
        for start in range(0, len(place_N), chunk):
            here = (which >= start) & (which < start + chunk)
            logits_NV = output(x_NH[start : start + chunk]).float()
            n, chosen = which[here] - start, token[here]
            # Not logsumexp: on a large vocabulary its rounding differs from this, which is what the
            # harness uses.
            value = logits_NV.log_softmax(-1)[n, chosen]
            missed = logits_NV.argmax(-1)[n] != chosen
            totals_P2.index_add_(
                0, index[here], torch.stack((value.double(), missed.double()), dim=1)
            )

    def _windows(
        self, context: list[int], continuation: list[int]
    ) -> Iterator[tuple[packing.Sequence, list[int]]]:
        """Yields inputs and the tokens that their last positions predict; each token is predicted
        once.

        One window, cut on the left, unless the continuation alone is longer than the model: the
        harness's `HFLM` refuses that, here it is scored window by window, as
        `loglikelihood_rolling` scores a long document.
        """
        tokens = context + continuation
        for start in range(0, len(continuation), self.max_length):
            target = continuation[start : start + self.max_length]
            end = len(context) + start + len(target)
            yield tuple(tokens[max(0, end - 1 - self.max_length) : end - 1]), target

    def _mine(self, work: list[Any]) -> list[Any]:
        """Returns this rank's share."""
        return (
            work
            if self._group is None
            else work[dist.get_rank(self._group) :: dist.get_world_size(self._group)]
        )

    # Generation -----------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns a continuation for each request, cut before its first stop string or end-of-text.

        Requests of the same text are different samples of it, where the task samples.
        """
        tokens = self._encode_all([request.args[0] for request in requests])
        groups: dict[Generation, list[Prompt]] = collections.defaultdict(list)
        repeats: dict[str, int] = collections.Counter()
        for index, request in enumerate(requests):
            text, options = request.arguments
            wanted = Generation.from_request(options)
            prompt = self._prompt(tokens[text], wanted.max_new_tokens)
            numbers = prompt_random(self._seed, prompt, repeats[text])
            groups[wanted].append(Prompt(index=index, tokens=prompt, random=numbers))
            repeats[text] += 1
        found: dict[int, str] = {}
        for wanted, prompts in groups.items():
            mine = self._mine(prompts)
            with tqdm(total=len(mine), desc="texts", disable=None, leave=False) as bar:
                for batch in batches(self._decoder, mine, wanted):
                    found |= self._continue(batch, wanted)
                    bar.update(len(batch))
        if self._group is not None:
            parts: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(parts, found, group=self._group)
            found = {index: text for part in parts for index, text in part.items()}
        return [found[index] for index in range(len(requests))]

    def _prompt(self, tokens: list[int], new: int) -> tuple[int, ...]:
        if new >= self.max_length:
            raise ConfigError(
                f"generation: {new} new tokens leave no room for a prompt in {self.max_length}"
                " tokens, the model's sequence length. Lower the task's max_gen_toks, or use a"
                " model with longer sequences."
            )
        room = self.max_length - new
        self.num_truncated += len(tokens) > room
        return tuple(tokens[-room:] or [self.prefix_token_id])

    def _continue(self, prompts: list[Prompt], options: Generation) -> dict[int, str]:
        def is_last(new: list[int]) -> bool:
            # A token has at least a byte, so a stop string that the newest token ends is in as many
            # last tokens.
            tail = self._tokenizer.decode(new[-(4 + max(map(len, stops_utf8), default=0)) :])
            return new[-1] == self.eot_token_id or any(stop in tail for stop in options.stops)

        stops_utf8 = [stop.encode() for stop in options.stops]
        texts = {}
        news = generate(
            self._decoder, prompts, options, is_last=is_last, batch_tokens=self.batch_tokens
        )
        for prompt, new in zip(prompts, news, strict=True):
            text = self._tokenizer.decode(new[:-1] if new[-1] == self.eot_token_id else new)
            for stop in options.stops:
                text = text.split(stop)[0]
            texts[prompt.index] = text
        return texts


def _check_fits(decoder: Decoder | Stage, tokenizer: Tokenizer, sequence_length: int) -> None:
    spec = decoder.spec
    if spec.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"tokenizer: it has {tokenizer.vocab_size:,} tokens but the model has"
            f" {spec.vocab_size:,} logits. Use the tokenizer that the model was trained with."
        )
    if spec.sequence_length < sequence_length:
        raise ConfigError(
            f"sequence_length: the model cannot run {sequence_length} tokens. "
            f"Give at most {spec.sequence_length}, the length that it was built for."
        )
