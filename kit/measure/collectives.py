"""Rates of all-reduces over groups of ranks; each rank runs `python -m kit.measure.collectives
--out FILE`.

The same code measures processes of one machine (gloo), devices of a node and nodes of a cluster
(NCCL, RCCL).
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.files import write_atomic
from kit.engines.process_group import start_process_group
from kit.measure.timing import best_of, timed
from kit.parallel.groups import final_barrier

SIZES = (2**10, 2**20, 2**24)
"""Sizes of the messages in bytes. The first gives the latency, the last the bandwidth."""
SECONDS = 0.3
"""Time in seconds that is spent on each group and size."""
MOST_REPEATS = 200
"""Largest number of all-reduces for each group and size."""


def bus_factor(ranks: int) -> float:
    """Returns the bytes on the slowest link of an all-reduce's ring, per byte of the message.

    Source: NCCL tests, PERFORMANCE.md.
    """
    return 2 * (ranks - 1) / ranks


def measure(device: torch.device) -> list[dict]:
    """Returns rows of ranks, bytes, seconds (of the best all-reduce) and bus_bytes_per_s. The
    groups have 2, 4, 8, ... ranks, and all ranks.

    A collective call: all ranks of the default process group take part.
    """
    world = dist.get_world_size()
    group_sizes = {world}
    ranks = 2
    while ranks < world:
        group_sizes.add(ranks)
        ranks *= 2
    rows = []
    for ranks in sorted(group_sizes):
        group = dist.new_group(list(range(ranks)))
        if isinstance(group, dist.ProcessGroup):  # ranks outside the group get a placeholder
            for size in SIZES:
                seconds = _best_s(torch.ones(size // 4, device=device), group)
                rate = bus_factor(ranks) * size / seconds
                rows.append(
                    {"ranks": ranks, "bytes": size, "seconds": seconds, "bus_bytes_per_s": rate}
                )
        dist.barrier()
    return rows


def _best_s(message: Tensor, group: dist.ProcessGroup | None) -> float:
    """Returns the shortest time of an all-reduce in seconds.

    Ranks agree on the number of runs, so that no rank waits for ever.
    """

    def run() -> object:
        return dist.all_reduce(message, group=group)

    run()
    repeats = max(3.0, SECONDS / max(timed(run), 1e-6))
    agreed = torch.tensor([repeats], device=message.device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return best_of(min(MOST_REPEATS, int(agreed)), run)


def measure_as_rank(module: str, text: str, measure: Callable[[torch.device], str]) -> int:
    """Measures with the other ranks and returns the exit code 0. Rank 0 writes the text that
    `measure` returns into the file `--out`.

    Ranks find each other by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. `text` is
    the help of the command `python -m module`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=text)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    out = parser.parse_args().out
    found = measure(start_process_group())
    if dist.get_rank() == 0:
        write_atomic(out, found)
    final_barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(
        measure_as_rank(
            "kit.measure.collectives",
            str(__doc__),
            lambda device: json.dumps(measure(device), indent=1) + "\n",
        )
    )
