"""One of several ranks that measure together, as a program."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from cluster.files import write_atomic
from kit.engines.process_group import start_process_group
from kit.parallel.groups import part


def measure_as_rank(module: str, text: str, measure: Callable[[torch.device], str]) -> int:
    """Measures with the other ranks and returns 0; rank 0 writes what it is told into `--out`.

    Ranks find each other by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. `text` is
    the help of the command `python -m module`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=text)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    found = measure(start_process_group())
    if dist.get_rank() == 0:
        write_atomic(options.out, found)
    part()
    dist.destroy_process_group()
    return 0
