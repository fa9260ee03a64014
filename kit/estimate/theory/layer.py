"""Time of one layer for one micro-batch: matrix products, attention, element-wise kernels,
collectives, and kernel launches by the host. This module does not import torch.

Symbols: h hidden size, f feed-forward size, a heads, s sequence length, t tensor parallel degree, T
tokens of a micro-batch on one device, A width of all query heads together, K width of all key heads
together. q = t with sequence parallelism, otherwise 1.
"""

import dataclasses
from functools import cached_property

import numpy as np

from kit.estimate.theory.communication import GroupLinks, all_reduce_seconds, exposed_seconds
from kit.estimate.theory.hardware import Coefficients, Hardware, Number
from kit.estimate.theory.layouts import EXCHANGES, RECOMPUTE, Array, Layouts

KERNELS = 30.0
"""Number of kernels that the forward pass of one layer launches. With fused attention, the forward
pass launches six kernels fewer."""
DROPOUT = 0.6
"""Ratio of the memory traffic of an attention score without dropout to the traffic with dropout.
Gated models (Llama) are trained without dropout."""
FIRST_GENERATION = 0.6
"""Ratio of the speed of FlashAttention 1 to the speed of FlashAttention 2 (arXiv 2307.08691,
section 4.1)."""
SELECTIVE = RECOMPUTE.index("selective")
FULL = RECOMPUTE.index("full")
Both = tuple[Array | float, Array | float]
"""Pair (seconds of the forward pass, seconds of the backward pass)."""


def layer_params(layouts: Layouts) -> Array:
    """Returns the number of parameters in the matrices of one layer: 2 h (A + K) + 2 h f with
    hidden size h, feed-forward size f and the widths A of all query heads and K of all key heads.
    Gated models have 3 h f instead of 2 h f.
    """
    hidden_size = layouts.hidden_size
    attention = 2 * hidden_size * (layouts.attention_size + layouts.kv_size)
    return attention + (2.0 + layouts.gated) * hidden_size * layouts.ffn_hidden_size


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """Seconds that one device needs for one layer and one micro-batch, divided into matrix
    products, attention, collectives and other terms. The terms `terms_s` add up to `total_s`.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients
    links: GroupLinks

    @cached_property
    def memory_bytes_per_s(self) -> Array | float:
        """Bytes/s that element-wise kernels reach: memory bandwidth x fitted efficiency."""
        return self.hardware.memory_bytes_per_s * self.coefficients.memory_efficiency

    @cached_property
    def gemm_forward_s(self) -> Array:
        """Seconds of the four matrix products in the forward pass.

        The time follows a smooth roofline: the square root of the summed squares of compute time
        and memory time. The memory traffic is 2 (T (4 h + (2 A + 2 K + 2 f) / t) + weights) bytes,
        with T tokens, hidden size h, widths A of all query heads and K of all key heads,
        feed-forward size f and tensor parallel degree t. Gated models have 3 f instead of 2 f.

        If torch overlaps the products with collectives, it splits the tokens into one part per
        tensor parallel rank (asynchronous tensor parallelism,
        `torch._inductor.fx_passes.micro_pipeline_tp`). The matrix product of one part of the tokens
        overlaps with the all-gather of the next input or the reduce-scatter of the previous result.
        Without sequence parallelism the collectives are all-reduces, which torch does not overlap.
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
        cut = 2 * x.attention_size + 2 * x.kv_size + (2.0 + x.gated) * x.ffn_hidden_size
        moved = x.tokens * (4 * hidden_size + cut / x.tensor_parallel) + params
        return np.hypot(parts * part, 2 * moved / self.memory_bytes_per_s)

    @cached_property
    def attention_forward_s(self) -> Array:
        """Seconds of attention in the forward pass, without its projections.

        Attention without a mask has 4 T s A / t FLOPs, with T tokens, sequence length s, width A of
        all query heads and tensor parallel degree t. Fused kernels execute half of these FLOPs,
        since they skip masked blocks, and have 8 T A / t bytes of memory traffic. Kernels that
        write the scores to memory execute all FLOPs. Their traffic is `score_bytes` for each of the
        T s a / t scores, with a heads.

        `_computed_scores` is the share of the FLOPs that a fused kernel executes in models with
        attention windows.
        """
        x = self.layouts
        coefficients = self.coefficients
        flops = 4 * x.tokens * x.sequence_length * x.attention_size / x.tensor_parallel
        products = flops / self.hardware.attention_flops_per_s
        speed = coefficients.flash_efficiency * x.where(
            x.flash_attention == 1, FIRST_GENERATION, 1.0
        )
        moved = 8 * x.tokens * x.attention_size / x.tensor_parallel
        per_score = (
            coefficients.score_bytes
            * x.where(x.gated, DROPOUT, 1.0)
            * x.where(x.fused_softmax, 1.0, coefficients.unfused_traffic)
        )
        scores = per_score * x.tokens * x.sequence_length * x.num_heads / x.tensor_parallel
        return np.where(
            x.flash_attention > 0,
            self._computed_scores * products / speed + moved / self.memory_bytes_per_s,
            products / coefficients.attention_efficiency + scores / self.memory_bytes_per_s,
        )

    @property
    def _computed_scores(self) -> Array | float:
        """Share of all pairs of tokens for which a fused kernel computes attention scores, as the
        mean over layers. It is 1/2 with a causal mask.

        In a layer with a window of w tokens, the kit's attention computes all pairs and masks
        those outside the window. Other code bases have kernels that skip them, so that w / s - (w /
        s)^2 / 2 of all pairs remain.
        """
        x = self.layouts
        if not np.any(x.local_share):
            return 0.5
        part = np.minimum(x.window / x.sequence_length, 1.0)
        in_window = x.where(x.native, 1.0, part - part**2 / 2)
        return 0.5 * (1 - x.local_share) + in_window * x.local_share

    @cached_property
    def elementwise_forward_s(self) -> Array:
        """Seconds of norms, residuals and activation functions in the forward pass. The time is
        memory traffic / memory bandwidth.

        The traffic is T (22 h / q + (8 A + 4 f) / t) bytes, with T tokens, hidden size h, width A
        of all query heads, feed-forward size f, tensor parallel degree t and sequence split over q
        ranks. Gated models have 6 f instead of 4 f. A third and fourth norm have 4 h / q bytes
        each. Norms of queries and keys have 4 (A + K) / t bytes, with width K of all key heads.

        The kit's decoder has more traffic if it is not compiled. Its rotary embedding needs seven
        kernels over queries and keys (`kit.model.rotate`: to fp32, negate one half, join, two
        products, sum, to bf16), which move 52 instead of 4 bytes per element. The result of
        silu(gate) is written and read again. A compiled block adds each residual in the kernel of
        the next norm, which saves 2 bytes per element for each of two norms.
        """
        x = self.layouts
        hidden_size = self.layouts.hidden_size
        heads = x.attention_size + x.kv_size
        cut = 8 * x.attention_size + (4.0 + 2.0 * x.gated) * x.ffn_hidden_size
        cut = cut + x.where(x.has_qk_norm, 4.0, 0.0) * heads
        whole = (14 + 4 * x.num_block_norms) * hidden_size
        traffic = x.tokens * (whole / x.residual_shards + cut / x.tensor_parallel)
        if np.any(x.compiled | x.native):
            rotary = x.where(x.has_learned_positions, 0.0, 48.0) * heads
            eager = rotary + 4 * x.gated * x.ffn_hidden_size
            eager = np.where(x.native, eager / x.tensor_parallel, 0.0)
            compiled = -4 * hidden_size / x.residual_shards
            traffic = traffic + x.tokens * np.where(x.compiled, compiled, eager)
        unfused = x.where(x.fused_norm, 1.0, self.coefficients.unfused_traffic)
        return traffic / self.memory_bytes_per_s * unfused

    @property
    def casts_s(self) -> Both:
        """Seconds in which operands of linear layers are cast to a narrower number format, as
        (forward pass, backward pass).

        Each cast element needs `cast_bytes` of memory traffic. Inputs and the kit's weights are
        cast in the forward pass, and gradients of outputs in the backward pass (torchao's
        `Float8Linear`). Transformer Engine stores weights in the narrow format and does not cast
        them. The kit's fused norms and activation functions write the narrow format instead of
        bf16. Inputs and outputs of attention, and gradients of the residual stream, are cast by
        separate kernels.
        """
        x = self.layouts
        hidden_size = self.layouts.hidden_size
        if not np.any(x.cast_bytes):
            return 0.0, 0.0
        t = x.tensor_parallel
        f = x.ffn_hidden_size
        apart = np.where(x.fused_norm & x.native, 0.0, 1.0)
        inputs = x.attention_size / t + apart * (2 * hidden_size + f / t)
        products = 2 * hidden_size + (x.attention_size + 2 * x.kv_size) / t
        outputs = products + apart * (1.0 + x.gated) * f / t
        weights = np.where(x.native, layer_params(x) / t, 0.0)
        cast = x.cast_bytes / self.memory_bytes_per_s
        return cast * (x.tokens * inputs + weights), cast * x.tokens * outputs

    @cached_property
    def tensor_sum_s(self) -> Array:
        """Seconds of one all-reduce of the hidden states in a tensor parallel group: 2 bytes x
        tokens x hidden size. An all-gather or reduce-scatter needs half of this time.
        """
        x = self.layouts
        size = 2 * x.tokens * x.hidden_size
        return all_reduce_seconds(size, x.tensor_parallel, self.links.tensor)

    @cached_property
    def tensor_sums_s(self) -> Both:
        """Seconds of tensor parallel collectives that do not overlap with computation, as (forward
        pass, backward pass).

        Each pass has two all-reduces of 2 bytes x tokens x hidden size. With sequence parallelism,
        Megatron gathers the inputs once more in the backward pass. With overlap, a rank computes on
        one part of the tokens while the next part arrives. Torch needs sequence parallelism for
        this, since otherwise the tokens are not split.
        """
        x = self.layouts
        ranks = self.layouts.tensor_parallel
        sums = 2 * self.tensor_sum_s
        backward = sums * x.where(x.sequence_parallel, 1.25, 1.0)
        if np.any(x.native & (ranks > 1)):
            forward_torch, backward_torch = self._torch_sums_s
            sums = np.where(x.native, forward_torch, sums)
            backward = np.where(x.native, backward_torch, backward)
        if not np.any(x.tensor_overlap):
            return sums, backward
        beside = np.where(x.native, (ranks - 1) / ranks * self.gemm_forward_s, self.gemm_forward_s)
        overlap = x.tensor_overlap & (x.sequence_parallel | np.logical_not(x.native))
        return (
            np.where(overlap, exposed_seconds(sums, beside), sums),
            np.where(overlap, exposed_seconds(backward, 2 * beside), backward),
        )

    @property
    def _torch_sums_s(self) -> Both:
        """Seconds of the tensor parallel collectives of torch's DTensor, as (forward pass, backward
        pass).

        Without sequence parallelism, each pass has two all-reduces. With sequence parallelism, each
        pass has two all-gathers and two reduce-scatters along the sequence axis. Torch's functional
        collectives work along the first axis, so that tokens are copied after an all-gather and
        before a reduce-scatter, with 4 bytes of memory traffic per element. After an all-gather of
        one sequence no copy is needed (`_maybe_view_chunk_cat`).

        With `separate_inputs`, five column-split matrices (queries, keys, values, gate and up)
        reduce the gradients of their inputs separately. Eager blocks also gather each input
        separately, and compiled blocks gather equal inputs once, as the collectives in the graphs
        of torch 2.13 and in KempnerForge's profile show (`benchmarks/profiling`).
        """
        x = self.layouts
        extra = x.where(x.separate_inputs, 2.0 + x.gated, 0.0)
        gathers = 2 + x.where(x.compiled, 0.0, extra)
        scatters = 2 + extra
        copied = np.where(x.tensor_parallel > 1, 4 * x.tokens * x.hidden_size, 0.0)
        copy_s = copied / self.memory_bytes_per_s
        gather_copy_s = np.where(x.micro_batch_size > 1, copy_s, 0.0)
        half_s = self.tensor_sum_s / 2
        forward = (gathers + 2) * half_s + gathers * gather_copy_s + 2 * copy_s
        backward = (2 + scatters) * half_s + 2 * gather_copy_s + scatters * copy_s
        whole = 2 * self.tensor_sum_s
        return (
            np.where(x.sequence_parallel, forward, whole),
            np.where(x.sequence_parallel, backward, whole + extra * self.tensor_sum_s),
        )

    @cached_property
    def context_s(self) -> Both:
        """Seconds of context parallel communication that do not overlap with attention, as (forward
        pass, backward pass).

        Ring attention (arXiv 2310.01889) sends keys and values around a ring while attention
        computes. In the backward pass it sends their gradients too. All-to-all (DeepSpeed-Ulysses,
        arXiv 2309.14509) exchanges parts of the sequence for parts of the heads and back, without
        overlap.

        All ranks are assumed to have equal work. As in torch and Megatron-LM, each rank holds one
        part of the sequence's first half and one part of its second half. With consecutive parts,
        the last of c ranks would have 2 - 1/c times the mean work under a causal mask.
        """
        x = self.layouts
        ranks = self.layouts.context_parallel
        if not np.any(ranks > 1):
            return 0.0, 0.0
        link = self.links.context
        width = 2 * x.tokens / x.tensor_parallel / link.rate
        blocks = (ranks - 1) * (2 * x.kv_size * width + link.latency_s)
        ring = exposed_seconds(blocks, self.attention_forward_s)
        exchanged = (ranks - 1) / ranks * (2 * x.attention_size + 2 * x.kv_size) * width
        swap = exchanged + 2 * link.latency_s
        is_ring = x.context_exchange == EXCHANGES.index("ring")
        return (
            np.where(ranks > 1, np.where(is_ring, ring, swap), 0.0),
            np.where(ranks > 1, np.where(is_ring, 2 * ring, swap), 0.0),
        )

    @cached_property
    def device_s(self) -> Both:
        """Seconds of work of the device for one layer and one micro-batch, as (forward pass,
        backward pass).

        The backward pass needs 2 times the forward time of matrix products and 1.6 times that of
        element-wise kernels. It needs 2.5 times the forward time of fused attention. If attention
        writes scores to memory, it needs 2 times the forward time of attention.
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
        """Seconds of one layer, as (forward pass, backward pass). Each is the longer of two times:
        the work of the device, and the time in which the host launches kernels and two tensor
        parallel collectives.
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
        """Seconds of recomputation. Full recomputation repeats the forward pass. Selective
        recomputation repeats attention, or the element-wise kernels if attention is fused.

        In the kit, full recomputation of a block that is not compiled stops before the last matrix
        product and its all-reduce, whose result is not needed (`Plan.recomputes_whole`).
        """
        x = self.layouts
        flash = self.layouts.flash_attention > 0
        some = np.where(flash, self.elementwise_forward_s, self.attention_forward_s)
        some = some + x.recomputed_products * self.gemm_forward_s
        product = self.gemm_forward_s * x.hidden_size * x.ffn_hidden_size / layer_params(x)
        stops = x.native & np.logical_not(x.compiled)
        last_sum = self.tensor_sum_s * x.where(x.sequence_parallel, 0.5, 1.0)
        whole = self.passes_s[0] - np.where(stops, product + last_sum, 0.0)
        some = np.where(x.recompute == SELECTIVE, some, 0.0)
        return np.where(x.recompute == FULL, x.recomputed_share * whole, some)

    @cached_property
    def total_s(self) -> Array:
        """Seconds of one layer and micro-batch: forward pass, backward pass and recomputation."""
        return self.passes_s[0] + self.passes_s[1] + self.recompute_s

    @property
    def terms_s(self) -> dict[str, Array | float]:
        """Maps each kind of work, e.g. `gemm`, to its seconds in both passes. `host_launch` is the
        time by which kernel launches of the host exceed the work of the device. `recompute`
        includes the all-reduces that recomputation repeats.
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
    """Returns the seconds of `count` matrix products. Each multiplies a matrix of tokens x inner
    elements by a matrix of inner x (outer / count) elements.

    `rate` is the highest FLOP/s. The fitted number of elements `c.gemm_edge` is added to each
    dimension of a product, so that small and thin products are less efficient.
    """
    edge = c.gemm_edge
    flops = 2 * (tokens + edge) * (inner + edge) * (outer + count * edge)
    return flops / (rate * c.gemm_efficiency)
