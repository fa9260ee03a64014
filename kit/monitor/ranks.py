"""Step times of all ranks over the last minutes: who is slow, and on which host."""

import dataclasses
import time
from pathlib import Path

import numpy as np

from cluster.state import read_rank_heartbeats

SAMPLES, MIN_SAMPLES = 120, 5
SHARE = 0.1
"""Of its time that a view may spend on reading heartbeats: those of many thousands of ranks are read less often."""


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
        begun = time.monotonic()
        if begun < self._rest_until:
            return False
        beats = [beat for beat in read_rank_heartbeats(self.run_dir, attempt) if beat.rank < self.num_ranks]
        took_s = time.monotonic() - begun
        self._rest_until = time.monotonic() + (took_s / SHARE if took_s > SHARE else 0.0)
        step = max((beat.step for beat in beats), default=-1)
        if step <= (self.steps[-1] if self.steps else -1):
            return False
        column = np.full(self.num_ranks, np.nan, dtype=np.float32)
        for beat in beats:
            own = beat.step_time_s if beat.work_s is None else beat.work_s  # a whole step includes waiting for the slow
            column[beat.rank] = np.nan if own is None else own
            self.hosts[beat.rank] = beat.host
        with np.errstate(all="ignore"):
            column /= np.median(column[np.isfinite(column)]) if np.isfinite(column).any() else np.float32(np.nan)
        self.steps, self.samples = [*self.steps, step][-SAMPLES:], [*self.samples, column][-SAMPLES:]
        return True

    @property
    def relative(self) -> np.ndarray:
        """Step time over the median of all ranks, float32 [rank, sample]; NaN where a rank has not said."""
        return self.last(len(self.samples))

    def last(self, count: int) -> np.ndarray:
        """Returns the newest `count` columns of `relative`; for many ranks, all of them are a lot of memory."""
        columns = self.samples[len(self.samples) - count :]
        return np.stack(columns, axis=1) if columns else np.empty((self.num_ranks, 0), dtype=np.float32)

    def rows(self, most: int) -> np.ndarray:
        """Returns `relative` in at most `most` rows, [row, sample]: of neighbours the slowest stands for all."""
        size = -(-self.num_ranks // most)
        if size == 1 or not self.samples:
            return self.relative
        starts = np.arange(0, self.num_ranks, size)
        return np.stack([np.fmax.reduceat(column, starts) for column in self.samples], axis=1)

    def slowest(self, over_steps: int = 20) -> Straggler | None:
        """Returns the rank whose fastest sample of the last `over_steps` steps is the slowest; None while unknown."""
        if not self.steps or self.num_ranks < 2 or self.steps[-1] - self.steps[0] < over_steps:
            return None
        # Heartbeats come once a second: of steps that are quicker, one sample alone would be an accident.
        samples = max(MIN_SAMPLES, int(np.sum(np.array(self.steps) >= self.steps[-1] - over_steps)))
        if len(self.steps) < samples:
            return None
        recent = self.last(samples)
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
        self._rest_until = 0.0
