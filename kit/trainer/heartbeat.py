"""The heartbeat of one rank, for those who watch the run and for the watchdog that must name the
rank that hangs.

Each rank has a file; of more than MANY ranks, rank 0 gathers them every GATHER_EVERY_S. So no file
system meets many ranks at once.
"""

import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cluster.files import unless_full
from cluster.heartbeats import (
    GATHER_EVERY_S,
    MANY,
    PARTS,
    RankHeartbeat,
    read_rank_heartbeats,
    tell,
    write_all_heartbeats,
)

RECENT = 15
"""Steps, of whose parts the medians are told: one step alone says little on a busy machine."""


class Heartbeat:
    """What a rank says of itself.

    Args:
        directory: of the run.
        attempt: of the run.
        group: of all ranks, on the CPU.
    """

    def __init__(self, directory: Path, attempt: int, group: dist.ProcessGroup) -> None:
        self.directory, self.group, self.num_ranks = directory, group, dist.get_world_size()
        self.beat = RankHeartbeat(
            rank=dist.get_rank(),
            attempt=attempt,
            step=0,
            time=time.time(),
            host=os.uname().nodename,
        )
        self.is_gathered = self.num_ranks > MANY
        self.gathered_at = float("-inf")
        self.last = dict[str, Any]()
        self.recent = deque[list[float | None]](maxlen=RECENT)

    def step_done(self, row: dict[str, Any], work_s: float | None) -> None:
        """Takes note of a step, to be told: of its row of the metrics, and how long this rank
        worked at it.
        """
        self.recent.append([*map(row.get, PARTS), work_s if "waiting_s" in row else None])
        self.last = {
            "step": row["step"],
            "time": time.time(),
            "step_time_s": row["step_time_s"],
            "work_s": work_s,
        }

    def say(self) -> None:
        """Says that this rank answers, and what it did last; also from the thread of the
        watchdog.
        """
        if not self.is_gathered:
            tell(self.directory, self._newest().replace(time=time.time()))

    def must_gather(self) -> bool:
        """Whether all ranks are to call `gather` now; for rank 0, which has them agree."""
        return self.is_gathered and time.monotonic() - self.gathered_at > GATHER_EVERY_S

    def gather(self) -> None:
        """Has rank 0 write what all ranks did last; all of them call it."""
        self.gathered_at = time.monotonic()
        lines: list[Any] | None = [None] * self.num_ranks if self.beat.rank == 0 else None
        dist.gather_object(self._newest().line, lines, dst=0, group=self.group)
        if lines:
            with unless_full():
                write_all_heartbeats(self.directory, lines)

    def _newest(self) -> RankHeartbeat:
        columns = zip(*list(self.recent), strict=True)  # a copy: the watchdog's thread asks too
        *parts_s, own_s = map(_median, columns) if self.recent else [None]
        return self.beat.replace(**self.last, parts_s=tuple(parts_s), own_s=own_s)

    def silent_ranks(self, for_s: float) -> list[int] | None:
        """Returns the ranks that have not said for so long that they answer, or None where
        nobody was told.
        """
        if self.is_gathered:
            return None
        beats = {
            beat.rank: beat.time for beat in read_rank_heartbeats(self.directory, self.beat.attempt)
        }
        newest = max(beats.values(), default=0.0)
        return [rank for rank in range(self.num_ranks) if beats.get(rank, 0.0) < newest - for_s]


def _median(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 6) if known else None
