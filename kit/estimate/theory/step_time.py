"""Step time of many layouts at once, in closed form and by named terms. No torch.

A layer takes the longer of two times: the work of its device (matrix products, attention,
element-wise kernels, collectives) and the launches of its host (`layer.py`). A pipeline stage takes
the time of its layers and sends, and of the embedding or the logits. A step takes the slowest stage
for each micro-batch, then the bubble, gradient reduction and the optimizer (`StepTime.total_s`).
Symbols are those of `layouts.py`.
"""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from kit.estimate.theory.communication import (
    GroupLinks,
    all_gather_seconds,
    all_reduce_seconds,
    exposed_seconds,
    small_sums_seconds,
)
from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layer import LayerTime, layer_params, product_seconds
from kit.estimate.theory.layouts import SCHEDULES, Array, Layouts

BACKWARD = 2 / 3
"""Share of the backward pass in the time of a layer."""
JITTER = 0.006
"""Relative increase of the step time for each doubling of the number of tensor parallel groups.
All groups wait for the latest one."""
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
    """Seconds per optimizer step of many layouts, as arrays with one element per layout.

    `hardware` describes one machine for all layouts, or has arrays with one element per layout.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients

    @cached_property
    def total_s(self) -> Array:
        """Seconds per step: factor x (m x slowest stage + bubble + filling + data parallelism +
        optimizer + fixed costs), with m micro-batches.
        """
        pipeline = (
            self.layouts.num_microbatches * self.slowest_stage_s + self.bubble_s + self.filling_s
        )
        return self.coefficients.factor * (
            pipeline + self.data_parallel_s + self.optimizer_s + self.fixed_s
        )

    @property
    def terms_s(self) -> dict[str, Array]:
        """Seconds per step by name in TERMS. They add up to `total_s`."""
        m = self.layouts.num_microbatches
        layers = m * self.layouts.num_layers / self.layouts.pipeline_parallel
        terms = {name: layers * term for name, term in self.layer.terms_s.items()} | {
            "embedding_logits": m
            * (self.embedding_s + self.logits_s)
            / self.layouts.pipeline_parallel,
            "pipeline_send": m * self.exposed_sends_s + self.filling_s,
            "imbalance": m * (self.slowest_stage_s - self.mean_stage_s),
            "bubble": self.bubble_s,
            "data_parallel": self.data_parallel_s,
            "optimizer": self.optimizer_s,
            "overhead": m * self.coefficients.microbatch_s + self.fixed_s,
        }
        factor = self.coefficients.factor
        shape = np.shape(self.total_s)
        return {name: np.broadcast_to(factor * terms[name], shape) for name in TERMS}

    @property
    def tokens_per_s(self) -> Array:
        """Tokens per second over all devices."""
        return self.layouts.global_batch_size * self.layouts.sequence_length / self.total_s

    def days(self, tokens: float) -> Array:
        """Returns days for a token budget, without restarts."""
        return tokens / self.tokens_per_s / 86_400

    def price(self, tokens: float) -> Array:
        """Returns USD for a token budget at the site's price. NaN if the site has no price."""
        return (
            self.days(tokens) * 24 * self.layouts.num_devices * self.hardware.price_per_device_hour
        )

    @cached_property
    def links(self) -> GroupLinks:
        """Links of each group of ranks."""
        return GroupLinks(self.layouts, self.hardware, self.coefficients)

    @cached_property
    def layer(self) -> LayerTime:
        """Seconds of one layer and micro-batch, by kind of work."""
        return LayerTime(self.layouts, self.hardware, self.coefficients, self.links)

    @cached_property
    def embedding_s(self) -> Array:
        """Seconds of the embedding per micro-batch, forward and backward: 12 T h bytes of memory
        traffic, and an all-reduce over tensor parallel ranks.
        """
        x = self.layouts
        moved = 12 * self.layouts.tokens * self.layouts.hidden_size
        gather = all_reduce_seconds(
            2 * x.tokens * x.hidden_size, x.tensor_parallel, self.links.tensor
        )
        return moved / self.layer.memory_bytes_per_s + gather

    @cached_property
    def logits_s(self) -> Array:
        """Seconds of the output projection and loss per micro-batch, forward and backward.

        There are three products T x h x V / t in bf16. The loss moves 14 bytes per logit in the
        forward pass and 7 in the backward pass.
        """
        x = self.layouts
        tokens = self.layouts.tokens
        hidden_size = self.layouts.hidden_size
        vocab_size = x.vocab_size / x.tensor_parallel
        rate = self.hardware.attention_flops_per_s
        moved = tokens * (hidden_size + vocab_size) + hidden_size * vocab_size
        product = product_seconds(tokens, hidden_size, vocab_size, 1.0, rate, self.coefficients)
        product = product + 2 * moved / self.layer.memory_bytes_per_s
        return 3 * product + 1.5 * (14 * tokens * vocab_size / self.layer.memory_bytes_per_s)

    @cached_property
    def has_few_micro_batches(self) -> Array:
        """Whether there are fewer micro-batches than pipeline devices (m < p). Then no other
        micro-batch hides a send (`exposed_trips`).
        """
        return self.layouts.num_microbatches < self.layouts.pipeline_parallel

    @cached_property
    def sends_s(self) -> Array:
        """Seconds of all sends of one micro-batch by one device, forward and backward.

        There are 2 v sends. Each tensor parallel rank sends its part of the activations, and the
        receivers gather the parts unless they use sequence parallelism.
        """
        x = self.layouts
        ranks = self.layouts.tensor_parallel
        link = self.links.pipeline
        size = 2 * x.tokens * x.hidden_size
        parts = (ranks - 1) / ranks * size / self.links.tensor.rate
        one = size / ranks / link.rate + link.latency_s + np.where(x.sequence_parallel, 0.0, parts)
        return np.where(x.pipeline_parallel > 1, 2 * x.virtual_stages * one, 0.0)

    @property
    def exposed_sends_s(self) -> Array:
        """Seconds of sends per micro-batch that no computation hides.

        It is a fitted share of all sends. With an interleaved schedule and overlap
        (Megatron-Core's `overlap_p2p_comm`) it is the time by which sends exceed the layers.
        """
        x = self.layouts
        part = self.coefficients.pipeline_exposed * self.sends_s
        if np.any(x.data_overlap & (x.virtual_stages > 1)):
            beside = exposed_seconds(self.sends_s, x.most_layers * self.layer.total_s)
            part = np.where(x.data_overlap & (x.virtual_stages > 1), beside, part)
        return np.where(self.has_few_micro_batches, 0.0, part)

    @cached_property
    def beside_layers_s(self) -> Array:
        """Seconds per micro-batch outside the layers: exposed sends and work of the host."""
        return self.exposed_sends_s + self.coefficients.microbatch_s

    @cached_property
    def inner_stage_s(self) -> Array:
        """Seconds per micro-batch of a stage with the largest number of layers, without embedding
        and logits.
        """
        return self.layouts.most_layers * self.layer.total_s + self.beside_layers_s

    @cached_property
    def mean_stage_s(self) -> Array:
        """Mean seconds per micro-batch over all stages: (L layers + embedding + logits) / p +
        exposed sends and work of the host.
        """
        x = self.layouts
        work = x.num_layers * self.layer.total_s + self.embedding_s + self.logits_s
        return work / x.pipeline_parallel + self.beside_layers_s

    @cached_property
    def _slowest_without_jitter_s(self) -> Array:
        """Seconds per micro-batch of the slowest stage if no rank is late.

        It is the first stage with the embedding, or the last one with the logits. If stages are
        uneven, the last stage has one layer less, as frameworks place the logits.
        """
        p = self.layouts.pipeline_parallel
        lighter = p * self.layouts.most_layers > self.layouts.num_layers
        last = self.inner_stage_s - lighter * self.layer.total_s + self.logits_s
        ends = np.where(p > 1, np.maximum(self.inner_stage_s + self.embedding_s, last), 0.0)
        return np.maximum(ends, self.mean_stage_s)

    @cached_property
    def jitter_factor(self) -> Array:
        """Factor of the step time for late ranks: 1 + JITTER log2(p c r)."""
        return 1 + JITTER * np.log2(self.layouts.num_devices / self.layouts.tensor_parallel)

    @cached_property
    def slowest_stage_s(self) -> Array:
        """Seconds per micro-batch of the slowest stage, with late ranks."""
        return self.jitter_factor * self._slowest_without_jitter_s

    @property
    def bubble_s(self) -> Array:
        """Seconds per step in which stages wait for other stages: p x mean stage - slowest stage.

        Interleaved schedules have 1/v of this time. ZB-H1 has a third and ZBV a tenth, since weight
        gradients fill the gaps. With m < p the first micro-batch passes all p v stages, and devices
        wait for it in each round but the last.
        """
        x = self.layouts
        p = self.layouts.pipeline_parallel
        v = self.layouts.virtual_stages
        zero = np.where(x.schedule == SCHEDULES.index("zero_bubble"), 1 / 3, 1.0)
        share = x.where(x.schedule == SCHEDULES.index("zbv"), 0.1, zero) / v
        bubble = (
            self.jitter_factor * (p * self.mean_stage_s - self._slowest_without_jitter_s) * share
        )
        if not np.any(self.has_few_micro_batches):
            return bubble
        rounds = (v - 1) / v * (p - x.num_microbatches) * (self.mean_stage_s - self.beside_layers_s)
        return bubble + np.where(self.has_few_micro_batches, rounds, 0.0)

    @property
    def filling_s(self) -> Array | float:
        """Seconds per step in which stages wait for sends while the pipeline fills, if m < p. 0
        otherwise.
        """
        x = self.layouts
        p = self.layouts.pipeline_parallel
        if not np.any(self.has_few_micro_batches):
            return 0.0
        exposed_part = self.coefficients.pipeline_exposed
        trips = exposed_trips(p, x.virtual_stages, x.num_microbatches, x.schedule, exposed_part)
        return np.where(self.has_few_micro_batches, trips * self.sends_s, 0.0)

    @property
    def fixed_s(self) -> Array:
        """Seconds per step that do not depend on the micro-batches: the host, and all-reduces of a
        few bytes over all ranks.
        """
        return self.coefficients.step_s + small_sums_seconds(
            self.layouts, self.hardware, self.coefficients
        )

    @cached_property
    def device_params(self) -> Array:
        """Number of parameters of a device, whose gradients it reduces: (layers + h V) / t."""
        x = self.layouts
        layers = x.most_layers * layer_params(x)
        return (layers + x.vocab_size * x.hidden_size) / x.tensor_parallel

    @property
    def optimizer_s(self) -> Array:
        """Seconds per step of AdamW: 44 bytes of memory traffic per parameter that the rank
        updates, and 6 per parameter of the device for gradient norm and cast.
        """
        sharded = self.layouts.zero_stage >= 1
        owned = np.where(sharded, self.device_params / self.layouts.num_shards, self.device_params)
        return (44 * owned + 6 * self.device_params) / self.layer.memory_bytes_per_s

    @cached_property
    def once_per_step_s(self) -> Array:
        """Seconds per step of communication that happens once: gradients of tied embeddings between
        the ends of a pipeline, and gradients of a shard between its copies (arXiv 2304.11277,
        3.2.2).
        """
        x = self.layouts
        table = self.layouts.vocab_size * self.layouts.hidden_size
        tied = table / x.tensor_parallel * x.gradient_bytes / self.links.network_rate
        once = np.where((x.pipeline_parallel > 1) & x.tied_embeddings, tied, 0.0)
        if not np.any(x.shard_size):
            return once
        copies = x.context_parallel * x.data_parallel / x.num_shards
        size = x.gradient_bytes * self.device_params / x.num_shards
        return once + all_reduce_seconds(size, copies, self.links.copy)

    @cached_property
    def gradient_reduction_s(self) -> Array:
        """Seconds per step to reduce gradients, without overlap. ZeRO reduce-scatters gradients and
        gathers weights of `gathered_bytes` each. Without ZeRO both halves of the all-reduce move
        gradients.
        """
        x = self.layouts
        zero = (self.layouts.gradient_bytes + self.layouts.gathered_bytes) / 2
        size = np.where(x.zero_stage >= 1, zero, x.gradient_bytes) * self.device_params
        return all_reduce_seconds(size, x.num_shards, self.links.shard)

    def _layerwise_seconds(self, bytes_per_param: Array) -> Array:
        """Returns seconds to gather or reduce-scatter all parameters of a device layer by layer."""
        size = bytes_per_param * self.device_params
        ranks = self.layouts.num_shards
        return all_gather_seconds(size, ranks, self.links.shard, steps=self.layouts.most_layers)

    @property
    def overlap_window_s(self) -> Array:
        """Seconds of computation that hide the reduction of gradients and the gathering of weights:
        (1 + (v - 1) min(p, m)) / v micro-batches.

        A stage's gradients are complete with its last backward pass, and its weights are needed by
        its first forward pass. A device runs its v stages in rounds of p micro-batches. Therefore
        v - 1 stages have the time of a round, and the last stage has the time of one micro-batch.
        """
        x = self.layouts
        v = self.layouts.virtual_stages
        rounds = np.minimum(x.pipeline_parallel, x.num_microbatches)
        return self.inner_stage_s * (1 + (v - 1) * rounds) / v

    @property
    def data_parallel_s(self) -> Array:
        """Seconds per step to reduce gradients and gather weights that no computation hides.

        Without a pipeline, ZeRO reduces buckets of gradients during the backward pass of the last
        micro-batch. Plain data parallelism of Megatron-LM waits for the end of that pass. With
        `data_overlap`, weights are gathered during forward passes too, and computation of
        `overlap_window_s` hides both. ZeRO 3 gathers weights in both passes of each micro-batch,
        and reduce-scatters gradients in each backward pass.
        """
        x = self.layouts
        m = x.num_microbatches
        stage = self.inner_stage_s
        waits = (x.pipeline_parallel > 1) | (x.zero_stage < 1)
        beside = np.where(
            x.data_overlap, self.overlap_window_s, np.where(waits, 0.0, BACKWARD * stage)
        )
        data = exposed_seconds(self.gradient_reduction_s + self.once_per_step_s, beside)
        is_third = x.zero_stage >= 3
        if not np.any(is_third):
            return data
        bulk = fully = data
        if not np.all(x.native):
            gathers = 2 * self._layerwise_seconds(x.gathered_bytes)
            sent = gathers + self._layerwise_seconds(x.gradient_bytes)
            last = exposed_seconds(sent + self.once_per_step_s, stage)
            bulk = (m - 1) * exposed_seconds(sent, stage) + last
        if np.any(x.native):
            fully = self._fully_sharded_seconds()
        return np.where(is_third, np.where(x.native, fully, bulk), data)

    def _fully_sharded_seconds(self) -> Array:
        """Returns seconds per step of ZeRO 3's communication that no computation hides, in the
        order of FSDP2 (PyTorch FSDP, arXiv 2304.11277, section 3.3).

        In each pass the weights of the next layer are gathered while the present layer computes.
        In the backward pass the gradients of the previous layer are reduce-scattered too. The time
        by which both exceed the layers is exposed. Nothing hides the gather of the first layer of a
        pass and the last reduce-scatter of a step. Communication that happens once per step
        (all-reduces over copies of a shard, and all gradients under a pipeline) overlaps with the
        last backward pass.
        """
        x = self.layouts
        m = x.num_microbatches
        once = self.once_per_step_s
        has_pipeline = x.pipeline_parallel > 1
        gather = self._layerwise_seconds(x.gathered_bytes)
        scatter = self._layerwise_seconds(x.gradient_bytes)
        forward_work = (1 - BACKWARD) * self.inner_stage_s
        backward_work = BACKWARD * self.inner_stage_s

        forward = exposed_seconds(gather, forward_work) + gather / x.most_layers
        sent_backward = gather + np.where(has_pipeline, 0.0, scatter)
        sent_last = sent_backward + (once + np.where(has_pipeline, scatter, 0.0))
        backward = exposed_seconds(sent_backward, backward_work)
        last = exposed_seconds(sent_last, backward_work)
        return m * forward + (m - 1) * backward + last + (scatter + once) / x.most_layers


def step_time(layouts: Layouts, hardware: Hardware, coefficients: Coefficients) -> StepTime:
    """Returns the time of one optimizer step of each layout. `hardware` describes one machine for
    all layouts, or has arrays with one element per layout.
    """
    return StepTime(layouts, hardware, coefficients)


def exposed_trips(p: Any, v: Any, m: Any, schedule: Any, exposed_part: Any) -> Any:
    """Returns the number of times that a step waits for all sends of one micro-batch, forward and
    backward.

    p is the number of pipeline devices, v the number of virtual stages and m the number of
    micro-batches. For m < p a step waits p - 1/v times, and under 1F1B another max(m - 2, 0) times.
    The simulation of these schedules (`schedule.py`) gives exactly these numbers. Otherwise a step
    waits for a fitted share `exposed_part` of the sends of each micro-batch.
    """
    alternating = np.where(schedule == SCHEDULES.index("1f1b"), np.maximum(m - 2, 0), 0.0)
    return np.where(m < p, p - 1 / v + alternating, m * exposed_part)
