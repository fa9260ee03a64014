"""Seconds of one layer and one micro-batch: products, attention, element-wise kernels, collectives,
host. No torch.

Symbols: layouts.py.
"""

import dataclasses
from functools import cached_property

import numpy as np

from kit.estimate.theory.communication import Links, all_reduce_seconds, exposed_seconds
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
Both = tuple[Array | float, Array | float]
"""Of a forward pass, and of a backward pass."""


def layer_params(layouts: Layouts) -> Array:
    """Returns the weights of one layer that multiply activations: 2 h (h + K) + 2 h f, gated
    3 h f.
    """
    hidden_size = layouts.hidden_size
    attention = 2 * hidden_size * (hidden_size + layouts.kv_size)
    return attention + (2.0 + layouts.gated) * hidden_size * layouts.ffn_hidden_size


@dataclasses.dataclass(frozen=True)
class Layer:
    """Seconds of one layer and micro-batch on one device: first of a forward pass or of both, then
    the terms, which add up to the total.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients
    links: Links

    @cached_property
    def memory_bytes_per_s(self) -> Array | float:
        """Bytes/s that kernels reach."""
        return self.hardware.memory_bytes_per_s * self.coefficients.memory_efficiency

    @cached_property
    def gemm_forward_s(self) -> Array:
        """The four products: a rounded roofline of multiplying and of moving 2 (T (4 h + (2 h + 2 K
        + 2 or 3 f) / t) + weights) bytes.

        Where torch overlaps them with collectives it cuts the tokens in as many parts as there are
        ranks: an all-gather is pipelined with the product that reads it, a product with the
        reduce-scatter of its result (asynchronous TP:
        `torch._inductor.fx_passes.micro_pipeline_tp`). All-reduces, without sequence parallelism,
        are left as they are.
        """
        x, hidden_size, parts = self.layouts, self.layouts.hidden_size, 1.0
        if np.any(x.tensor_overlap & x.native):
            is_cut = x.tensor_overlap & x.native & x.sequence_parallel
            parts = np.where(is_cut, x.tensor_parallel, 1.0)
        params, rate = layer_params(x) / x.tensor_parallel, self.hardware.matmul_flops_per_s
        part = product_seconds(
            x.tokens / parts, hidden_size, params / hidden_size, 4.0, rate, self.coefficients
        )
        cut = 2 * hidden_size + 2 * x.kv_size + (2.0 + x.gated) * x.ffn_hidden_size
        moved = x.tokens * (4 * hidden_size + cut / x.tensor_parallel) + params
        return np.hypot(parts * part, 2 * moved / self.memory_bytes_per_s)

    @cached_property
    def attention_forward_s(self) -> Array:
        """Between projections, 4 T s h / t FLOPs: fused, half of them, since the causal mask is
        skipped, and 8 T h / t bytes; written out, all, and `score_bytes` for each of T s a / t
        scores.
        """
        x, coefficients = self.layouts, self.coefficients
        flops = 4 * x.tokens * x.sequence_length * x.hidden_size / x.tensor_parallel
        products = flops / self.hardware.attention_flops_per_s
        speed = coefficients.flash_efficiency * x.where(
            x.flash_attention == 1, FIRST_GENERATION, 1.0
        )
        moved = 8 * x.tokens * x.hidden_size / x.tensor_parallel
        per_score = (
            coefficients.score_bytes
            * x.where(x.gated, DROPOUT, 1.0)
            * x.where(x.fused_softmax, 1.0, coefficients.unfused_traffic)
        )
        scores = per_score * x.tokens * x.sequence_length * x.num_heads / x.tensor_parallel
        return np.where(
            x.flash_attention > 0,
            0.5 * products / speed + moved / self.memory_bytes_per_s,
            products / coefficients.attention_efficiency + scores / self.memory_bytes_per_s,
        )

    @cached_property
    def elementwise_forward_s(self) -> Array:
        """Norms, residuals, activation: T (22 h / q + (8 h + 4 or 6 f) / t) bytes.

        The kit's decoder moves more where it is not compiled. Rotation by positions takes seven
        kernels over queries and keys (`kit.model.rotate`: to fp32, half negated, joined, two
        products, sum, to bf16: 52 bytes a number, not 4); silu(gate) is written and read again.
        Compiled, on the other hand, a residual is added in the kernel of the norm that reads it: 2
        bytes fewer for each of two norms.
        """
        x, hidden_size = self.layouts, self.layouts.hidden_size
        cut = 8 * hidden_size + (4.0 + 2.0 * x.gated) * x.ffn_hidden_size
        traffic = x.tokens * (22 * hidden_size / x.sequence_shards + cut / x.tensor_parallel)
        if np.any(x.compiled | x.native):
            eager = x.gated * (48 * (hidden_size + x.kv_size) + 4 * x.ffn_hidden_size)
            eager = np.where(x.native, eager / x.tensor_parallel, 0.0)
            compiled = -4 * hidden_size / x.sequence_shards
            traffic = traffic + x.tokens * np.where(x.compiled, compiled, eager)
        unfused = x.where(x.fused_norm, 1.0, self.coefficients.unfused_traffic)
        return traffic / self.memory_bytes_per_s * unfused

    @property
    def casts_s(self) -> Both:
        """In which operands of linear layers become narrower.

        Inputs, and the kit's weights, going forward, gradients of outputs going back (torchao's
        `Float8Linear`), `cast_bytes` each; Transformer Engine keeps weights in the narrow format.
        The kit's fused norms and activations write it in place of bf16; what attention gives and
        takes, and gradients of the residual stream, are cast by themselves.
        """
        x, hidden_size = self.layouts, self.layouts.hidden_size
        if not np.any(x.cast_bytes):
            return 0.0, 0.0
        t, f = x.tensor_parallel, x.ffn_hidden_size
        apart = np.where(x.fused_norm & x.native, 0.0, 1.0)
        inputs = hidden_size / t + apart * (2 * hidden_size + f / t)
        products = 2 * hidden_size + (hidden_size + 2 * x.kv_size) / t
        outputs = products + apart * (1.0 + x.gated) * f / t
        weights = np.where(x.native, layer_params(x) / t, 0.0)
        cast = x.cast_bytes / self.memory_bytes_per_s
        return cast * (x.tokens * inputs + weights), cast * x.tokens * outputs

    @cached_property
    def tensor_sums_s(self) -> Both:
        """Two sums of 2 T h bytes over tensor ranks in each pass; in the backward pass Megatron
        gathers an input once more under sequence parallelism.

        Overlapped, a rank begins with its own part while the next is on its way; without sequence
        parallelism there are no parts.
        """
        x, ranks = self.layouts, self.layouts.tensor_parallel
        sums = 2 * all_reduce_seconds(2 * x.tokens * x.hidden_size, ranks, self.links.tensor)
        backward = sums * x.where(x.sequence_parallel, 1.25, 1.0)
        if not np.any(x.tensor_overlap):
            return sums, backward
        beside = np.where(x.native, (ranks - 1) / ranks * self.gemm_forward_s, self.gemm_forward_s)
        overlap = x.tensor_overlap & (x.sequence_parallel | np.logical_not(x.native))
        return (
            np.where(overlap, exposed_seconds(sums, beside), sums),
            np.where(overlap, exposed_seconds(backward, 2 * beside), backward),
        )

    @cached_property
    def context_s(self) -> Both:
        """In which parts of a sequence wait for each other.

        Ring (arXiv 2310.01889): keys and values go round while attention computes, and with them
        their gradients in the backward pass. All to all (DeepSpeed-Ulysses, arXiv 2309.14509):
        query, key, value and result change from parts of the sequence to parts of the heads and
        back, and nothing hides it. Both take each rank's work as equal: each has a part of the head
        of the sequence and one of its tail (as torch's and Megatron-LM's context parallelism),
        since in plain order the last of c ranks has 2 - 1/c times the mean under a causal mask.
        """
        x, ranks = self.layouts, self.layouts.context_parallel
        if not np.any(ranks > 1):
            return 0.0, 0.0
        link = self.links.context
        width = 2 * x.tokens / x.tensor_parallel / link.rate
        blocks = (ranks - 1) * (2 * x.kv_size * width + link.latency_s)
        ring = exposed_seconds(blocks, self.attention_forward_s)
        exchanged = (ranks - 1) / ranks * (2 * x.hidden_size + 2 * x.kv_size) * width
        swap = exchanged + 2 * link.latency_s
        is_ring = x.context_exchange == EXCHANGES.index("ring")
        return (
            np.where(ranks > 1, np.where(is_ring, ring, swap), 0.0),
            np.where(ranks > 1, np.where(is_ring, 2 * ring, swap), 0.0),
        )

    @cached_property
    def device_s(self) -> Both:
        """What the device does; in a backward pass twice the products, 2.5 times fused attention or
        twice a written-out one, and 1.6 times the element-wise traffic.
        """
        gemm, attention, elementwise = (
            self.gemm_forward_s,
            self.attention_forward_s,
            self.elementwise_forward_s,
        )
        again = self.layouts.where(self.layouts.flash_attention > 0, 2.5, 2.0) * attention
        (casts, casts_back), (sums, sums_back) = self.casts_s, self.tensor_sums_s
        context, context_back = self.context_s
        return (
            gemm + attention + elementwise + casts + sums + context,
            2 * gemm + again + 1.6 * elementwise + casts_back + sums_back + context_back,
        )

    @cached_property
    def passes_s(self) -> Both:
        """The longer of what the device does and of what its host needs to launch it: kernels, and
        two collectives over tensor ranks.
        """
        x, coefficients, (forward, backward) = self.layouts, self.coefficients, self.device_s
        kernels = x.where(x.flash_attention > 0, KERNELS - 6.0, KERNELS) * coefficients.launch_s
        sums = x.where(x.tensor_parallel > 1, 2 * coefficients.collective_launch_s, 0.0)
        host = kernels + sums
        return (
            np.maximum(forward, host),
            np.maximum(backward, coefficients.backward_launches * host),
        )

    @property
    def recompute_s(self) -> Array:
        """A forward pass once more, or under selective recomputation attention, where it is fused
        the element-wise kernels.

        Blocks of the kit that are not compiled stop before their last product and its sum:
        `Plan.recomputes_whole`.
        """
        x, flash = self.layouts, self.layouts.flash_attention > 0
        some = np.where(flash, self.elementwise_forward_s, self.attention_forward_s)
        product = self.gemm_forward_s * x.hidden_size * x.ffn_hidden_size / layer_params(x)
        stops = x.native & np.logical_not(x.compiled)
        whole = self.passes_s[0] - np.where(stops, product + self.tensor_sums_s[0] / 2, 0.0)
        some = np.where(x.recompute == SELECTIVE, some, 0.0)
        return np.where(x.recompute == FULL, x.recomputed_share * whole, some)

    @cached_property
    def total_s(self) -> Array:
        """Forward + backward + recompute."""
        return self.passes_s[0] + self.passes_s[1] + self.recompute_s

    @property
    def terms_s(self) -> dict[str, Array | float]:
        """Both passes by kind of work, and what comes on top: how much longer the host takes than
        the device, and recomputation (which repeats sums too).
        """
        attention = self.layouts.where(self.layouts.flash_attention > 0, 3.5, 3.0)
        (forward, backward), (forward_work, backward_work) = self.passes_s, self.device_s
        return {
            "gemm": 3 * self.gemm_forward_s,
            "attention": attention * self.attention_forward_s,
            "elementwise": 2.6 * self.elementwise_forward_s + self.casts_s[0] + self.casts_s[1],
            "host_launch": forward - forward_work + backward - backward_work,
            "tensor_parallel": self.tensor_sums_s[0] + self.tensor_sums_s[1],
            "context_parallel": self.context_s[0] + self.context_s[1],
            "recompute": self.recompute_s,
        }


def product_seconds(
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
