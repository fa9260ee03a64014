"""Communication between devices: alpha-beta costs over the tiers of a machine. No torch.

A ring all-reduce of n bytes over g ranks moves 2 (g - 1) / g n bytes through the slowest link of
the ring and takes 2 (g - 1) steps inside a node; between nodes trees are used, 2 log2 of the nodes
(Thakur et al. 2005; NCCL). Gathering or scattering alone is half of it.
"""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layouts import Array, Layouts

SMALL_SUMS = 4
"""Of a step: loss, tokens, norm of gradients, whether one is not finite (Megatron-LM:
training.py, clip_grads.py)."""


class Link(NamedTuple):
    """What a group of ranks communicates over."""

    rate: Array
    """Bytes/s of one rank."""
    latency_s: Array
    """That one collective takes, whatever its size."""


@dataclasses.dataclass(frozen=True)
class Links:
    """What each group of a layout gets.

    Ranks are laid out as tensor, context, data, pipeline, neighbours first, as Megatron and
    DeepSpeed do.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients

    @cached_property
    def tensor(self) -> Link:
        """Inside a node its links, in 2 (g - 1) steps of a ring; across nodes no more than the
        network, in 2 log2 of the nodes steps of a tree.
        """
        ranks, coefficients = self.layouts.tensor_parallel, self.coefficients
        rate, inside = self._on_node(ranks, ranks), np.minimum(ranks, self.hardware.node_devices)
        return Link(
            np.where(
                ranks <= self.hardware.node_devices, rate, np.minimum(rate, self._network_rate)
            ),
            2 * coefficients.node_latency_s * (inside - 1)
            + 2 * coefficients.network_latency_s * np.log2(ranks / inside),
        )

    @property
    def context(self) -> Link:
        """As tensor parallelism's, but all groups of a node share the network; the latency is that
        of one hop of a ring, or of one exchange of all with all.
        """
        ranks = self.layouts.tensor_parallel * self.layouts.context_parallel
        groups = np.minimum(self.layouts.tensor_parallel, self.hardware.node_devices)
        rate, fits = self._on_node(ranks, ranks), ranks <= self.hardware.node_devices
        crossing = np.minimum(rate, self._network_rate / groups)
        return Link(np.where(fits, rate, crossing), self._hop(fits))

    @property
    def pipeline(self) -> Link:
        """Between neighbours: a pair's links on one node, else a device's part of the network."""
        one_node = self.layouts.num_devices <= self.hardware.node_devices
        inside: Array | float = 1.0
        if np.any(one_node):
            inside = self._on_node(2.0, self.layouts.num_devices)
        rate = self.layouts.where(one_node, inside, self.network_rate)
        return Link(rate, self._hop(one_node))

    @cached_property
    def data(self) -> Link:
        """Of all replicas: links inside a node, or the share of the network that is left, with 2
        log2 of twice the nodes steps between these.
        """
        x, coefficients = self.layouts, self.coefficients
        replicas = x.context_parallel * x.data_parallel
        # Its ring is as long as the group, and goes round all neighbours between its ranks.
        inside = np.minimum(self._inside(replicas), self._inside(x.tensor_parallel * replicas))
        rate = np.where(self._nodes > 1, np.minimum(inside, self._network_share), inside)
        hop = self.layouts.where(self._nodes > 1, coefficients.network_latency_s, 0.0)
        hops = hop * np.log2(2 * np.maximum(1.0, self._nodes))
        return Link(rate * self._data_efficiency, 2 * (coefficients.node_latency_s + hops))

    @cached_property
    def shard(self) -> Link:
        """Of ZeRO's shards: with `shard_size` the links of a node, which are no slower than the
        ring over all replicas that they are part of; else, or across nodes, those of data.
        """
        if not np.any(self.layouts.shard_size):
            return self.data
        ranks = self.layouts.tensor_parallel * self.layouts.num_shards
        alone = self.layouts.is_hybrid & (ranks <= self.hardware.node_devices)
        rate = np.maximum(self._inside(ranks) * self._data_efficiency, self.data.rate)
        return Link(
            np.where(alone, rate, self.data.rate),
            np.where(alone, 2 * self.coefficients.node_latency_s, self.data.latency_s),
        )

    @property
    def copy(self) -> Link:
        """Between copies of a shard: each device of a group sums its own shard, so that they share
        the node's network.
        """
        tensor_parallel, node_devices = self.layouts.tensor_parallel, self.hardware.node_devices
        groups = np.minimum(tensor_parallel, node_devices)
        ranks = np.minimum(tensor_parallel * self.layouts.num_shards, node_devices)
        shared = self._network_share * self._data_efficiency * groups / ranks
        crossing = np.minimum(self.data.rate, shared)
        return Link(np.where(self._nodes > 1, crossing, self.data.rate), self.data.latency_s)

    @cached_property
    def _data_efficiency(self) -> Array:
        """Of the links, by gradients and weights: all that the network gives where they overlap,
        since they move from contiguous buffers then (Megatron-Core's `ParamAndGradBuffer`).
        """
        x, coefficients = self.layouts, self.coefficients
        return x.where(
            x.data_overlap, coefficients.network_efficiency, coefficients.data_efficiency
        )

    @property
    def network_rate(self) -> Array | float:
        """Bytes/s of one device, all devices of a node sending at once."""
        return self._network_rate / self.hardware.node_devices

    @property
    def _network_rate(self) -> Array | float:
        """Bytes/s out of a node."""
        return self.hardware.network_bytes_per_s * self.coefficients.network_efficiency

    @cached_property
    def _nodes(self) -> Array:
        """t c r / node: that a data-parallel group and its neighbours span; it crosses them from 1
        on.
        """
        replicas = self.layouts.context_parallel * self.layouts.data_parallel
        return self.layouts.tensor_parallel * replicas / self.hardware.node_devices

    @property
    def _network_share(self) -> Array:
        """Bytes/s between nodes of one data-parallel group.

        All groups of a node share its network. So do the nodes of a large job its links, but in a
        full fat tree, whose rails are free of contention.
        """
        node_devices = self.hardware.node_devices
        jobs = np.maximum(1.0, self.layouts.num_devices / (8 * node_devices))
        share = self.hardware.network_bytes_per_s / np.minimum(
            self.layouts.tensor_parallel, node_devices
        )
        return share * jobs ** -(self.coefficients.data_contention * self.hardware.contention)

    def _inside(self, ranks: Array) -> Array:
        """Returns bytes/s of one device in groups of so many neighbours on a node."""
        hardware, near = self.hardware, ranks <= self.hardware.near_devices
        return self.layouts.where(near, hardware.near_bytes_per_s, hardware.node_bytes_per_s)

    def _on_node(self, ranks: Array | float, span: Array) -> Array:
        """Returns bytes/s of one device in a group on the links of tensor parallelism: their
        efficiency x min(1, ranks / all) ^ sharing; `span` is how many neighbours it reaches over.

        On a mesh a group only has the links between its own devices; on a switch it should have
        all, but rarely has.
        """
        hardware, coefficients = self.hardware, self.coefficients
        near = span <= hardware.near_devices
        nearest = np.minimum(hardware.near_devices, hardware.full_devices)
        all_ranks = self.layouts.where(near, nearest, hardware.full_devices)
        rate = self._inside(span) * coefficients.node_efficiency
        return rate * np.minimum(1.0, ranks / all_ranks) ** coefficients.node_sharing

    def _hop(self, on_node: Array) -> Array:
        """Returns seconds of one step, inside a node or between nodes."""
        node_s, network_s = self.coefficients.node_latency_s, self.coefficients.network_latency_s
        return self.layouts.where(on_node, node_s, network_s)


def all_reduce(size: Array, ranks: Array, link: Link) -> Array:
    """Returns seconds to sum `size` bytes over `ranks`; 0 for one rank."""
    return np.where(ranks > 1, 2 * (ranks - 1) / ranks * size / link.rate + link.latency_s, 0.0)


def all_gather(size: Array, ranks: Array, link: Link, steps: Array | float = 1.0) -> Array:
    """Returns seconds to gather, or to reduce and scatter, `size` bytes in all over `ranks`, in so
    many collectives one after the other; 0 for one rank.
    """
    return all_reduce(size, ranks, link._replace(latency_s=link.latency_s * steps)) / 2


def small_sums(layouts: Layouts, hardware: Hardware, coefficients: Coefficients) -> Array:
    """Returns seconds per step of summing a few bytes over all ranks, `SMALL_SUMS` times: latency
    alone.

    Up and down a tree, twice log2 of the ranks steps (Thakur et al. 2005), inside a node first.
    """
    ranks, node_devices = layouts.num_devices, hardware.node_devices
    inside = np.log2(np.minimum(ranks, node_devices))
    outside = np.log2(np.maximum(1.0, ranks / node_devices))
    return (
        2
        * SMALL_SUMS
        * (coefficients.node_latency_s * inside + coefficients.network_latency_s * outside)
    )


def exposed(communication_s: Array, work_s: Array) -> Array:
    """Returns what is left of communication that runs beside work: little where it is short, all
    of the rest if not.
    """
    return np.hypot(communication_s, work_s) - work_s
