"""Step time of any layout in closed form, broken down in named terms; all layouts at once. No torch.

A layer takes the longer of what its device does (products, attention, element-wise kernels, collectives) and of what
its host needs to launch it. A stage takes its layers, its sends, and the embedding or the logits; a step takes the
slowest stage for every micro-batch, the bubble, gradient reduction and the optimizer. Symbols: layouts.py.
"""

import dataclasses
from typing import Any

import numpy as np

from kit.estimate.theory.communication import Links, all_gather, all_reduce, exposed
from kit.estimate.theory.hardware import Coefficients, Hardware, Number
from kit.estimate.theory.layouts import EXCHANGES, RECOMPUTE, SCHEDULES, Array, Layouts

KERNELS = 30.0
"""Launched by one layer's forward pass; fused attention saves six."""
DROPOUT = 0.6
"""Traffic of a written-out score without dropout, which gated (Llama) models do not have, over that with it."""
FIRST_GENERATION = 0.6
"""Speed of fused attention's first generation over its second (FlashAttention-2, arXiv 2307.08691, section 4.1)."""
BACKWARD = 2 / 3
"""Of a layer's time, by its backward pass."""
STAGE_JITTER = 0.005
"""How much longer a pipeline takes per doubling of its stages, since each waits for whichever is late."""
ZERO_BUBBLE, ZBV = SCHEDULES.index("zero_bubble"), SCHEDULES.index("zbv")
SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
LAYER_TERMS = (
    "gemm", "attention", "elementwise", "host_launch", "tensor_parallel", "context_parallel", "recompute",
)  # fmt: skip
TERMS = (
    *LAYER_TERMS, "embedding_logits", "pipeline_send", "imbalance", "bubble", "data_parallel", "optimizer", "overhead",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds per step of many layouts; the terms add up to the total."""

    total_s: Array
    layouts: Layouts
    hardware: Hardware
    factor: Array | float
    """Of all terms: the coefficient of that name."""
    layer: "Layer"
    parts_s: dict[str, Array]
    """Terms of a step that are not of its layers, without the factor."""

    @property
    def terms_s(self) -> dict[str, Array]:
        """Seconds by name in TERMS; they add up to the total."""
        x = self.layouts
        layers = x.num_microbatches * x.num_layers / x.pipeline_parallel
        terms = {name: layers * getattr(self.layer, name) for name in LAYER_TERMS}
        terms = terms | self.parts_s
        return {name: np.broadcast_to(self.factor * terms[name], np.shape(self.total_s)) for name in TERMS}

    @property
    def tokens_per_s(self) -> Array:
        """Of all devices together."""
        return self.layouts.global_batch_size * self.layouts.sequence_length / self.total_s

    def hfu(self) -> Array:
        """Returns the FLOP/s of `FlopBasis.MODEL` and the forward pass of full recomputation, over the peak, 0-1."""
        x = self.layouts
        again = 2 * x.num_layers * (layer_params(x) + 2 * x.hidden_size * x.sequence_length)
        flops = model_flops_per_token(x) + np.where(x.recompute == FULL, again, 0.0)
        return self.tokens_per_s * flops / (x.num_devices * self.hardware.peak_flops_per_s)

    def days(self, tokens: float) -> Array:
        """Returns days for a token budget, without restarts."""
        return tokens / self.tokens_per_s / 86_400

    def price(self, tokens: float) -> Array:
        """Returns USD for a token budget at the site's price; NaN where it has none."""
        return self.days(tokens) * 24 * self.layouts.num_devices * self.hardware.price_per_device_hour


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


def model_flops_per_token(x: Layouts) -> Array:
    """Returns `FlopBasis.MODEL` (spec.py) for each layout."""
    h = x.hidden_size
    return 6 * (x.num_layers * layer_params(x) + x.vocab_size * h) + 12 * x.num_layers * h * x.sequence_length


def step_time(layouts: Layouts, hardware: Hardware, coefficients: Coefficients) -> StepTime:
    """Returns the time of one optimizer step of each layout, on hardware of one machine or one element per layout."""
    x, c = layouts, coefficients
    links = Links.of(x, hardware, c)
    layer = _layer(x, hardware, c, links)
    p, v, m = x.pipeline_parallel, x.virtual_stages, x.num_microbatches
    logits, embedding = _ends(x, hardware, c, links)
    sent = np.where(p > 1, 2 * v * _send(x, links), 0.0)
    few = m < p  # no micro-batch is left whose work could hide a send: `exposed_trips`
    send = np.where(few, 0.0, c.pipeline_exposed * sent) if np.any(few) else c.pipeline_exposed * sent
    each = send + c.microbatch_s
    most = np.ceil(x.num_layers / (p * v)) * v
    lighter = p * most > x.num_layers  # uneven stages: the last has a layer less, as frameworks place the logits
    middle = most * layer.total + each
    slowest = np.where(p > 1, np.maximum(middle + embedding, middle - lighter * layer.total + logits), 0.0)
    mean = (x.num_layers * layer.total + embedding + logits) / p + each
    slowest = np.maximum(slowest, mean)
    jitter = 1 + STAGE_JITTER * np.log2(p)
    slowest, bubble = jitter * slowest, jitter * (p * mean - slowest) * _bubble_share(x, v)
    filling = 0.0
    if np.any(few):  # the first micro-batch passes all p v stages, and devices wait for it in each round but the last
        filling = np.where(few, exposed_trips(p, v, m, x.schedule, c.pipeline_exposed) * sent, 0.0)
        bubble = bubble + np.where(few, (v - 1) / v * (p - m) * (mean - each), 0.0)
    reduction, gather = _data_parallel(x, hardware, c, links, most, m)
    # Without a pipeline, ZeRO reduces buckets of gradients beside the last micro-batch's backward pass; plain data
    # parallelism of Megatron-LM waits for its end. With overlap weights are gathered beside the first forward pass too.
    beside = np.where(x.overlap, middle, np.where((p > 1) | (x.zero_stage < 1), 0.0, BACKWARD * middle))
    data = exposed(reduction, beside) + m * exposed(gather, middle)
    optimizer = _optimizer(x, hardware, c, most)
    total = c.factor * (m * slowest + bubble + filling + data + optimizer + c.step_s)
    parts = {
        "embedding_logits": m * (embedding + logits) / p, "pipeline_send": m * send + filling,
        "imbalance": m * (slowest - mean),
        "bubble": bubble, "data_parallel": data, "optimizer": optimizer, "overhead": m * c.microbatch_s + c.step_s,
    }  # fmt: skip
    return StepTime(total_s=total, layouts=x, hardware=hardware, factor=c.factor, layer=layer, parts_s=parts)


def _gemm(tokens: Array, inner: Array, outer: Array, count: float, rate: Number, c: Coefficients) -> Array:
    """Returns seconds of `count` products that read tokens x inner and write tokens x (outer / count) each.

    Each side of a product is rounded up by `gemm_edge`, which is where small and thin ones lose their efficiency.
    """
    edge = c.gemm_edge
    flops = 2 * (tokens + edge) * (inner + edge) * (outer + count * edge)
    return flops / (rate * c.gemm_efficiency)


def _layer(x: Layouts, hardware: Hardware, c: Coefficients, links: Links) -> Layer:
    h, t, f, s = x.hidden_size, x.tensor_parallel, x.ffn_hidden_size, x.sequence_length
    tokens = x.micro_batch_size * s / x.context_parallel
    memory_rate = hardware.memory_bytes_per_s * c.memory_efficiency
    kv = h * x.num_kv_heads / x.num_heads
    params = layer_params(x) / t
    moved = tokens * (4 * h + (2 * h + 2 * kv + (2.0 + x.gated) * f) / t) + params
    rate = hardware.matmul_flops_per_s
    gemm = np.hypot(_gemm(tokens, h, params / h, 4.0, rate, c), 2 * moved / memory_rate)  # a rounded roofline
    attention, flash = _attention(x, tokens, hardware, c, memory_rate)
    sharded = np.where(x.sequence_parallel, t, 1.0)
    traffic = tokens * (22 * h / sharded + (8 * h + (4.0 + 2.0 * x.gated) * f) / t)
    elementwise = traffic / memory_rate * np.where(x.fused_norm, 1.0, c.unfused_traffic)
    casts, casts_backward = _casts(x, tokens, kv, params, memory_rate)
    sums = 2 * all_reduce(2 * tokens * h, t, links.tensor_rate, links.tensor_latency_s)
    sums_backward = sums * np.where(x.sequence_parallel, 1.25, 1.0)  # Megatron gathers an input once more
    if np.any(x.overlap):
        sums = np.where(x.overlap, exposed(sums, gemm), sums)
        sums_backward = np.where(x.overlap, exposed(sums_backward, 2 * gemm), sums_backward)
    context, context_backward = _context_parallel(x, tokens, kv, attention, links)
    forward = gemm + attention + elementwise + casts + sums + context
    backward = 2 * gemm + np.where(flash, 2.5, 2.0) * attention + 1.6 * elementwise + casts_backward
    backward = backward + sums_backward + context_backward
    launches = (KERNELS - 6.0 * flash) * c.launch_s + np.where(t > 1, 2 * c.collective_launch_s, 0.0)
    forward_s = np.maximum(forward, launches)
    backward_s = np.maximum(backward, c.backward_launches * launches)
    again = np.where(x.recompute == SELECTIVE, np.where(flash, elementwise, attention), 0.0)
    again = np.where(x.recompute == FULL, forward_s, again)
    return Layer(
        gemm=3 * gemm, attention=np.where(flash, 3.5, 3.0) * attention,
        elementwise=2.6 * elementwise + casts + casts_backward, tensor_parallel=sums + sums_backward,
        context_parallel=context + context_backward,
        host_launch=forward_s - forward + backward_s - backward, recompute=again, total=forward_s + backward_s + again,
    )  # fmt: skip


def _casts(x: Layouts, tokens: Array, kv: Array, params: Array, memory_rate: Any) -> tuple:
    """Returns (seconds of a forward pass, of a backward pass) in which operands of linear layers become narrower.

    Weights and inputs going forward, gradients of outputs going back (torchao's `Float8Linear`). A number takes 2 bytes
    to read and 2 to write, as it is and transposed, since the products of the backward pass read along the other side
    (`cast_transpose` of Transformer Engine). Fused norms and activations write both in place of one in bf16; what
    attention gives and takes, and gradients of the residual stream, are cast by themselves.
    """
    if not np.any(x.narrow):
        return 0.0, 0.0
    h, t, f = x.hidden_size, x.tensor_parallel, x.ffn_hidden_size
    unfused = np.where(x.fused_norm, 0.0, 1.0)
    inputs = h / t + unfused * (2 * h + f / t)
    outputs = 2 * h + (h + 2 * kv) / t + unfused * (1.0 + x.gated) * f / t
    cast = np.where(x.narrow, 4.0, 0.0) / memory_rate
    return cast * (tokens * inputs + params), cast * tokens * outputs


def _attention(x: Layouts, tokens: Array, hardware: Hardware, c: Coefficients, memory_rate: Array | float) -> tuple:
    """Returns (seconds of a forward pass between projections, where attention is fused)."""
    h, t, s = x.hidden_size, x.tensor_parallel, x.sequence_length
    flash = x.flash_attention > 0
    products = 4 * tokens * s * h / t / hardware.attention_flops_per_s
    speed = c.flash_efficiency * np.where(x.flash_attention == 1, FIRST_GENERATION, 1.0)
    fused = 0.5 * products / speed + 8 * tokens * h / t / memory_rate  # half: the causal mask is skipped
    per_score = c.score_bytes * np.where(x.gated, DROPOUT, 1.0) * np.where(x.fused_softmax, 1.0, c.unfused_traffic)
    written = products / c.attention_efficiency + per_score * tokens * s * x.num_heads / t / memory_rate
    return np.where(flash, fused, written), flash


def _context_parallel(x: Layouts, tokens: Array, kv: Array, attention: Array, links: Links) -> tuple:
    """Returns (seconds of a forward pass, of a backward pass) in which parts of a sequence wait for each other.

    Ring (arXiv 2310.01889): keys and values go round while attention computes, and with them their gradients in the
    backward pass. All to all (DeepSpeed-Ulysses, arXiv 2309.14509): query, key, value and result change from parts of
    the sequence to parts of the heads and back, and nothing hides it. Both take each rank's work as equal: each has a
    part of the head of the sequence and one of its tail (as torch's and Megatron-LM's context parallelism), since in
    plain order the last of c ranks has 2 - 1/c times the mean under a causal mask.
    """
    ranks = x.context_parallel
    if not np.any(ranks > 1):
        return 0.0, 0.0
    width = 2 * tokens / x.tensor_parallel / links.context_rate
    ring = exposed((ranks - 1) * (2 * kv * width + links.context_latency_s), attention)
    swap = (ranks - 1) / ranks * (2 * x.hidden_size + 2 * kv) * width + 2 * links.context_latency_s
    is_ring = x.context_exchange == EXCHANGES.index("ring")
    return (np.where(ranks > 1, np.where(is_ring, ring, swap), 0.0),
            np.where(ranks > 1, np.where(is_ring, 2 * ring, swap), 0.0))  # fmt: skip


def _ends(x: Layouts, hardware: Hardware, c: Coefficients, links: Links) -> tuple[Array, Array]:
    """Returns (logits with loss, embedding): seconds per micro-batch, forward and backward."""
    h, t = x.hidden_size, x.tensor_parallel
    tokens, vocab = x.micro_batch_size * x.sequence_length / x.context_parallel, x.vocab_size / x.tensor_parallel
    memory_rate = hardware.memory_bytes_per_s * c.memory_efficiency
    rate = hardware.matmul_flops_per_s
    rate = np.where(x.narrow, hardware.attention_flops_per_s, rate) if np.any(x.narrow) else rate
    product = _gemm(tokens, h, vocab, 1.0, rate, c) + 2 * (tokens * (h + vocab) + h * vocab) / memory_rate
    loss = 14 * tokens * vocab / memory_rate
    gather = all_reduce(2 * tokens * h, t, links.tensor_rate, links.tensor_latency_s)
    return 3 * product + 1.5 * loss, 12 * tokens * h / memory_rate + gather


def _send(x: Layouts, links: Links) -> Array:
    """Returns seconds to pass one micro-batch's activations on: a part by each tensor rank, gathered on arrival."""
    t = x.tensor_parallel
    size = 2 * x.micro_batch_size * x.sequence_length / x.context_parallel * x.hidden_size
    gather = np.where(x.sequence_parallel, 0.0, (t - 1) / t * size / links.tensor_rate)
    return size / t / links.pipeline_rate + links.pipeline_latency_s + gather


def exposed_trips(p: Any, v: Any, m: Any, schedule: Any, exposed_part: Any) -> Any:
    """Returns how often a step waits for all sends of one micro-batch, there and back.

    With fewer micro-batches than stages: p - 1/v times, and under 1F1B for each but two more, as the simulation of
    these orders (schedule.py) has it exactly; else `exposed_part` (fitted) of each.
    """
    alternating = np.where(schedule == SCHEDULES.index("1f1b"), np.maximum(m - 2, 0), 0.0)
    return np.where(m < p, p - 1 / v + alternating, m * exposed_part)


def _bubble_share(x: Layouts, v: Array) -> Array:
    """Returns the bubble over that of 1F1B: 1/v interleaved, a third of it where weight gradients fill in (ZB-H1)."""
    zero = np.where(x.schedule == ZBV, 0.1, np.where(x.schedule == ZERO_BUBBLE, 1 / 3, 1.0))
    return zero / v


def _data_parallel(x: Layouts, hardware: Hardware, c: Coefficients, links: Links, most: Array, m: Array) -> tuple:
    """Returns (seconds per step of gradient reduction, seconds per micro-batch of ZeRO 3's gathering)."""
    t, ranks = x.tensor_parallel, x.num_shards
    params = (most * layer_params(x) + x.vocab_size * x.hidden_size) / t
    # ZeRO scatters gradients and gathers bf16 weights; without it both halves of the all-reduce move gradients.
    size = np.where(x.zero_stage >= 1, (x.gradient_bytes + 2.0) / 2, x.gradient_bytes) * params
    reduction = all_reduce(size, ranks, links.shard_rate, links.shard_latency_s)
    gather = 2 * all_gather(2.0 * params, ranks, links.shard_rate, links.shard_latency_s * most)
    gather = np.where(x.zero_stage >= 3, gather + np.where(m > 1, reduction, 0.0), 0.0)
    if np.any(x.shard_size):  # once a step, a shard's gradients are summed over its copies (arXiv 2304.11277, 3.2.2)
        copies = x.context_parallel * x.data_parallel / ranks
        shard = x.gradient_bytes * params / ranks
        reduction = reduction + all_reduce(shard, copies, links.copy_rate, links.data_latency_s)
    tied = x.vocab_size * x.hidden_size / t * x.gradient_bytes / links.network_rate
    return reduction + np.where((x.pipeline_parallel > 1) & x.tied_embeddings, tied, 0.0), gather


def _optimizer(x: Layouts, hardware: Hardware, c: Coefficients, most: Array) -> Array:
    """Returns seconds of Adam: 44 bytes per parameter it owns, 6 per parameter of the device for norm and cast."""
    params = (most * layer_params(x) + x.vocab_size * x.hidden_size) / x.tensor_parallel
    owned = np.where(x.zero_stage >= 1, params / x.num_shards, params)
    return (44 * owned + 6 * params) / (hardware.memory_bytes_per_s * c.memory_efficiency)
