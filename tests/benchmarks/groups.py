"""Ranks joining: descriptors, reads of the store and CPU seconds, with gloo's full mesh (before)
and lazily (the kit).

The ranks are forked and do nothing but join, make the groups for control and checkpoints, and use
each once. Descriptors and reads are counts; of many processes on few cores, CPU seconds are good to
some 20 %.
"""

import datetime
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.engines import process_group
from kit.parallel.groups import connect, cpu_group
from kit.show.results import Row, row
from tests.workers import run_ranks

RANKS = 128
c10d: Any = dist.distributed_c10d
SEEN: dict[str, Any] = {}
"""Of this rank's process."""


class CountingStore(c10d.Store):
    """Passes all calls to another store and counts the reads."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store, self.reads = store, 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return self.store.get(key)

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self.store.wait(keys, timeout) if timeout else self.store.wait(keys)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.store.set_timeout(timeout)


def join_lazily() -> None:
    """Joins as the kit does."""
    _count()
    process_group.start_process_group()


def join_fully() -> None:
    """Joins as torch does by default."""
    _count()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    dist.init_process_group("gloo", **process_group.local_store(datetime.timedelta(minutes=5)))
    SEEN["reads_to_join"] = SEEN["store"].reads


def _count() -> None:
    local_store = process_group.local_store

    def counted(*args: Any) -> dict[str, Any]:
        found = local_store(*args)
        SEEN["store"] = CountingStore(found["store"])
        return {**found, "store": SEEN["store"]}

    def first(*args: Any) -> None:
        SEEN.setdefault("reads_to_join", SEEN["store"].reads)
        connect(*args)

    process_group.local_store, process_group.connect = counted, first
    SEEN.update(descriptors=_descriptors(), cpu=time.process_time())


def use(groups: int) -> dict[str, float]:
    """Returns what one rank has seen once so many groups were made and used."""
    made = [dist.group.WORLD, *(cpu_group(f"group {number}") for number in range(1, groups))]
    for group in made:
        dist.broadcast(torch.zeros(2), src=0, group=group)
        dist.barrier(group)
    return {
        "descriptors": _descriptors() - SEEN["descriptors"],
        "reads_to_join": SEEN["reads_to_join"],
        "reads": SEEN["store"].reads,
        "cpu_s": time.process_time() - SEEN["cpu"],
    }


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def measure(workplace: Path, ranks: int = RANKS) -> list[Row]:
    """Returns the rows of both ways; nothing is written."""
    rows = []
    # Control was a group of its own; where the world's is on the CPU, the kit now takes that.
    for name, join, groups, limits in (
        ("before, full mesh", join_fully, 3, (None, None)),
        ("lazy", join_lazily, 2, (40, 0)),
    ):
        seen = run_ranks(ranks, use, groups, start=join)
        note = f"{ranks} ranks, {groups} groups; rank 0, with the store: "
        found = {key: max(rank[key] for rank in seen[1:]) for key in seen[0]}
        rows += [
            row(
                f"{name}: descriptors of a rank",
                found["descriptors"],
                "",
                at_most=limits[0],
                note=f"{note}{seen[0]['descriptors']}",
            ),
            row(
                f"{name}: reads of the store to join",
                found["reads_to_join"],
                "",
                at_most=limits[1],
                note="one group",
            ),
            row(f"{name}: reads of the store in all", found["reads"], "", note="groups in use"),
            row(
                f"{name}: CPU of a rank",
                statistics.median(rank["cpu_s"] for rank in seen),
                "s",
                note=f"median; {note}{seen[0]['cpu_s']:.2f} s",
            ),
        ]
    return rows
