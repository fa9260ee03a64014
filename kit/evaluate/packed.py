"""Scores requests as lm-eval's class `HFLM` does, but computes the tokens with which several
requests begin only once.

Packing is used for the architectures in `PACKED_TYPES`, for which the scores with packing were
compared with those of `HFLM`. All other models are scored by `HFLM`'s own method.

The answers to one question share the question. The questions of one task share their solved
examples. A row holds several prefix trees in preorder. Each node is a token. Its position is its
depth, and it attends to its ancestors only. In preorder, the descendants of node j are the nodes
from j up to an index end_j. So node i attends to node j if j <= i < end_j, and the attention mask
needs nothing more.

Shape letters: B rows, T nodes of a row, N nodes whose next token is scored, H hidden size, V
vocabulary size. Imports torch, transformers and lm-eval.
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

HFLM: Any = huggingface.HFLM  # lm-eval registers HFLM by a decorator without types.
Tokens = tuple[int, ...]
"""Input of the model for one request: its tokens without the last one, which is only predicted."""

PART = 1024
"""Number of requests that are tokenized and scored at once. All prompts of MMLU, tokenized
together, would take many gigabytes."""
LOGITS = 2**23
"""Largest number of logits in memory at once, 32 MiB in fp32. Without a limit, logits would take
most of the memory."""
OPEN = 2**31
"""End index of a tree node whose last descendant is not known yet. In the attention mask, it is the
end of the row."""
SHORTEST_ROW = 256
"""Length in tokens up to which sequences are added to a row, even if all of them are short.
Otherwise, short sequences would need many rows. Attention in such rows costs little compared with
matrix products: 4 T h FLOPs per token and block, against 24 h^2. T is the length of the row, and h
the hidden size, at least some hundreds."""
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
"""`model_type` of the architectures that can be packed. `tests/evaluate/test_families.py` compares
each architecture with `HFLM`.

Packing needs an attention mask and position ids per token. It also needs logits that are the output
projection of the last hidden state. Gemma 2 and Granite scale their logits, Bloom takes no such
mask, and Mamba has a state in place of attention."""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary scalings, by their names in transformers, that do not depend on the length of the input.
Packing joins inputs, so it needs such a scaling."""
SEQUENCES_PER_ROW = 3
"""Largest length of a row above SHORTEST_ROW, as a multiple of the length of the last sequence in
the row. The multiple leaves room for the tokens that the sequences do not share."""


@dataclasses.dataclass
class PackedRow:
    """One row of a packed batch: several prefix trees, one after another. Each node of a tree is a
    token.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    """Token of each node of the trees, in preorder."""
    depths: list[int] = dataclasses.field(default_factory=list)
    """Depth of each node in its tree, from 0. The depth is also the position id of the token."""
    ends: list[int] = dataclasses.field(default_factory=list)
    """Index after the last descendant of each node, or OPEN if that descendant is not known yet."""
    paths: dict[Tokens, list[int]] = dataclasses.field(default_factory=dict)
    """Dict from a packed sequence (its tokens) to the indices of its nodes in the row, from the
    first token to the last."""


def can_pack(config: Any, max_length: int) -> bool:
    """Returns whether a model with this configuration can be scored with packing, that is, with
    equal scores as by lm-eval's class `HFLM`.

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
    """Model of lm-eval that scores as its class `HFLM` does, but faster if requests are short or
    begin with equal tokens. Texts are generated by `HFLM` itself.

    Attributes:
        packs: whether requests are packed. If False, `HFLM` scores them, `batch_size` sequences in
            a forward pass.
        sequences: `batch_size` as a number, or None if `batch_tokens` limits the batch.

    Args:
        model, tokenizer: as transformers loads them.
        max_length: the longest input, in tokens.
        batch_tokens: tokens in one forward pass, padding included. At least one sequence is always
            run.
        batch_size: sequences in one forward pass, or `auto` for as many as the device's memory
            holds, as in `HFLM`. A packed forward pass then has up to `batch_size` times
            `max_length` tokens. If None, `batch_tokens` limits the batch. Without packing, None
            means one sequence at a time, `HFLM`'s default.
        replicas: process group of the processes that hold copies of the same weights. All must make
            the same calls. Packed requests and generated texts are divided among them, and each
            process returns all results.
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
        # `batch_size_per_gpu` is the batch size of `HFLM`. Each method that uses it sets it first.
        super().__init__(model, tokenizer=tokenizer, max_length=max_length, softmax_dtype="float32")
        self.packs = can_pack(model.config, max_length)
        dtype = str(model.dtype).removeprefix("torch.")
        self.precision = DTYPES.get(dtype, dtype)
        if batch_size is None and not self.packs:
            batch_size = 1  # HFLM's default
        if str(batch_size).startswith("auto"):
            # HFLM prints the size to standard output, which may be reserved for a report.
            with contextlib.redirect_stdout(sys.stderr):
                batch_size = self._detect_batch_size()
        self.sequences = None
        self.batch_tokens = batch_tokens
        if batch_size is not None:
            self.sequences = int(batch_size)
            self.batch_tokens = self.sequences * max_length
        self.replicas = replicas
        self.num_replicas = 1
        self.mine = slice(None)  # packed batches and prompts that this process computes
        if replicas is not None:
            self.num_replicas = dist.get_world_size(replicas)
            self.mine = slice(dist.get_rank(replicas), None, self.num_replicas)
        self.num_truncated = 0  # prompts truncated so far

    # Scoring --------------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, whether it is the greedy choice) of the continuation,
        for each request (context, continuation).

        Raises:
            DataError: A continuation has no token.
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
        self.batch_size_per_gpu = PART  # windows per call of `_loglikelihood_tokens`
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
        # Requests with equal inputs share one sequence, such as one-token answers to a question.
        asked: dict[Tokens, list[tuple[int, list[int]]]] = collections.defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            tokens = context + continuation
            # HFLM refuses a continuation that is longer than `max_length`. Here, such continuations
            # are scored window by window, as long documents are.
            for start in range(0, len(continuation), self.max_length):
                target = continuation[start : start + self.max_length]
                # The input ends before the last token of the target.
                end = len(context) + start + len(target) - 1
                asked[tuple(tokens[max(0, end - self.max_length) : end])].append((index, target))
        # Columns for each request: log-likelihood, number of tokens that are not the most likely.
        totals = torch.zeros(len(requests), 2, dtype=torch.float64, device=self.device)
        rows = pack(asked, longest=min(self.batch_tokens, self.max_length))
        for batch in list(batches(rows, self.batch_tokens))[self.mine]:
            self._score(batch, asked, totals)
        if self.num_replicas > 1:
            dist.all_reduce(totals, group=self.replicas)
        return [(value, misses == 0) for value, misses in totals.tolist()]

    def _plain_loglikelihoods(self, requests: Any) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, whether it is the greedy choice) of each request, by the
        method of lm-eval's `HFLM`. `HFLM` refuses a continuation that is longer than `max_length`,
        so such continuations are scored in windows.
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
        """Adds the scores of the tokens in `rows` to `totals`. `asked` has (index of a request, its
        scored tokens), for each sequence.
        """
        tokens_BT, depths_BT, mask_B1TT = tensors(rows, self.device)
        # One entry per scored token: node that predicts it, token, index of its request.
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
            # log_softmax is used as in HFLM, since logsumexp is rounded differently on a large
            # vocabulary.
            value = logits_NV.log_softmax(-1)[n, chosen]
            missed = logits_NV.argmax(-1)[n] != chosen
            found = torch.stack((value.double(), missed.double()), dim=1)
            totals.index_add_(0, index[here], found)

    # Generation -----------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns `HFLM`'s continuation of each prompt.

        Raises:
            ConfigError: A task requests so many new tokens that no room is left for a prompt.
            DataError: A prompt has no token.
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
        # During generation, memory holds the keys and values of this number of sequences of
        # `max_length` tokens.
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
        # Processes that share weights have equal prompts, so they end together. Replicas need not
        # wait for each other.
        return super()._model_generate(*args, **options, synced_gpus=False)


def pack(sequences: Iterable[Tokens], longest: int) -> list[PackedRow]:
    """Packs token sequences into rows of prefix trees, and returns the rows. A row has at most
    `longest` tokens, unless a single sequence is longer.
    """
    rows: list[PackedRow] = []
    before: Tokens = ()
    path: list[int] = []  # nodes of the previous sequence
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
    """Yields batches of rows, the longest rows first. Padded to its longest row, a batch has at
    most `batch_tokens` tokens, unless its single row is longer.
    """
    left = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    while left:
        count = max(1, batch_tokens // len(left[0].tokens))
        yield left[:count]
        left = left[count:]


def tensors(rows: list[PackedRow], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (tokens_BT, positions_BT, mask_B1TT) of rows, padded on the right. mask[b, 0, i, j]
    is True if node i attends to node j.
    """

    def padded(values: Iterable[list[int]], fill: int = 0) -> Tensor:
        return pad_sequence([torch.tensor(each) for each in values], True, fill).to(device)

    tokens_BT = padded(row.tokens for row in rows)
    nodes_T = torch.arange(tokens_BT.shape[1], device=device)
    # Padding tokens attend to padding tokens, since a token that attends to nothing would give NaN.
    ends_BT = padded((row.ends for row in rows), fill=OPEN)
    mask_BTT = (nodes_T <= nodes_T[:, None]) & (nodes_T[:, None] < ends_BT[:, None])
    return tokens_BT, padded(row.depths for row in rows), mask_BTT[:, None]
