"""Time of one layer and one micro-batch: matrix products, attention, element-wise kernels,
collectives, and the host. No torch.

Symbols are those of `layouts.py`.
"""

import dataclasses
from functools import cached_property

import numpy as np

from kit.estimate.theory.communication import GroupLinks, all_reduce_seconds, exposed_seconds
from kit.estimate.theory.hardware import Coefficients, Hardware, Number
from kit.estimate.theory.layouts import EXCHANGES, RECOMPUTE, Array, Layouts

KERNELS = 30.0
"""Number of kernels in the forward pass of one layer. Fused attention has six fewer."""
DROPOUT = 0.6
"""Memory traffic of an attention score without dropout, as a share of the traffic with dropout.
Gated (Llama) models have no dropout."""
FIRST_GENERATION = 0.6
"""Speed of FlashAttention 1 as a share of the speed of FlashAttention 2 (arXiv 2307.08691, section
4.1)."""
SELECTIVE = RECOMPUTE.index("selective")
FULL = RECOMPUTE.index("full")
Both = tuple[Array | float, Array | float]
"""Seconds of (forward pass, backward pass)."""


def layer_params(layouts: Layouts) -> Array:
    """Returns the number of parameters of the matrix products of one layer: 2 h (h + K) + 2 h f.
    Gated models have 3 h f instead of 2 h f.
    """
    hidden_size = layouts.hidden_size
    attention = 2 * hidden_size * (hidden_size + layouts.kv_size)
    return attention + (2.0 + layouts.gated) * hidden_size * layouts.ffn_hidden_size


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch on one device, by kind of work. `terms_s` adds up to
    `total_s`.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients
    links: GroupLinks

    @cached_property
    def memory_bytes_per_s(self) -> Array | float:
        """Memory bandwidth in bytes/s that kernels reach."""
        return self.hardware.memory_bytes_per_s * self.coefficients.memory_efficiency

    @cached_property
    def gemm_forward_s(self) -> Array:
        """Seconds of the four matrix products in the forward pass.

        They follow a rounded roofline: the root of the summed squares of compute time and memory
        time. Memory traffic is 2 (T (4 h + (2 h + 2 K + 2 f) / t) + weights) bytes. Gated models
        have 3 f instead of 2 f.

        If torch overlaps the products with collectives, it splits the tokens into one part per
        rank. An all-gather is pipelined with the product that reads its result, and a product with
        the reduce-scatter of its result (asynchronous tensor parallelism:
        `torch._inductor.fx_passes.micro_pipeline_tp`). Without sequence parallelism the collectives
        are all-reduces, which torch does not overlap.
        """
        x = self.layouts
        hidden_size = self.layouts.hidden_size
        parts = 1.0
        if np.any(x.tensor_overlap & x.native):
            is_cut = x.tensor_overlap & x.native & x.sequence_parallel
            parts = np.where(is_cut, x.tensor_parallel, 1.0)
        params = layer_params(x) / x.tensor_parallel
        rate = self.hardware.matmul_flops_per_s
        part = product_seconds(
            x.tokens / parts, hidden_size, params / hidden_size, 4.0, rate, self.coefficients
        )
        cut = 2 * hidden_size + 2 * x.kv_size + (2.0 + x.gated) * x.ffn_hidden_size
        moved = x.tokens * (4 * hidden_size + cut / x.tensor_parallel) + params
        return np.hypot(parts * part, 2 * moved / self.memory_bytes_per_s)

    @cached_property
    def attention_forward_s(self) -> Array:
        """Seconds of attention between the projections in the forward pass.

        Attention without a mask has 4 T s h / t FLOPs. Fused kernels do half of these FLOPs, since
        they skip masked blocks, and move 8 T h / t bytes. Kernels that write the scores to memory
        do all FLOPs, and move `score_bytes` for each of T s a / t scores.
        """
        x = self.layouts
        coefficients = self.coefficients
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
        """Seconds of norms, residuals and activation in the forward pass: T (22 h / q + (8 h + 4 f)
        / t) bytes of memory traffic. Gated models have 6 f instead of 4 f.

        The kit's decoder moves more if it is not compiled. Rotary embeddings take seven kernels
        over queries and keys (`kit.model.rotate`: to fp32, negate one half, join, two products,
        sum, to bf16). These kernels move 52 bytes per element instead of 4. The result of
        silu(gate) is written and read again. A compiled block adds a residual in the kernel of the
        next norm, which saves 2 bytes per element for each of two norms.
        """
        x = self.layouts
        hidden_size = self.layouts.hidden_size
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
        """Seconds of casting operands of linear layers to a narrower format.

        Each cast element costs `cast_bytes`. Inputs and the kit's weights are cast in the forward
        pass, and gradients of outputs in the backward pass (torchao's `Float8Linear`). Transformer
        Engine stores weights in the narrow format, so it does not cast them. The kit's fused norms
        and activations write the narrow format instead of bf16. Inputs and outputs of attention,
        and gradients of the residual stream, are cast by separate kernels.
        """
        x = self.layouts
        hidden_size = self.layouts.hidden_size
        if not np.any(x.cast_bytes):
            return 0.0, 0.0
        t = x.tensor_parallel
        f = x.ffn_hidden_size
        apart = np.where(x.fused_norm & x.native, 0.0, 1.0)
        inputs = hidden_size / t + apart * (2 * hidden_size + f / t)
        products = 2 * hidden_size + (hidden_size + 2 * x.kv_size) / t
        outputs = products + apart * (1.0 + x.gated) * f / t
        weights = np.where(x.native, layer_params(x) / t, 0.0)
        cast = x.cast_bytes / self.memory_bytes_per_s
        return cast * (x.tokens * inputs + weights), cast * x.tokens * outputs

    @cached_property
    def tensor_sums_s(self) -> Both:
        """Seconds of tensor parallel collectives: two all-reduces of 2 T h bytes in each pass. In
        the backward pass Megatron gathers an input once more under sequence parallelism.

        With overlap a rank computes on its own part of the tokens while the next part arrives.
        Torch needs sequence parallelism for this, since without it the tokens are not split.
        """
        x = self.layouts
        ranks = self.layouts.tensor_parallel
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
        """Seconds of context parallel communication that attention does not hide.

        Ring attention (arXiv 2310.01889) passes keys and values round while attention computes, and
        in the backward pass their gradients too. All-to-all (DeepSpeed-Ulysses, arXiv 2309.14509)
        exchanges parts of the sequence for parts of the heads and back. Nothing hides it. All
        ranks are assumed to have equal work: each rank holds one part of the sequence's first half
        and one part of its second half, as in torch and Megatron-LM. In plain order the last of c
        ranks would have 2 - 1/c times the mean work under a causal mask.
        """
        x = self.layouts
        ranks = self.layouts.context_parallel
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
        """Seconds of work of the device in each pass. Relative to the forward pass, the backward
        pass has 2 times the products and 1.6 times the element-wise traffic. It has 2.5 times the
        time of fused attention, or 2 times the time of attention that writes scores to memory.
        """
        gemm = self.gemm_forward_s
        attention = self.attention_forward_s
        elementwise = self.elementwise_forward_s
        again = self.layouts.where(self.layouts.flash_attention > 0, 2.5, 2.0) * attention
        (casts, casts_back), (sums, sums_back) = self.casts_s, self.tensor_sums_s
        context, context_back = self.context_s
        return (
            gemm + attention + elementwise + casts + sums + context,
            2 * gemm + again + 1.6 * elementwise + casts_back + sums_back + context_back,
        )

    @cached_property
    def passes_s(self) -> Both:
        """Seconds of each pass: the work of the device, or the launches by its host if the launches
        take longer. In each pass the host launches kernels and two tensor parallel collectives.
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
        """Seconds of recomputation: the forward pass under full recomputation. Selective
        recomputation repeats attention, or the element-wise kernels if attention is fused.

        In the kit, full recomputation of a block that is not compiled stops before the last product
        and its all-reduce (`Plan.recomputes_whole`).
        """
        x = self.layouts
        flash = self.layouts.flash_attention > 0
        some = np.where(flash, self.elementwise_forward_s, self.attention_forward_s)
        product = self.gemm_forward_s * x.hidden_size * x.ffn_hidden_size / layer_params(x)
        stops = x.native & np.logical_not(x.compiled)
        whole = self.passes_s[0] - np.where(stops, product + self.tensor_sums_s[0] / 2, 0.0)
        some = np.where(x.recompute == SELECTIVE, some, 0.0)
        return np.where(x.recompute == FULL, x.recomputed_share * whole, some)

    @cached_property
    def total_s(self) -> Array:
        """Seconds of forward pass, backward pass and recomputation."""
        return self.passes_s[0] + self.passes_s[1] + self.recompute_s

    @property
    def terms_s(self) -> dict[str, Array | float]:
        """Seconds of both passes by kind of work, by name. `host_launch` is the time by which the
        launches of the host exceed the work of the device. `recompute` includes the all-reduces of
        recomputation.
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
    """Returns seconds of `count` matrix products. Each reads tokens x inner elements and writes
    tokens x (outer / count).

    `gemm_edge` is added to each side of a product. It makes small and thin products less efficient.
    """
    edge = c.gemm_edge
    flops = 2 * (tokens + edge) * (inner + edge) * (outer + count * edge)
    return flops / (rate * c.gemm_efficiency)
