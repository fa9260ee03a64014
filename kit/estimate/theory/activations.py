"""Activations: bytes that one layer saves per token for its backward pass, and the number of
micro-batches in flight.

Bytes are counted per tensor as in Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv 2205.05198), table 2 and equations 1 to 6. Grouped heads and gated
feed-forward layers are added. The table below has bytes per token at 2 bytes per element.

Symbols: h hidden size, f feed-forward size, a heads, k key/value heads, d head size, s sequence
length, b micro-batch size, t tensor parallel degree. q = t with sequence parallelism, otherwise 1.
A = a d is the width of all query heads together, K = k d that of all key heads.

    inputs of the query and feed-forward matrices   4 h / q
    inputs of n norms                               2 n h / q (not fused: `norm_bytes` instead of 2
                                                    each)
    query, key, value, result of attention          (4 A + 4 K) / t (+ 2 A + 2 K with norms of
                                                    queries and keys)
    scores                                          4 a / t with flash attention (log-sum-exp),
                                                    otherwise 2 a s / t (not fused: `score_bytes`
                                                    instead of 2; + 3 with dropout)
    hidden elements of feed-forward                 4 f / t, gated 8 f / t (6 f / t if silu(gate) *
                                                    up is fused)
    dropout masks                                   2 h / q

For h = a d, f = 4 h and q = 1, the sum over s b tokens is equal to Korthikanti's formula
s b h (10 + 24 / t + 5 a s / (h t)). For q = t it is equal to s b h / t (34 + 5 a s / h). Linear
layers may save their inputs with i bytes per element (1 in fp8). The 4 h / q bytes of the query and
feed-forward inputs are then 2 i h / q, and 2 f / t of the bytes of hidden elements are i f / t.
Full recomputation saves only the input of the layer, 2 h / q.
"""

import dataclasses
from functools import cached_property
from typing import Any, Literal

import numpy as np

from cluster.record import Record, field_doc
from cluster.site import Device
from kit.config.plan import logits_at_once
from kit.engines.capabilities import EngineName, capabilities_of
from kit.estimate.theory.layouts import EXCHANGES, RECOMPUTE, SCHEDULES, Array, Layouts

_NONE = RECOMPUTE.index("none")
_FULL = RECOMPUTE.index("full")
_CODE = {name: SCHEDULES.index(name) for name in SCHEDULES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels(Record):
    """Properties of a training code on which the bytes saved for the backward pass depend, in
    addition to the model and the layout.
    """

    dropout: bool = field_doc(
        "whether dropout masks are saved for the backward pass. Gated models (Llama) have none"
    )
    fused_gate: bool = field_doc(
        "whether silu(gate) * up is one kernel, so that silu(gate) is not saved"
    )
    selective: Literal["attention", "elementwise"] = field_doc(
        "operations that selective recomputation repeats. attention: the core of attention, without"
        " its projections. elementwise: all operations except matrix products and attention"
    )
    gathered_inputs: bool = field_doc(
        "whether each rank saves the gathered inputs of matrix products (whole sequence) under"
        " sequence parallelism, instead of its part of the sequence"
    )
    gathered_logits: bool = field_doc(
        "whether each tensor parallel rank computes the loss over the whole vocabulary"
    )
    logit_bytes: float = field_doc(
        "bytes per logit at the memory peak of the loss, summed over all copies of the logit"
    )
    score_bytes: float = field_doc(
        "bytes saved per attention score that is written to memory, if mask and softmax are not"
        " fused",
        default=8.0,
    )
    norm_bytes: float = field_doc(
        "bytes saved per input element of an RMSNorm that is not fused", default=8.0
    )
    chunk_logits: float = field_doc(
        "number of logits per chunk if the loss is computed in chunks. Chunks are used only without"
        " tensor and pipeline parallelism. 0: no chunks",
        default=0,
    )
    chunk_logit_bytes: float = field_doc(
        "bytes per logit of a chunk, summed over all copies of the logit", default=0
    )
    fully_sharded: bool = field_doc(
        "whether torch's fully_shard shards the weights. A device then holds only fp32 shards of"
        " weights, and gradients are reduced block by block. Gradients of a single micro-batch"
        " reuse the memory of its activations",
        default=False,
    )
    gradient_copy_bytes: float = field_doc(
        "bytes per parameter of the unsharded gradients that ZeRO 0 to 2 keep in addition to the"
        " accumulated gradients",
        default=0,
    )
    reduction_bytes: float = field_doc(
        "bytes per parameter of the temporary copy in which ZeRO 1 reduces the accumulated"
        " gradients over the replicas",
        default=0,
    )
    bucket_bytes: float = field_doc(
        "bytes of the buffer in which ZeRO 2 and 3 collect gradients before their reduction",
        default=0,
    )
    tied_positions: bool = field_doc(
        "whether the last pipeline stage holds a copy of the learned position embeddings, in"
        " addition to its copy of the tied token embedding",
        default=False,
    )


MEGATRON = Kernels(
    dropout=True,
    fused_gate=True,
    selective="attention",
    gathered_inputs=False,
    gathered_logits=False,
    logit_bytes=10,
)
"""Properties of Megatron-LM's kernels. The 10 bytes per logit are 2 for bf16 logits, 4 for fp32
logits and 4 for their gradient. The softmax reuses the memory of the fp32 logits."""
MEGATRON_CORE = MEGATRON.replace(dropout=False, logit_bytes=4)
"""Properties of the kernels in Megatron-Core's recipes since 2024. The recipes have no dropout, and
use Transformer Engine's cross entropy, whose gradient overwrites the logits."""
MEGATRON_DEEPSPEED = MEGATRON.replace(tied_positions=True)
"""Kernels of Megatron-DeepSpeed. Its last pipeline stage has a copy of the whole embedding layer,
learned positions included (`EmbeddingPipe` as a `TiedLayerSpec`, `megatron/model/gpt_model.py`)."""
KIT = Kernels(
    dropout=False,
    fused_gate=False,
    selective="elementwise",
    gathered_inputs=True,
    gathered_logits=False,
    logit_bytes=14,
    chunk_logits=logits_at_once(None),
    chunk_logit_bytes=10,
    fully_sharded=True,
)
"""Kernels of the kit's decoder. Tests measure their memory.

The 14 bytes per logit are 2 for bf16 logits, 4 for fp32 logits, 4 for the log-softmax and 4 for the
gradient. Without tensor and pipeline parallelism the loss is computed in chunks
(`kit.model.cross_entropy`). The 10 bytes per logit of a chunk are 2 for bf16 logits, 4 for fp32
logits and 4 for the log-softmax."""

TORCHTITAN = KIT.replace(chunk_logits=0, chunk_logit_bytes=0, logit_bytes=10, fused_gate=True)
"""Properties of torchtitan's kernels with compiled blocks. For the backward pass the blocks save
gate and up, but not silu(gate). One compiled kernel computes the loss from all logits at once."""
DEEPSPEED = KIT.replace(
    chunk_logits=0,
    fully_sharded=False,
    gradient_copy_bytes=2,
    reduction_bytes=2,
    bucket_bytes=2 * 500e6,
)
"""Kernels of the kit's decoder in DeepSpeed 0.19.8. The bytes were counted in DeepSpeed's source.

ZeRO 1 (`BF16_Optimizer`) and ZeRO 2 keep bf16 gradients in addition to their fp32 sums. To reduce
the sums, ZeRO 1 casts all of them to bf16 at once (`allreduce_bucket`). The bucket
(`reduce_bucket_size`) has 5e8 elements of 2 bytes."""
KERNELS_BY_MODEL = {"torch": KIT, "deepspeed": DEEPSPEED, "megatron": MEGATRON}
"""Maps each value of `Capabilities.memory_model` to the kernels whose memory the planner assumes.
The value names the code base that an engine's memory use resembles."""


def engine_kernels(engine: EngineName, device: Device | None = None) -> Kernels:
    """Returns the properties of an engine's kernels.

    The loss is computed in chunks of logits. If `device` is a GPU whose memory size is known, the
    chunk size follows from this memory. Otherwise it is the chunk size for a CPU.
    """
    kernels = KERNELS_BY_MODEL[capabilities_of(engine).memory_model]
    memory = device and device.is_gpu and device.memory_bytes
    if memory and kernels.chunk_logits:
        return kernels.replace(chunk_logits=logits_at_once(memory.value))
    return kernels


@dataclasses.dataclass(frozen=True)
class LayerActivations:
    """Activations that one layer saves for its backward pass, in bytes per token of a micro-batch.
    Each property is an array with one element per layout.
    """

    layouts: Layouts
    kernels: Kernels

    @cached_property
    def residual_size(self) -> Array:
        """Number of elements per token of the residual stream on one device: h / q with hidden size
        h. q is the tensor parallel degree with sequence parallelism, otherwise 1.
        """
        return self.layouts.hidden_size / self.layouts.residual_shards

    @cached_property
    def product_input_bytes(self) -> Array:
        """Bytes per token of the inputs of the query and feed-forward matrices: 2 i h / q, with
        hidden size h, i bytes per element (2, or fewer in a narrow format), and sequence split over
        q ranks. Training code that saves gathered inputs needs 2 i h.
        """
        x = self.layouts
        size = self.residual_size
        if self.kernels.gathered_inputs:
            size = x.hidden_size
        return 2 * x.input_bytes * size

    @cached_property
    def _has_fused_norm(self) -> Array:
        """Whether each norm runs as one kernel. A LayerNorm always does. An RMSNorm does if the
        layout has `fused_norm`.
        """
        return self.layouts.fused_norm | self.layouts.has_layernorm

    @cached_property
    def norm_input_bytes(self) -> Array:
        """Bytes per token of the inputs of the n norms of a layer: 2 n h / q, with hidden size h
        and sequence split over q ranks. If RMSNorm is not fused, each norm needs
        `Kernels.norm_bytes` bytes per element instead of 2. With a parallel residual, both norms of
        a layer have one input.
        """
        x = self.layouts
        inputs = x.num_block_norms - x.where(x.parallel_residual, 1.0, 0.0)
        return self._norm_bytes * inputs * self.residual_size

    @cached_property
    def _norm_bytes(self) -> Array:
        """Bytes per element of the input of a norm that are saved for backward: 2 if the norm is
        one kernel, or 4 if it also computes in fp32.
        """
        x = self.layouts
        fused = x.where(x.zero_centered_norm, 4.0, 2.0)
        unfused = np.full_like(fused, self.kernels.norm_bytes)
        return np.where(self._has_fused_norm, fused, unfused)

    @cached_property
    def layer_input_bytes(self) -> Array:
        """Bytes per token of the layer's input, in bf16: 2 h / q, with hidden size h and sequence
        split over q ranks. The fused first norm saves this tensor, and full recomputation saves it
        too. If the norm is not fused, the value is 0.
        """
        return self.layouts.where(self._has_fused_norm, 2.0, 0.0) * self.residual_size

    @cached_property
    def attention_bytes(self) -> Array:
        """Bytes per token of query, key, value and result of attention: (4 A + 4 K) / t, with
        widths A of all query heads and K of all key heads and tensor parallel degree t.

        With the all-to-all exchange of context parallelism, the result is saved twice, split by
        heads and split by sequence. This needs 2 A / t more.
        """
        layouts = self.layouts
        tensor_parallel = self.layouts.tensor_parallel
        heads = (4 * layouts.attention_size + 4 * layouts.kv_size) / tensor_parallel
        if not np.any(layouts.context_exchange):
            return heads
        is_swapped = layouts.context_exchange == EXCHANGES.index("all_to_all")
        return heads + np.where(is_swapped, 2 * layouts.attention_size / tensor_parallel, 0.0)

    @cached_property
    def qk_norm_bytes(self) -> Array:
        """Bytes per token of the inputs of the norms of queries and keys: 2 (A + K) / t, with
        widths A of all query heads and K of all key heads and tensor parallel degree t. 0 without
        such norms.
        """
        x = self.layouts
        size = (x.attention_size + x.kv_size) / x.tensor_parallel
        return x.where(x.has_qk_norm, 1.0, 0.0) * self._norm_bytes * size

    @cached_property
    def attention_score_bytes(self) -> Array:
        """Bytes per token that attention saves to compute the gradients of its scores.

        Here a is the number of heads, t the tensor parallel degree and s the sequence length. Fused
        attention saves only the log-sum-exp: 4 a / t. Attention that writes its scores to memory
        saves k a s / t, with k = `score_bytes`. If mask and softmax are fused, it saves 2 a s / t.
        Dropout needs 3 a s / t more.
        """
        layouts = self.layouts
        kernels = self.kernels
        each = layouts.where(layouts.fused_softmax, 2.0, kernels.score_bytes)
        if kernels.dropout:
            each = each + 3.0 * layouts.plain
        heads = layouts.num_heads / layouts.tensor_parallel
        written = each * layouts.sequence_length
        return np.where(layouts.flash_attention > 0, 4.0, written) * heads

    @property
    def feed_forward_bytes(self) -> Array:
        """Bytes per token of the intermediate tensors of the feed-forward layer: (2 + i) f / t,
        with feed-forward size f, tensor parallel degree t and i bytes per saved input element.
        Gated models need (6 + i) f / t, or (4 + i) f / t if the gate is fused.
        """
        x = self.layouts
        gate = 2.0 if self.kernels.fused_gate else 4.0
        width = x.ffn_hidden_size / x.tensor_parallel
        return (2 + x.input_bytes + (1 - x.plain) * gate) * width

    @cached_property
    def all_bytes(self) -> Array:
        """Bytes per token that the forward pass stores for the backward pass if nothing is
        recomputed: inputs of matrix products and norms, tensors of attention and feed-forward, and
        dropout masks. Masks need 2 bytes per element of the residual stream.
        """
        masks: Array | float = 0.0
        if self.kernels.dropout:
            masks = 2 * self.layouts.plain * self.residual_size
        return (
            self.product_input_bytes
            + self.norm_input_bytes
            + self.attention_bytes
            + self.qk_norm_bytes
            + self.feed_forward_bytes
            + self.attention_score_bytes
            + masks
        )

    @cached_property
    def _activation_input_bytes(self) -> Array:
        """Bytes per token of the inputs of the activation function in bf16: 2 f / t, or 4 f / t in
        gated models, with feed-forward size f and tensor parallel degree t.
        """
        layouts = self.layouts
        return (2 + 2 * (1 - layouts.plain)) * (layouts.ffn_hidden_size / layouts.tensor_parallel)

    @cached_property
    def _selectively_saved_bytes(self) -> Array:
        """Bytes per token that the forward pass stores for the backward pass under selective
        recomputation.

        If `kernels.selective` is `attention`, all tensors are stored except the attention scores,
        which only unfused attention writes to memory. If `kernels.selective` is `elementwise`, the
        layer's input and the results of all matrix products and of attention are stored. Results of
        row-split products are stored before and after their sum over tensor parallel ranks.
        """
        layouts = self.layouts
        if self.kernels.selective == "attention":
            return self.all_bytes - self._selectively_recomputed_bytes
        hidden_size = layouts.hidden_size
        tensor_parallel = layouts.tensor_parallel
        summed = np.where(tensor_parallel > 1, 4 * self.residual_size, 0.0)
        results = (
            2 * self.residual_size
            + self.attention_bytes
            + 4 * hidden_size
            + summed
            + self._activation_input_bytes
        )
        # Unfused attention has two matrix products, and the result of the first is the scores.
        scores = layouts.where(layouts.flash_attention > 0, 4.0, 2 * layouts.sequence_length)
        return results + scores * layouts.num_heads / tensor_parallel

    @cached_property
    def _selectively_recomputed_bytes(self) -> Array:
        """Bytes per token of the tensors that the backward pass recomputes under selective
        recomputation.

        If `kernels.selective` is `attention`, these tensors are the attention scores, which only
        unfused attention writes to memory. If `kernels.selective` is `elementwise`, the tensors are
        the results of norms, rotary embedding and activation function, and the inputs of matrix
        products.
        """
        layouts = self.layouts
        if self.kernels.selective == "attention":
            return np.where(layouts.flash_attention > 0, 0.0, self.attention_score_bytes)
        heads = (2 * layouts.attention_size + 2 * layouts.kv_size) / layouts.tensor_parallel
        rotated = layouts.where(layouts.has_learned_positions, 0.0, 1.0) * heads
        return (
            self.product_input_bytes
            + self.norm_input_bytes
            - self.layer_input_bytes
            + rotated
            + self._activation_input_bytes
            + np.where(layouts.flash_attention > 0, 0.0, self.attention_score_bytes)
        )

    @cached_property
    def saved_bytes(self) -> Array:
        """Bytes per token of a micro-batch that one layer saves from the forward pass until the
        backward pass. The value of a layout depends on its kind of recomputation: none, selective
        or full.
        """
        recompute = self.layouts.recompute
        some = np.where(recompute == _NONE, self.all_bytes, self._selectively_saved_bytes)
        share = self.layouts.recomputed_share
        full = share * 2 * self.residual_size + (1 - share) * self.all_bytes
        return np.where(recompute == _FULL, full, some)

    @cached_property
    def workspace_bytes(self) -> Array:
        """Bytes per token that exist only during the backward pass of a layer: recomputed tensors,
        and the gradients of the input and the output of the activation function. These gradients
        need 4 f / t, with feed-forward size f and tensor parallel degree t.
        """
        recompute = self.layouts.recompute
        some = np.where(recompute == _NONE, 0.0, self._selectively_recomputed_bytes)
        again = np.where(recompute == _FULL, self.all_bytes - self.layer_input_bytes, some)
        return again + 4 * self.layouts.ffn_hidden_size / self.layouts.tensor_parallel


def microbatches_in_flight(layouts: Layouts, stage: Any) -> Array:
    """Returns the largest number of micro-batches whose activations a pipeline device keeps in
    memory at once. `stage` is the number i of the device, from 0.

    One micro-batch in all layers of the device counts 1. With p pipeline devices, v virtual stages
    per device and m micro-batches per step, the number is at most m and depends on the schedule:

    - gpipe: m (arXiv 1811.06965).
    - 1f1b: p - i (arXiv 2104.04473, section 2.2).
    - interleaved: ((v - 1) p + 2 (p - i - 1) + 1) / v, which is p + (p - 1) / v on the first device
      (arXiv 2104.04473, section 2.2).
    - zero_bubble (ZB-H1) and zbv: p on every device. Later devices have fewer micro-batches in
      flight, but delay the weight gradients, and so keep the activations longer (arXiv 2401.10241,
      sections 2 and 5).
    """
    m = layouts.num_microbatches
    p = layouts.pipeline_parallel
    v = layouts.virtual_stages
    code = layouts.schedule
    remaining = p - stage
    # 1f1b is not the case v = 1 of the formula for interleaved schedules. For v = 1 this formula
    # gives 2 (p - i) - 1 micro-batches on device i of p, while 1f1b has only p - i.
    interleaved = ((v - 1) * p + 2 * remaining - 1) / v
    units = np.where(code == _CODE["1f1b"], remaining, p)
    units = np.where(code == _CODE["interleaved"], interleaved, units)
    units = np.where((code == _CODE["gpipe"]) & (p > 1), m, units)
    return np.minimum(m, units)
