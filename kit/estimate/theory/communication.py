"""Time of collectives and sends on the network links that each process group uses. The time is
latency plus bytes / rate (alpha-beta model). This module does not import torch.

A ring all-reduce of n bytes over g ranks moves 2 (g - 1) / g n bytes through the slowest link of
the ring. Inside a node it has 2 (g - 1) steps. Between nodes trees are used, which have
2 log2(number of nodes) steps (Thakur et al. 2005, NCCL). An all-gather or reduce-scatter needs
half the time of an all-reduce.
"""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layouts import Array, Layouts

SMALL_SUMS = 4
"""Number of all-reduces of a few bytes per step. They sum the loss, the number of tokens, the
squared gradient norm, and a flag for gradients that are not finite (Megatron-LM: training.py,
clip_grads.py)."""


class Link(NamedTuple):
    """Rate and latency of the communication within one process group, or between neighbouring
    pipeline stages.
    """

    rate: Array
    """Bytes/s at which one rank sends and receives, one element per layout."""
    latency_s: Array
    """Seconds of one collective or send of zero bytes, one element per layout."""


@dataclasses.dataclass(frozen=True)
class GroupLinks:
    """Rates and latencies of the process groups (tensor, context, data, ...) of many layouts.

    A group inside a node uses the links of the node, and a larger group the network. Ranks are
    numbered as in Megatron and DeepSpeed: tensor parallel ranks are next to each other, then follow
    context, data and pipeline ranks.
    """

    layouts: Layouts
    hardware: Hardware
    coefficients: Coefficients

    @cached_property
    def tensor(self) -> Link:
        """Rate and latency of all-reduces in a tensor parallel group of g ranks. Inside a node, an
        all-reduce uses the node's links in a ring of 2 (g - 1) steps. If the group spans nodes, the
        network limits the rate, and a tree adds 2 log2(number of nodes) steps.
        """
        ranks = self.layouts.tensor_parallel
        coefficients = self.coefficients
        rate = self._on_node(ranks, ranks)
        inside = np.minimum(ranks, self.hardware.node_devices)
        return Link(
            np.where(
                ranks <= self.hardware.node_devices, rate, np.minimum(rate, self._network_rate)
            ),
            2 * coefficients.node_latency_s * (inside - 1)
            + 2 * coefficients.network_latency_s * np.log2(ranks / inside),
        )

    @property
    def context(self) -> Link:
        """Rate and latency of context parallel groups. If groups span nodes, all groups of one node
        share the network connection of this node. The latency is the time of one step of a ring, or
        of one all-to-all.
        """
        ranks = self.layouts.tensor_parallel * self.layouts.context_parallel
        groups = np.minimum(self.layouts.tensor_parallel, self.hardware.node_devices)
        rate = self._on_node(ranks, ranks)
        fits = ranks <= self.hardware.node_devices
        crossing = np.minimum(rate, self._network_rate / groups)
        return Link(np.where(fits, rate, crossing), self._hop(fits))

    @property
    def pipeline(self) -> Link:
        """Rate and latency of sends between neighbouring pipeline stages. If all devices are in one
        node, a pair of devices uses the node's links. Otherwise each device uses its share of the
        network.
        """
        one_node = self.layouts.num_devices <= self.hardware.node_devices
        inside: Array | float = 1.0
        if np.any(one_node):
            inside = self._on_node(2.0, self.layouts.num_devices)
        rate = self.layouts.where(one_node, inside, self.network_rate)
        return Link(rate, self._hop(one_node))

    @cached_property
    def data(self) -> Link:
        """Rate and latency of all-reduces in a data parallel group. A group inside a node uses the
        node's links. If the group spans nodes, the rate is the group's share of the network, and
        the latency is the time of 2 log2(2 x number of nodes) steps.
        """
        x = self.layouts
        coefficients = self.coefficients
        replicas = x.context_parallel * x.data_parallel
        # The ranks of the group are t devices apart, with t the tensor parallel degree. The group
        # therefore also uses the links between t times as many devices, which may be slower.
        inside = np.minimum(self._inside(replicas), self._inside(x.tensor_parallel * replicas))
        rate = np.where(self._nodes > 1, np.minimum(inside, self._network_share), inside)
        hop = self.layouts.where(self._nodes > 1, coefficients.network_latency_s, 0.0)
        hops = hop * np.log2(2 * np.maximum(1.0, self._nodes))
        return Link(rate * self._data_efficiency, 2 * (coefficients.node_latency_s + hops))

    @cached_property
    def shard(self) -> Link:
        """Rate and latency of the group of ranks over which ZeRO shards. If groups of `shard_size`
        replicas fit into a node, they use the node's links. The node's links are assumed to be at
        least as fast as the ring over all replicas. Otherwise rate and latency are equal to those
        of the data parallel group.
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
        """Rate and latency of all-reduces between the ranks that hold copies of one ZeRO shard.
        Each device of a shard group reduces its own shard, so all devices of a node share the
        network connection of this node.
        """
        tensor_parallel = self.layouts.tensor_parallel
        node_devices = self.hardware.node_devices
        groups = np.minimum(tensor_parallel, node_devices)
        ranks = np.minimum(tensor_parallel * self.layouts.num_shards, node_devices)
        shared = self._network_share * self._data_efficiency * groups / ranks
        crossing = np.minimum(self.data.rate, shared)
        return Link(np.where(self._nodes > 1, crossing, self.data.rate), self.data.latency_s)

    @cached_property
    def _data_efficiency(self) -> Array:
        """Share of the bandwidth, 0 to 1, that gradient reduction and weight gathering reach. If
        this communication overlaps with computation, the value is the efficiency of the network,
        since gradients and weights are in contiguous buffers (Megatron-Core's
        `ParamAndGradBuffer`).
        """
        x = self.layouts
        coefficients = self.coefficients
        return x.where(
            x.data_overlap, coefficients.network_efficiency, coefficients.data_efficiency
        )

    @property
    def network_rate(self) -> Array | float:
        """Bytes/s at which one device sends to another node if all devices of its node send at
        once.
        """
        return self._network_rate / self.hardware.node_devices

    @property
    def _network_rate(self) -> Array | float:
        """Bytes/s at which all devices of a node together send to other nodes: the network
        bandwidth times its fitted efficiency.
        """
        return self.hardware.network_bytes_per_s * self.coefficients.network_efficiency

    @cached_property
    def _nodes(self) -> Array:
        """Number of nodes that a data parallel group spans: tensor x context x data parallel degree
        / devices of a node. If the number is above 1, the group communicates between nodes.
        """
        replicas = self.layouts.context_parallel * self.layouts.data_parallel
        return self.layouts.tensor_parallel * replicas / self.hardware.node_devices

    @property
    def _network_share(self) -> Array:
        """Bytes/s at which one data parallel group communicates between nodes.

        All groups of a node share the network connection of this node. In jobs of more than 8
        nodes, the nodes also share the links of the network, so the rate falls. A full fat tree has
        no such contention.
        """
        node_devices = self.hardware.node_devices
        jobs = np.maximum(1.0, self.layouts.num_devices / (8 * node_devices))
        share = self.hardware.network_bytes_per_s / np.minimum(
            self.layouts.tensor_parallel, node_devices
        )
        return share * jobs ** -(self.coefficients.data_contention * self.hardware.contention)

    def _inside(self, ranks: Array) -> Array:
        """Returns the bandwidth in bytes/s of one device in a group of `ranks` neighbours on a
        node. Small groups use the fastest links, larger groups the slower links of the node.
        """
        hardware = self.hardware
        near = ranks <= self.hardware.near_devices
        return self.layouts.where(near, hardware.near_bytes_per_s, hardware.node_bytes_per_s)

    def _on_node(self, ranks: Array | float, span: Array) -> Array:
        """Returns the bytes/s that one device reaches in a group of `ranks` on a node:
        bandwidth x node_efficiency x min(1, ranks / all) ^ node_sharing.

        `all` is the number of ranks with which a group uses all links of each device. `span` is the
        number of neighbouring devices over which the group extends. On a mesh a group uses only the
        links between its own devices, so small groups are slower. On a switch a small group could
        use the full bandwidth, but measured rates are mostly lower.
        """
        hardware = self.hardware
        coefficients = self.coefficients
        near = span <= hardware.near_devices
        nearest = np.minimum(hardware.near_devices, hardware.full_devices)
        all_ranks = self.layouts.where(near, nearest, hardware.full_devices)
        rate = self._inside(span) * coefficients.node_efficiency
        return rate * np.minimum(1.0, ranks / all_ranks) ** coefficients.node_sharing

    def _hop(self, on_node: Array) -> Array:
        """Returns the latency in seconds of one step of a collective. `on_node` says for each
        layout whether the step is inside a node or between nodes.
        """
        node_s = self.coefficients.node_latency_s
        network_s = self.coefficients.network_latency_s
        return self.layouts.where(on_node, node_s, network_s)


def all_reduce_seconds(size: Array, ranks: Array, link: Link) -> Array:
    """Returns the seconds of an all-reduce of `size` bytes over `ranks` ranks. For one rank the
    result is 0.
    """
    return np.where(ranks > 1, 2 * (ranks - 1) / ranks * size / link.rate + link.latency_s, 0.0)


def all_gather_seconds(size: Array, ranks: Array, link: Link, steps: Array | float = 1.0) -> Array:
    """Returns the seconds of an all-gather or reduce-scatter over `ranks` ranks. The `size` bytes
    are divided into `steps` collectives, one after the other. For one rank the result is 0.
    """
    return all_reduce_seconds(size, ranks, link._replace(latency_s=link.latency_s * steps)) / 2


def small_sums_seconds(layouts: Layouts, hardware: Hardware, coefficients: Coefficients) -> Array:
    """Returns the seconds per optimizer step of `SMALL_SUMS` all-reduces of a few bytes over all
    ranks. Their time is only latency.

    Each all-reduce has 2 log2(number of ranks) steps in a tree (Thakur et al. 2005), first inside
    a node, then between nodes.
    """
    ranks = layouts.num_devices
    node_devices = hardware.node_devices
    inside = np.log2(np.minimum(ranks, node_devices))
    outside = np.log2(np.maximum(1.0, ranks / node_devices))
    return (
        2
        * SMALL_SUMS
        * (coefficients.node_latency_s * inside + coefficients.network_latency_s * outside)
    )


def exposed_seconds(communication_s: Array, work_s: Array) -> Array:
    """Returns the exposed seconds of communication: the part that is not hidden by `work_s` seconds
    of computation at the same time.

    The result is sqrt(communication^2 + work^2) - work, a smooth form of max(communication, work) -
    work. The result is small if communication is shorter than computation. If communication is much
    longer, the result approaches the difference of the two times.
    """
    return np.hypot(communication_s, work_s) - work_s
