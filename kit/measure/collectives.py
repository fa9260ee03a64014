"""Measures the rates of all-reduces over groups of ranks. Each rank of a job runs the command
`python -m kit.measure.collectives --out FILE`.

The ranks may be processes of one machine (gloo), devices of one node, or devices of several nodes
of a cluster (NCCL, RCCL).
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
"""Bytes of the messages that are all-reduced. The smallest message shows the latency, the largest
shows the bandwidth."""
SECONDS = 0.3
"""Approximate seconds of repeated all-reduces for each group of ranks and each message size."""
MOST_REPEATS = 200
"""Largest number of repeated all-reduces for each group of ranks and each message size."""


def bus_factor(ranks: int) -> float:
    """Returns the number of bytes that each link of a ring carries during an all-reduce, divided by
    the bytes of the message. It converts message bytes per second into bus bandwidth.

    Source: NCCL tests, PERFORMANCE.md.
    """
    return 2 * (ranks - 1) / ranks


def measure(device: torch.device) -> list[dict]:
    """Measures all-reduces and returns one dict per group of ranks and message size. Its keys are
    `ranks`, `bytes`, `seconds` (of the fastest all-reduce) and `bus_bytes_per_s`. Groups have 2, 4,
    8, ... ranks, and the last group has all ranks.

    All ranks of the default process group must call this function. The result of a rank contains
    only the groups to which the rank belongs.
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
        # On ranks outside the group, `new_group` returns a placeholder.
        if isinstance(group, dist.ProcessGroup):
            for size in SIZES:
                seconds = _best_s(torch.ones(size // 4, device=device), group)
                rate = bus_factor(ranks) * size / seconds
                rows.append(
                    {"ranks": ranks, "bytes": size, "seconds": seconds, "bus_bytes_per_s": rate}
                )
        dist.barrier()
    return rows


def _best_s(message: Tensor, group: dist.ProcessGroup | None) -> float:
    """Returns the seconds of the fastest of several all-reduces of `message` over a group.

    The ranks first agree on the number of all-reduces. With different numbers, one rank would wait
    forever for the others.
    """

    def run() -> object:
        return dist.all_reduce(message, group=group)

    run()
    repeats = max(3.0, SECONDS / max(timed(run), 1e-6))
    agreed = torch.tensor([repeats], device=message.device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return best_of(min(MOST_REPEATS, int(agreed)), run)


def measure_as_rank(module: str, text: str, measure: Callable[[torch.device], str]) -> int:
    """Runs the command `python -m module` as one rank and returns the exit code 0. It parses the
    arguments, starts the process group and calls `measure`. Rank 0 writes the text that `measure`
    returns into the file `--out`.

    Ranks find each other by the environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT. `text` is the help text of the command.
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
