"""Step time of any layout in closed form, broken down in named terms; all layouts at once. No
torch.

A layer takes the longer of what its device does (products, attention, element-wise kernels,
collectives) and of what its host needs to launch it (`layer.py`). A stage takes its layers, its
sends, and the embedding or the logits. A step takes the slowest stage for every micro-batch, the
bubble, gradient reduction and the optimizer: `StepTime.total_s`. Symbols: layouts.py.
"""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from kit.estimate.theory.communication import Links, all_gather, all_reduce, exposed, small_sums
from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layer import Layer, layer_params, product_time
from kit.estimate.theory.layouts import SCHEDULES, Array, Layouts

BACKWARD = 2 / 3
"""Of a layer's time, by its backward pass."""
JITTER = 0.006
"""How much longer a step takes per doubling of the groups of tensor ranks that wait for each
other, since some are late."""
TERMS = (
    "gemm",
    "attention",
    "elementwise",
    "host_launch",
    "tensor_parallel",
    "context_parallel",
    "recompute",
    "embedding_logits",
    "pipeline_send",
    "imbalance",
    "bubble",
    "data_parallel",
    "optimizer",
    "overhead",
)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds per step of many layouts, on hardware of one machine or one element per layout; the
    terms add up to the total.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients

    @cached_property
    def total_s(self) -> Array:
        """factor x (m x slowest stage + bubble + filling + data parallelism + optimizer + own)."""
        pipeline = self.layouts.num_microbatches * self.slowest + self.bubble + self.filling
        return self.coefficients.factor * (
            pipeline + self.data_parallel + self.optimizer + self.own
        )

    @property
    def terms_s(self) -> dict[str, Array]:
        """Seconds by name in TERMS; they add up to the total."""
        m = self.layouts.num_microbatches
        layers = m * self.layouts.num_layers / self.layouts.pipeline_parallel
        terms = {name: layers * term for name, term in self.layer.terms.items()} | {
            "embedding_logits": m * (self.embedding + self.logits) / self.layouts.pipeline_parallel,
            "pipeline_send": m * self.send + self.filling,
            "imbalance": m * (self.slowest - self.mean),
            "bubble": self.bubble,
            "data_parallel": self.data_parallel,
            "optimizer": self.optimizer,
            "overhead": m * self.coefficients.microbatch_s + self.own,
        }
        factor, shape = self.coefficients.factor, np.shape(self.total_s)
        return {name: np.broadcast_to(factor * terms[name], shape) for name in TERMS}

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

    @cached_property
    def links(self) -> Links:
        """What each group of a layout gets."""
        return Links(self.layouts, self.hardware, self.coefficients)

    @cached_property
    def layer(self) -> Layer:
        """One layer and micro-batch."""
        return Layer(self.layouts, self.hardware, self.coefficients, self.links)

    @cached_property
    def embedding(self) -> Array:
        """Per micro-batch, both passes: 12 T h bytes, and a sum over tensor ranks."""
        x, moved = self.layouts, 12 * self.layouts.tokens * self.layouts.hidden_size
        gather = all_reduce(2 * x.tokens * x.hidden_size, x.tensor_parallel, self.links.tensor)
        return moved / self.layer.memory_rate + gather

    @cached_property
    def logits(self) -> Array:
        """Per micro-batch, both passes: three products T x h x V / t in bf16, and the loss, which
        moves 14 bytes a logit in the forward pass and half of it in the backward pass.
        """
        x, tokens, hidden_size = self.layouts, self.layouts.tokens, self.layouts.hidden_size
        vocab_size = x.vocab_size / x.tensor_parallel
        rate = self.hardware.attention_flops_per_s
        moved = tokens * (hidden_size + vocab_size) + hidden_size * vocab_size
        product = product_time(tokens, hidden_size, vocab_size, 1.0, rate, self.coefficients)
        product = product + 2 * moved / self.layer.memory_rate
        return 3 * product + 1.5 * (14 * tokens * vocab_size / self.layer.memory_rate)

    @cached_property
    def few(self) -> Array:
        """Where no micro-batch is left whose work could hide a send, m < p: `exposed_trips`."""
        return self.layouts.num_microbatches < self.layouts.pipeline_parallel

    @cached_property
    def sent(self) -> Array:
        """All sends of one micro-batch by one device, there and back: 2 v times a part of its
        activations by each tensor rank, gathered on arrival.
        """
        x, ranks, link = self.layouts, self.layouts.tensor_parallel, self.links.pipeline
        size = 2 * x.tokens * x.hidden_size
        parts = (ranks - 1) / ranks * size / self.links.tensor.rate
        one = size / ranks / link.rate + link.latency_s + np.where(x.sequence_parallel, 0.0, parts)
        return np.where(x.pipeline_parallel > 1, 2 * x.virtual_stages * one, 0.0)

    @property
    def send(self) -> Array:
        """What of them nothing hides, per micro-batch: a part, or, interleaved and overlapped, what
        takes longer than the layers (Megatron-Core's `overlap_p2p_comm`).
        """
        x, part = self.layouts, self.coefficients.pipeline_exposed * self.sent
        if np.any(x.data_overlap & (x.virtual_stages > 1)):
            beside = exposed(self.sent, x.most_layers * self.layer.total)
            part = np.where(x.data_overlap & (x.virtual_stages > 1), beside, part)
        return np.where(self.few, 0.0, part)

    @cached_property
    def each(self) -> Array:
        """What each micro-batch takes beside layers: sends and the host."""
        return self.send + self.coefficients.microbatch_s

    @cached_property
    def middle(self) -> Array:
        """A stage with most layers, without embedding and logits, per micro-batch."""
        return self.layouts.most_layers * self.layer.total + self.each

    @cached_property
    def mean(self) -> Array:
        """Of all stages, per micro-batch: (L layers + embedding + logits) / p + sends."""
        x = self.layouts
        work = x.num_layers * self.layer.total + self.embedding + self.logits
        return work / x.pipeline_parallel + self.each

    @cached_property
    def _ideal(self) -> Array:
        """The slowest stage if none is late: the first with the embedding, or the last with the
        logits, which has a layer less where stages are uneven, as frameworks place the logits.
        """
        p = self.layouts.pipeline_parallel
        lighter = p * self.layouts.most_layers > self.layouts.num_layers
        last = self.middle - lighter * self.layer.total + self.logits
        ends = np.where(p > 1, np.maximum(self.middle + self.embedding, last), 0.0)
        return np.maximum(ends, self.mean)

    @cached_property
    def jitter(self) -> Array:
        """1 + JITTER log2(p c r)."""
        return 1 + JITTER * np.log2(self.layouts.num_devices / self.layouts.tensor_parallel)

    @cached_property
    def slowest(self) -> Array:
        """The slowest stage, per micro-batch, as late as some are."""
        return self.jitter * self._ideal

    @property
    def bubble(self) -> Array:
        """What the others wait for: p x mean - slowest, 1/v of it interleaved, a third where weight
        gradients fill in (ZB-H1).

        With m < p the first micro-batch passes all p v stages, and devices wait for it in each
        round but the last.
        """
        x, p, v = self.layouts, self.layouts.pipeline_parallel, self.layouts.virtual_stages
        zero = np.where(x.schedule == SCHEDULES.index("zero_bubble"), 1 / 3, 1.0)
        share = x.where(x.schedule == SCHEDULES.index("zbv"), 0.1, zero) / v
        bubble = self.jitter * (p * self.mean - self._ideal) * share
        if not np.any(self.few):
            return bubble
        rounds = (v - 1) / v * (p - x.num_microbatches) * (self.mean - self.each)
        return bubble + np.where(self.few, rounds, 0.0)

    @property
    def filling(self) -> Array | float:
        """Sends that a step with m < p waits for."""
        x, p = self.layouts, self.layouts.pipeline_parallel
        if not np.any(self.few):
            return 0.0
        exposed_part = self.coefficients.pipeline_exposed
        trips = exposed_trips(p, x.virtual_stages, x.num_microbatches, x.schedule, exposed_part)
        return np.where(self.few, trips * self.sent, 0.0)

    @property
    def own(self) -> Array:
        """Of a step, whatever its micro-batches: host, and sums of a few bytes over all ranks."""
        return self.coefficients.step_s + small_sums(self.layouts, self.hardware, self.coefficients)

    @cached_property
    def params(self) -> Array:
        """Weights that a device reduces and updates: (layers + h V) / t."""
        x = self.layouts
        layers = x.most_layers * layer_params(x)
        return (layers + x.vocab_size * x.hidden_size) / x.tensor_parallel

    @property
    def optimizer(self) -> Array:
        """Adam: 44 bytes per parameter it owns, 6 per parameter of the device for norm and cast."""
        sharded = self.layouts.zero_stage >= 1
        owned = np.where(sharded, self.params / self.layouts.num_shards, self.params)
        return (44 * owned + 6 * self.params) / self.layer.memory_rate

    @cached_property
    def once(self) -> Array:
        """Sent once a step: gradients of tied embeddings between the ends of a pipeline, and those
        of a shard between its copies (arXiv 2304.11277, 3.2.2).
        """
        x, table = self.layouts, self.layouts.vocab_size * self.layouts.hidden_size
        tied = table / x.tensor_parallel * x.gradient_bytes / self.links.network_rate
        once = np.where((x.pipeline_parallel > 1) & x.tied_embeddings, tied, 0.0)
        if not np.any(x.shard_size):
            return once
        copies = x.context_parallel * x.data_parallel / x.num_shards
        size = x.gradient_bytes * self.params / x.num_shards
        return once + all_reduce(size, copies, self.links.copy)

    @cached_property
    def reduction(self) -> Array:
        """Of gradients. ZeRO scatters them and gathers bf16 weights; without it both halves of the
        all-reduce move gradients.
        """
        x, zero = self.layouts, (self.layouts.gradient_bytes + self.layouts.gathered_bytes) / 2
        size = np.where(x.zero_stage >= 1, zero, x.gradient_bytes) * self.params
        return all_reduce(size, x.num_shards, self.links.shard)

    def _by_layer(self, bytes_per_param: Array) -> Array:
        """Returns seconds to gather or scatter all weights of a device, layer by layer."""
        size, ranks = bytes_per_param * self.params, self.layouts.num_shards
        return all_gather(size, ranks, self.links.shard, steps=self.layouts.most_layers)

    @property
    def window(self) -> Array:
        """What overlapped gradients and weights move beside: (1 + (v - 1) min(p, m)) / v
        micro-batches.

        A stage's gradients are complete with its last backward pass, and its weights are needed by
        its first forward pass. A device goes through its v stages in rounds of p micro-batches, so
        that v - 1 of them have a round, and the last one its own micro-batch.
        """
        x, v = self.layouts, self.layouts.virtual_stages
        rounds = np.minimum(x.pipeline_parallel, x.num_microbatches)
        return self.middle * (1 + (v - 1) * rounds) / v

    @property
    def data_parallel(self) -> Array:
        """Reducing gradients and gathering weights, as far as no micro-batch hides it.

        Without a pipeline, ZeRO reduces buckets of gradients beside the last micro-batch's backward
        pass; plain data parallelism of Megatron-LM waits for its end. With overlap weights are
        gathered beside forward passes too, and both have a `window`. ZeRO 3 gathers weights in both
        passes of each micro-batch, and scatters gradients in each.
        """
        x, m, middle = self.layouts, self.layouts.num_microbatches, self.middle
        waits = (x.pipeline_parallel > 1) | (x.zero_stage < 1)
        beside = np.where(x.data_overlap, self.window, np.where(waits, 0.0, BACKWARD * middle))
        data = exposed(self.reduction + self.once, beside)
        is_third = x.zero_stage >= 3
        if not np.any(is_third):
            return data
        bulk = fully = data
        if not np.all(x.native):
            each = 2 * self._by_layer(x.gathered_bytes) + self._by_layer(x.gradient_bytes)
            bulk = (m - 1) * exposed(each, middle) + exposed(each + self.once, middle)
        if np.any(x.native):
            fully = self._fully_sharded()
        return np.where(is_third, np.where(x.native, fully, bulk), data)

    def _fully_sharded(self) -> Array:
        """Returns seconds per step in which ZeRO 3 waits as FSDP2 does it (PyTorch FSDP, arXiv
        2304.11277, section 3.3).

        In each pass the weights of the next layer are gathered while this one computes, and in the
        backward pass the gradients of the last are scattered besides: what takes longer than the
        layers is seen. Nothing hides the gather of a pass's first layer and the last scatter of a
        step. What is sent once a step (sums over copies of a shard; under a pipeline all gradients)
        goes beside the last backward pass.
        """
        x, m, once = self.layouts, self.layouts.num_microbatches, self.once
        gather, scatter = self._by_layer(x.gathered_bytes), self._by_layer(x.gradient_bytes)
        piped = x.pipeline_parallel > 1
        forward = exposed(gather, (1 - BACKWARD) * self.middle) + gather / self.layouts.most_layers
        sent = gather + np.where(piped, 0.0, scatter)
        at_end = sent + (once + np.where(piped, scatter, 0.0))
        backward = exposed(sent, BACKWARD * self.middle)
        last = exposed(at_end, BACKWARD * self.middle)
        return m * forward + (m - 1) * backward + last + (scatter + once) / self.layouts.most_layers


def step_time(layouts: Layouts, hardware: Hardware, coefficients: Coefficients) -> StepTime:
    """Returns the time of one optimizer step of each layout, on hardware of one machine or one
    element per layout.
    """
    return StepTime(layouts, hardware, coefficients)


def exposed_trips(p: Any, v: Any, m: Any, schedule: Any, exposed_part: Any) -> Any:
    """Returns how often a step waits for all sends of one micro-batch, there and back.

    With fewer micro-batches than stages: p - 1/v times, and under 1F1B for each but two more, as
    the simulation of these orders (schedule.py) has it exactly; else `exposed_part` (fitted) of
    each.
    """
    alternating = np.where(schedule == SCHEDULES.index("1f1b"), np.maximum(m - 2, 0), 0.0)
    return np.where(m < p, p - 1 / v + alternating, m * exposed_part)
