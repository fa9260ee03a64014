"""Activations: bytes that one layer keeps per token for its backward pass, and micro-batches in
flight.

Counted per tensor as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), table 2 and equations 1 to 6, with grouped heads and gated feed-forward
from the shapes. At 2 bytes a number, per token, with q = t under sequence parallelism, else 1, and
K = h k / a the width of keys:

    inputs of the query and feed-forward matrices   4 h / q
    inputs of two norms                             4 h / q (not fused: `norm_bytes` instead of 2
                                                    each)
    query, key, value, result of attention          (4 h + 4 K) / t
    scores                                          4 a / t with flash attention (log-sum-exp), else
                                                    2 a s / t (not fused: `score_bytes`; + 3 with
                                                    dropout)
    hidden of feed-forward                          4 f / t, gated 8 f / t (6 f / t where silu(gate)
                                                    * up is fused)
    dropout masks                                   2 h / q

For h = a d, f = 4 h, q = 1 that is Korthikanti's s b h (10 + 24 / t + 5 a s / (h t)); with q = t
his s b h / t (34 + 5 a s / h). Where linear layers keep their inputs in i bytes (fp8: 1), 2 i h / q
and i f / t stand for 4 h / q and 2 f / t of these. Full recomputation keeps the input, 2 h / q.
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
    """What a code base keeps for the backward pass beyond what shapes and layout say."""

    dropout: bool = field_doc("keeps masks of dropout, in models without gate")
    fused_gate: bool = field_doc("silu(gate) * up is one kernel, so silu(gate) is not kept")
    selective: Literal["attention", "elementwise"] = field_doc(
        "what selective recompute makes again: the core of attention, or all but matrix products"
        " and attention"
    )
    gathered_inputs: bool = field_doc(
        "sequence parallelism keeps whole inputs of matrix products, not parts of them"
    )
    gathered_logits: bool = field_doc(
        "each tensor parallel rank computes the loss over the whole vocabulary"
    )
    logit_bytes: float = field_doc("of all copies of one logit at the peak of the loss")
    score_bytes: float = field_doc(
        "kept of one written-out score where mask and softmax are not fused", default=8.0
    )
    norm_bytes: float = field_doc("kept of one input of an RMSNorm that is not fused", default=8.0)
    chunk_logits: float = field_doc(
        "a device with the whole model computes the loss of so many logits at a time; 0: of all",
        default=0,
    )
    chunk_logit_bytes: float = field_doc("of all copies of one such logit", default=0)
    fully_sharded: bool = field_doc(
        "as torch's fully_shard: fp32 shards of weights only, and gradients of blocks reduced as"
        " they come, so that those of a single micro-batch take the place of its activations",
        default=False,
    )
    gradient_copy_bytes: float = field_doc(
        "of a whole gradient beside its sum, whatever ZeRO cuts", default=0
    )
    reduction_bytes: float = field_doc(
        "of the copy in which ZeRO 1 reduces a sum of gradients", default=0
    )
    bucket_bytes: float = field_doc(
        "of the buffer in which ZeRO 2 and 3 collect gradients", default=0
    )
    tied_positions: bool = field_doc(
        "the last stage has learned positions too, beside its tied table", default=False
    )


MEGATRON = Kernels(
    dropout=True,
    fused_gate=True,
    selective="attention",
    gathered_inputs=False,
    gathered_logits=False,
    logit_bytes=10,
)
"""Megatron-LM: logits in bf16 and fp32 (whose memory the softmax takes over), and their
gradient."""
MEGATRON_CORE = MEGATRON.replace(dropout=False, logit_bytes=4)
"""Its recipes since 2024: no dropout, and Transformer Engine's cross entropy, whose gradient takes
the place of the logits."""
MEGATRON_DEEPSPEED = MEGATRON.replace(tied_positions=True)
"""Its pipeline ties the whole embedding layer (`EmbeddingPipe` as a `TiedLayerSpec`,
`megatron/model/gpt_model.py`)."""
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
"""The kit's own decoder, as tests measure it: logits in bf16 and fp32, log-softmax, gradient. One
tensor rank without a pipeline computes its loss in chunks (`kit.model.cross_entropy`): of one,
logits in bf16 and fp32, and log-softmax."""

TORCHTITAN = KIT.replace(chunk_logits=0, chunk_logit_bytes=0, logit_bytes=10, fused_gate=True)
"""Compiled blocks keep gate and up, not silu(gate); the loss is computed of all logits at once, in
one compiled kernel."""
DEEPSPEED = KIT.replace(
    chunk_logits=0,
    fully_sharded=False,
    gradient_copy_bytes=2,
    reduction_bytes=2,
    bucket_bytes=2 * 500e6,
)
"""The kit's decoder in DeepSpeed 0.19.8, counted: ZeRO 1 (`BF16_Optimizer`) and 2 keep bf16
gradients beside their fp32 sums; ZeRO 1 casts all sums to bf16 at once to reduce them
(`allreduce_bucket`); `reduce_bucket_size` is 5e8 numbers."""
KERNELS_BY_MODEL = {"torch": KIT, "deepspeed": DEEPSPEED, "megatron": MEGATRON}
"""Kernels by `Capabilities.memory_model`."""


def engine_kernels(engine: EngineName, device: Device | None = None) -> Kernels:
    """Returns what an engine keeps, on a CPU unless the device is a GPU."""
    kernels = KERNELS_BY_MODEL[capabilities_of(engine).memory_model]
    memory = device and device.is_gpu and device.memory_bytes
    if memory and kernels.chunk_logits:
        return kernels.replace(chunk_logits=logits_at_once(memory.value))
    return kernels


@dataclasses.dataclass(frozen=True)
class LayerActivations:
    """Bytes that one layer saves for its backward pass, per token of a micro-batch, by tensor."""

    layouts: Layouts
    kernels: Kernels

    @cached_property
    def residual_size(self) -> Array:
        """Numbers per token between blocks on one device: h / q."""
        return self.layouts.hidden_size / self.layouts.sequence_shards

    @cached_property
    def product_input_bytes(self) -> Array:
        """Inputs of the query and feed-forward matrices: 2 i h / q at i bytes per number (2, fewer
        in a narrow format). Code that saves gathered inputs needs 2 i h.
        """
        x = self.layouts
        size = self.residual_size
        if self.kernels.gathered_inputs:
            size = x.hidden_size
        return 2 * x.input_bytes * size

    @cached_property
    def _has_fused_norm(self) -> Array:
        """Whether the norm is one kernel, bool. A LayerNorm always is."""
        return self.layouts.fused_norm | np.logical_not(self.layouts.gated)

    @cached_property
    def norm_input_bytes(self) -> Array:
        """Inputs of both norms: 4 h / q, or for an RMSNorm that is not fused 2 `norm_bytes` h /
        q.
        """
        each = self.layouts.where(self._has_fused_norm, 4.0, 2 * self.kernels.norm_bytes)
        return each * self.residual_size

    @cached_property
    def layer_input_bytes(self) -> Array:
        """Input of the layer, which a fused first norm and full recomputation both save: 2 h / q.
        0 if the norm is not fused.
        """
        return self.layouts.where(self._has_fused_norm, 2.0, 0.0) * self.residual_size

    @cached_property
    def attention_bytes(self) -> Array:
        """Query, key, value and result of attention: (4 h + 4 K) / t.

        With the all-to-all exchange the result is saved twice, split by heads and split by
        sequence: + 2 h / t.
        """
        layouts = self.layouts
        tensor_parallel = self.layouts.tensor_parallel
        heads = (4 * layouts.hidden_size + 4 * layouts.kv_size) / tensor_parallel
        if not np.any(layouts.context_exchange):
            return heads
        is_swapped = layouts.context_exchange == EXCHANGES.index("all_to_all")
        return heads + np.where(is_swapped, 2 * layouts.hidden_size / tensor_parallel, 0.0)

    @cached_property
    def attention_score_bytes(self) -> Array:
        """Log-sum-exp of fused attention: 4 a / t. Written-out scores: `score_bytes` a s / t, with
        dropout 3 a s / t more.
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
        """Hidden numbers of feed-forward: (2 + i) f / t, gated (6 + i) f / t, or (4 + i) f / t if
        the gate is fused.
        """
        x = self.layouts
        gate = 2.0 if self.kernels.fused_gate else 4.0
        width = x.ffn_hidden_size / x.tensor_parallel
        return (2 + x.input_bytes + (1 - x.plain) * gate) * width

    @cached_property
    def all_bytes(self) -> Array:
        """Sum of the tensors above, and masks of dropout, 2 h / q."""
        masks: Array | float = 0.0
        if self.kernels.dropout:
            masks = 2 * self.layouts.plain * self.residual_size
        return (
            self.product_input_bytes
            + self.norm_input_bytes
            + self.attention_bytes
            + self.feed_forward_bytes
            + self.attention_score_bytes
            + masks
        )

    @cached_property
    def _activation_input_bytes(self) -> Array:
        """Inputs of the activation function in bf16: 2 f / t, gated 4 f / t."""
        layouts = self.layouts
        return (2 + 2 * (1 - layouts.plain)) * (layouts.ffn_hidden_size / layouts.tensor_parallel)

    @cached_property
    def _selectively_saved_bytes(self) -> Array:
        """Bytes saved under selective recomputation.

        With `attention` everything but written-out scores is saved. With `elementwise` the input
        and the results of all matrix products and of attention are saved. Results of row-split
        products are saved gathered, and summed too.
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
        return results + 4 * layouts.num_heads / tensor_parallel

    @cached_property
    def _selectively_recomputed_bytes(self) -> Array:
        """Bytes recomputed in the backward pass under selective recomputation.

        With `attention` these are written-out scores. With `elementwise` they are norms, rotation,
        activation function and inputs of products.
        """
        layouts = self.layouts
        if self.kernels.selective == "attention":
            return np.where(layouts.flash_attention > 0, 0.0, self.attention_score_bytes)
        gated = 1 - layouts.plain
        rotated = gated * (2 * layouts.hidden_size + 2 * layouts.kv_size) / layouts.tensor_parallel
        return (
            self.product_input_bytes
            + self.norm_input_bytes
            - self.layer_input_bytes
            + rotated
            + self._activation_input_bytes
        )

    @cached_property
    def saved_bytes(self) -> Array:
        """Bytes saved from the forward pass until the backward pass, per micro-batch."""
        recompute = self.layouts.recompute
        some = np.where(recompute == _NONE, self.all_bytes, self._selectively_saved_bytes)
        share = self.layouts.recomputed_share
        full = share * 2 * self.residual_size + (1 - share) * self.all_bytes
        return np.where(recompute == _FULL, full, some)

    @cached_property
    def workspace_bytes(self) -> Array:
        """Bytes in the backward pass of one layer at a time: recomputed tensors, and the gradients
        before and after the activation function, 4 f / t.
        """
        recompute = self.layouts.recompute
        some = np.where(recompute == _NONE, 0.0, self._selectively_recomputed_bytes)
        again = np.where(recompute == _FULL, self.all_bytes - self.layer_input_bytes, some)
        return again + 4 * self.layouts.ffn_hidden_size / self.layouts.tensor_parallel


def microbatches_in_flight(layouts: Layouts, stage: Any) -> Array:
    """Returns the largest number of micro-batches whose activations pipeline device `stage` holds
    at once.

    One unit is one micro-batch in all layers of the device, at most m of them:

    - gpipe: m (arXiv 1811.06965);
    - 1f1b: p - i (arXiv 2104.04473, section 2.2);
    - interleaved: ((v - 1) p + 2 (p - i - 1) + 1) / v, on the first device p + (p - 1) / v (ibid.);
    - zero_bubble (ZB-H1), zbv: p on every device: later devices spend what they save on delayed
      weight gradients (arXiv 2401.10241, sections 2 and 5).
    """
    m = layouts.num_microbatches
    p = layouts.pipeline_parallel
    v = layouts.virtual_stages
    code = layouts.schedule
    remaining = p - stage
    # For v = 1 the formula of interleaved schedules gives 2 (p - i) - 1, not the p - i of 1f1b.
    interleaved = ((v - 1) * p + 2 * remaining - 1) / v
    units = np.where(code == _CODE["1f1b"], remaining, p)
    units = np.where(code == _CODE["interleaved"], interleaved, units)
    units = np.where((code == _CODE["gpipe"]) & (p > 1), m, units)
    return np.minimum(m, units)
