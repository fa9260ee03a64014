"""Metrics: the steps in `metrics.jsonl`, with tokens/s, MFU and HFU derived from spec, plan and
site.

Imports no torch.
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
"""Largest number of lines that wait in memory for the disk. A line has about 500 bytes. A run with
one step per second produces this number in two days."""
WRITE_BYTES = 1 << 20
"""Bytes of lines that are joined for one write to the disk."""
SPEED_STEPS = 20
"""Number of the newest steps whose median is shown, wherever a view shows one number for tokens/s,
MFU, HFU or time per step."""
MAX_ABOVE_PEAK = 0.05
"""Largest share of a run's steps that may be faster than the peak. With a larger share the peak is
taken to be wrong, and no MFU is given."""
RECENT_STEPS = 100
"""Number of the last steps whose mean step time predicts the time left."""
PERIODS = 5
"""Number of the last periods of each kind of pause, such as validation, that predict the time
left."""
LOOK_BACK_STEPS = 20_000
"""Largest number of steps from which the time left is predicted. It bounds the work for a long
run."""


class MetricsWriter:
    """Appends one line per optimizer step to `metrics.jsonl`. Lines that cannot be written wait in
    memory.

    One thread may call `add` while another one calls `flush`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream: io.FileIO | None = None
        self.waiting = deque[bytes]()
        """Lines from `add` that `flush` has not moved to `pending`, oldest first."""
        self.pending = bytearray()
        """Bytes that `flush` writes next. The beginning of the first line may be written
        already."""
        self.is_begun = False
        """Whether the file was opened before."""
        self.num_dropped = 0
        """Number of lines that were dropped, because MOST_WAITING lines were waiting."""

    @property
    def num_unwritten(self) -> int:
        """Number of lines that are not in the file, including dropped lines."""
        return len(self.waiting) + self.pending.count(b"\n") + self.num_dropped

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Adds the lines of some steps to the waiting lines. Never waits for the disk."""
        for row in rows:
            if len(self.waiting) < MOST_WAITING:
                self.waiting.append(f"{json.dumps(row)}\n".encode())
            else:
                self.num_dropped += 1

    def flush(self) -> None:
        """Writes all waiting lines. Readers see them immediately.

        Raises:
            OSError: Some lines could not be written. They wait for the next call.
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
                # A handle of a network file system may stay stale, so the next call opens a new
                # one.
                self.stream = None
                with contextlib.suppress(OSError):
                    stream.close()
            raise

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes the waiting lines and then the lines of some steps. Raises OSError as `flush`."""
        self.add(rows)
        self.flush()

    def close(self) -> None:
        """Closes the file. Waiting lines are not written."""
        if self.stream is not None:
            self.stream.close()

    def _open(self) -> io.FileIO:
        """Opens the file for appending and returns its stream."""
        self.stream = appending(self.file)
        if not self.is_begun:
            # After a torn last line of a killed attempt, a line break must come first.
            self.pending[:0] = line_break(self.stream)
            self.is_begun = True
        return self.stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """The steps of a run in ascending order, each step once. From the first step of an attempt on,
    its steps replace the steps of older attempts.

    `metrics["loss"]` is one column as an array.
    """

    columns: dict[str, np.ndarray]
    spec: ModelSpec
    plans: dict[int, Plan]
    site: Site
    skipped_lines: int
    other_sites: Mapping[int, Site] = dataclasses.field(default_factory=dict)
    """Sites of attempts that did not run on `site`, by attempt."""
    damaged: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Reason why the plan or site of an attempt cannot be read, by attempt. The steps of such an
    attempt have neither MFU nor HFU."""
    is_imported: bool = False
    """Whether the steps were converted from another trainer's log."""

    @classmethod
    def read(cls, file: Path, **facts: Any) -> "Metrics":
        """Returns the metrics in a `metrics.jsonl`. Without the file, they have no steps.

        Lines that are torn or not written by the kit are skipped and counted. `facts` are the
        fields `spec`, `plans`, `site` and, optionally, `other_sites`, `damaged` and `is_imported`,
        as `kit.run.Run.facts` returns them.
        """
        return cls.of(Columns(file).read_all(), **facts)

    @classmethod
    def of(cls, read: Columns, **facts: Any) -> "Metrics":
        """Returns the metrics of steps that were read already. `facts` are as in `read`."""
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
        """Returns the MFU of each step, from 0 to 1: model FLOP/s divided by peak dense FLOP/s of
        the plan's dtype. Returns None if the peak is unknown or wrong, see `why_no_mfu`.

        If the peak is believable, a single step above the peak is NaN. Causes are a changed clock
        or a damaged line.
        """
        return self._believable(0)

    def hfu(self) -> np.ndarray | None:
        """Returns the HFU of each step, from 0 to 1. Unlike MFU, it counts recomputed FLOPs.
        Returns None, or NaN for a step, in the cases of `mfu`.
        """
        return self._believable(1)

    def speeds(self) -> dict[str, np.ndarray]:
        """Returns `tokens_per_s` of each step and, if the peak is known and believable, `mfu` and
        `hfu`, by name.
        """
        speeds = {"tokens_per_s": self.tokens_per_s, "mfu": self.mfu(), "hfu": self.hfu()}
        return {name: values for name, values in speeds.items() if values is not None}

    @property
    def why_no_mfu(self) -> str | None:
        """Reason why there is neither MFU nor HFU: `peak unknown`, or `above the peak` if too many
        steps are faster than the peak. None if both are known.
        """
        both = self.utilisations
        if both is None:
            return "peak unknown"
        known = both[1][np.isfinite(both[1])]
        return "above the peak" if refutes_peak(int(np.sum(known > 1)), len(known)) else None

    def _believable(self, which: int) -> np.ndarray | None:
        """Returns MFU (`which` is 0) or HFU (`which` is 1), with the rules of `mfu`."""
        if (both := self.utilisations) is None or self.why_no_mfu:
            return None
        return np.where(both[which] > 1, np.nan, both[which])

    @functools.cached_property
    def utilisations(self) -> np.ndarray | None:
        """MFU and HFU of each step, [2, steps]. Values above 1 are included. None if the peak is
        unknown.
        """
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
        """Number of the layout of each step, counted from 0. See `layout_numbers`."""
        return layout_numbers(self["attempt"], self.plans, self.other_sites)

    def summary(self) -> dict[str, Any]:
        """Returns the numbers of the last step by name. Speeds are medians over the last
        SPEED_STEPS steps with the layout of the last step.

        A loss or gradient norm that is not finite is NaN or infinity. A number is None if it was
        never recorded or is unknown.
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
    """Returns the numbers of the last step by name.

    The result for each name in `speeds` is a median. It is taken over those of the last SPEED_STEPS
    steps that have the layout of the last step. `speed_steps` is the number of these steps. A loss
    or gradient norm that is not finite is NaN or infinity. A number is None if it was never
    recorded or is unknown.

    Args:
        steps: steps of a run, at least one.
        speeds: speed of each step, by name.
        layouts: number of the layout of each step.
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
    """Returns rows of metrics.jsonl as metrics, in their order and with repeated steps. `facts` are
    as in `Metrics.read`.
    """
    return Metrics(columns=dict(zip(NAMES, values_of(rows), strict=True)), skipped_lines=0, **facts)


def utilisation_rates(
    spec: ModelSpec, plan: Plan, site: Site, *, is_imported: bool
) -> tuple[float, float] | None:
    """Returns (MFU, HFU) at one token per second. Both are proportional to tokens per second.
    Returns None if the peak is unknown.

    For the steps of another trainer, full recomputation counts the whole forward pass of each
    block, as Megatron runs it and as the papers count it.
    """
    peak = site.peak_flops_per_s(plan.precision)
    devices = plan.num_devices
    if peak is None:
        return None
    if site.scheduler == "local":  # Processes beyond the number of cores share the cores.
        devices = min(devices, site.devices_per_node)
    executed = spec.hardware_flops_per_token(
        plan.recompute,
        whole=is_imported or plan.recomputes_whole,
        layers=plan.recomputed_layers(spec),
    )
    return spec.flops_per_token() / (peak * devices), executed / (peak * devices)


def time_left_s(steps: Metrics | Columns, num_steps: int) -> float | None:
    """Returns the predicted seconds until a run will have done `num_steps` steps. Returns None if
    the time of a step is unknown.

    The time of a step is the mean over the last RECENT_STEPS steps of the newest attempt.
    Validation, saves and other pauses between steps are added at the rate of their last PERIODS
    periods. So a slow phase in the past does not affect the prediction, however long it was.
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
    # If the clock was set back, a gap is negative, and the gaps beside it may be far too long.
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
    if len(pauses) <= PERIODS:  # With too few periods, the rate is that over the whole attempt.
        return float(gaps_s[counted].sum()) / (now + 1)
    begin = pauses[-PERIODS - 1]
    end = pauses[-1]
    # The present period is longer than all counted periods, so the pauses have become rarer.
    if now - end > np.diff(pauses[-PERIODS - 1 :]).max():
        end = now
    return float(gaps_s[counted].sum()) / float(end - begin)


def _column(steps: Metrics | Columns, name: str) -> np.ndarray:
    """Returns a column of some steps, all NaN if the run lacks it."""
    if isinstance(steps, Metrics) and name not in steps.columns:
        return np.full(len(steps), np.nan)
    return steps[name]


def refutes_peak(above: int, known: int) -> bool:
    """Returns whether a peak is too low to be true. `above` is the number of steps that are faster
    than the peak, and `known` the number of all steps with a known speed.
    """
    return above > MAX_ABOVE_PEAK * known


def median(values: np.ndarray) -> float | None:
    """Returns the median of the finite values, or None if no value is finite."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else None


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns recorded counts as int64. A value that is NaN or too large for a count becomes 0."""
    return np.where(np.abs(values) < 2.0**53, values, 0).astype(np.int64)
