"""Heartbeats of ranks: the last step of each, to find stragglers. Standard library only.

    ranks/rank_00003.json     of one rank, written by itself: up to MANY ranks
    ranks/all.jsonl           of more ranks: a line of each, which rank 0 gathers every
                              GATHER_EVERY_S

A file per rank and second is 15,000 metadata operations a second at 3,072 ranks, as many as a whole
file system gives.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from cluster.files import read_small, write_atomic
from cluster.record import Record, field_doc

MANY = 64
"""Ranks from which no rank has files of its own: neither its heartbeat nor, under Slurm, its
log."""
GATHER_EVERY_S = 10.0
PARTS = ("data_s", "forward_backward_s", "reduction_s", "optimizer_s", "waiting_s")
"""Of a step, columns of the metrics; a wait for other ranks or the network lies within the
others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankHeartbeat(Record):
    """One rank's last step."""

    rank: int = field_doc("global rank")
    attempt: int = field_doc("attempt it belongs to")
    step: int = field_doc("last finished step")
    time: float = field_doc("unix time of that step's end")
    step_time_s: float | None = field_doc("seconds that this step took", default=None)
    host: str | None = field_doc("where the rank runs", default=None)
    work_s: float | None = field_doc(
        "seconds of that step without the wait for other ranks, where that is known", default=None
    )
    parts_s: tuple[float | None, ...] = field_doc(
        "medians of its last steps, in the order of PARTS", default=()
    )
    own_s: float | None = field_doc(
        "median of `work_s` over its last steps, where its waits are known", default=None
    )

    @property
    def line(self) -> bytes:
        """As JSON, without a line break."""
        return json.dumps(self.to_dict(), separators=(",", ":")).encode()


def tell(run_dir: Path, beat: RankHeartbeat) -> None:
    """Writes what a rank did last into its own file."""
    beat.write(run_dir / "ranks" / f"rank_{beat.rank:05d}.json")


def write_all_heartbeats(run_dir: Path, lines: Iterable[bytes]) -> None:
    """Writes the file of all ranks' heartbeats."""
    write_atomic(run_dir / "ranks" / "all.jsonl", b"\n".join(lines) + b"\n")


def read_rank_heartbeats(run_dir: Path, attempt: int) -> list[RankHeartbeat]:
    """Returns the heartbeats of one attempt in rank order; a rank that has not written yet is
    absent.
    """
    folder = run_dir / "ranks"
    beats = list[RankHeartbeat]()
    with contextlib.suppress(OSError):
        lines = read_small(folder / "all.jsonl").splitlines()
        beats = [
            beat
            for line in lines
            if (beat := RankHeartbeat.parsed(line)) and beat.attempt == attempt
        ]
    if not beats:  # each has its own
        own = (RankHeartbeat.read_or_none(file) for file in folder.glob("rank_*.json"))
        beats = [beat for beat in own if beat and beat.attempt == attempt]
    return sorted(beats, key=lambda beat: beat.rank)
