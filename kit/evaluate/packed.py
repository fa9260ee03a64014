"""lm-eval's own `HFLM`, with what several requests begin with computed once.

Packing is used for architectures for which its scores were compared with those of `HFLM`
(`PACKED_TYPES`). All other models are scored by `HFLM`'s own method.

The answers to one question share the question, the questions of one task their solved examples. A
row holds prefix trees in preorder: each node is a token, its position the depth, and it may look at
its ancestors only. In preorder the descendants of node j are the nodes from j up to an end_j, so
node i may look at j where j <= i < end_j: that is all the attention mask needs.

Shape letters: B rows, T nodes of a row, N places whose next token is asked for, H hidden, V
vocabulary. Needs torch, transformers and lm-eval at import.
"""

import collections
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.models import huggingface
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from kit.errors import ConfigError, DataError
from kit.evaluate.benchmarks import DTYPES

HFLM: Any = huggingface.HFLM  # the harness registers it by a decorator without types
Tokens = tuple[int, ...]
"""Input of the model: the tokens of one request, without the last."""

PART = 1024
"""Requests that are encoded and scored at once: the prompts of MMLU, encoded together, would be
many gigabytes."""
LOGITS = 2**23
"""Logits that exist at once: 32 MiB in fp32. Without a bound they would be most of the memory."""
OPEN = 2**31
"""End of descendants that may still come: the end of the row."""
SHORTEST_ROW = 256
"""Tokens up to which a row is filled whatever the sequences, so that short ones make few rows.
Attention in such a row costs little beside matrix products: 4 T h FLOPs a token and block against
24 h^2, with h in the hundreds or more."""
PACKED_TYPES = (
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmoe",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""`model_type` of the architectures that can be packed: `tests/evaluate/test_families.py` compares
each with `HFLM`. Packing needs an attention mask and position ids per token, and logits that are
the output projection of the last hidden state. Gemma 2 and Granite scale their logits, Bloom takes
no such mask, Mamba has a state in place of attention."""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary scalings that do not depend on the length of the input."""
SEQUENCES_PER_ROW = 3
"""A row of long sequences may be so many times as long as the last of them: room for what they
do not share."""


@dataclasses.dataclass
class PackedRow:
    """Prefix trees, side by side."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # of the nodes, in preorder
    depths: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)  # of each node's descendants
    paths: dict[Tokens, list[int]] = dataclasses.field(default_factory=dict)  # nodes of each


def can_pack(config: Any, max_length: int) -> bool:
    """Returns whether packing gives the scores of `HFLM` for a configuration of transformers.

    The architecture must be one of `PACKED_TYPES`. All its layers must attend to the whole input of
    up to `max_length` tokens. Its rotary frequencies must not depend on the length of the input.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in PACKED_TYPES
        and kinds == {"full_attention"}
        and (window is None or window >= max_length)
        and rope.get("rope_type", "default") in FIXED_ROPE
    )


class PackedLM(HFLM):
    """Scores as `HFLM` does, faster where requests are short or begin alike; texts are HFLM's own.

    Attributes:
        packs: whether requests are packed. If False, `HFLM` scores them, `batch_size` sequences in
            a forward pass.
        sequences: `batch_size` as a number, None if `batch_tokens` counts.

    Args:
        model, tokenizer: as transformers loads them.
        max_length: the longest input, in tokens.
        batch_tokens: tokens in one forward pass, padding included (at least one sequence is always
            run).
        batch_size: as `HFLM`'s: sequences in one forward pass, or `auto` for as many as the
            device's memory holds. A packed forward pass has as many tokens as these sequences at
            their longest. If None, `batch_tokens` counts, and a model that is not packed is scored
            and writes one sequence at a time, `HFLM`'s default.
        replicas: processes that hold the same weights. All must make the same calls. Packed
            requests and generated texts are divided among them, and each gets all results.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int,
        batch_tokens: int = 4096,
        batch_size: int | str | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        # Each method that uses `batch_size_per_gpu`, the batch size of `HFLM`, sets it before.
        super().__init__(model, tokenizer=tokenizer, max_length=max_length, softmax_dtype="float32")
        self.packs = can_pack(model.config, max_length)
        dtype = str(model.dtype).removeprefix("torch.")
        self.precision = DTYPES.get(dtype, dtype)
        if batch_size is None and not self.packs:
            batch_size = 1  # the default of HFLM
        if str(batch_size).startswith("auto"):
            # HFLM announces the size on standard output, where a report may be expected.
            with contextlib.redirect_stdout(sys.stderr):
                batch_size = self._detect_batch_size()
        self.sequences = None
        self.batch_tokens = batch_tokens
        if batch_size is not None:
            self.sequences = int(batch_size)
            self.batch_tokens = self.sequences * max_length
        self.replicas = replicas
        self.num_replicas = 1
        self.mine = slice(None)  # share of this process in the packed batches and prompts
        if replicas is not None:
            self.num_replicas = dist.get_world_size(replicas)
            self.mine = slice(dist.get_rank(replicas), None, self.num_replicas)
        self.num_truncated = 0  # prompts cut so far

    # Scoring --------------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns for each (context, continuation) its log-likelihood in nats, and whether it is
        the greedy choice.

        Raises:
            DataError: a continuation has no token.
        """
        score = super().loglikelihood
        found = []
        starts = range(0, len(requests), PART)
        for start in tqdm(starts, desc="log-likelihoods", disable=None, leave=False):
            found += score(requests[start : start + PART], disable_tqdm=True)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of each text in nats, from its first token to its last."""
        self.batch_size_per_gpu = PART  # windows that HFLM hands over to be packed at once
        return super().loglikelihood_rolling(requests, disable_tqdm=not sys.stderr.isatty())

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for texts, context, continuation in requests:
            if not continuation:
                raise DataError(f"A continuation has no token of its own: {str(texts):.120}.")
            self.num_truncated += len(context) + len(continuation) - 1 > self.max_length
        if not self.packs:
            return self._plain_loglikelihoods(requests)
        # Equal inputs, such as those of one-token answers to one question, are one sequence.
        asked: dict[Tokens, list[tuple[int, list[int]]]] = collections.defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            tokens = context + continuation
            # Where HFLM refuses a continuation that is longer than the model, it is scored window
            # by window, as a long document is.
            for start in range(0, len(continuation), self.max_length):
                target = continuation[start : start + self.max_length]
                end = len(context) + start + len(target) - 1  # of what predicts the last of them
                asked[tuple(tokens[max(0, end - self.max_length) : end])].append((index, target))
        # Of each request: log-likelihood, and how many tokens are not the most likely ones.
        totals = torch.zeros(len(requests), 2, dtype=torch.float64, device=self.device)
        rows = pack(asked, longest=min(self.batch_tokens, self.max_length))
        for batch in list(batches(rows, self.batch_tokens))[self.mine]:
            self._score(batch, asked, totals)
        if self.num_replicas > 1:
            dist.all_reduce(totals, group=self.replicas)
        return [(value, misses == 0) for value, misses in totals.tolist()]

    def _plain_loglikelihoods(self, requests: Any) -> list[tuple[float, bool]]:
        """Returns `HFLM`'s own results. A continuation longer than the model, which `HFLM` refuses,
        is scored in windows.
        """
        windows = []
        owners = []
        for index, (texts, context, continuation) in enumerate(requests):
            for start in range(0, len(continuation), self.max_length):
                target = continuation[start : start + self.max_length]
                windows.append((texts, context + continuation[:start], target))
                owners.append(index)
        self.batch_size_per_gpu = self.sequences
        found = super()._loglikelihood_tokens(windows, disable_tqdm=True)
        totals = [0.0] * len(requests)
        is_greedy = [True] * len(requests)
        for index, (value, greedy) in zip(owners, found, strict=True):
            totals[index] += value
            is_greedy[index] = is_greedy[index] and greedy
        return list(zip(totals, is_greedy, strict=True))

    def _score(self, rows: list[PackedRow], asked: dict[Tokens, list], totals: Tensor) -> None:
        """Adds what the tokens asked for in these rows contribute."""
        tokens_BT, depths_BT, mask_B1TT = tensors(rows, self.device)
        # Of each token asked for: the node that predicts it, the token, and its request.
        wanted = []
        for number, row in enumerate(rows):
            first = number * tokens_BT.shape[1]
            for sequence, path in row.paths.items():
                for index, continuation in asked[sequence]:
                    nodes = path[-len(continuation) :]
                    for node, token in zip(nodes, continuation, strict=True):
                        wanted.append((first + node, token, index))
        place, token, index = torch.tensor(wanted, device=self.device).T
        place_N, which = place.unique(return_inverse=True)
        options = {"attention_mask": mask_B1TT, "position_ids": depths_BT, "use_cache": False}
        x_NH = self.model.base_model(tokens_BT, **options)[0].flatten(0, 1)[place_N]
        chunk = max(1, LOGITS // self.model.config.vocab_size)
        for start in range(0, len(place_N), chunk):
            here = (which >= start) & (which < start + chunk)
            logits_NV = self.model.get_output_embeddings()(x_NH[start : start + chunk]).float()
            n = which[here] - start
            chosen = token[here]
            # Not logsumexp: on a large vocabulary its rounding differs from this, which is HFLM's.
            value = logits_NV.log_softmax(-1)[n, chosen]
            missed = logits_NV.argmax(-1)[n] != chosen
            found = torch.stack((value.double(), missed.double()), dim=1)
            totals.index_add_(0, index[here], found)

    # Generation -----------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns `HFLM`'s continuation of each request.

        Raises:
            ConfigError: a task asks for more tokens than the model has room for.
            DataError: a prompt has no token.
        """
        for request in requests:
            prompt, options = request.arguments
            new = normalize_gen_kwargs(options, self.max_gen_toks).get("max_gen_toks", 0)
            if new >= self.max_length:
                raise ConfigError(
                    f"generation: {new} new tokens leave no room for a prompt in {self.max_length}"
                    " tokens, the model's sequence length. Lower the task's max_gen_toks, or use a"
                    " model with longer sequences."
                )
            tokens = self.tok_encode(prompt)
            if not tokens:
                raise DataError(
                    "generation: a prompt has no token. Use a task that asks something."
                )
            self.num_truncated += len(tokens) > self.max_length - new
        # Keys and values of this many sequences of the longest length are in memory.
        self.batch_size_per_gpu = self.sequences or max(1, self.batch_tokens // self.max_length)
        texts = super().generate_until(requests[self.mine], disable_tqdm=not sys.stderr.isatty())
        if self.num_replicas == 1:
            return texts
        parts: list[Any] = [None] * self.num_replicas
        dist.all_gather_object(parts, texts, group=self.replicas)
        found = [""] * len(requests)
        for number, part in enumerate(parts):
            found[number :: self.num_replicas] = part
        return found

    def _model_generate(self, *args: Any, **options: Any) -> Tensor:
        # Processes that share weights have the same prompts; other replicas end when they do.
        return super()._model_generate(*args, **options, synced_gpus=False)


def pack(sequences: Iterable[Tokens], longest: int) -> list[PackedRow]:
    """Returns rows with all sequences, each of at most `longest` tokens unless a single sequence is
    longer.
    """
    rows: list[PackedRow] = []
    before: Tokens = ()
    path: list[int] = []  # nodes of the sequence before
    for sequence in sorted(sequences):
        shared = len(os.path.commonprefix([before, sequence]))
        limit = min(longest, max(SHORTEST_ROW, SEQUENCES_PER_ROW * len(sequence)))
        if not rows or len(rows[-1].tokens) + len(sequence) - shared > limit:
            rows.append(PackedRow())
            path = []
            shared = 0
        row = rows[-1]
        first = len(rows[-1].tokens)
        for node in path[shared:]:
            row.ends[node] = first
        path = path[:shared] + list(range(first, first + len(sequence) - shared))
        row.ends += [OPEN] * (len(sequence) - shared)
        row.tokens += sequence[shared:]
        row.depths += range(shared, len(sequence))
        row.paths[sequence] = path
        before = sequence
    return rows


def batches(rows: list[PackedRow], batch_tokens: int) -> Iterator[list[PackedRow]]:
    """Yields the rows by falling length, as many at a time as `batch_tokens` holds when padded
    to the longest.
    """
    left = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    while left:
        count = max(1, batch_tokens // len(left[0].tokens))
        yield left[:count]
        left = left[count:]


def tensors(rows: list[PackedRow], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens_BT and their positions, padded on the right, and which of them each may look
    at, as mask_B1TT.
    """

    def padded(values: Iterable[list[int]], fill: int = 0) -> Tensor:
        return pad_sequence([torch.tensor(each) for each in values], True, fill).to(device)

    tokens_BT = padded(row.tokens for row in rows)
    nodes_T = torch.arange(tokens_BT.shape[1], device=device)
    # Padding looks at padding: a token that may look at nothing would be a NaN.
    ends_BT = padded((row.ends for row in rows), fill=OPEN)
    mask_BTT = (nodes_T <= nodes_T[:, None]) & (nodes_T[:, None] < ends_BT[:, None])
    return tokens_BT, padded(row.depths for row in rows), mask_BTT[:, None]
