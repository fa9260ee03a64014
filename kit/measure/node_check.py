"""The first seconds of a job on several nodes: does every node compute and send as fast as the
others?

One slow node slows all of them, and nothing in a step time says which. `check_nodes` names it: by a
matrix product on each rank, and by exchanges between neighbours in a ring of nodes, two for each
node, of which the better one counts, so that a slow node does not drag its neighbours down with it.

`python -m kit.measure.node_check --out FILE` as the command of several ranks writes what they were
seen to do.
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
from kit.measure.timing import timed

COMPARED = (("computes", 0.75, "matmul_flops_per_s"), ("sends", 0.5, "bytes_per_s"))
"""What of a node is compared, the share of the median of all nodes below which it is called slow
(links differ more than chips do), and the field of it."""
SECONDS = 0.3
REPEATS = 3
CPU_NUMBERS, DEVICE_NUMBERS = 2**20, 2**24
"""In fp32, of one message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeRate(Record):
    """What one node was seen to do."""

    node: str = field_doc("name of the node")
    matmul_flops_per_s: float = field_doc("rate of matrix products of its slowest rank")
    bytes_per_s: float | None = field_doc(
        "bandwidth of its first rank to its better neighbour, one direction", default=None
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeReport(Record):
    """What all nodes of a job were seen to do."""

    dtype: str = field_doc("dtype of the matrix products")
    num_ranks: int = field_doc("ranks over all nodes")
    nodes: tuple[NodeRate, ...] = field_doc("nodes in rank order")
    all_reduce_bytes_per_s: float | None = field_doc(
        "sent by each rank while all of them add up a tensor", default=None
    )

    @property
    def slow(self) -> list[str]:
        """One line for each slow node and reason; fewer than three nodes give no majority to
        compare with.
        """
        if len(self.nodes) < 3:
            return []
        found = []
        for what, share, field in COMPARED:
            rates = {node.node: getattr(node, field) for node in self.nodes if getattr(node, field)}
            median = statistics.median(rates.values()) if rates else 0.0
            found += [
                f"{node} {what} at {rate / median:.0%} of the median of {len(rates)} nodes"
                for node, rate in rates.items()
                if rate < share * median
            ]
        return found


def check_nodes(device: torch.device, dtype: str) -> NodeReport:
    """Returns the same report on every rank.

    A collective call: all ranks of the default process group take part.
    """
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    all_reduce = _all_reduce_bytes_per_s(device)
    ranks = _gather((name, measure_gemm_flops_per_s(dtype, seconds=SECONDS)))
    names = list(dict.fromkeys(node for node, _ in ranks))
    firsts = [next(rank for rank, (node, _) in enumerate(ranks) if node == name) for name in names]
    sent = _gather(_exchange_rates(firsts, device))
    return NodeReport(
        dtype=dtype,
        num_ranks=len(ranks),
        nodes=tuple(
            NodeRate(
                node=name,
                matmul_flops_per_s=min(rate for node, rate in ranks if node == name),
                bytes_per_s=max(sent[first], default=None),
            )
            for name, first in zip(names, firsts, strict=True)
        ),
        all_reduce_bytes_per_s=all_reduce,
    )


def record_nodes(report: NodeReport, run_directory: Path) -> None:
    """Writes node_check.json into a run directory, and prints the names of slow nodes."""
    for line in report.slow:
        print(f"slow node: {line}", flush=True)
    report.write(run_directory / "node_check.json")


def _all_reduce_bytes_per_s(device: torch.device) -> float | None:
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    tensor = _message(device)
    slowest_s = max(_gather(_best_s(lambda: dist.all_reduce(tensor))))
    return bus_factor(ranks) * tensor.nbytes / slowest_s


def _exchange_rates(firsts: list[int], device: torch.device) -> list[float]:
    """Returns bytes/s of the exchanges of this rank, which speaks for its node if it is one of
    `firsts`.
    """
    own = dist.get_rank()
    rates = []
    for pairs in _rounds(len(firsts)):
        for left, right in pairs:
            partner = {firsts[left]: firsts[right], firsts[right]: firsts[left]}.get(own)
            if partner is not None:
                rates.append(_exchange_bytes_per_s(partner, device))
        dist.barrier()
    return rates


def _rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Returns the neighbours of a ring in two or three rounds, in each of which a node takes
    part once at most.
    """
    links = num_nodes if num_nodes > 2 else num_nodes - 1
    ring = [(node, (node + 1) % num_nodes) for node in range(links)]
    paired = links - links % 2  # in an odd ring the last link shares a node with the first
    return [*filter(None, (ring[0:paired:2], ring[1:paired:2], ring[paired:]))]


def _exchange_bytes_per_s(partner: int, device: torch.device) -> float:
    mine = _message(device)
    theirs = _message(device)

    def exchange() -> None:
        sends = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
        for request in dist.batch_isend_irecv(sends):
            request.wait()

    return mine.nbytes / _best_s(exchange)


def _best_s(function: Callable[[], object]) -> float:
    """Returns the shortest of some timed calls, after one that is not timed."""
    timed(function)
    return min(timed(function) for _ in range(REPEATS))


def _gather(value: Any) -> list[Any]:
    """Returns the values of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _message(device: torch.device) -> Tensor:
    return torch.ones(CPU_NUMBERS if device.type == "cpu" else DEVICE_NUMBERS, device=device)


def checked(device: torch.device) -> str:
    """Returns the report as JSON, on every rank.

    Raises:
        RuntimeError: a sum over the ranks is wrong.
    """
    ones = torch.ones(2, device=device)
    dist.all_reduce(ones)
    if ones.tolist() != 2 * [dist.get_world_size()]:
        raise RuntimeError(
            f"an all-reduce of ones over {dist.get_world_size()} ranks gave {ones.tolist()}"
        )
    return check_nodes(device, "fp32" if device.type == "cpu" else "bf16").to_json()


if __name__ == "__main__":
    sys.exit(measure_as_rank("kit.measure.node_check", str(__doc__), checked))
