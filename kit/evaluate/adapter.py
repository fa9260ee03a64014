"""The harness's language-model interface over any callable that maps tokens_BT to logits_BTV.

Shape letters: B batch, T time, V vocabulary, C tokens of one continuation. Needs torch and lm-eval at import.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor

from kit.data.tokenizer import Tokenizer
from kit.errors import ConfigError, DataError

DEFAULT_NEW_TOKENS = 256
"""Tokens to generate where a task does not say; the value of the harness's own Hugging Face model."""


class DecoderLM(TemplateLM):
    """Scores and continues text with a causal decoder.

    Numbers equal those of the harness's own `HFLM` on the same weights: documents start after the end-of-text token,
    prompts that are too long lose tokens on the left (`num_truncated` counts them), and rows are padded on the right,
    where causal attention cannot look.

    Args:
        model: maps tokens_BT (int64) to logits_BTV, causally.
        tokenizer: the one the model was trained with.
        sequence_length: the longest input of the model, in tokens.
        batch_tokens: tokens in one forward pass, padding included (at least one row is always run).
        device: where the model is.

    Raises:
        ConfigError: the model rejects a sequence of that length, or has fewer logits than the tokenizer has tokens.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        batch_tokens: int = 4096,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self.max_length, self.batch_tokens = sequence_length, batch_tokens
        self._device = torch.device(device)
        self.num_truncated = 0  # prompts cut so far
        self._check()

    def _check(self) -> None:
        for name, value in (("sequence_length", self.max_length), ("batch_tokens", self.batch_tokens)):
            if value < 1:
                raise ConfigError(f"{name}: {value} is not allowed. Give a whole number from 1.")
        vocabulary = self._logits([[0]]).shape[-1]
        if vocabulary < self._tokenizer.vocab_size:
            raise ConfigError(
                f"tokenizer: it has {self._tokenizer.vocab_size:,} tokens but the model has {vocabulary:,} logits. "
                f"Use the tokenizer that the model was trained with."
            )
        try:
            self._logits([[0] * self.max_length])
        except (IndexError, RuntimeError) as error:
            raise ConfigError(
                f"sequence_length: the model cannot run {self.max_length} tokens ({error}). "
                f"Give at most the length that it was built for."
            ) from error

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string)

    # Scoring -----------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns for each (context, continuation) its log-likelihood in nats, and whether it is the greedy choice."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Returns the log-likelihood of each text in nats, from its first token to its last."""
        texts = [request.args[0] for request in requests]
        return [value for value, _ in self._score_all([([self.prefix_token_id], self.tok_encode(t)) for t in texts])]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for (context, text), context_tokens, tokens in requests:
            if not tokens:
                raise DataError(f"A continuation has no token of its own: {text!r} after {context[-60:]!r}.")
            self.num_truncated += len(context_tokens) + len(tokens) - 1 > self.max_length
        return self._score_all([(context, continuation) for _, context, continuation in requests])

    @torch.inference_mode()
    def _score_all(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        # Equal rows, such as those of one-token answers to one question, are run once.
        targets: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for index, pair in enumerate(pairs):
            for row, target in self._windows(*pair):
                targets.setdefault(row, []).append((index, target))
        totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
        for rows in self._batches(list(targets)):
            for row, logits_TV in zip(rows, self._logits(rows), strict=True):
                for index, target in targets[row]:
                    value, is_greedy = _score(logits_TV[: len(row)], target)
                    totals[index] += value
                    greedy[index] &= is_greedy
        return list(zip(totals, greedy, strict=True))

    def _windows(self, context: list[int], continuation: list[int]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Yields inputs and the tokens that their last positions predict; each token is predicted once.

        One window, cut on the left, unless the continuation alone is longer than the model: the harness's `HFLM`
        refuses that, here it is scored window by window, as `loglikelihood_rolling` scores a long document.
        """
        tokens = context + continuation
        for start in range(0, len(continuation), self.max_length):
            target = continuation[start : start + self.max_length]
            end = len(context) + start + len(target)
            yield tuple(tokens[max(0, end - 1 - self.max_length) : end - 1]), target

    def _batches(self, rows: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Yields the rows by falling length, as many at a time as `batch_tokens` holds when padded to the longest."""
        rows = sorted(rows, key=len, reverse=True)
        while rows:
            count = max(1, self.batch_tokens // len(rows[0]))
            yield rows[:count]
            rows = rows[count:]

    def _logits(self, rows: list[Any]) -> Tensor:
        """Returns logits_BTV of rows of token ids, padded on the right to the longest."""
        length = max(map(len, rows))
        padded = [[*row, *[0] * (length - len(row))] for row in rows]
        with torch.inference_mode():
            return self._model(torch.tensor(padded, device=self._device))

    # Generation --------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns a greedy continuation for each request, cut before its first stop string or end-of-text."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            raise ConfigError("generation: sampling is asked for, but only greedy generation is supported.")
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
        limit = int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS))
        if limit >= self.max_length:
            raise ConfigError(
                f"generation: {limit} new tokens leave no room for a prompt in {self.max_length} tokens, the model's "
                f"sequence length. Lower the task's max_gen_toks, or use a model with longer sequences."
            )
        prompt = self.tok_encode(context)[-(self.max_length - limit) :] or [self.prefix_token_id]
        new: list[int] = []
        while len(new) < limit:
            token = int(self._logits([prompt + new])[0, -1].argmax())
            if token == self.eot_token_id:
                break
            new.append(token)
            if any(stop in self._tokenizer.decode(new) for stop in stops):
                break
        text = self._tokenizer.decode(new)
        for stop in stops:
            text = text.split(stop)[0]
        return text


def _score(logits_TV: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Returns the log-likelihood of the last tokens in nats, and whether each of them is the most likely one."""
    logits_CV = logits_TV[-len(continuation) :].float()
    tokens_C = torch.tensor(continuation, device=logits_CV.device)
    chosen_C = logits_CV.log_softmax(-1).gather(1, tokens_C[:, None])
    return float(chosen_C.sum()), bool((logits_CV.argmax(-1) == tokens_C).all())
