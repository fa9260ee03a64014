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
his s b h / t (34 + 5 a s / h). Full recomputation keeps the input, 2 h / q.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from cluster.record import Record, field_doc
from cluster.site import Device
from kit.estimate.theory.layouts import EXCHANGES, RECOMPUTE, SCHEDULES, Array, Layouts
from kit.plan import EngineName, logits_at_once

_NONE, _FULL = RECOMPUTE.index("none"), RECOMPUTE.index("full")
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
ENGINE_KERNELS: dict[EngineName, Kernels] = {
    "native": KIT,
    "deepspeed": DEEPSPEED,
    "neuron": MEGATRON,
}
"""NxD's layers are made after Megatron-LM's."""


def engine_kernels(engine: EngineName, device: Device | None = None) -> Kernels:
    """Returns what an engine keeps, on a CPU unless the device is a GPU."""
    kernels, memory = ENGINE_KERNELS[engine], device and device.is_gpu and device.memory_bytes
    return (
        kernels.replace(chunk_logits=logits_at_once(memory.value))
        if memory and kernels.chunk_logits
        else kernels
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes per token of one layer."""

    kept: Array
    """From the forward pass until the backward pass, per micro-batch."""
    workspace: Array
    """In the backward pass of one layer at a time: what is made again, and gradients."""
    sequence: Array
    """q: over how many devices sequence parallelism cuts what lies between blocks."""


def layer_activations(layouts: Layouts, kernels: Kernels) -> LayerActivations:
    """Returns what one layer keeps and needs, per token of a micro-batch."""
    t, h, f, a = (
        layouts.tensor_parallel,
        layouts.hidden_size,
        layouts.ffn_hidden_size,
        layouts.num_heads,
    )
    gated = layouts.gated.astype(h.dtype)
    plain = 1 - gated
    q = np.where(layouts.sequence_parallel, t, 1.0)
    key = h * (layouts.num_kv_heads / a)
    residual = h / q
    inputs = 4 * h if kernels.gathered_inputs else 4 * residual
    fused = layouts.fused_norm | np.logical_not(layouts.gated)
    # The first norm's is the input of the layer.
    shared_input = np.where(fused, 2.0, 0.0).astype(h.dtype) * (h / q)
    norms = np.where(fused, 4.0, 2 * kernels.norm_bytes).astype(h.dtype) * residual
    heads = (4 * h + 4 * key) / t
    # The result lies there as parts of heads and as parts of the sequence.
    if np.any(layouts.context_exchange):
        heads = heads + np.where(
            layouts.context_exchange == EXCHANGES.index("all_to_all"), 2 * h / t, 0.0
        )
    hidden = (4 + gated * (2.0 if kernels.fused_gate else 4.0)) * (f / t)
    flash = layouts.flash_attention > 0
    score_bytes = np.where(layouts.fused_softmax, 2.0, kernels.score_bytes).astype(h.dtype)
    score_bytes = score_bytes + 3.0 * plain if kernels.dropout else score_bytes
    scores = np.where(flash, 4.0, score_bytes * layouts.sequence_length) * (a / t)
    whole = inputs + norms + heads + hidden + scores
    if kernels.dropout:
        whole = whole + 2 * plain * residual
    if kernels.selective == "attention":
        again = np.where(flash, 0.0, scores)
        kept = whole - again
    # kept: input, results of all matrix products (those of row-split ones whole, and summed) and of
    # attention
    else:
        summed = np.where(t > 1, 4 * residual, 0.0)
        kept = 2 * residual + heads + 4 * h + summed + (2 + 2 * gated) * (f / t) + 4 * a / t
        again = (
            inputs
            + norms
            - shared_input
            + gated * (2 * h + 2 * key) / t
            + (2 + 2 * gated) * (f / t)
        )
    none, full = layouts.recompute == _NONE, layouts.recompute == _FULL
    again = np.where(full, whole - shared_input, np.where(none, 0.0, again))
    kept = np.where(full, 2 * residual, np.where(none, whole, kept))
    # Besides, the gradients before and after the activation function are there together.
    return LayerActivations(kept=kept, workspace=again + 4 * f / t, sequence=q)


def in_flight(layouts: Layouts, stage: Any) -> Array:
    """Returns the most micro-batches that pipeline device `stage` holds activations of at once.

    One unit is one micro-batch in all layers of the device, at most m of them:

    - gpipe: m (arXiv 1811.06965);
    - 1f1b: p - i (arXiv 2104.04473, section 2.2);
    - interleaved: ((v - 1) p + 2 (p - i - 1) + 1) / v, on the first device p + (p - 1) / v (ibid.);
    - zero_bubble (ZB-H1), zbv: p on every device: later devices spend what they save on delayed
      weight gradients (arXiv 2401.10241, sections 2 and 5).
    """
    m, p, v = layouts.num_microbatches, layouts.pipeline_parallel, layouts.virtual_stages
    code = layouts.schedule
    remaining = p - stage
    virtual = (
        (v - 1) * p + 2 * remaining - 1
    ) / v  # p - i for v = 1 would be 2 (p - i) - 1 by this
    units = np.where(
        code == _CODE["interleaved"], virtual, np.where(code == _CODE["1f1b"], remaining, p)
    )
    return np.minimum(m, np.where((code == _CODE["gpipe"]) & (p > 1), m, units))
