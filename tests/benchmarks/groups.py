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
from collections.abc import Callable
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
    # Control was a group of its own; where the world's is on the CPU, the kit now takes that.
    return [
        *_way("before, full mesh", join_fully, ranks, 3),
        *_way("lazy", join_lazily, ranks, 2, most_descriptors=40, most_reads=0),
    ]


def _way(
    name: str,
    join: Callable[[], None],
    ranks: int,
    groups: int,
    most_descriptors: int | None = None,
    most_reads: int | None = None,
) -> list[Row]:
    """Returns the rows of one way to join; the most of any rank but the first counts."""
    first, *others = seen = run_ranks(ranks, use, groups, start=join)
    found = {key: max(rank[key] for rank in others) for key in first}
    cpu_s = statistics.median(rank["cpu_s"] for rank in seen)
    note = f"{ranks} ranks, {groups} groups; rank 0, with the store: "
    opened, spent = f"{note}{first['descriptors']}", f"median; {note}{first['cpu_s']:.2f} s"
    counts = (
        ("descriptors of a rank", "descriptors", most_descriptors, opened),
        ("reads of the store to join", "reads_to_join", most_reads, "one group"),
        ("reads of the store in all", "reads", None, "groups in use"),
    )
    return [
        *(
            row(f"{name}: {told}", found[key], at_most=most, note=n)
            for told, key, most, n in counts
        ),
        row(f"{name}: CPU of a rank", cpu_s, "s", note=spent),
    ]
