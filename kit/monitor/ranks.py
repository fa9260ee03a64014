"""Step times of all ranks over the last minutes: who is slow, and on which host."""

import dataclasses
from pathlib import Path

import numpy as np

from cluster.state import read_rank_heartbeats

SAMPLES, MIN_SAMPLES = 120, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """The slowest rank of a job."""

    rank: int
    ratio: float
    host: str | None

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{where} takes {self.ratio:.2f} x the median step time"


class RankTimes:
    """Samples of the ranks' heartbeats, kept while someone looks; a new attempt starts afresh."""

    def __init__(self, run_dir: Path, num_ranks: int) -> None:
        self.run_dir, self.num_ranks = run_dir, num_ranks
        self._start(0)

    def look(self, attempt: int) -> bool:
        """Takes a sample if any rank has finished a step since the last; returns whether one did."""
        if attempt != self.attempt:
            self._start(attempt)
        beats = [beat for beat in read_rank_heartbeats(self.run_dir, attempt) if beat.rank < self.num_ranks]
        step = max((beat.step for beat in beats), default=-1)
        if step <= (self.steps[-1] if self.steps else -1):
            return False
        column = np.full(self.num_ranks, np.nan)
        for beat in beats:
            own = beat.step_time_s if beat.work_s is None else beat.work_s  # a whole step includes waiting for the slow
            column[beat.rank] = np.nan if own is None else own
            self.hosts[beat.rank] = beat.host
        self.steps, self.samples = [*self.steps, step][-SAMPLES:], [*self.samples, column][-SAMPLES:]
        return True

    @property
    def relative(self) -> np.ndarray:
        """Step time over the median of all ranks, [rank, sample]; NaN where a rank has not said."""
        if not self.samples:
            return np.empty((self.num_ranks, 0))
        times = np.stack(self.samples, axis=1)
        known = np.isfinite(times).any(axis=0)
        medians = np.full(times.shape[1], np.nan)
        medians[known] = np.nanmedian(times[:, known], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return times / medians

    def slowest(self, over_steps: int = 20) -> Straggler | None:
        """Returns the rank whose fastest sample of the last `over_steps` steps is the slowest; None while unknown."""
        if not self.steps or self.num_ranks < 2 or self.steps[-1] - self.steps[0] < over_steps:
            return None
        # Heartbeats come once a second: of steps that are quicker, one sample alone would be an accident.
        samples = max(MIN_SAMPLES, int(np.sum(np.array(self.steps) >= self.steps[-1] - over_steps)))
        if len(self.steps) < samples:
            return None
        recent = self.relative[:, -samples:]
        least = np.fmin.reduce(recent, axis=1)
        if not np.isfinite(least).any():
            return None
        rank = int(np.nanargmax(least))
        return Straggler(rank=rank, ratio=float(least[rank]), host=self.hosts.get(rank))

    def _start(self, attempt: int) -> None:
        self.attempt = attempt
        self.steps: list[int] = []
        self.samples: list[np.ndarray] = []
        self.hosts: dict[int, str | None] = {}
