"""Rates of collectives over groups of ranks; each rank runs `python -m kit.measure.collectives
--out FILE`.

The same code measures processes of one machine (gloo), devices of a node and nodes of a cluster
(NCCL, RCCL).
"""

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from kit.measure.ranks import measure_as_rank
from kit.measure.timing import timed

SIZES = (2**10, 2**20, 2**24)
"""Bytes of a message: the first gives the latency, the last the bandwidth."""
SECONDS = 0.3
"""Of measuring per operation, group and size."""


def bus_factor(operation: str, ranks: int) -> float:
    """Returns by what a message counts on the slowest link of a ring, so that operations compare.

    Source: NCCL tests, PERFORMANCE.md: all-reduce 2 (n - 1) / n; all-gather and reduce-scatter (n -
    1) / n; send 1.
    """
    return {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(operation, (ranks - 1) / ranks)


def measure(device: torch.device) -> list[dict]:
    """Returns rows of operation, ranks, bytes, seconds (the best) and bus_bytes_per_s; all ranks
    must call it.
    """
    world, rows = dist.get_world_size(), []
    sizes = sorted({n for n in (2**k for k in range(1, 20)) if n <= world} | {world})
    for ranks in sizes:
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() < ranks:
            for operation, run in _operations(group, ranks, device).items():
                for size in SIZES:
                    seconds = _best(run, torch.ones(size // 4, device=device), group)
                    rate = bus_factor(operation, ranks) * size / seconds
                    rows.append(
                        {
                            "operation": operation,
                            "ranks": ranks,
                            "bytes": size,
                            "seconds": seconds,
                            "bus_bytes_per_s": rate,
                        }
                    )
        dist.barrier()
    return rows


def _operations(group, ranks: int, device: torch.device) -> dict[str, Callable[[Tensor], object]]:
    """Returns what to time; each takes a message, the whole of it as the parallel engines count."""

    def gather(message: Tensor) -> object:
        part = message[: message.numel() // ranks]
        return dist.all_gather([torch.empty_like(part) for _ in range(ranks)], part, group=group)

    def send(message: Tensor) -> object:
        if dist.get_rank() == 0:
            return dist.send(message, 1)
        return dist.recv(message, 0) if dist.get_rank() == 1 else None

    operations = {
        "all_reduce": lambda message: dist.all_reduce(message, group=group),
        "all_gather": gather,
    }
    return operations | ({"send": send} if ranks == 2 else {})


def _best(run: Callable[[Tensor], object], message: Tensor, group) -> float:
    """Returns the shortest time; ranks agree on the number of runs, so that none waits for ever."""
    run(message)
    repeats = torch.tensor(
        [max(3.0, SECONDS / max(timed(lambda: run(message)), 1e-6))], device=message.device
    )
    dist.all_reduce(repeats, dist.ReduceOp.MIN, group=group)
    return min(timed(lambda: run(message)) for _ in range(min(200, int(repeats))))


if __name__ == "__main__":
    sys.exit(
        measure_as_rank(
            "kit.measure.collectives",
            str(__doc__),
            lambda device: json.dumps(measure(device), indent=1) + "\n",
        )
    )
