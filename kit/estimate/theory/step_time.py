"""Step time of many layouts at once, in closed form, as a sum of named terms. This module does not
import torch.

The time of a layer is the longer of two times: the work of the device (matrix products, attention,
element-wise kernels, collectives), and the kernel launches of the host (`layer.py`). The time of a
pipeline stage is the time of its layers and sends, and of the embedding or the logits. The step
time is the time of the slowest stage for each micro-batch, plus the bubble, gradient reduction and
the optimizer (`StepTime.total_s`).

Symbols: L layers, h hidden size, V vocabulary size, T tokens of a micro-batch on one device, m
micro-batches per step, v virtual stages per pipeline device, t tensor parallel, p pipeline
parallel, c context parallel, r data parallel degree.
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
"""Share of the backward pass in the time of a layer, 0 to 1."""
JITTER = 0.006
"""Relative increase of the time of a stage for each doubling of the number of tensor parallel
groups. More groups are slower, since all groups wait for the slowest group."""
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
    """Seconds per optimizer step of many layouts, and the terms whose sum is this time. Arrays have
    one element per layout.

    `hardware` describes one machine for all layouts, or has arrays with one element per layout.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients

    @cached_property
    def total_s(self) -> Array:
        """Seconds per step: factor x (m x time of the slowest stage + bubble + filling + data
        parallelism + optimizer + fixed costs), with m micro-batches.
        """
        pipeline = (
            self.layouts.num_microbatches * self.slowest_stage_s + self.bubble_s + self.filling_s
        )
        return self.coefficients.factor * (
            pipeline + self.data_parallel_s + self.optimizer_s + self.fixed_s
        )

    @property
    def terms_s(self) -> dict[str, Array]:
        """Maps each name in TERMS, e.g. `gemm`, to its seconds per step. The sum is `total_s`."""
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
        """Tokens per second, summed over all devices."""
        return self.layouts.global_batch_size * self.layouts.sequence_length / self.total_s

    def days(self, tokens: float) -> Array:
        """Returns the days of training on `tokens` tokens. Restarts are not included."""
        return tokens / self.tokens_per_s / 86_400

    def price(self, tokens: float) -> Array:
        """Returns the price in USD of training on `tokens` tokens. If the site has no price, the
        result is NaN.
        """
        return (
            self.days(tokens) * 24 * self.layouts.num_devices * self.hardware.price_per_device_hour
        )

    @cached_property
    def links(self) -> GroupLinks:
        """Rates and latencies of the communication in each process group (tensor, data, ...)."""
        return GroupLinks(self.layouts, self.hardware, self.coefficients)

    @cached_property
    def layer(self) -> LayerTime:
        """Seconds of one layer for one micro-batch, divided into matrix products, attention,
        collectives and other terms.
        """
        return LayerTime(self.layouts, self.hardware, self.coefficients, self.links)

    @cached_property
    def embedding_s(self) -> Array:
        """Seconds of the embedding per micro-batch, forward and backward together: memory traffic
        of 12 bytes x tokens x hidden size, and an all-reduce over tensor parallel ranks.
        """
        x = self.layouts
        moved = 12 * self.layouts.tokens * self.layouts.hidden_size
        gather = all_reduce_seconds(
            2 * x.tokens * x.hidden_size, x.tensor_parallel, self.links.tensor
        )
        return moved / self.layer.memory_bytes_per_s + gather

    @cached_property
    def logits_s(self) -> Array:
        """Seconds of the output projection and the loss per micro-batch, forward and backward
        together.

        The projection has three matrix products in bf16 of the size tokens x hidden size x
        vocabulary size / tensor parallel degree. The loss has 14 bytes of memory traffic per logit
        in the forward pass and 7 in the backward pass.
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
        """Whether there are fewer micro-batches than pipeline devices (m < p). In this case devices
        wait for sends, since there is no other micro-batch to compute meanwhile.
        """
        return self.layouts.num_microbatches < self.layouts.pipeline_parallel

    @cached_property
    def sends_s(self) -> Array:
        """Seconds of all sends of one micro-batch by one device, forward and backward together.
        There are two sends per virtual stage.

        Each tensor parallel rank sends its part of the activations. The receiving ranks gather the
        parts, unless they use sequence parallelism.
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
        """Seconds of sends per micro-batch that do not overlap with computation.

        They are a fitted share of the time of all sends. With an interleaved schedule and overlap
        (Megatron-Core's `overlap_p2p_comm`), they are the time by which sends exceed the layers. If
        there are fewer micro-batches than pipeline devices, the value is 0, since `filling_s` then
        counts the waiting for sends.
        """
        x = self.layouts
        part = self.coefficients.pipeline_exposed * self.sends_s
        if np.any(x.data_overlap & (x.virtual_stages > 1)):
            beside = exposed_seconds(self.sends_s, x.most_layers * self.layer.total_s)
            part = np.where(x.data_overlap & (x.virtual_stages > 1), beside, part)
        return np.where(self.has_few_micro_batches, 0.0, part)

    @cached_property
    def beside_layers_s(self) -> Array:
        """Seconds per micro-batch and device outside the layers: sends that do not overlap with
        computation, and work of the host.
        """
        return self.exposed_sends_s + self.coefficients.microbatch_s

    @cached_property
    def inner_stage_s(self) -> Array:
        """Seconds per micro-batch of the pipeline device with the most layers, without embedding
        and logits.
        """
        return self.layouts.most_layers * self.layer.total_s + self.beside_layers_s

    @cached_property
    def mean_stage_s(self) -> Array:
        """Seconds per micro-batch of a pipeline device, as the mean over all devices. The time of
        all layers, embedding and logits is divided by the number of pipeline devices. Exposed sends
        and work of the host are added.
        """
        x = self.layouts
        work = x.num_layers * self.layer.total_s + self.embedding_s + self.logits_s
        return work / x.pipeline_parallel + self.beside_layers_s

    @cached_property
    def _slowest_without_jitter_s(self) -> Array:
        """Seconds per micro-batch of the slowest pipeline device if no rank is late.

        The slowest is the first device, which has the embedding, or the last device, which has the
        logits. If devices have unequal numbers of layers, the last device has one layer fewer than
        the others, as in training frameworks. The time is at least the mean over all devices.
        """
        p = self.layouts.pipeline_parallel
        lighter = p * self.layouts.most_layers > self.layouts.num_layers
        last = self.inner_stage_s - lighter * self.layer.total_s + self.logits_s
        ends = np.where(p > 1, np.maximum(self.inner_stage_s + self.embedding_s, last), 0.0)
        return np.maximum(ends, self.mean_stage_s)

    @cached_property
    def jitter_factor(self) -> Array:
        """Factor by which waiting for late ranks increases the time of a stage: 1 + JITTER x
        log2(number of tensor parallel groups).
        """
        return 1 + JITTER * np.log2(self.layouts.num_devices / self.layouts.tensor_parallel)

    @cached_property
    def slowest_stage_s(self) -> Array:
        """Seconds per micro-batch of the slowest pipeline device, including the wait for late
        ranks.
        """
        return self.jitter_factor * self._slowest_without_jitter_s

    @property
    def bubble_s(self) -> Array:
        """Seconds per step in which pipeline devices wait for each other. The time is p x (mean
        time of a device per micro-batch) - (time of the slowest device), with p pipeline devices.

        Interleaved schedules with v virtual stages have 1/v of this time. ZB-H1 has a third and ZBV
        a tenth, since weight gradients are computed while a device would wait. If there are fewer
        micro-batches than pipeline devices, the first micro-batch passes all p v stages. Devices
        wait for it in each round except the last.
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
        """Seconds per step in which devices wait for sends while the pipeline fills, if there are
        fewer micro-batches than pipeline devices. Otherwise the value is 0, since `exposed_sends_s`
        then counts the sends.
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
        """Number of parameters whose gradients a device reduces: (parameters of its layers + hidden
        size x vocabulary size) / tensor parallel degree. The layers are those of the pipeline
        device with the most layers.
        """
        x = self.layouts
        layers = x.most_layers * layer_params(x)
        return (layers + x.vocab_size * x.hidden_size) / x.tensor_parallel

    @property
    def optimizer_s(self) -> Array:
        """Seconds per step of AdamW. Memory traffic is 44 bytes per parameter that the rank
        updates, and 6 bytes per parameter of the device for gradient norm and cast.
        """
        sharded = self.layouts.zero_stage >= 1
        owned = np.where(sharded, self.device_params / self.layouts.num_shards, self.device_params)
        return (44 * owned + 6 * self.device_params) / self.layer.memory_bytes_per_s

    @cached_property
    def once_per_step_s(self) -> Array:
        """Seconds per step of two reductions that are made once per step. One is of the gradients
        of tied embeddings, between the first and the last pipeline device. The other is of the
        gradients of a ZeRO shard, between the ranks that hold copies of this shard (hybrid sharding
        of PyTorch FSDP, arXiv 2304.11277, section 3.2.2).
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
        """Seconds per step in which replicas reduce their gradients, if nothing overlaps. ZeRO
        reduce-scatters gradients and then gathers weights, with `gathered_bytes` per weight.
        Without ZeRO, both halves of the all-reduce move gradients.
        """
        x = self.layouts
        zero = (self.layouts.gradient_bytes + self.layouts.gathered_bytes) / 2
        size = np.where(x.zero_stage >= 1, zero, x.gradient_bytes) * self.device_params
        return all_reduce_seconds(size, x.num_shards, self.links.shard)

    def _layerwise_seconds(self, bytes_per_param: Array) -> Array:
        """Returns the seconds of an all-gather or reduce-scatter of all parameters of a device,
        with one collective per layer.
        """
        size = bytes_per_param * self.device_params
        ranks = self.layouts.num_shards
        return all_gather_seconds(size, ranks, self.links.shard, steps=self.layouts.most_layers)

    @property
    def overlap_window_s(self) -> Array:
        """Seconds of computation with which the reduction of gradients and the gathering of weights
        can overlap: the time of (1 + (v - 1) min(p, m)) / v micro-batches, with p pipeline devices,
        v virtual stages per device and m micro-batches.

        The gradients of a stage are complete after its last backward pass. Its weights are needed
        by its first forward pass. A device runs its v stages in rounds of p micro-batches. For v -
        1 stages the overlap lasts one round, and for the last stage one micro-batch.
        """
        x = self.layouts
        v = self.layouts.virtual_stages
        rounds = np.minimum(x.pipeline_parallel, x.num_microbatches)
        return self.inner_stage_s * (1 + (v - 1) * rounds) / v

    @property
    def data_parallel_s(self) -> Array:
        """Exposed seconds per step of data parallel communication: the part of gradient reduction
        and weight gathering that does not overlap with computation.

        Without a pipeline, ZeRO reduces buckets of gradients during the backward pass of the last
        micro-batch. Plain data parallelism in Megatron-LM starts after this backward pass. With
        `data_overlap`, weights are gathered during forward passes too, and both overlap with
        `overlap_window_s` seconds of computation. ZeRO 3 gathers weights in both passes of each
        micro-batch, and reduce-scatters gradients in each backward pass.
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
        """Returns the exposed seconds per step of the communication of ZeRO 3 in FSDP2, the part
        that does not overlap with computation (PyTorch FSDP, arXiv 2304.11277, section 3.3).

        In each pass, the weights of the next layer are gathered while the present layer computes.
        In the backward pass, the gradients of the previous layer are reduce-scattered too. The time
        by which this communication exceeds the computation is exposed. The gather of the first
        layer of each pass and the last reduce-scatter of a step do not overlap with anything.
        Communication that is made once per step overlaps with the last backward pass. It reduces
        the gradients of shard copies and, with a pipeline, all gradients.
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
    """Returns the time for which a step waits for sends. The unit is the time of all sends of one
    micro-batch by one device, forward and backward together.

    p is the number of pipeline devices, v the number of virtual stages per device and m the number
    of micro-batches. For m < p the result is p - 1/v. Under 1F1B it is p - 1/v + max(m - 2, 0). The
    simulation of these schedules (`schedule.py`) gives exactly these numbers. For m >= p the result
    is m x `exposed_part`, the fitted share of the sends that do not overlap with computation.
    """
    alternating = np.where(schedule == SCHEDULES.index("1f1b"), np.maximum(m - 2, 0), 0.0)
    return np.where(m < p, p - 1 / v + alternating, m * exposed_part)
