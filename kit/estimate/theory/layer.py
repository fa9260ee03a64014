"""Seconds of one layer and one micro-batch: products, attention, element-wise kernels, collectives,
host. No torch.

Symbols: layouts.py.
"""

import dataclasses
from typing import Any

import numpy as np

from kit.estimate.theory.communication import Links, all_reduce, exposed
from kit.estimate.theory.hardware import Coefficients, Hardware, Number
from kit.estimate.theory.layouts import EXCHANGES, RECOMPUTE, Array, Layouts

KERNELS = 30.0
"""Launched by one layer's forward pass; fused attention saves six."""
DROPOUT = 0.6
"""Traffic of a written-out score without dropout, which gated (Llama) models do not have, over
that with it."""
FIRST_GENERATION = 0.6
"""Speed of fused attention's first generation over its second (FlashAttention-2, arXiv
2307.08691, section 4.1)."""
SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Seconds of one layer and micro-batch on one device."""

    gemm: Array
    attention: Array
    elementwise: Array
    tensor_parallel: Array
    """Forward and backward, not what recomputation repeats."""
    context_parallel: Array
    host_launch: Array
    recompute: Array
    total: Array


def layer_params(x: Layouts) -> Array:
    """Returns the weights of one layer that multiply activations."""
    h, kv = x.hidden_size, x.hidden_size * x.num_kv_heads / x.num_heads
    return 2 * h * (h + kv) + (2.0 + x.gated) * h * x.ffn_hidden_size


def layer_time(x: Layouts, hardware: Hardware, c: Coefficients, links: Links) -> Layer:
    """Returns what the forward and the backward pass of a layer take, and its recomputation."""
    h, t, f, s = x.hidden_size, x.tensor_parallel, x.ffn_hidden_size, x.sequence_length
    tokens = x.micro_batch_size * s / x.context_parallel
    memory_rate = hardware.memory_bytes_per_s * c.memory_efficiency
    kv = h * x.num_kv_heads / x.num_heads
    params = layer_params(x) / t
    moved = tokens * (4 * h + (2 * h + 2 * kv + (2.0 + x.gated) * f) / t) + params
    # A rounded roofline.
    gemm = np.hypot(_products(x, tokens, params, hardware, c), 2 * moved / memory_rate)
    attention, flash = _attention(x, tokens, hardware, c, memory_rate)
    sharded = np.where(x.sequence_parallel, t, 1.0)
    traffic = tokens * (22 * h / sharded + (8 * h + (4.0 + 2.0 * x.gated) * f) / t)
    if np.any(x.compiled | x.native):
        traffic = traffic + tokens * np.where(
            x.compiled, -4 * h / sharded, np.where(x.native, _eager(x, kv), 0.0)
        )
    elementwise = traffic / memory_rate * x.where(x.fused_norm, 1.0, c.unfused_traffic)
    casts, casts_backward = _casts(x, tokens, kv, params, memory_rate)
    sums = 2 * all_reduce(2 * tokens * h, t, links.tensor_rate, links.tensor_latency_s)
    # Megatron gathers an input once more.
    sums_backward = sums * x.where(x.sequence_parallel, 1.25, 1.0)
    if np.any(x.overlap):
        # A rank begins with its own part while the next is on its way; without sequence parallelism
        # there are no parts.
        beside = np.where(x.native, (t - 1) / t * gemm, gemm)
        overlap = x.overlap & (x.sequence_parallel | np.logical_not(x.native))
        sums = np.where(overlap, exposed(sums, beside), sums)
        sums_backward = np.where(overlap, exposed(sums_backward, 2 * beside), sums_backward)
    context, context_backward = _context_parallel(x, tokens, kv, attention, links)
    forward = gemm + attention + elementwise + casts + sums + context
    backward = 2 * gemm + x.where(flash, 2.5, 2.0) * attention + 1.6 * elementwise + casts_backward
    backward = backward + sums_backward + context_backward
    launches = x.where(flash, KERNELS - 6.0, KERNELS) * c.launch_s + x.where(
        t > 1, 2 * c.collective_launch_s, 0.0
    )
    forward_s = np.maximum(forward, launches)
    backward_s = np.maximum(backward, c.backward_launches * launches)
    again = np.where(x.recompute == SELECTIVE, np.where(flash, elementwise, attention), 0.0)
    # Blocks of the kit that are not compiled stop before their last product and its sum:
    # `Plan.recomputes_whole`.
    last = np.where(
        x.native & np.logical_not(x.compiled), gemm * h * f / layer_params(x) + sums / 2, 0.0
    )
    again = np.where(x.recompute == FULL, forward_s - last, again)
    return Layer(
        gemm=3 * gemm,
        attention=x.where(flash, 3.5, 3.0) * attention,
        elementwise=2.6 * elementwise + casts + casts_backward,
        tensor_parallel=sums + sums_backward,
        context_parallel=context + context_backward,
        host_launch=forward_s - forward + backward_s - backward,
        recompute=again,
        total=forward_s + backward_s + again,
    )


def _products(
    x: Layouts, tokens: Array, params: Array, hardware: Hardware, c: Coefficients
) -> Array:
    """Returns seconds of the four products of a layer.

    Where torch overlaps them with collectives it cuts the tokens in as many parts as there are
    ranks: an all-gather is pipelined with the product that reads it, a product with the
    reduce-scatter of its result (asynchronous TP: `torch._inductor.fx_passes.micro_pipeline_tp`).
    All-reduces, without sequence parallelism, are left as they are.
    """
    h, parts = x.hidden_size, 1.0
    if np.any(x.overlap & x.native):
        parts = np.where(x.overlap & x.native & x.sequence_parallel, x.tensor_parallel, 1.0)
    return parts * product_time(tokens / parts, h, params / h, 4.0, hardware.matmul_flops_per_s, c)


def _eager(x: Layouts, kv: Array) -> Array:
    """Returns bytes per token that a layer of the kit's decoder moves beyond fused kernels where it
    is not compiled.

    Rotation by positions takes seven kernels over queries and keys (`kit.model.rotate`: to fp32,
    half negated, joined, two products, sum, to bf16: 52 bytes a number, not 4); silu(gate) is
    written and read again. Compiled, on the other hand, a residual is added in the kernel of the
    norm that reads it: 2 bytes fewer for each of two norms.
    """
    return x.gated * (48 * (x.hidden_size + kv) + 4 * x.ffn_hidden_size) / x.tensor_parallel


def _casts(x: Layouts, tokens: Array, kv: Array, params: Array, memory_rate: Any) -> tuple:
    """Returns (seconds of a forward pass, of a backward pass) in which operands of linear layers
    become narrower.

    Weights and inputs going forward, gradients of outputs going back (torchao's `Float8Linear`). A
    number takes 2 bytes to read and 2 to write, as it is and transposed, since the products of the
    backward pass read along the other side (`cast_transpose` of Transformer Engine). Fused norms
    and activations write both in place of one in bf16; what attention gives and takes, and
    gradients of the residual stream, are cast by themselves.
    """
    if not np.any(x.narrow):
        return 0.0, 0.0
    h, t, f = x.hidden_size, x.tensor_parallel, x.ffn_hidden_size
    unfused = np.where(x.fused_norm, 0.0, 1.0)
    inputs = h / t + unfused * (2 * h + f / t)
    outputs = 2 * h + (h + 2 * kv) / t + unfused * (1.0 + x.gated) * f / t
    cast = np.where(x.narrow, 4.0, 0.0) / memory_rate
    return cast * (tokens * inputs + params), cast * tokens * outputs


def _attention(
    x: Layouts, tokens: Array, hardware: Hardware, c: Coefficients, memory_rate: Array | float
) -> tuple:
    """Returns (seconds of a forward pass between projections, where attention is fused)."""
    h, t, s = x.hidden_size, x.tensor_parallel, x.sequence_length
    flash = x.flash_attention > 0
    products = 4 * tokens * s * h / t / hardware.attention_flops_per_s
    speed = c.flash_efficiency * x.where(x.flash_attention == 1, FIRST_GENERATION, 1.0)
    # half: the causal mask is skipped.
    fused = 0.5 * products / speed + 8 * tokens * h / t / memory_rate
    per_score = (
        c.score_bytes
        * x.where(x.gated, DROPOUT, 1.0)
        * x.where(x.fused_softmax, 1.0, c.unfused_traffic)
    )
    written = (
        products / c.attention_efficiency + per_score * tokens * s * x.num_heads / t / memory_rate
    )
    return np.where(flash, fused, written), flash


def _context_parallel(
    x: Layouts, tokens: Array, kv: Array, attention: Array, links: Links
) -> tuple:
    """Returns (seconds of a forward pass, of a backward pass) in which parts of a sequence wait for
    each other.

    Ring (arXiv 2310.01889): keys and values go round while attention computes, and with them their
    gradients in the backward pass. All to all (DeepSpeed-Ulysses, arXiv 2309.14509): query, key,
    value and result change from parts of the sequence to parts of the heads and back, and nothing
    hides it. Both take each rank's work as equal: each has a part of the head of the sequence and
    one of its tail (as torch's and Megatron-LM's context parallelism), since in plain order the
    last of c ranks has 2 - 1/c times the mean under a causal mask.
    """
    ranks = x.context_parallel
    if not np.any(ranks > 1):
        return 0.0, 0.0
    width = 2 * tokens / x.tensor_parallel / links.context_rate
    ring = exposed((ranks - 1) * (2 * kv * width + links.context_latency_s), attention)
    swap = (ranks - 1) / ranks * (2 * x.hidden_size + 2 * kv) * width + 2 * links.context_latency_s
    is_ring = x.context_exchange == EXCHANGES.index("ring")
    return (
        np.where(ranks > 1, np.where(is_ring, ring, swap), 0.0),
        np.where(ranks > 1, np.where(is_ring, 2 * ring, swap), 0.0),
    )


def product_time(
    tokens: Array, inner: Array, outer: Array, count: float, rate: Number, c: Coefficients
) -> Array:
    """Returns seconds of `count` products that read tokens x inner and write tokens x (outer /
    count) each.

    Each side of a product is rounded up by `gemm_edge`, which is where small and thin ones lose
    their efficiency.
    """
    edge = c.gemm_edge
    flops = 2 * (tokens + edge) * (inner + edge) * (outer + count * edge)
    return flops / (rate * c.gemm_efficiency)
