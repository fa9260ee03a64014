"""What all ranks do with one checkpoint: one reads what all need and tells the others, none goes
on alone.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from kit.errors import CheckpointError, ConfigError, DataError
from kit.run.checkpoint import Checkpoints, Manifest


def describe_together(
    checkpoints: Checkpoints, step: int, group: Any = None
) -> tuple[Manifest, bytes]:
    """Returns `Checkpoints.describe` to all ranks, of which rank 0 alone reads files.

    All ranks of the group, which is on the CPU and has all of them, must call this. An error is
    raised on all.
    """
    told: list[Any] = [None]
    with alike(group):
        if dist.get_rank() == 0:
            told = [checkpoints.describe(step)]
    dist.broadcast_object_list(told, src=0, group=group)
    return told[0]


@contextlib.contextmanager
def alike(group: Any = None) -> Iterator[None]:
    """Raises an error that one rank meets on all ranks, so that none waits for it; a strange one
    as CheckpointError.
    """
    met: list[Any] = [None]
    try:
        yield
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        met = [error]
    except Exception as error:  # may not survive pickling
        met = [CheckpointError(f"{type(error).__name__}: {error}")]
        met[0].__cause__ = error
    first = torch.tensor([dist.get_rank() if met[0] else dist.get_world_size()])
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if int(first) < dist.get_world_size():
        dist.broadcast_object_list(met, src=int(first), group=group)
        raise met[0]
