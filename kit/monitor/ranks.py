"""Samples the step times of all ranks over the last minutes, to find a slow rank and its host."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cluster.heartbeats import RankHeartbeat, read_rank_heartbeats, summarise_devices
from kit.monitor.detectors import MIN_SAMPLES, TEST_MEDIANS, slowest_rank
from kit.run.metrics import median

SAMPLES = 120
"""Largest number of samples of step times that are stored. Older samples are dropped."""
WINDOWS = (MIN_SAMPLES, SAMPLES)
"""Numbers of newest samples over which the slowest rank is tested. The small window detects a rank
that has just become slow. The large window detects a slow rank in strong noise."""
BY_CHANCE = 1e-5
"""Largest accepted probability that noise alone causes an alert at one look. A view looks once per
second, which is 86,400 times per day. Only 720 of these looks have no sample in common."""
MAX_SPLIT_RANKS = 5
"""Largest number of ranks for which a view shows how long each part of a step takes."""
DEVICE_TEXTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "lowest_device_utilisation": ("lowest utilisation", "{:.0%}".format),
    "highest_device_temperature_c": ("highest temperature", "{:.0f} °C".format),
    "device_power_w": ("power of all", "{:,.0f} W".format),
    "largest_device_memory_bytes": ("largest memory", lambda value: f"{value / 2**30:.1f} GiB"),
}
"""Words for each number about the devices and the function that formats it, by the name of the
column of metrics.jsonl."""
MAX_TIME_SHARE = 0.1
"""Largest fraction of a view's time that is spent on reading heartbeats. The heartbeats of many
thousands of ranks are therefore read less often."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """The slowest rank of a job, with the result of the statistical test of its step times."""

    rank: int
    ratio: float
    """Step time of the rank divided by the step time of the other ranks."""
    by_chance: float
    """p-value of the test: probability that noise alone makes any rank look as slow as the slowest
    observed rank, if no rank is slower than `kit.monitor.detectors.SLOW` times the other ranks."""
    host: str | None
    """Host name of the node on which the rank runs. None if it is unknown."""

    @property
    def is_sure(self) -> bool:
        """Whether the p-value is below BY_CHANCE, so that the rank gets an alert."""
        return self.by_chance < BY_CHANCE

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{where} takes {self.ratio:.2f} x the median step time"


class RankTimes:
    """Samples of the step times of all ranks in an attempt, taken while a view is open.

    Attributes:
        samples: newest samples, at most SAMPLES. Each is a float32 array [rank] of step times
            divided by the median of all ranks. NaN for a rank without a heartbeat.
        beats: newest heartbeat of each rank, by the number of the rank.
        slowest: slowest rank, from the window of WINDOWS whose test has the smallest p-value. None
            for fewer than MIN_SAMPLES samples.
    """

    def __init__(self, run_dir: Path, num_ranks: int, attempt: int) -> None:
        self.run_dir = run_dir
        self.num_ranks = num_ranks
        self.attempt = attempt
        self._step = -1
        """Newest training step that any rank had finished at the last sample."""
        self._rest_until = 0.0
        """Monotonic time until which no heartbeats are read, in seconds."""
        self.samples: list[np.ndarray] = []
        self.beats: dict[int, RankHeartbeat] = {}
        self.slowest: Straggler | None = None

    def read_heartbeats(self) -> bool:
        """Reads the heartbeats. Stores a sample of step times if any rank has finished a step since
        the last sample. Returns whether a sample was stored.
        """
        begun = time.monotonic()
        if begun < self._rest_until:
            return False
        heartbeats = read_rank_heartbeats(self.run_dir, self.attempt)
        took_s = time.monotonic() - begun
        self._rest_until = 0.0
        if took_s > MAX_TIME_SHARE:
            self._rest_until = begun + took_s / MAX_TIME_SHARE
        beats = {beat.rank: beat for beat in heartbeats if beat.rank < self.num_ranks}
        step = max((beat.step for beat in beats.values()), default=-1)
        if step <= self._step:
            return False
        self._step = step
        self.beats |= beats
        sample = np.full(self.num_ranks, np.nan, dtype=np.float32)
        for rank, beat in beats.items():
            # The time of a whole step includes the wait for slower ranks. It is used only if the
            # rank's own work was not measured.
            own_s = beat.step_time_s if beat.work_s is None else beat.work_s
            if own_s is not None:
                sample[rank] = own_s
        with np.errstate(all="ignore"):
            sample /= median(sample) or np.nan
        self.samples = [*self.samples, sample][-SAMPLES:]
        self.slowest = self._slowest()
        return True

    def newest_samples(self, count: int) -> np.ndarray:
        """Returns at most `count` of the newest samples, as an array [rank, sample]."""
        return np.reshape(self.samples[-count:], (-1, self.num_ranks)).T

    def relative_times(self, max_rows: int) -> np.ndarray:
        """Returns all samples as an array [row, sample] with at most `max_rows` rows. Each row is
        one rank, or the slowest of several neighbouring ranks.
        """
        starts = np.arange(0, self.num_ranks, -(-self.num_ranks // max_rows))
        rows = [np.fmax.reduceat(sample, starts) for sample in self.samples]
        return np.reshape(rows, (-1, len(starts))).T

    def step_parts(self) -> list[dict[str, Any]]:
        """Returns the parts of a step for the ranks with the longest work per step, at most
        MAX_SPLIT_RANKS. Each rank has one dictionary with `rank`, `host` and `seconds`. The
        dictionaries are sorted by rank.

        `seconds` is a list with the median seconds of each part of a step, in the order of
        `cluster.heartbeats.STEP_PHASES`. The wait for other ranks is subtracted from the forward
        and backward pass, since most of the wait occurs within this part.
        """
        work_s = {
            rank: beat.own_s or sum(filter(None, beat.parts_s))
            for rank, beat in self.beats.items()
            if beat.parts_s
        }
        longest = sorted(work_s, key=lambda rank: -work_s[rank])[:MAX_SPLIT_RANKS]
        rows = []
        for rank in sorted(longest):
            beat = self.beats[rank]
            seconds = [part or 0.0 for part in beat.parts_s]
            seconds[1] = max(0.0, seconds[1] - seconds[-1])
            rows.append({"rank": rank, "host": beat.host, "seconds": seconds})
        return rows

    def device_facts(self) -> dict[str, Any]:
        """Returns the numbers about the devices of all ranks in their newest heartbeats, by the
        name of the column of metrics.jsonl. Each has `value`, `rank` and `host`, which are None for
        the power, a sum over the devices. `problem` is the reason why a rank cannot read its
        device. Returns {} on a CPU.
        """
        facts = dict[str, Any]()
        for name, summary in summarise_devices(map(vars, self.beats.values())).items():
            facts[name] = dataclasses.asdict(summary)
        problems = [beat for beat in self.beats.values() if beat.device_problem]
        if problems:
            first = min(problems, key=lambda beat: beat.rank)
            facts["problem"] = f"rank {first.rank}: {first.device_problem}"
        return facts

    def device_text(self) -> str:
        """Returns the facts about the devices as one line of text. Returns "" on a CPU."""
        facts = self.device_facts()
        texts = []
        for name, (words, number) in DEVICE_TEXTS.items():
            if name not in facts:
                continue
            fact = facts[name]
            text = f"{words} {number(fact['value'])}"
            if fact["rank"] is not None and self.num_ranks > 1:
                where = f" on {fact['host']}" if fact["host"] else ""
                text += f" (rank {fact['rank']}{where})"
            texts.append(text)
        if "problem" in facts:
            texts.append(f"not read on {facts['problem']}")
        return f"Devices: {'; '.join(texts)}" if texts else ""

    def _slowest(self) -> Straggler | None:
        """Tests the slowest rank in each window of WINDOWS. Returns the result with the smallest
        p-value, or None for fewer than two ranks or MIN_SAMPLES samples.
        """
        if self.num_ranks < 2 or len(self.samples) < MIN_SAMPLES:
            return None
        testable = len(self.samples) // TEST_MEDIANS * TEST_MEDIANS
        sizes = sorted({min(size, testable) for size in WINDOWS})
        results = [slowest_rank(self.newest_samples(size)) for size in sizes]
        found = [result for result in results if result is not None]
        if not found:
            return None
        rank, ratio, by_chance = min(found, key=lambda result: result[2])
        return Straggler(
            rank=rank, ratio=ratio, by_chance=len(WINDOWS) * by_chance, host=self.beats[rank].host
        )
