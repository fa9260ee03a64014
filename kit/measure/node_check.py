"""Finds slow nodes in the first seconds of a job. All nodes are compared in their rates of matrix
products and of messages.

One slow node slows all nodes, and the step time does not show which node is slow. `measure_nodes`
times a matrix product on each rank, and exchanges of messages between neighbours in a ring of
nodes. For each node, the faster of its two exchanges is used, so that the neighbours of a slow node
do not look slow.

If the ranks of a job run `python -m kit.measure.node_check --out FILE`, a report on their nodes is
written into the file.
"""

import dataclasses
import os
import socket
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.record import Record, field_doc
from kit.measure.collectives import bus_factor, measure_as_rank
from kit.measure.gemm import measure_gemm_flops_per_s
from kit.measure.timing import best_of, timed

COMPARED = (("computes", 0.75, "matmul_flops_per_s"), ("sends", 0.5, "bytes_per_s"))
"""Rates that are compared between nodes, as (verb for the message, limit, field of `NodeRate`). A
node is slow if its rate is below the limit times the median over all nodes. Rates of links vary
more than rates of devices, so their limit is lower."""
SECONDS = 0.3
"""Seconds for which each rank repeats matrix products."""
REPEATS = 3
"""Number of timed messages per measurement. The time of the fastest message is used."""
CPU_NUMBERS = 2**20
"""Number of fp32 elements in one timed message between CPUs, 4 MiB."""
DEVICE_NUMBERS = 2**24
"""Number of fp32 elements in one timed message between GPUs or other accelerators, 64 MiB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeRate(Record):
    """Rates of matrix products and messages that were measured on one node."""

    node: str = field_doc("name of the node")
    matmul_flops_per_s: float = field_doc(
        "rate of matrix products of the slowest rank of the node, in FLOP/s"
    )
    bytes_per_s: float | None = field_doc(
        "bandwidth between the first rank of the node and the better of its two neighbours, in"
        " one direction, in bytes/s",
        default=None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeReport(Record):
    """Rates of matrix products and messages that were measured on all nodes of a job."""

    dtype: str = field_doc("dtype of the timed matrix products")
    num_ranks: int = field_doc("number of ranks over all nodes")
    nodes: tuple[NodeRate, ...] = field_doc("rates of the nodes, in rank order")
    all_reduce_bytes_per_s: float | None = field_doc(
        "bus bandwidth of an all-reduce over all ranks, in bytes/s that each rank sends. If there"
        " is a single rank, None",
        default=None,
    )

    @property
    def slow(self) -> list[str]:
        """One line of text for each slow node and each of its slow rates. With fewer than three
        nodes the list is empty, since it cannot be decided which of two nodes is slow.
        """
        if len(self.nodes) < 3:
            return []
        lines = []
        for verb, share, field in COMPARED:
            rates = {node.node: getattr(node, field) for node in self.nodes if getattr(node, field)}
            if not rates:
                continue
            median = statistics.median(rates.values())
            for node, rate in rates.items():
                if rate < share * median:
                    lines.append(
                        f"{node} {verb} at {rate / median:.0%} of the median of {len(rates)} nodes"
                    )
        return lines


def measure_nodes(device: torch.device, dtype: str) -> NodeReport:
    """Measures the rates of all nodes of a job and returns them. The result is equal on all ranks.

    All ranks of the default process group must call this function.
    """
    own_node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    all_reduce = _all_reduce_bytes_per_s(device)
    ranks = _gather((own_node, measure_gemm_flops_per_s(dtype, seconds=SECONDS)))
    first_rank: dict[str, int] = {}
    matmul: dict[str, float] = {}
    for rank, (node, rate) in enumerate(ranks):
        first_rank.setdefault(node, rank)
        matmul[node] = min(rate, matmul.get(node, rate))
    exchange_rates = _gather(_exchange_rates(list(first_rank.values()), device))
    nodes = [
        NodeRate(
            node=node,
            matmul_flops_per_s=matmul[node],
            bytes_per_s=max(exchange_rates[first], default=None),
        )
        for node, first in first_rank.items()
    ]
    return NodeReport(
        dtype=dtype,
        num_ranks=len(ranks),
        nodes=tuple(nodes),
        all_reduce_bytes_per_s=all_reduce,
    )


def record_nodes(report: NodeReport, run_directory: Path) -> None:
    """Writes the report into the file node_check.json of a run directory, and prints a line for
    each slow rate of a node.
    """
    for line in report.slow:
        print(f"slow node: {line}", flush=True)
    report.write(run_directory / "node_check.json")


def _all_reduce_bytes_per_s(device: torch.device) -> float | None:
    """Returns the bus bandwidth of an all-reduce over all ranks in bytes/s. If there is a single
    rank, the result is None.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    tensor = _message(device)
    slowest_s = max(_gather(_best_s(lambda: dist.all_reduce(tensor))))
    return bus_factor(ranks) * tensor.nbytes / slowest_s


def _exchange_rates(firsts: list[int], device: torch.device) -> list[float]:
    """Returns the bandwidths in bytes/s, in one direction, between this rank's node and its
    neighbours in a ring of all nodes.

    `firsts` has the first rank of each node. Only these ranks exchange messages. All other ranks
    return an empty list, but must call this function too.
    """
    own = dist.get_rank()
    rates = []
    for pairs in _rounds(len(firsts)):
        for left, right in pairs:
            if own == firsts[left]:
                rates.append(_exchange_bytes_per_s(firsts[right], device))
            elif own == firsts[right]:
                rates.append(_exchange_bytes_per_s(firsts[left], device))
        dist.barrier()
    return rates


def _rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Returns the pairs of neighbours in a ring of nodes, divided into up to three rounds. In a
    round, each node is in at most one pair, so that all pairs can exchange messages at once.
    """
    links = num_nodes if num_nodes > 2 else num_nodes - 1
    ring = [(node, (node + 1) % num_nodes) for node in range(links)]
    # In a ring with an odd number of links, the last link and the first share a node. The last link
    # therefore has a round for itself.
    paired = links - links % 2
    rounds = (ring[0:paired:2], ring[1:paired:2], ring[paired:])
    return [pairs for pairs in rounds if pairs]


def _exchange_bytes_per_s(partner: int, device: torch.device) -> float:
    """Returns the bandwidth in one direction, in bytes/s, while this rank and rank `partner` send
    messages to each other at the same time.
    """
    mine = _message(device)
    theirs = _message(device)

    def exchange() -> None:
        sends = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
        for request in dist.batch_isend_irecv(sends):
            request.wait()

    return mine.nbytes / _best_s(exchange)


def _best_s(function: Callable[[], object]) -> float:
    """Returns the seconds of the shortest of REPEATS calls of `function`. One call for warm-up
    comes first and is not timed.
    """
    timed(function)
    return best_of(REPEATS, function)


def _gather(value: Any) -> list[Any]:
    """Returns the argument `value` of all ranks, in rank order. All ranks must call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _message(device: torch.device) -> Tensor:
    numbers = CPU_NUMBERS if device.type == "cpu" else DEVICE_NUMBERS
    return torch.ones(numbers, device=device)


def node_report_json(device: torch.device) -> str:
    """Measures the rates of all nodes and returns them as JSON, on every rank. Before that, the
    result of an all-reduce is checked.

    Raises:
        RuntimeError: The all-reduce of ones does not give the number of ranks.
    """
    ones = torch.ones(2, device=device)
    dist.all_reduce(ones)
    ranks = dist.get_world_size()
    if ones.tolist() != [ranks, ranks]:
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {ones.tolist()}")
    dtype = "fp32" if device.type == "cpu" else "bf16"
    return measure_nodes(device, dtype).to_json()


if __name__ == "__main__":
    sys.exit(measure_as_rank("kit.measure.node_check", str(__doc__), node_report_json))
