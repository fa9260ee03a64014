"""Metrics: what `metrics.jsonl` says, with tokens/s, MFU and HFU derived from spec, plan and site.

No torch.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cluster.files import FULL, appending, line_break
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.run.columns import (
    COLUMNS,
    NAMES,
    OPTIONAL_COLUMNS,
    Columns,
    tokens_seen,
    values_of,
)

MOST_WAITING = 200_000
"""Largest number of lines that wait in memory for the disk, of about 500 bytes each. A run of one
step per second fills it in two days."""
WRITE_BYTES = 1 << 20
"""Bytes of lines that are joined for one write."""
SPEED_STEPS = 20
"""Steps of which tokens/s, MFU, HFU and time per step are the median, wherever a view shows one
number."""
MAX_ABOVE_PEAK = 0.05
"""Share of a run's steps that may look faster than the peak before it is the peak that is not
believed."""
RECENT_STEPS = 100
"""Number of the last steps whose mean step time predicts the time left."""
PERIODS = 5
"""Number of the last periods of each kind of pause, such as validation, that predict the time
left."""
LOOK_BACK_STEPS = 20_000
"""Largest number of steps from which the time left is predicted. It bounds the work for a long
run."""


class MetricsWriter:
    """Appends one line per optimizer step to `metrics.jsonl`. Lines that the disk does not take
    wait in memory.

    `add` and `flush` may be called by two threads.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream: io.FileIO | None = None
        self.waiting = deque[bytes]()
        """Lines of `add` that `flush` has not taken over, oldest first."""
        self.pending = bytearray()
        """Bytes that `flush` writes next. The beginning of its first line may be written."""
        self.is_begun = False
        """Whether the file was opened before."""
        self.num_dropped = 0
        """Number of lines that were dropped, because MOST_WAITING lines were waiting."""

    @property
    def num_unwritten(self) -> int:
        """Number of lines that are not in the file, with those that were dropped."""
        return len(self.waiting) + self.pending.count(b"\n") + self.num_dropped

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Adds the lines of some steps to those that wait. Never waits for the disk."""
        for row in rows:
            if len(self.waiting) < MOST_WAITING:
                self.waiting.append(f"{json.dumps(row)}\n".encode())
            else:
                self.num_dropped += 1

    def flush(self) -> None:
        """Writes all lines that wait, visible to readers at once.

        Raises:
            OSError: not all could be written. The rest waits for the next call.
        """
        if not self.waiting and not self.pending:
            return
        stream = self.stream or self._open()
        try:
            while True:
                while self.waiting and len(self.pending) < WRITE_BYTES:
                    self.pending += self.waiting.popleft()
                if not self.pending:
                    return
                del self.pending[: stream.write(self.pending)]
        except OSError as error:
            if error.errno not in FULL:
                # A handle of a network file system may be stale for good.
                self.stream = None
                with contextlib.suppress(OSError):
                    stream.close()
            raise

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes some steps after those that wait. Raises OSError as `flush`."""
        self.add(rows)
        self.flush()

    def close(self) -> None:
        """Closes the file. Lines that wait are not written."""
        if self.stream is not None:
            self.stream.close()

    def _open(self) -> io.FileIO:
        self.stream = appending(self.file)
        if not self.is_begun:
            # The torn last line of a killed attempt must not swallow our first line.
            self.pending[:0] = line_break(self.stream)
            self.is_begun = True
        return self.stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """The steps of a run, oldest first, each once: a newer attempt's steps replace what an older
    one did after it.
    """

    columns: dict[str, np.ndarray]
    spec: ModelSpec
    plans: dict[int, Plan]
    site: Site
    skipped_lines: int
    other_sites: Mapping[int, Site] = dataclasses.field(default_factory=dict)
    """Of attempts that ran elsewhere than on `site`."""
    damaged: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Why the plan or site of an attempt cannot be read: its steps have neither MFU nor HFU."""
    is_imported: bool = False
    """Whether another trainer than the kit's made the steps."""

    @classmethod
    def read(cls, file: Path, **facts: Any) -> "Metrics":
        """Returns the metrics in a `metrics.jsonl`, if there is one; torn or foreign lines are
        skipped and counted.

        `facts` are the run's own: spec, the plans of its attempts, the site, whose peak makes
        MFU, and what else is known of `other_sites`, `damaged` and `is_imported`.
        """
        return cls.of(Columns(file).read_all(), **facts)

    @classmethod
    def of(cls, read: Columns, **facts: Any) -> "Metrics":
        """Returns the metrics of steps that were read; `facts` as in `read`."""
        names = [*COLUMNS, *(name for name in OPTIONAL_COLUMNS if np.isfinite(read[name]).any())]
        columns = {name: read[name] for name in names}
        columns |= {name: _whole(columns[name]) for name in ("step", "attempt", "tokens")}
        return cls(columns=columns, skipped_lines=read.skipped_lines, **facts)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def tokens_per_s(self) -> np.ndarray:
        """Tokens per second of each step, over all devices."""
        with np.errstate(all="ignore"):
            return self["tokens"] / self["step_time_s"]

    @property
    def total_tokens(self) -> np.ndarray:
        """Tokens seen at the end of each step."""
        consumed = self.columns.get("consumed_tokens", np.full(len(self), np.nan))
        return _whole(tokens_seen(_whole(self["tokens"]), consumed))

    def mfu(self) -> np.ndarray | None:
        """Returns model FLOP/s over peak dense FLOP/s of the plan's dtype, 0-1, per step; None
        where there is none.

        There is none for an unknown peak, nor for one that the run goes beyond: see `why_no_mfu`.
        Of a believable peak, a single step above it (a clock was set, a line was damaged) is NaN.
        """
        return self._believable(0)

    def hfu(self) -> np.ndarray | None:
        """Returns the same with recomputed FLOPs counted; None and NaN as in `mfu`."""
        return self._believable(1)

    def speeds(self) -> dict[str, np.ndarray]:
        """Returns tokens_per_s and, where the peak is known and holds, mfu and hfu."""
        speeds = {"tokens_per_s": self.tokens_per_s, "mfu": self.mfu(), "hfu": self.hfu()}
        return {name: values for name, values in speeds.items() if values is not None}

    @property
    def why_no_mfu(self) -> str | None:
        """Why there is neither MFU nor HFU: `peak unknown` or `above the peak`; None where they
        are known.
        """
        both = self.utilisations
        if both is None:
            return "peak unknown"
        known = both[1][np.isfinite(both[1])]
        return "above the peak" if refutes_peak(int(np.sum(known > 1)), len(known)) else None

    def _believable(self, which: int) -> np.ndarray | None:
        if (both := self.utilisations) is None or self.why_no_mfu:
            return None
        return np.where(both[which] > 1, np.nan, both[which])

    @functools.cached_property
    def utilisations(self) -> np.ndarray | None:
        """MFU and HFU as they come out, [2, steps], above 1 too; None for an unknown peak."""
        rates = np.full((2, len(self)), np.nan)
        for attempt, plan in self.plans.items():
            site = self.other_sites.get(attempt, self.site)
            found = utilisation_rates(self.spec, plan, site, is_imported=self.is_imported)
            if found is None and attempt not in self.other_sites:
                return None
            rates[:, self["attempt"] == attempt] = np.array(found or (np.nan, np.nan))[:, None]
        with np.errstate(all="ignore"):
            return rates * self.tokens_per_s

    @property
    def layouts(self) -> np.ndarray:
        """Number of the layout of each step, from 0: see `layout_numbers`."""
        return layout_numbers(self["attempt"], self.plans, self.other_sites)

    def summary(self) -> dict[str, Any]:
        """Returns the last step in plain numbers, speeds as the median of the last 20 steps with
        its layout.

        A loss or gradient norm that was not finite stays what it was; None is what was never
        recorded, or is not known.
        """
        if not len(self):
            return {"step": 0}
        speeds = {"step_time_s": self["step_time_s"], **self.speeds()}
        return {
            "mfu": None,
            **last_step_values(self, speeds, self.layouts),
            "tokens": int(self.total_tokens[-1]),
            "attempt": int(self["attempt"][-1]),
        }


def last_step_values(
    steps: Metrics | Columns, speeds: Mapping[str, np.ndarray], layouts: np.ndarray
) -> dict[str, Any]:
    """Returns the numbers of the last of some steps. `layouts` is the number of each step's layout.
    Each of `speeds` is the median over those of the last SPEED_STEPS steps that have the layout of
    the last step. `speed_steps` is the number of these steps.

    A loss or gradient norm that was not finite stays as it was. A number is None if it was never
    recorded or is unknown.
    """
    norms = steps["grad_norm"]
    grad_norm = None
    if not np.isnan(norms).all():
        grad_norm = float(norms[-1])
    recent = layouts[-SPEED_STEPS:] == layouts[-1]
    return {
        "step": int(steps["step"][-1]),
        "loss": float(steps["loss"][-1]),
        "grad_norm": grad_norm,
        **{name: median(values[-SPEED_STEPS:][recent]) for name, values in speeds.items()},
        "speed_steps": int(recent.sum()),
    }


def layout_numbers(
    attempts: np.ndarray, plans: Mapping[int, Plan], other_sites: Mapping[int, Site]
) -> np.ndarray:
    """Returns the number of the layout of each step, given the attempt of each step. The number
    grows where an attempt has another plan or another site than the attempt before.

    Speed, MFU and time per step are averaged within one layout only.
    """
    numbers = sorted(plans)
    changes = [
        attempt
        for earlier, attempt in itertools.pairwise(numbers)
        if (plans[earlier], other_sites.get(earlier)) != (plans[attempt], other_sites.get(attempt))
    ]
    return np.searchsorted(changes, attempts, side="right")


def rows_to_metrics(rows: list[dict[str, Any]], **facts: Any) -> Metrics:
    """Returns rows as they are, in their order and with repeated steps, as metrics with their
    derived speeds; `facts` as in `Metrics.read`.
    """
    return Metrics(columns=dict(zip(NAMES, values_of(rows), strict=True)), skipped_lines=0, **facts)


def utilisation_rates(
    spec: ModelSpec, plan: Plan, site: Site, *, is_imported: bool
) -> tuple[float, float] | None:
    """Returns MFU and HFU at one token per second, to which both are proportional; None for an
    unknown peak.

    Of another trainer's steps, full recomputation is counted whole, as Megatron runs it and the
    papers count it.
    """
    peak = site.peak_flops_per_s(plan.precision)
    devices = plan.num_devices
    if peak is None:
        return None
    if site.scheduler == "local":  # more processes than cores share the cores
        devices = min(devices, site.devices_per_node)
    executed = spec.hardware_flops_per_token(
        plan.recompute,
        whole=is_imported or plan.recomputes_whole,
        layers=plan.recomputed_layers(spec),
    )
    return spec.flops_per_token() / (peak * devices), executed / (peak * devices)


def time_left_s(steps: Metrics | Columns, num_steps: int) -> float | None:
    """Returns the predicted seconds until a run will have done `num_steps` steps, or None where
    the time of a step is unknown.

    A step takes the mean of the newest attempt's last RECENT_STEPS steps. Validation, saves and
    other pauses between steps are added at the rate of their last PERIODS periods. So the
    prediction forgets a slow phase, however long it was.
    """
    if not len(steps):
        return None
    first = int(np.argmax(steps["attempt"] == steps["attempt"][-1]))
    first = max(first, len(steps) - LOOK_BACK_STEPS)
    took_s = steps["step_time_s"][first:]
    # An attempt's first step compiles and connects, which later steps do not.
    recent_s = took_s[1:][-RECENT_STEPS:] if len(took_s) > 1 else took_s
    recent_s = recent_s[np.isfinite(recent_s)]
    step_s = float(recent_s.mean()) if recent_s.size else 0.0
    if not step_s > 0:
        return None
    gaps_s = np.diff(steps["time"][first:]) - took_s[1:]
    # Where the clock was set back, a gap is negative, and the gaps beside it may be far too long.
    is_wrong = ~(gaps_s > -step_s)
    is_beside = is_wrong.copy()
    is_beside[1:] |= is_wrong[:-1]
    is_beside[:-1] |= is_wrong[1:]
    gaps_s = np.where(is_beside, 0.0, gaps_s)
    pauses = {
        "validation": np.isfinite(_column(steps, "validation_loss")[first:][:-1]),
        "save": _column(steps, "checkpoint_s")[first:][1:] > 0,
    }
    is_other = ~(pauses["validation"] | pauses["save"])
    pauses["other"] = is_other & (gaps_s > step_s)
    is_short = is_other & (gaps_s <= step_s)
    if len(gaps_s):
        step_s += float(np.where(is_short, gaps_s, 0.0)[-RECENT_STEPS:].mean())
    for is_pause in pauses.values():
        step_s += _pause_s_per_step(gaps_s, np.flatnonzero(is_pause))
    return max(0, num_steps - int(steps["step"][-1])) * step_s


def _pause_s_per_step(gaps_s: np.ndarray, pauses: np.ndarray) -> float:
    """Returns the seconds per step that one kind of pause takes.

    Args:
        gaps_s: seconds between each step and the next one.
        pauses: indices in `gaps_s` of the pauses of this kind, ascending.
    """
    if not len(pauses):
        return 0.0
    now = len(gaps_s) - 1
    counted = pauses[-PERIODS:]
    if len(pauses) <= PERIODS:  # too few periods: all steps of the attempt
        return float(gaps_s[counted].sum()) / (now + 1)
    begin = pauses[-PERIODS - 1]
    end = pauses[-1]
    if now - end > np.diff(pauses[-PERIODS - 1 :]).max():  # the pauses have become rarer
        end = now
    return float(gaps_s[counted].sum()) / float(end - begin)


def _column(steps: Metrics | Columns, name: str) -> np.ndarray:
    """Returns a column of some steps, all NaN if the run lacks it."""
    if isinstance(steps, Metrics) and name not in steps.columns:
        return np.full(len(steps), np.nan)
    return steps[name]


def refutes_peak(above: int, known: int) -> bool:
    """Returns whether a peak is too low to be true: `above` of `known` steps computed faster
    than that.
    """
    return above > MAX_ABOVE_PEAK * known


def median(values: np.ndarray) -> float | None:
    """Returns the median of the finite values, None where there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else None


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns recorded counts as int64, 0 where there is none that could be one."""
    return np.where(np.abs(values) < 2.0**53, values, 0).astype(np.int64)
