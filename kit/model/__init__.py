"""One decoder for the GPT and Llama families: a plain nn.Module without code for parallelism.

The last letters of a tensor's name are its dimensions: B batch, T time (sequence), H hidden, N
query heads, K key/value heads, D head size, F feed-forward, V vocabulary. On a tensor parallel rank
N, K, F and V are smaller, so the numbers of heads are read from tensors, not from the spec.
"""

import hashlib
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from kit.config.plan import Recompute
from kit.config.spec import ModelSpec
from kit.model.cross_entropy import chunked_cross_entropy
from kit.model.past import DOCUMENT_KERNELS, attend_within_documents
from kit.model.past import Past as Past
from kit.torch_private import ATTENTION, TENSOR_PARALLEL_SUMS

TENSOR_PARALLEL_SPLIT = {
    "embedding.tokens": "vocabulary",
    "attention.query": "column",
    "attention.key": "column",
    "attention.value": "column",
    "attention.output": "row",
    "feed_forward.gate": "column",
    "feed_forward.up": "column",
    "feed_forward.down": "row",
    "output": "column",
}
"""Maps each matrix that tensor parallelism splits to the kind of its split.

`column` splits the output features, and `vocabulary` splits the vocabulary. In both cases the rows
of the stored weight are split. `row` splits the input features, which are the columns of the stored
weight. All other weights are not split."""

SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    *ATTENTION,
    *DOCUMENT_KERNELS,
    *TENSOR_PARALLEL_SUMS,
}
"""Operations whose results selective recomputation saves, since they are expensive: matrix
products, attention and sums over tensor parallel ranks. All other results of a block are
recomputed. Tensors that sequence parallelism splits are gathered again in the backward pass, since
saving the gathered tensors would undo the saving of memory.

The results of all matrix products are saved. By default torchtitan saves those of every second
matrix product, which needs about a quarter less memory for activations and about 2 % more time. If
a run lacks memory, the planner instead chooses a number of blocks that are recomputed in full
(`recompute_layers`)."""


class Embedding(nn.Module):
    """Token embedding. If the spec has learned positions, their embedding is added."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        learned = spec.positions == "learned"
        self.positions = nn.Embedding(spec.sequence_length, spec.hidden_size) if learned else None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTH = self.tokens(tokens_BT)
        if self.positions is not None:
            positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            x_BTH = x_BTH + self.positions(positions_T)
        return x_BTH


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads. If the spec has rotary positions, queries
    and keys are rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=spec.bias)
        self.head_size = spec.head_size
        self.query = linear(spec.hidden_size, spec.hidden_size)
        self.key = linear(spec.hidden_size, spec.num_kv_heads * spec.head_size)
        self.value = linear(spec.hidden_size, spec.num_kv_heads * spec.head_size)
        self.output = linear(spec.hidden_size, spec.hidden_size)

    def forward(self, x_BTH: Tensor, rotary_2TD: Tensor | None, past: Past | None = None) -> Tensor:
        heads = (*x_BTH.shape[:2], -1, self.head_size)
        q_BNTD = self.query(x_BTH).view(heads).transpose(1, 2)
        k_BKTD = self.key(x_BTH).view(heads).transpose(1, 2)
        v_BKTD = self.value(x_BTH).view(heads).transpose(1, 2)
        if rotary_2TD is not None:
            q_BNTD = rotate(q_BNTD, rotary_2TD)
            k_BKTD = rotate(k_BKTD, rotary_2TD)
        if past is not None and past.begins_N is not None:
            y_BNTD = attend_within_documents(q_BNTD, k_BKTD, v_BKTD, past.begins_N)
        else:
            mask_B1TT = None
            if past is not None and past.mask_BTT is not None:
                mask_B1TT = past.mask_BTT[:, None]
            y_BNTD = F.scaled_dot_product_attention(
                q_BNTD,
                k_BKTD,
                v_BKTD,
                attn_mask=mask_B1TT,
                is_causal=past is None,
                enable_gqa=q_BNTD.shape[1] != k_BKTD.shape[1],
            )
        return self.output(y_BNTD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Feed-forward layer: down(act(up(x))), or down(silu(gate(x)) * up(x)) if it is gated."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=spec.bias)
        self.activation = spec.activation
        self.gate = linear(spec.hidden_size, spec.ffn_hidden_size) if spec.gated else None
        self.up = linear(spec.hidden_size, spec.ffn_hidden_size)
        self.down = linear(spec.ffn_hidden_size, spec.hidden_size)

    def forward(self, x_BTH: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x_BTH)) * self.up(x_BTH))
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down(F.gelu(self.up(x_BTH), approximate=approximate))


class Block(nn.Module):
    """One transformer block: attention and feed-forward layer, each with a norm before it and a
    residual connection. `recompute` is the kind of activation recomputation.
    """

    def __init__(self, spec: ModelSpec, recompute: Recompute) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec)
        self.feed_forward_norm = make_norm(spec)
        self.feed_forward = FeedForward(spec)
        self.recompute = recompute

    def forward(self, x_BTH: Tensor, rotary_2TD: Tensor | None, past: Past | None = None) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._forward(x_BTH, rotary_2TD, past)
        context = partial(create_selective_checkpoint_contexts, _selective_policy)
        if self.recompute == "full":
            context = noop_context_fn
        return checkpoint(
            self._forward, x_BTH, rotary_2TD, past, use_reentrant=False, context_fn=context
        )

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles the block with torch.compile. Under full recomputation, only the function inside
        the activation checkpoint is compiled.

        The reason is that Dynamo cannot trace an activation checkpoint without a policy. Selective
        recomputation has a policy, and the compiled graph itself saves the results that the policy
        names. The arguments are passed to `torch.compile`.
        """
        if self.recompute == "full":
            self._forward = torch.compile(self._forward, *args, **options)
        else:
            super().compile(*args, **options)

    def _forward(
        self, x_BTH: Tensor, rotary_2TD: Tensor | None, past: Past | None = None
    ) -> Tensor:
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH), rotary_2TD, past=past)
        return x_BTH + self.feed_forward(self.feed_forward_norm(x_BTH))


class Output(nn.Linear):
    """Output projection of the decoder. Without targets it returns logits_BTV. If `targets_BT` are
    given, it returns the mean loss in nats, without having all logits in memory at once.

    The loss is computed in this module, since sharding and hooks prepare the weight only for the
    forward pass of the module that has this weight.
    """

    compiled = False

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles only the operations of the loss on logits. All other work of the module is
        matrix products and a Python loop over chunks, which are not compiled.
        """
        self.compiled = True

    def forward(self, x_BTH: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if targets_BT is None:
            return super().forward(x_BTH)
        return chunked_cross_entropy(
            x_BTH.flatten(0, 1), self.weight, targets_BT.flatten(), compiled=self.compiled
        )


class Decoder(nn.Module):
    """A whole decoder, or the part of a decoder that one pipeline stage has.

    Args:
        spec: Shapes of the whole model.
        layers: Numbers of the consecutive blocks that the module has, by default all. With the
            first block of the model, the module also has the embedding. With the last block, it
            also has the final norm and the output projection. A block is named by its number in the
            model, so the names of weights do not depend on the pipeline stages.
        is_first, is_last: Whether the module has the embedding, and whether it has the norm and the
            output projection. If None, `layers` decides. They are needed for a stage without
            blocks.
        recompute: Activations that are recomputed in the backward pass: none, selective or full.
        recompute_layers: Number of blocks, counted from the first of `layers`, whose activations
            are recomputed. By default these are all blocks.

    The forward pass of the first stage takes tokens_BT, that of any other stage takes activations
    x_BTH. The last stage returns logits_BTV, any other stage returns activations. If `targets_BT`
    are given, the last stage instead returns the mean loss in nats, without having all logits in
    memory at once. In this case the output projection must not be split by tensor parallelism. If
    `past` is None, each token attends to all earlier tokens of its row.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: range | None = None,
        is_first: bool | None = None,
        is_last: bool | None = None,
        recompute: Recompute = "none",
        recompute_layers: int | None = None,
    ) -> None:
        super().__init__()
        layers = range(spec.num_layers) if layers is None else layers
        recomputed = layers[:recompute_layers]
        is_first = layers.start == 0 if is_first is None else is_first
        is_last = layers.stop == spec.num_layers if is_last is None else is_last
        self.spec = spec
        self.embedding = Embedding(spec) if is_first else None
        self.layers = nn.ModuleDict()
        for i in layers:
            kind: Recompute = recompute if i in recomputed else "none"
            self.layers[str(i)] = Block(spec, kind)
        self.norm = make_norm(spec) if is_last else None
        self.output = Output(spec.hidden_size, spec.vocab_size, bias=False) if is_last else None
        self._rotary_2TD: Tensor | None = None
        self.tie()

    def tie(self) -> None:
        """Makes the output projection share the weight of the embedding, if the spec ties both and
        this module has both.
        """
        if self.spec.tied_embeddings and self.embedding is not None and self.output is not None:
            self.output.weight = self.embedding.tokens.weight

    def forward(
        self, x: Tensor, targets_BT: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        # Only the first stage reads the sequence length from its input. The activations that other
        # stages receive may be split by sequence parallelism. In training the length of all
        # sequences is that of the spec.
        length = x.shape[1] if self.embedding is not None else self.spec.sequence_length
        rotary_2TD = self.rotary(length, x.device)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x, rotary_2TD, past)
        if self.norm is None or self.output is None:
            return x
        inputs = (self.norm(x),) if targets_BT is None else (self.norm(x), targets_BT)
        # `targets_BT` is passed only if present, since the hooks of a split projection allow only
        # one input.
        return self.output(*inputs)

    def rotary(self, length: int, device: torch.device) -> Tensor | None:
        """Returns cosines and sines of the rotary angles for `length` positions, [2, T, D] fp32.
        The table is stored for later calls. If the spec has learned positions, the result is None.
        """
        if self.spec.positions != "rotary":
            return None
        table = self._rotary_2TD
        if table is None or table.shape[1] < length or table.device != device:
            table = self._rotary_2TD = rotary_table(
                self.spec, max(length, self.spec.sequence_length), device
            )
        return table[:, :length]


def rotary_table(spec: ModelSpec, length: int, device: torch.device) -> Tensor:
    """Returns a table of cosines and sines of the rotary angles, [2, T, D] fp32.

    The table is neither a parameter nor a buffer. It is fp32 in every precision. It is computed on
    the device where it is needed, so a model that was built on the meta device needs no new table.

    Source: RoFormer (arXiv 2104.09864). With `spec.rope_scaling`, each frequency is scaled. The
    scale depends on the number of turns that the angle makes in the original sequence length, as in
    `_compute_llama3_parameters` of the library transformers.
    """
    # With this order of operations, the numbers are equal to those of the library transformers to
    # the last bit, also for long sequences.
    exponent_D = (
        torch.arange(0, spec.head_size, 2, dtype=torch.float32, device=device) / spec.head_size
    )
    frequency_D = 1.0 / spec.rope_theta**exponent_D
    if scaling := spec.rope_scaling:
        turns_D = scaling.original_max_position_embeddings / (2 * math.pi / frequency_D)
        range_ = scaling.high_freq_factor - scaling.low_freq_factor
        kept_D = ((turns_D - scaling.low_freq_factor) / range_).clamp(0, 1)
        frequency_D = (1 - kept_D) * frequency_D / scaling.factor + kept_D * frequency_D
    angle_TD = torch.outer(
        torch.arange(length, dtype=torch.float32, device=device), frequency_D
    ).repeat(1, 2)
    return torch.stack((angle_TD.cos(), angle_TD.sin()))


def rotate(x_BNTD: Tensor, rotary_2TD: Tensor) -> Tensor:
    """Returns a copy of `x_BNTD` with rotary position embedding. Each pair of elements (i, i + D/2)
    of a head is rotated by the angle of the token's position. The rotation is computed in fp32, and
    the result has the dtype of `x_BNTD`.
    """
    cos_TD, sin_TD = rotary_2TD
    x = x_BNTD.float()
    left, right = x.chunk(2, dim=-1)
    return (x * cos_TD + torch.cat((-right, left), dim=-1) * sin_TD).to(x_BNTD.dtype)


def initial_weight(
    spec: ModelSpec, name: str, shape: torch.Size, seed: int, device: torch.device
) -> Tensor:
    """Returns the initial value of one parameter before sharding, in fp32. It depends only on the
    spec, the name of the parameter in the whole model, and the seed. Every layout therefore starts
    from identical weights.

    Norm weights are 1 and biases are 0. Elements of matrices are normally distributed with standard
    deviation `spec.init_std`. With `spec.scaled_init`, matrices whose result is added to the
    residual stream are divided by sqrt(2 x number of layers), as in GPT-2 and HLAT.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if spec.tied_embeddings and name == "output.weight":
        name = "embedding.tokens.weight"
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    writes_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
    std = spec.init_std
    if spec.scaled_init and writes_residual:
        std = spec.init_std / math.sqrt(2 * spec.num_layers)
    return torch.randn(shape, generator=generator, device=device).mul_(std)


def empty_decoder(spec: ModelSpec, *, recompute: Recompute = "none") -> Decoder:
    """Returns a whole decoder on the CPU in fp32. Its weights are allocated but not initialised."""
    with torch.device("meta"):
        decoder = Decoder(spec, recompute=recompute)
    decoder.to_empty(device="cpu")
    decoder.tie()
    return decoder


def build_decoder(spec: ModelSpec, *, seed: int = 1234, recompute: Recompute = "none") -> Decoder:
    """Returns a whole decoder on the CPU in fp32. Its initial weights are computed from `seed`."""
    decoder = empty_decoder(spec, recompute=recompute)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initial_weight(spec, name, parameter.shape, seed, parameter.device))
    return decoder


def make_norm(spec: ModelSpec) -> nn.Module:
    """Returns a new normalisation layer of the kind that the spec names: LayerNorm or RMSNorm."""
    kind = nn.LayerNorm if spec.norm == "layernorm" else nn.RMSNorm
    return kind(spec.hidden_size, eps=spec.norm_eps)


def _selective_policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
