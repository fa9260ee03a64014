"""Step time of any layout in closed form, broken down in named terms; all layouts at once. No
torch.

A layer takes the longer of what its device does (products, attention, element-wise kernels,
collectives) and of what its host needs to launch it. A stage takes its layers, its sends, and the
embedding or the logits; a step takes the slowest stage for every micro-batch, the bubble, gradient
reduction and the optimizer. Symbols: layouts.py.
"""

import dataclasses
from typing import Any

import numpy as np

from kit.estimate.theory.communication import Links, all_gather, all_reduce, exposed, small_sums
from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layer import Layer, layer_params, layer_time, product_time
from kit.estimate.theory.layouts import SCHEDULES, Array, Layouts

BACKWARD = 2 / 3
"""Of a layer's time, by its backward pass."""
STAGE_JITTER = 0.005
"""How much longer a pipeline takes per doubling of its stages, since each waits for whichever is
late."""
ZERO_BUBBLE, ZBV = SCHEDULES.index("zero_bubble"), SCHEDULES.index("zbv")
LAYER_TERMS = (
    "gemm",
    "attention",
    "elementwise",
    "host_launch",
    "tensor_parallel",
    "context_parallel",
    "recompute",
)
TERMS = (
    *LAYER_TERMS,
    "embedding_logits",
    "pipeline_send",
    "imbalance",
    "bubble",
    "data_parallel",
    "optimizer",
    "overhead",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds per step of many layouts; the terms add up to the total."""

    total_s: Array
    layouts: Layouts
    hardware: Hardware
    factor: Array | float
    """Of all terms: the coefficient of that name."""
    layer: Layer
    parts_s: dict[str, Array]
    """Terms of a step that are not of its layers, without the factor."""

    @property
    def terms_s(self) -> dict[str, Array]:
        """Seconds by name in TERMS; they add up to the total."""
        x = self.layouts
        layers = x.num_microbatches * x.num_layers / x.pipeline_parallel
        terms = {name: layers * getattr(self.layer, name) for name in LAYER_TERMS}
        terms = terms | self.parts_s
        return {
            name: np.broadcast_to(self.factor * terms[name], np.shape(self.total_s))
            for name in TERMS
        }

    @property
    def tokens_per_s(self) -> Array:
        """Of all devices together."""
        return self.layouts.global_batch_size * self.layouts.sequence_length / self.total_s

    def days(self, tokens: float) -> Array:
        """Returns days for a token budget, without restarts."""
        return tokens / self.tokens_per_s / 86_400

    def price(self, tokens: float) -> Array:
        """Returns USD for a token budget at the site's price; NaN where it has none."""
        return (
            self.days(tokens) * 24 * self.layouts.num_devices * self.hardware.price_per_device_hour
        )


def step_time(layouts: Layouts, hardware: Hardware, coefficients: Coefficients) -> StepTime:
    """Returns the time of one optimizer step of each layout, on hardware of one machine or one
    element per layout.
    """
    x, c = layouts, coefficients
    links = Links.of(x, hardware, c)
    layer = layer_time(x, hardware, c, links)
    p, v, m = x.pipeline_parallel, x.virtual_stages, x.num_microbatches
    logits, embedding = _ends(x, hardware, c, links)
    sent = np.where(p > 1, 2 * v * _send(x, links), 0.0)
    few = m < p  # no micro-batch is left whose work could hide a send: `exposed_trips`
    send = (
        np.where(few, 0.0, c.pipeline_exposed * sent) if np.any(few) else c.pipeline_exposed * sent
    )
    each = send + c.microbatch_s
    most = np.ceil(x.num_layers / (p * v)) * v
    # Uneven stages: the last has a layer less, as frameworks place the logits.
    lighter = p * most > x.num_layers
    middle = most * layer.total + each
    slowest = np.where(
        p > 1, np.maximum(middle + embedding, middle - lighter * layer.total + logits), 0.0
    )
    mean = (x.num_layers * layer.total + embedding + logits) / p + each
    slowest = np.maximum(slowest, mean)
    jitter = 1 + STAGE_JITTER * np.log2(p)
    slowest, bubble = jitter * slowest, jitter * (p * mean - slowest) * _bubble_share(x, v)
    filling = 0.0
    if np.any(
        few
        # the first micro-batch passes all p v stages, and devices wait for it in each round but the
        # last
    ):
        filling = np.where(few, exposed_trips(p, v, m, x.schedule, c.pipeline_exposed) * sent, 0.0)
        bubble = bubble + np.where(few, (v - 1) / v * (p - m) * (mean - each), 0.0)
    data = _data_parallel(x, links, most, middle)
    optimizer = _optimizer(x, hardware, c, most)
    step = c.step_s + small_sums(x, hardware, c)
    total = c.factor * (m * slowest + bubble + filling + data + optimizer + step)
    parts = {
        "embedding_logits": m * (embedding + logits) / p,
        "pipeline_send": m * send + filling,
        "imbalance": m * (slowest - mean),
        "bubble": bubble,
        "data_parallel": data,
        "optimizer": optimizer,
        "overhead": m * c.microbatch_s + step,
    }
    return StepTime(
        total_s=total, layouts=x, hardware=hardware, factor=c.factor, layer=layer, parts_s=parts
    )


def _ends(x: Layouts, hardware: Hardware, c: Coefficients, links: Links) -> tuple[Array, Array]:
    """Returns (logits with loss, embedding): seconds per micro-batch, forward and backward."""
    h, t = x.hidden_size, x.tensor_parallel
    tokens, vocab = (
        x.micro_batch_size * x.sequence_length / x.context_parallel,
        x.vocab_size / x.tensor_parallel,
    )
    memory_rate = hardware.memory_bytes_per_s * c.memory_efficiency
    rate = hardware.matmul_flops_per_s
    rate = np.where(x.narrow, hardware.attention_flops_per_s, rate) if np.any(x.narrow) else rate
    product = (
        product_time(tokens, h, vocab, 1.0, rate, c)
        + 2 * (tokens * (h + vocab) + h * vocab) / memory_rate
    )
    loss = 14 * tokens * vocab / memory_rate
    gather = all_reduce(2 * tokens * h, t, links.tensor_rate, links.tensor_latency_s)
    return 3 * product + 1.5 * loss, 12 * tokens * h / memory_rate + gather


def _send(x: Layouts, links: Links) -> Array:
    """Returns seconds to pass one micro-batch's activations on: a part by each tensor rank,
    gathered on arrival.
    """
    t = x.tensor_parallel
    size = 2 * x.micro_batch_size * x.sequence_length / x.context_parallel * x.hidden_size
    gather = np.where(x.sequence_parallel, 0.0, (t - 1) / t * size / links.tensor_rate)
    return size / t / links.pipeline_rate + links.pipeline_latency_s + gather


def exposed_trips(p: Any, v: Any, m: Any, schedule: Any, exposed_part: Any) -> Any:
    """Returns how often a step waits for all sends of one micro-batch, there and back.

    With fewer micro-batches than stages: p - 1/v times, and under 1F1B for each but two more, as
    the simulation of these orders (schedule.py) has it exactly; else `exposed_part` (fitted) of
    each.
    """
    alternating = np.where(schedule == SCHEDULES.index("1f1b"), np.maximum(m - 2, 0), 0.0)
    return np.where(m < p, p - 1 / v + alternating, m * exposed_part)


def _bubble_share(x: Layouts, v: Array) -> Array:
    """Returns the bubble over that of 1F1B: 1/v interleaved, a third of it where weight
    gradients fill in (ZB-H1).
    """
    zero = x.where(x.schedule == ZBV, 0.1, np.where(x.schedule == ZERO_BUBBLE, 1 / 3, 1.0))
    return zero / v


def _data_parallel(x: Layouts, links: Links, most: Array, middle: Array) -> Array:
    """Returns seconds per step of reducing gradients and gathering weights that no micro-batch
    (`middle`) hides.
    """
    t, p, m, ranks, is_third = (
        x.tensor_parallel,
        x.pipeline_parallel,
        x.num_microbatches,
        x.num_shards,
        x.zero_stage >= 3,
    )
    params = (most * layer_params(x) + x.vocab_size * x.hidden_size) / t
    # ZeRO scatters gradients and gathers bf16 weights; without it both halves of the all-reduce
    # move gradients.
    size = (
        np.where(x.zero_stage >= 1, (x.gradient_bytes + x.gathered_bytes) / 2, x.gradient_bytes)
        * params
    )
    reduction = all_reduce(size, ranks, links.shard_rate, links.shard_latency_s)
    gather = all_gather(
        x.gathered_bytes * params, ranks, links.shard_rate, links.shard_latency_s * most
    )
    once = np.where(
        (p > 1) & x.tied_embeddings,
        x.vocab_size * x.hidden_size / t * x.gradient_bytes / links.network_rate,
        0.0,
    )
    # Once a step, a shard's gradients are summed over its copies (arXiv 2304.11277, 3.2.2)
    if np.any(x.shard_size):
        copies = x.context_parallel * x.data_parallel / ranks
        once = once + all_reduce(
            x.gradient_bytes * params / ranks, copies, links.copy_rate, links.data_latency_s
        )
    # Without a pipeline, ZeRO reduces buckets of gradients beside the last micro-batch's backward
    # pass; plain data parallelism of Megatron-LM waits for its end. With overlap weights are
    # gathered beside the first forward pass too.
    beside = np.where(
        x.overlap, middle, np.where((p > 1) | (x.zero_stage < 1), 0.0, BACKWARD * middle)
    )
    data = exposed(reduction + once, beside)
    if not np.any(is_third):
        return data
    bulk = fully = data
    if not np.all(x.native):
        bulk = data + m * exposed(2 * gather + np.where(m > 1, reduction, 0.0), middle)
    if np.any(x.native):
        scatter = all_gather(
            x.gradient_bytes * params, ranks, links.shard_rate, links.shard_latency_s * most
        )
        fully = _fully_sharded(x, gather, scatter, once, middle, most)
    return np.where(is_third, np.where(x.native, fully, bulk), data)


def _fully_sharded(
    x: Layouts, gather: Array, scatter: Array, once: Array, work: Array, layers: Array
) -> Array:
    """Returns seconds per step in which ZeRO 3 waits as FSDP2 does it (PyTorch FSDP, arXiv
    2304.11277, section 3.3).

    In each pass the weights of the next layer are gathered while this one computes, and in the
    backward pass the gradients of the last are scattered besides: what takes longer than the layers
    is seen. Nothing hides the gather of a pass's first layer and the last scatter of a step. What
    is sent once a step (sums over copies of a shard; under a pipeline all gradients) goes beside
    the last backward pass.
    """
    m, piped = x.num_microbatches, x.pipeline_parallel > 1
    forward = exposed(gather, (1 - BACKWARD) * work) + gather / layers
    sent, at_end = gather + np.where(piped, 0.0, scatter), once + np.where(piped, scatter, 0.0)
    backward, last = exposed(sent, BACKWARD * work), exposed(sent + at_end, BACKWARD * work)
    return m * forward + (m - 1) * backward + last + (scatter + once) / layers


def _optimizer(x: Layouts, hardware: Hardware, c: Coefficients, most: Array) -> Array:
    """Returns seconds of Adam: 44 bytes per parameter it owns, 6 per parameter of the device for
    norm and cast.
    """
    params = (most * layer_params(x) + x.vocab_size * x.hidden_size) / x.tensor_parallel
    owned = np.where(x.zero_stage >= 1, params / x.num_shards, params)
    return (44 * owned + 6 * params) / (hardware.memory_bytes_per_s * c.memory_efficiency)
