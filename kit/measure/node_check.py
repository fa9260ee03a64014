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

from cluster.record import Record, field_doc
from kit.measure.collectives import bus_factor, measure_as_rank
from kit.measure.gemm import measure_gemm_flops_per_s
from kit.measure.timing import timed

SLOW_COMPUTE, SLOW_LINK = 0.75, 0.5
"""Share of the median of all nodes below which a node is called slow; links differ more than
chips do."""
SECONDS, REPEATS = 0.3, 3
CPU_MESSAGE_BYTES, DEVICE_MESSAGE_BYTES = 2**22, 2**26


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeRate(Record):
    """What one node was seen to do."""

    node: str = field_doc("its name")
    matmul_flops_per_s: float = field_doc("matrix product, of its slowest rank")
    bytes_per_s: float | None = field_doc(
        "of its first rank, one direction, to its better neighbour", default=None
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeReport(Record):
    """What all nodes of a job were seen to do."""

    dtype: str = field_doc("of the matrix products")
    num_ranks: int = field_doc("over all nodes")
    nodes: tuple[NodeRate, ...] = field_doc("in rank order")
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
        compared = (
            ("computes", SLOW_COMPUTE, "matmul_flops_per_s"),
            ("sends", SLOW_LINK, "bytes_per_s"),
        )
        for what, share, field in compared:
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
    nodes = tuple(
        NodeRate(
            node=name,
            matmul_flops_per_s=min(rate for node, rate in ranks if node == name),
            bytes_per_s=max(sent[first], default=None),
        )
        for name, first in zip(names, firsts, strict=True)
    )
    return NodeReport(
        dtype=dtype, num_ranks=len(ranks), nodes=nodes, all_reduce_bytes_per_s=all_reduce
    )


def record_nodes(report: NodeReport, run_directory: Path) -> None:
    """Writes node_check.json into a run directory, and prints the names of slow nodes."""
    report.write(run_directory / "node_check.json")
    for line in report.slow:
        print(f"slow node: {line}", flush=True)


def _all_reduce_bytes_per_s(device: torch.device) -> float | None:
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    tensor = torch.ones(_message_bytes(device) // 4, device=device)
    seconds = _best_s(lambda: dist.all_reduce(tensor))
    return bus_factor(ranks) * tensor.nbytes / max(_gather(seconds))


def _exchange_rates(firsts: list[int], device: torch.device) -> list[float]:
    """Returns bytes/s of the exchanges of this rank, which speaks for its node if it is one of
    `firsts`.
    """
    own, rates = dist.get_rank(), []
    for pairs in _rounds(len(firsts)):
        for pair in pairs:
            ranks = [firsts[node] for node in pair]
            if own in ranks:
                partner = ranks[1 - ranks.index(own)]
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
    rounds = (ring[0:paired:2], ring[1:paired:2], ring[paired:])
    return [pairs for pairs in rounds if pairs]


def _exchange_bytes_per_s(partner: int, device: torch.device) -> float:
    mine = torch.ones(_message_bytes(device) // 4, device=device)
    theirs = torch.empty_like(mine)

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


def _message_bytes(device: torch.device) -> int:
    return CPU_MESSAGE_BYTES if device.type == "cpu" else DEVICE_MESSAGE_BYTES


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
