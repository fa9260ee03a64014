"""Cost of joining the ranks of a job: file descriptors, reads of the rendezvous store, and CPU
seconds.

The ranks are forked. They only join, create the process groups for control messages and
checkpoints, and use each group once. Descriptors and reads are exact counts. CPU seconds have an
error of some 20 %, because many processes share few cores.
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
from tests.support.workers import run_ranks

RANKS = 128
GROUPS = 2
"""Number of process groups: the world group, which also carries control messages, and the group of
checkpoints."""
c10d: Any = dist.distributed_c10d
MEASURED: dict[str, Any] = {}
"""Measurements of this rank's process by name. `store` is the store that counts reads.
`descriptors` and `cpu` are measured before the rank joins. `reads_to_join` is the number of reads
before the first call of `connect`."""


class CountingStore(c10d.Store):
    """Store that passes all calls to another store and counts the reads."""

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
    """Joins the process group as a rank of the kit does. Records file descriptors and reads of the
    store in MEASURED.
    """
    local_store = process_group.local_store

    def counted(*args: Any) -> dict[str, Any]:
        found = local_store(*args)
        MEASURED["store"] = CountingStore(found["store"])
        return {**found, "store": MEASURED["store"]}

    def first(*args: Any) -> None:
        MEASURED.setdefault("reads_to_join", MEASURED["store"].reads)
        connect(*args)

    process_group.local_store, process_group.connect = counted, first
    MEASURED.update(descriptors=_descriptors(), cpu=time.process_time())
    process_group.start_process_group()


def use(groups: int) -> dict[str, float]:
    """Creates `groups` process groups and uses each once. Returns this rank's file descriptors,
    reads of the store and CPU seconds.
    """
    for group in (dist.group.WORLD, *(cpu_group(f"group {i}") for i in range(1, groups))):
        dist.broadcast(torch.zeros(2), src=0, group=group)
        dist.barrier(group)
    return {
        "descriptors": _descriptors() - MEASURED["descriptors"],
        "reads_to_join": MEASURED["reads_to_join"],
        "reads": MEASURED["store"].reads,
        "cpu_s": time.process_time() - MEASURED["cpu"],
    }


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def measure(workplace: Path, ranks: int = RANKS) -> list[Row]:
    """Returns rows with file descriptors, reads of the store and CPU seconds of ranks that join and
    use their process groups. Descriptors and reads are the maximum over all ranks except rank 0.
    Nothing is written to `workplace`.
    """
    first, *others = seen = run_ranks(ranks, use, GROUPS, start=join_lazily)
    most = {key: max(rank[key] for rank in others) for key in first}
    note = f"{GROUPS} groups; rank 0, which hosts the rendezvous store,"
    cpu_s = statistics.median(rank["cpu_s"] for rank in seen)
    opened = (
        f"largest value of the {ranks} ranks except rank 0; {note} opens {first['descriptors']}"
    )
    spent = f"median of the {ranks} ranks; {note} needs {first['cpu_s']:.2f} s"
    reads = "reads of the rendezvous store by a rank"
    to_join, in_all = f"{reads} before it connects to another rank", f"{reads} in total"
    joined = "counted at the end of `init_process_group`, before the first collective"
    return [
        row("file descriptors that a rank opens", most["descriptors"], at_most=40, note=opened),
        row(to_join, most["reads_to_join"], at_most=0, note=joined),
        row(in_all, most["reads"], note=f"after each of the {GROUPS} groups was used once"),
        row("CPU time of a rank", cpu_s, "s", note=spent),
    ]
