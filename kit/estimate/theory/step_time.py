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
        return self.factor * (pipeline + self.data_parallel_s + self.optimizer_s + self.fixed_s)

    @cached_property
    def factor(self) -> Array | float:
        """Factor by which the whole step is slower than the sum of the modelled work. Plain torch
        code has a further factor (`Coefficients.torch_factor`).
        """
        x = self.layouts
        if not np.any(x.native):
            return self.coefficients.factor
        return self.coefficients.factor * x.where(x.native, self.coefficients.torch_factor, 1.0)

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
        factor = self.factor
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
        loss = 1.5 * (14 * tokens * vocab_size / self.layer.memory_bytes_per_s)
        if not np.any(x.gathers_logits):
            return 3 * product + loss
        size = 2 * tokens * x.vocab_size
        gather = all_gather_seconds(size, x.tensor_parallel, self.links.tensor)
        return 3 * product + np.where(x.gathers_logits, gather + x.tensor_parallel * loss, loss)

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
            beside = exposed_seconds(self.sends_s, x.max_layers_per_device * self.layer.total_s)
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
        return self.layouts.max_layers_per_device * self.layer.total_s + self.beside_layers_s

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
        lighter = p * self.layouts.max_layers_per_device > self.layouts.num_layers
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
        layers = x.max_layers_per_device * layer_params(x)
        return (layers + x.vocab_size * x.hidden_size) / x.tensor_parallel

    @property
    def optimizer_s(self) -> Array:
        """Seconds per step of AdamW. Memory traffic is 44 bytes per parameter that the rank
        updates, and 6 bytes per parameter of the device for gradient norm and cast. If Muon trains
        the matrices, `muon_s` is added.
        """
        adamw = (44 * self._owned(self.device_params) + 6 * self.device_params) / (
            self.layer.memory_bytes_per_s
        )
        return adamw + self.muon_s if np.any(self.layouts.muon) else adamw

    def _owned(self, params: Array) -> Array:
        """Returns how many of `params` parameters of a device its rank updates."""
        sharded = self.layouts.zero_stage >= 1
        return np.where(sharded, params / self.layouts.num_shards, params)

    @property
    def muon_s(self) -> Array:
        """Seconds per step by which Muon takes longer than AdamW. The value is 0 where
        `layouts.muon` is false.

        It has three parts. Each element of a matrix has 12 bytes less memory traffic than with
        AdamW: 32 bytes for momentum, weights and buffers. The Newton-Schulz products of all
        matrices of a pipeline device (`orthogonalisation_s`) are shared equally among its tensor,
        context and data parallel ranks, but one matrix is the work of one rank. A rank sends its
        shards to the owners of the matrices, and receives its shards of the results, with 2 bytes
        per element.
        """
        x = self.layouts
        ranks = x.tensor_parallel * x.context_parallel * x.data_parallel
        matrices = x.max_layers_per_device * layer_params(x)
        owned = self._owned(matrices / x.tensor_parallel)
        one_layer_s, longest_s = self.orthogonalisation_s
        products_s = np.maximum(longest_s, x.max_layers_per_device * one_layer_s / ranks)
        has_replicas = x.context_parallel * x.data_parallel > 1
        rate = np.where(has_replicas, self.links.data.rate, self.links.tensor.rate)
        sent_s = np.where(ranks > 1, 2 * (matrices / ranks + owned) / rate, 0.0)
        saved_s = 12 * owned / self.layer.memory_bytes_per_s
        return x.muon * (products_s + sent_s - saved_s)

    @property
    def orthogonalisation_s(self) -> tuple[Array, Array]:
        """Seconds of the Newton-Schulz iterations as (all matrices of one layer, the largest
        matrix). Each of 5 iterations has three products in bf16, of sizes m x n x m, m x m x m and
        m x m x n, with the smaller dimension m and the larger dimension n.
        """
        x = self.layouts
        rate = self.hardware.attention_flops_per_s
        shapes = [
            (2.0, x.hidden_size, x.hidden_size),
            (2.0, x.kv_size, x.hidden_size),
            (2.0 + x.gated, x.hidden_size, x.ffn_hidden_size),
        ]
        layer_s: Any = 0.0
        longest_s: Any = 0.0
        for count, rows, columns in shapes:
            m = np.minimum(rows, columns)
            n = np.maximum(rows, columns)
            products = [(m, n, m), (m, m, m), (m, m, n)]
            one_s = 5 * sum(
                product_seconds(*product, 1.0, rate, self.coefficients) for product in products
            )
            layer_s = layer_s + count * one_s
            longest_s = np.maximum(longest_s, one_s)
        return layer_s, longest_s

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
        return all_gather_seconds(
            size, ranks, self.links.shard, steps=self.layouts.max_layers_per_device
        )

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

        In FSDP2, ZeRO 2 reduces gradients in each backward pass too, unless `reduces_once` is set.
        """
        x = self.layouts
        m = x.num_microbatches
        stage = self.inner_stage_s
        waits = (x.pipeline_parallel > 1) | (x.zero_stage < 1)
        beside = np.where(
            x.data_overlap, self.overlap_window_s, np.where(waits, 0.0, BACKWARD * stage)
        )
        data = exposed_seconds(self.gradient_reduction_s + self.once_per_step_s, beside)
        if np.any(x.native):
            scatter = self._layerwise_seconds(x.gradient_bytes)
            early = (self._num_reductions - 1) * exposed_seconds(scatter, BACKWARD * stage)
            data = data + np.where(x.native & (x.zero_stage == 2), early, 0.0)
        is_third = x.zero_stage >= 3
        if np.any(is_third):
            bulk = fully = data
            if not np.all(x.native):
                gathers = 2 * self._layerwise_seconds(x.gathered_bytes)
                sent = gathers + self._layerwise_seconds(x.gradient_bytes)
                last = exposed_seconds(sent + self.once_per_step_s, stage)
                bulk = (m - 1) * exposed_seconds(sent, stage) + last
            if np.any(x.native):
                fully = self._fully_sharded_seconds()
            data = np.where(is_third, np.where(x.native, fully, bulk), data)
        if np.any(x.native):
            data = data + np.where(x.native & (x.num_shards > 1), self._fsdp2_copies_s, 0.0)
        return data

    @property
    def _num_reductions(self) -> Array:
        """Number of times per step that FSDP2 reduces gradients over the ranks: once per
        micro-batch with ZeRO 2 and 3, otherwise once. With a pipeline, or if `reduces_once` is set,
        it is once too.
        """
        x = self.layouts
        once = (x.zero_stage < 2) | (x.pipeline_parallel > 1) | x.reduces_once
        return x.where(once, 1.0, x.num_microbatches)

    @property
    def _fsdp2_copies_s(self) -> Array:
        """Seconds per step in which FSDP2 copies weights and gradients between its parameters and
        the buffers of its collectives. The copies run on the stream of the computation, so nothing
        hides them (torch.distributed.fsdp, `foreach_all_gather_copy_out` and
        `foreach_reduce_scatter_copy_in`).

        After each all-gather, a weight is read and written once. Before each reduce-scatter, a
        gradient in bf16 is read, and written with `gradient_bytes`. ZeRO 3 gathers weights in both
        passes of each micro-batch, ZeRO 1 and 2 once per step.
        """
        x = self.layouts
        num_gathers = x.where(x.zero_stage >= 3, 2 * x.num_microbatches, 1.0)
        num_gathers = x.where(x.zero_stage >= 1, num_gathers, 0.0)
        moved = num_gathers * 2 * x.gathered_bytes
        moved = moved + self._num_reductions * (2 + x.gradient_bytes)
        return moved * self.device_params / self.layer.memory_bytes_per_s

    def _fully_sharded_seconds(self) -> Array:
        """Returns the exposed seconds per step of the communication of ZeRO 3 in FSDP2, the part
        that does not overlap with computation (PyTorch FSDP, arXiv 2304.11277, section 3.3).

        In each pass, the weights of the next layer are gathered while the present layer computes.
        In the backward pass, the gradients of the previous layer are reduce-scattered too. The time
        by which this communication exceeds the computation is exposed. The gather of the first
        layer of each pass and the last reduce-scatter of a step do not overlap with anything.
        Communication that is made once per step overlaps with the last backward pass. It reduces
        the gradients of shard copies and, with a pipeline or `reduces_once`, all gradients.
        """
        x = self.layouts
        m = x.num_microbatches
        once = self.once_per_step_s
        scatters_once = (x.pipeline_parallel > 1) | x.reduces_once
        gather = self._layerwise_seconds(x.gathered_bytes)
        scatter = self._layerwise_seconds(x.gradient_bytes)
        forward_work = (1 - BACKWARD) * self.inner_stage_s
        backward_work = BACKWARD * self.inner_stage_s

        forward = exposed_seconds(gather, forward_work) + gather / x.max_layers_per_device
        sent_backward = gather + np.where(scatters_once, 0.0, scatter)
        sent_last = sent_backward + (once + np.where(scatters_once, scatter, 0.0))
        backward = exposed_seconds(sent_backward, backward_work)
        last = exposed_seconds(sent_last, backward_work)
        return m * forward + (m - 1) * backward + last + (scatter + once) / x.max_layers_per_device


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
