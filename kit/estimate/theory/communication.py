"""Communication between devices: alpha-beta costs over the tiers of a machine. No torch.

A ring all-reduce of n bytes over g ranks moves 2 (g - 1) / g n bytes through the slowest link of
the ring and takes 2 (g - 1) steps inside a node; between nodes trees are used, 2 log2 of the nodes
(Thakur et al. 2005; NCCL). Gathering or scattering alone is half of it.
"""

import dataclasses

import numpy as np

from kit.estimate.theory.hardware import Coefficients, Hardware
from kit.estimate.theory.layouts import Array, Layouts

SMALL_SUMS = 4
"""Of a step: loss, tokens, norm of gradients, whether one is not finite (Megatron-LM:
training.py, clip_grads.py)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """What each group of a layout gets: bytes/s of one rank, and seconds that one collective takes
    whatever its size.

    Ranks are laid out as tensor, context, data, pipeline, neighbours first, as Megatron and
    DeepSpeed do.
    """

    tensor_rate: Array
    tensor_latency_s: Array
    context_rate: Array
    context_latency_s: Array
    """Of one hop of a ring, or one exchange of all with all."""
    data_rate: Array
    data_latency_s: Array
    shard_rate: Array
    shard_latency_s: Array
    copy_rate: Array
    """Between copies of a shard. Without `shard_size` there are none, and a shard's links are
    those of data."""
    pipeline_rate: Array
    pipeline_latency_s: Array
    network_rate: Array | float
    """Of one device, all devices of a node sending at once."""

    @classmethod
    def of(cls, layouts: Layouts, hardware: Hardware, c: Coefficients) -> "Links":
        """Returns the links that each group of each layout uses."""
        t, cp, node = layouts.tensor_parallel, layouts.context_parallel, hardware.node_devices
        model = t * cp
        replicas = cp * layouts.data_parallel
        devices = model * layouts.data_parallel * layouts.pipeline_parallel
        inside = _inside(t, hardware)
        full = np.where(
            t <= hardware.near_devices,
            np.minimum(hardware.near_devices, hardware.full_devices),
            hardware.full_devices,
        ).astype(t.dtype)
        # On a mesh a group only has the links between its own devices; on a switch it should have
        # all, but rarely has.
        node_rate, model_rate, pair_rate = (
            inside * c.node_efficiency * np.minimum(1.0, group / full) ** c.node_sharing
            for group in (t, model, 2.0)
        )
        network = hardware.network_bytes_per_s * c.network_efficiency
        ranks_inside = np.minimum(t, node)  # of one tensor-parallel group
        # That a data-parallel group and its neighbours span.
        nodes = np.maximum(1.0, t * replicas / node)
        crosses = t * replicas > node
        # All groups of a node share its network, and the more so the larger the job (no fabric is
        # free of it).
        contention = np.maximum(1.0, devices / (8 * node)) ** -c.data_contention
        share = hardware.network_bytes_per_s / ranks_inside * contention
        one_node = devices <= node
        data_rate = np.where(crosses, np.minimum(inside, share), inside) * c.data_efficiency
        hop = np.where(crosses, c.network_latency_s, 0.0).astype(t.dtype)
        data_latency_s = 2 * (c.node_latency_s + hop * np.log2(2 * nodes))
        shard_rate, shard_latency_s, copy_rate = data_rate, data_latency_s, data_rate
        if np.any(layouts.shard_size):
            group = t * layouts.num_shards
            shard_inside = _inside(group, hardware) * c.data_efficiency
            # else it crosses nodes like any data-parallel group
            alone = layouts.is_hybrid & (group <= node)
            # The ring inside a node is part of the ring over all replicas, so it is no slower.
            shard_rate = np.where(alone, np.maximum(shard_inside, data_rate), data_rate)
            shard_latency_s = np.where(alone, 2 * c.node_latency_s, data_latency_s)
            # Each device of a group sums its own shard, so that they share the node's network.
            shared = share * c.data_efficiency * ranks_inside / np.minimum(group, node)
            copy_rate = np.where(crosses, np.minimum(data_rate, shared), data_rate)
        return cls(
            tensor_rate=np.where(t <= node, node_rate, np.minimum(node_rate, network)),
            tensor_latency_s=2 * c.node_latency_s * (ranks_inside - 1)
            + 2 * c.network_latency_s * np.log2(t / ranks_inside),
            context_rate=np.where(
                model <= node, model_rate, np.minimum(model_rate, network / ranks_inside)
            ),
            context_latency_s=np.where(model <= node, c.node_latency_s, c.network_latency_s).astype(
                t.dtype
            ),
            data_rate=data_rate,
            data_latency_s=data_latency_s,
            shard_rate=shard_rate,
            shard_latency_s=shard_latency_s,
            copy_rate=copy_rate,
            pipeline_rate=np.where(one_node, pair_rate, network / node),
            pipeline_latency_s=np.where(one_node, c.node_latency_s, c.network_latency_s).astype(
                t.dtype
            ),
            network_rate=network / node,
        )


def _inside(ranks: Array, hardware: Hardware) -> Array:
    """Returns bytes/s of one device in groups of so many neighbours on a node."""
    near = ranks <= hardware.near_devices
    rate = np.where(near, hardware.near_bytes_per_s, hardware.node_bytes_per_s)
    return rate.astype(ranks.dtype)


def all_reduce(size: Array, ranks: Array, rate: Array, latency_s: Array) -> Array:
    """Returns seconds to sum `size` bytes over `ranks`; 0 for one rank."""
    return np.where(ranks > 1, 2 * (ranks - 1) / ranks * size / rate + latency_s, 0.0)


def all_gather(size: Array, ranks: Array, rate: Array, latency_s: Array) -> Array:
    """Returns seconds to gather, or to reduce and scatter, `size` bytes in all over `ranks`; 0
    for one rank.
    """
    return all_reduce(size, ranks, rate, latency_s) / 2


def small_sums(layouts: Layouts, hardware: Hardware, c: Coefficients) -> Array:
    """Returns seconds per step of summing a few bytes over all ranks, `SMALL_SUMS` times: latency
    alone.

    Up and down a tree, twice log2 of the ranks steps (Thakur et al. 2005), inside a node first.
    """
    ranks, node = layouts.num_devices, hardware.node_devices
    inside, outside = np.log2(np.minimum(ranks, node)), np.log2(np.maximum(1.0, ranks / node))
    return 2 * SMALL_SUMS * (c.node_latency_s * inside + c.network_latency_s * outside)


def exposed(communication_s: Array, work_s: Array) -> Array:
    """Returns what is left of communication that runs beside work: little where it is short, all
    of the rest if not.
    """
    return np.hypot(communication_s, work_s) - work_s
