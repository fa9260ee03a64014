"""One decoder for all dense models: a plain nn.Module without code for parallelism. The fields of
`ModelSpec` are its switches.

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
from kit.model.cross_entropy import ZLoss, chunked_cross_entropy
from kit.model.past import (
    DOCUMENT_KERNELS,
    additive_mask,
    attend_softly_capped,
    attend_within_documents,
)
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
    """Token embedding, multiplied by the spec's factor. If the spec has learned positions, their
    embedding is added.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.multiplier = spec.embedding_multiplier
        self.tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        learned = spec.positions == "learned"
        self.positions = nn.Embedding(spec.sequence_length, spec.hidden_size) if learned else None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTH = self.tokens(tokens_BT)
        if self.multiplier != 1:
            x_BTH = x_BTH * self.multiplier
        if self.positions is not None:
            positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            x_BTH = x_BTH + self.positions(positions_T)
        return x_BTH


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads. If a rotary table is given, queries and
    keys are rotated.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=spec.has_qkv_bias)
        self.head_size = spec.head_size
        self.scale = spec.attention_multiplier
        self.soft_cap = spec.attn_logit_softcapping
        self.query = linear(spec.hidden_size, spec.attention_size)
        self.key = linear(spec.hidden_size, spec.kv_size)
        self.value = linear(spec.hidden_size, spec.kv_size)
        self.output = nn.Linear(spec.attention_size, spec.hidden_size, bias=spec.bias)
        self.normalises_heads = spec.qk_norm == "per_head"
        self.query_norm = None
        self.key_norm = None
        if spec.has_qk_norm:
            sizes = (spec.attention_size, spec.kv_size)
            if self.normalises_heads:
                sizes = (spec.head_size, spec.head_size)
            self.query_norm, self.key_norm = (make_norm(spec, size) for size in sizes)

    def forward(self, x_BTH: Tensor, rotary_2TD: Tensor | None, past: Past | None = None) -> Tensor:
        heads = (*x_BTH.shape[:2], -1, self.head_size)
        q = self.query(x_BTH)
        k = self.key(x_BTH)
        v_BKTD = self.value(x_BTH).view(heads).transpose(1, 2)
        if self.query_norm is None or self.key_norm is None:
            q, k = q.view(heads), k.view(heads)
        elif self.normalises_heads:
            q, k = self.query_norm(q.view(heads)), self.key_norm(k.view(heads))
        else:
            q, k = self.query_norm(q).view(heads), self.key_norm(k).view(heads)
        q_BNTD = q.transpose(1, 2)
        k_BKTD = k.transpose(1, 2)
        if rotary_2TD is not None:
            q_BNTD = rotate(q_BNTD, rotary_2TD)
            k_BKTD = rotate(k_BKTD, rotary_2TD)
        if self.soft_cap is not None:
            mask_BTT = None if past is None else past.mask_BTT
            y_BNTD = attend_softly_capped(
                q_BNTD, k_BKTD, v_BKTD, mask_BTT, scale=self.scale, soft_cap=self.soft_cap
            )
        elif past is not None and past.begins_N is not None:
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
                scale=self.scale,
                enable_gqa=q_BNTD.shape[1] != k_BKTD.shape[1],
            )
        return self.output(y_BNTD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Feed-forward layer: down(act(up(x))), or down(act(gate(x)) * up(x)) if it is gated."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=spec.has_ffn_bias)
        self.activation = spec.activation
        self.gate = linear(spec.hidden_size, spec.ffn_hidden_size) if spec.gated else None
        self.up = linear(spec.hidden_size, spec.ffn_hidden_size)
        self.down = linear(spec.ffn_hidden_size, spec.hidden_size)

    def forward(self, x_BTH: Tensor) -> Tensor:
        if self.activation == "swiglu" and self.gate is not None:
            return self.down(F.silu(self.gate(x_BTH)) * self.up(x_BTH))
        if self.gate is not None:
            return self.down(F.gelu(self.gate(x_BTH), approximate="tanh") * self.up(x_BTH))
        if self.activation == "relu_squared":
            return self.down(F.relu(self.up(x_BTH)).square())
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down(F.gelu(self.up(x_BTH), approximate=approximate))


class Block(nn.Module):
    """One transformer block: attention and feed-forward layer, each with a residual connection and
    with a norm before it, after it, or both. `recompute` is the kind of activation recomputation.
    """

    def __init__(self, spec: ModelSpec, recompute: Recompute) -> None:
        super().__init__()
        has_norms_before = spec.norm_placement != "after"
        has_norms_after = spec.norm_placement != "before"
        self.attention_norm = make_norm(spec) if has_norms_before else None
        self.attention = Attention(spec)
        self.attention_post_norm = make_norm(spec) if has_norms_after else None
        self.feed_forward_norm = make_norm(spec) if has_norms_before else None
        self.feed_forward = FeedForward(spec)
        self.feed_forward_post_norm = make_norm(spec) if has_norms_after else None
        self.parallel_residual = spec.parallel_residual
        self.residual_multiplier = spec.residual_multiplier
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
        attended_BTH = self._attention_part(x_BTH, rotary_2TD, past)
        if self.parallel_residual:
            return x_BTH + attended_BTH + self._feed_forward_part(x_BTH)
        x_BTH = x_BTH + attended_BTH
        return x_BTH + self._feed_forward_part(x_BTH)

    def _attention_part(
        self, x_BTH: Tensor, rotary_2TD: Tensor | None, past: Past | None
    ) -> Tensor:
        """Returns what attention adds to the residual stream."""
        if self.attention_norm is not None:
            x_BTH = self.attention_norm(x_BTH)
        y_BTH = self.attention(x_BTH, rotary_2TD, past=past)
        if self.attention_post_norm is not None:
            y_BTH = self.attention_post_norm(y_BTH)
        return y_BTH if self.residual_multiplier == 1 else y_BTH * self.residual_multiplier

    def _feed_forward_part(self, x_BTH: Tensor) -> Tensor:
        """Returns what feed-forward adds to the residual stream."""
        if self.feed_forward_norm is not None:
            x_BTH = self.feed_forward_norm(x_BTH)
        y_BTH = self.feed_forward(x_BTH)
        if self.feed_forward_post_norm is not None:
            y_BTH = self.feed_forward_post_norm(y_BTH)
        return y_BTH if self.residual_multiplier == 1 else y_BTH * self.residual_multiplier


class Output(nn.Linear):
    """Output projection of the decoder. Without targets it returns logits_BTV. If `targets_BT` are
    given, it returns the mean loss in nats, without having all logits in memory at once.

    The loss is computed in this module, since sharding and hooks prepare the weight only for the
    forward pass of the module that has this weight.
    """

    compiled = False

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.hidden_size, spec.vocab_size, bias=False)
        self.scaling = spec.logits_scaling
        self.soft_cap = spec.final_logit_softcapping

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles only the operations of the loss on logits. All other work of the module is
        matrix products and a Python loop over chunks, which are not compiled.
        """
        self.compiled = True

    def forward(
        self, x_BTH: Tensor, targets_BT: Tensor | None = None, z_loss: ZLoss | None = None
    ) -> Tensor:
        if self.scaling != 1:
            x_BTH = x_BTH / self.scaling
        if targets_BT is None:
            logits_BTV = super().forward(x_BTH)
            if self.soft_cap is not None:
                logits_BTV = self.soft_cap * torch.tanh(logits_BTV / self.soft_cap)
            return logits_BTV
        return chunked_cross_entropy(
            x_BTH.flatten(0, 1),
            self.weight,
            targets_BT.flatten(),
            compiled=self.compiled,
            soft_cap=self.soft_cap,
            z_loss=z_loss,
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
    memory at once. In this case the output projection must not be split by tensor parallelism, and
    the loss contains `z_loss`, if it is given. If `past` is None, each token attends to all earlier
    tokens of its row.
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
        self.output = Output(spec) if is_last else None
        self._rotary_tables: dict[tuple[bool, bool], Tensor] = {}
        self._window_1TT: Tensor | None = None
        self.tie()

    def tie(self) -> None:
        """Makes the output projection share the weight of the embedding, if the spec ties both and
        this module has both.
        """
        if self.spec.tied_embeddings and self.embedding is not None and self.output is not None:
            self.output.weight = self.embedding.tokens.weight

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor | None = None,
        past: Past | None = None,
        z_loss: ZLoss | None = None,
    ) -> Tensor:
        # Only the first stage reads the sequence length from its input. The activations that other
        # stages receive may be split by sequence parallelism. In training the length of all
        # sequences is that of the spec.
        length = x.shape[1] if self.embedding is not None else self.spec.sequence_length
        if self.embedding is not None:
            x = self.embedding(x)
        additive = None if past is None else past.with_additive_mask(x.dtype)
        surroundings = (self.rotary(length, x.device), additive)
        local_surroundings = surroundings
        if self.spec.sliding_window is not None:
            rotary_2TD = self.rotary(length, x.device, is_local=True)
            local_surroundings = (rotary_2TD, self._within_window(additive, length, x))
        for number, block in self.layers.items():
            is_local = self.spec.is_local(int(number))
            rotary_2TD, seen = local_surroundings if is_local else surroundings
            if not self.spec.is_rotary(int(number)):
                rotary_2TD = None
            x = block(x, rotary_2TD, seen)
        if self.norm is None or self.output is None:
            return x
        # `targets_BT` is passed only if present, since the hooks of a split projection allow only
        # one input.
        if targets_BT is None:
            return self.output(self.norm(x))
        return self.output(self.norm(x), targets_BT, z_loss)

    def rotary(self, length: int, device: torch.device, *, is_local: bool = False) -> Tensor | None:
        """Returns cosines and sines of the rotary angles for `length` positions, [2, T, R] fp32,
        with R rotated elements of a head. The table is stored for later calls. If the spec has
        learned positions, the result is None.

        `is_local` is whether the table is for layers with an attention window.
        """
        spec = self.spec
        if spec.positions != "rotary":
            return None
        # One table serves all layers unless local layers have a base of their own.
        is_local = is_local and spec.local_rope_theta is not None
        is_long = is_longer_than_original(spec, length)
        table = self._rotary_tables.get((is_local, is_long))
        if table is None or table.shape[1] < length or table.device != device:
            longest = max(length, spec.sequence_length)
            table = rotary_table(spec, longest, device, is_local=is_local, is_long=is_long)
            self._rotary_tables[is_local, is_long] = table
        return table[:, :length]

    def _within_window(self, past: Past | None, length: int, like: Tensor) -> Past | None:
        """Returns the tokens to which each token attends in a layer with an attention window.

        `past` describes the tokens without the window. A mask of it or of the result is additive,
        with the dtype and the device of `like`.
        """
        window = self.spec.sliding_window
        if window is None or window >= length:
            return past
        mask_1TT = self._window_1TT
        if (
            mask_1TT is None
            or mask_1TT.shape[1] != length
            or mask_1TT.device != like.device
            or mask_1TT.dtype != like.dtype
        ):
            positions_T = torch.arange(length, device=like.device)
            distance_TT = positions_T[:, None] - positions_T
            within_TT = (distance_TT >= 0) & (distance_TT < window)
            mask_1TT = self._window_1TT = additive_mask(within_TT[None], like.dtype)
        if past is None or past.mask_BTT is None:
            return Past(mask_BTT=mask_1TT)
        return Past(mask_BTT=mask_1TT + past.mask_BTT)


def is_longer_than_original(spec: ModelSpec, length: int) -> bool:
    """Returns whether a sequence of `length` tokens has the long factors of longrope. The result is
    False with any other scaling of rotary frequencies.
    """
    scaling = spec.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return False
    return length > scaling.original_max_position_embeddings


def rotary_table(
    spec: ModelSpec,
    length: int,
    device: torch.device,
    *,
    is_local: bool = False,
    is_long: bool = False,
) -> Tensor:
    """Returns a table of cosines and sines of the rotary angles, [2, T, R] fp32, with R rotated
    elements of a head.

    The table is neither a parameter nor a buffer. It is fp32 in every precision. It is computed on
    the device where it is needed, so a model that was built on the meta device needs no new table.

    `is_local` is whether the table is for layers with an attention window and a base of their own.
    `is_long` is whether the sequences have the long factors of longrope.

    Source: RoFormer (arXiv 2104.09864), and `modeling_rope_utils` of the library transformers for
    the kinds of `spec.rope_scaling`. With `llama3`, the scale of a frequency depends on the number
    of turns that its angle makes in the original sequence length.
    """
    # With this order of operations, the numbers are equal to those of the library transformers to
    # the last bit, also for long sequences.
    size = spec.rotary_size
    exponent_D = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    base = spec.rope_theta
    scaling = spec.rope_scaling
    if is_local and spec.local_rope_theta is not None:
        base = spec.local_rope_theta
        scaling = None
    frequency_D = 1.0 / base**exponent_D
    factor = 1.0
    if scaling is not None and scaling.rope_type == "llama3":
        turns_D = scaling.original_max_position_embeddings / (2 * math.pi / frequency_D)
        range_ = scaling.high_freq_factor - scaling.low_freq_factor
        kept_D = ((turns_D - scaling.low_freq_factor) / range_).clamp(0, 1)
        frequency_D = (1 - kept_D) * frequency_D / scaling.factor + kept_D * frequency_D
    elif scaling is not None and scaling.rope_type == "linear":
        frequency_D = frequency_D / scaling.factor
    elif scaling is not None:
        divisors = scaling.long_factor if is_long else scaling.short_factor
        divisor_D = torch.tensor(divisors, dtype=torch.float32, device=device)
        frequency_D = 1.0 / (divisor_D * base**exponent_D)
        factor = scaling.attention_factor
    angle_TD = torch.outer(
        torch.arange(length, dtype=torch.float32, device=device), frequency_D
    ).repeat(1, 2)
    table_2TD = torch.stack((angle_TD.cos(), angle_TD.sin()))
    return table_2TD if factor == 1 else table_2TD * factor


def rotate(x_BNTD: Tensor, rotary_2TD: Tensor) -> Tensor:
    """Returns a copy of `x_BNTD` with rotary position embedding. Each pair of elements (i, i + R/2)
    of a head is rotated by the angle of the token's position. The rotation is computed in fp32, and
    the result has the dtype of `x_BNTD`.

    The table has R rotated elements. If R is smaller than the head size D, the last D - R elements
    of a head are not changed.
    """
    size = rotary_2TD.shape[-1]
    if size < x_BNTD.shape[-1]:
        rotated = rotate(x_BNTD[..., :size], rotary_2TD)
        return torch.cat((rotated, x_BNTD[..., size:]), dim=-1)
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

    Norm weights are 1, or 0 with `spec.zero_centered_norm`, and biases are 0. Elements of matrices
    are normally distributed with standard deviation `spec.init_std`. With `spec.scaled_init`,
    matrices whose result is added to the residual stream are divided by sqrt(2 x number of layers),
    as in GPT-2 and HLAT.
    """
    if name.endswith("norm.weight"):
        make = torch.zeros if spec.zero_centered_norm else torch.ones
        return make(shape, device=device)
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


def make_norm(spec: ModelSpec, size: int | None = None) -> nn.Module:
    """Returns a new normalisation layer of the kind that the spec names: LayerNorm or RMSNorm.
    `size` is the number of normalised elements, by default the hidden size.
    """
    if spec.zero_centered_norm:
        kind = ZeroCenteredLayerNorm if spec.has_layernorm else ZeroCenteredRMSNorm
    else:
        kind = nn.LayerNorm if spec.has_layernorm else nn.RMSNorm
    return kind(size or spec.hidden_size, eps=spec.norm_eps)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight is stored as an offset from 1. It computes in fp32, as Gemma does: the
    sum of 1 and a small offset would lose most of the offset in bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """LayerNorm whose weight is stored as an offset from 1, in fp32 as in ZeroCenteredRMSNorm."""

    def forward(self, input: Tensor) -> Tensor:
        weight = 1 + self.weight.float()
        normed = F.layer_norm(
            input.float(), self.normalized_shape, weight, self.bias.float(), self.eps
        )
        return normed.type_as(input)


def _selective_policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
