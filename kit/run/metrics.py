"""Metrics: the steps in metrics.jsonl as columns, with tokens/s, MFU and HFU, which are computed
from spec, plan and site.

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

from cluster.files import FULL, line_break, open_for_appending
from cluster.site import Site
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.run.columns import (
    COLUMNS,
    NAMES,
    Columns,
    tokens_seen,
    values_of,
)

MOST_WAITING = 200_000
"""Largest number of lines that are kept in memory while they cannot be written to disk. A line has
about 500 bytes. A run with one step per second reaches this number after two days."""
WRITE_BYTES = 1 << 20
"""Number of bytes of lines that are joined for one write to the disk, 1 MiB."""
SPEED_STEPS = 20
"""Number of newest steps over which a median is taken, where a view shows a single number for
tokens/s, MFU, HFU or time per step."""
MAX_ABOVE_PEAK = 0.05
"""Largest fraction of a run's steps that may be faster than the peak FLOP/s of the device. If more
steps are faster, the peak must be wrong, and no MFU is shown."""
RECENT_STEPS = 100
"""Number of last steps whose mean step time is used to predict the time left."""
PERIODS = 5
"""Number of last periods of each kind of pause (such as validation) that are used to predict the
time left. A period reaches from one pause to the next."""
LOOK_BACK_STEPS = 20_000
"""Largest number of last steps that are used to predict the time left. It limits the computation
for a long run."""


class MetricsWriter:
    """Appends one line per optimizer step to metrics.jsonl. If lines cannot be written, they are
    kept in memory and written later.

    One thread may call `add` while another thread calls `flush`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream: io.FileIO | None = None
        self.waiting = deque[bytes]()
        """Lines that `add` has received and that `flush` has not moved to `pending` yet, oldest
        first."""
        self.pending = bytearray()
        """Bytes that `flush` writes next. If a write was incomplete, they begin in the middle of a
        line."""
        self.is_begun = False
        """Whether this object has opened the file before."""
        self.num_dropped = 0
        """Number of lines that were dropped because MOST_WAITING lines were already waiting."""

    @property
    def num_unwritten(self) -> int:
        """Number of lines that are not in the file: lines that wait in memory, and dropped
        lines.
        """
        return len(self.waiting) + self.pending.count(b"\n") + self.num_dropped

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Adds one line per row to the lines in memory. `flush` writes them later. Never waits for
        the disk.
        """
        for row in rows:
            if len(self.waiting) < MOST_WAITING:
                self.waiting.append(f"{json.dumps(row)}\n".encode())
            else:
                self.num_dropped += 1

    def flush(self) -> None:
        """Writes all lines that wait in memory. Readers of the file see them immediately.

        Raises:
            OSError: Some lines could not be written. They stay in memory for the next call.
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
                # On a network file system the file handle may stay invalid after an error, so the
                # next call opens the file again.
                self.stream = None
                with contextlib.suppress(OSError):
                    stream.close()
            raise

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Adds one line per row, and writes all lines that wait in memory to the file.

        Raises:
            OSError: Some lines could not be written. They stay in memory for the next call.
        """
        self.add(rows)
        self.flush()

    def close(self) -> None:
        """Closes the file. Lines that wait in memory are not written."""
        if self.stream is not None:
            self.stream.close()

    def _open(self) -> io.FileIO:
        """Opens the file for appending and returns its stream."""
        self.stream = open_for_appending(self.file)
        if not self.is_begun:
            # A killed attempt may have left a torn last line. New lines must then begin with a line
            # break.
            self.pending[:0] = line_break(self.stream)
            self.is_begun = True
        return self.stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """The steps of a run in ascending order, each step once. A restarted attempt may repeat steps
    of older attempts. From its first step on, its steps replace those of older attempts.

    `metrics["loss"]` is one column as an array with one value per step. Other columns of the file
    that have numbers, such as `hook/NAME`, are columns, too.
    """

    columns: dict[str, np.ndarray]
    spec: ModelSpec
    plans: dict[int, Plan]
    site: Site
    skipped_lines: int
    other_sites: Mapping[int, Site] = dataclasses.field(default_factory=dict)
    """Sites of attempts that ran on another site than `site`, by number of the attempt."""
    damaged: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Reason why the plan or site of an attempt cannot be read, by number of the attempt. The steps
    of this attempt have neither MFU nor HFU."""
    is_imported: bool = False
    """Whether the steps were converted from the log of another training code."""

    @classmethod
    def read(cls, file: Path, **facts: Any) -> "Metrics":
        """Returns the steps in a metrics.jsonl as Metrics. If the file does not exist, there are no
        steps.

        Lines that are torn or were not written by the kit are skipped and counted. `facts` are the
        fields `spec`, `plans`, `site` and, optionally, `other_sites`, `damaged` and `is_imported`.
        `kit.run.Run.facts` returns them.
        """
        return cls.of(Columns(file).read_all(), **facts)

    @classmethod
    def of(cls, read: Columns, **facts: Any) -> "Metrics":
        """Returns Metrics of steps that were already read into Columns. `facts` are fields such as
        `spec` and `plans`, which `kit.run.Run.facts` returns.
        """
        further = (name for name in read.names if name not in COLUMNS)
        names = [*COLUMNS, *(name for name in further if np.isfinite(read[name]).any())]
        columns = {name: read[name] for name in names}
        columns |= {name: _whole(columns[name]) for name in ("step", "attempt", "tokens")}
        return cls(columns=columns, skipped_lines=read.skipped_lines, **facts)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def tokens_per_s(self) -> np.ndarray:
        """Tokens per second of each step, summed over all devices."""
        with np.errstate(all="ignore"):
            return self["tokens"] / self["step_time_s"]

    @property
    def total_tokens(self) -> np.ndarray:
        """Cumulative number of tokens of the run at the end of each step."""
        consumed = self.columns.get("consumed_tokens", np.full(len(self), np.nan))
        return _whole(tokens_seen(_whole(self["tokens"]), consumed))

    def mfu(self) -> np.ndarray | None:
        """Returns the MFU (model FLOP/s utilization) of each step, from 0 to 1: model FLOP/s
        divided by the peak dense FLOP/s of the devices for the plan's dtype. Returns None if the
        peak is unknown or wrong (`why_no_mfu`).

        If only a few steps are faster than the peak, the peak is believed, and these steps are NaN.
        They have a wrong time, after a change of the clock or from a damaged line.
        """
        return self._believable(0)

    def hfu(self) -> np.ndarray | None:
        """Returns the HFU (hardware FLOP/s utilization) of each step, from 0 to 1. Unlike MFU, it
        also counts the FLOPs of recomputation, as `ModelSpec.hardware_flops_per_token` defines
        them. It is None, or NaN for a step, in the same cases as the MFU.
        """
        return self._believable(1)

    def speeds(self) -> dict[str, np.ndarray]:
        """Returns the speeds of each step as arrays: `tokens_per_s` and, if the peak is known and
        not too low, `mfu` and `hfu`.
        """
        speeds = {"tokens_per_s": self.tokens_per_s, "mfu": self.mfu(), "hfu": self.hfu()}
        return {name: values for name, values in speeds.items() if values is not None}

    @property
    def why_no_mfu(self) -> str | None:
        """Reason why neither MFU nor HFU can be computed: `peak unknown`, or `above the peak` if
        too many steps are faster than the peak. None if both can be computed.
        """
        both = self.utilisations
        if both is None:
            return "peak unknown"
        known = both[1][np.isfinite(both[1])]
        return "above the peak" if refutes_peak(int(np.sum(known > 1)), len(known)) else None

    def _believable(self, which: int) -> np.ndarray | None:
        """Returns MFU (`which` is 0) or HFU (`which` is 1) of each step. Steps above the peak are
        NaN. Returns None if the peak is unknown or wrong.
        """
        if (both := self.utilisations) is None or self.why_no_mfu:
            return None
        return np.where(both[which] > 1, np.nan, both[which])

    @functools.cached_property
    def utilisations(self) -> np.ndarray | None:
        """MFU and HFU of each step, an array [2, steps]. Values above 1 are not removed. None if
        the peak is unknown.
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
        """Number of the layout (plan and site) of each step, counted from 0. It grows when an
        attempt changes the layout (`layout_numbers`).
        """
        return layout_numbers(self["attempt"], self.plans, self.other_sites)

    def summary(self) -> dict[str, Any]:
        """Returns the values of the last step by name. Speeds are medians over those of the last
        SPEED_STEPS steps that have the layout of the last step.

        A loss or gradient norm that is not finite is NaN or infinity. A value is None if it was
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
    """Returns the values of the last step by name.

    The value for each name in `speeds` is a median over those of the last SPEED_STEPS steps that
    have the layout of the last step. `speed_steps` is the number of these steps. A loss or gradient
    norm that is not finite is NaN or infinity. A value is None if it was never recorded or is
    unknown.

    Args:
        steps: steps of a run, at least one.
        speeds: arrays with one speed per step, by name of the speed.
        layouts: number of the layout (plan and site) of each step.
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
    """Returns the number of the layout (plan and site) of each step. `attempts` has the attempt of
    each step. The number grows by one at each attempt whose plan or site differs from that of the
    attempt before.

    Speed, MFU and time per step are averaged only over steps of one layout.
    """
    numbers = sorted(plans)
    changes = [
        attempt
        for earlier, attempt in itertools.pairwise(numbers)
        if (plans[earlier], other_sites.get(earlier)) != (plans[attempt], other_sites.get(attempt))
    ]
    return np.searchsorted(changes, attempts, side="right")


def rows_to_metrics(rows: list[dict[str, Any]], **facts: Any) -> Metrics:
    """Returns rows of metrics.jsonl as Metrics, in their order and including repeated steps.
    `facts` are fields such as `spec` and `plans`, which `kit.run.Run.facts` returns.
    """
    return Metrics(columns=dict(zip(NAMES, values_of(rows), strict=True)), skipped_lines=0, **facts)


def utilisation_rates(
    spec: ModelSpec, plan: Plan, site: Site, *, is_imported: bool
) -> tuple[float, float] | None:
    """Returns (MFU, HFU) at a speed of one token per second. Both are proportional to tokens per
    second, so the caller multiplies them by the speed. Returns None if the peak FLOP/s is unknown.

    For the steps of another training code, full recomputation is counted as the whole forward pass
    of each block, and selective recomputation as the core of attention. Megatron recomputes them
    this way, and papers count full recomputation this way.
    """
    peak = site.peak_flops_per_s(plan.precision)
    devices = plan.num_devices
    if peak is None:
        return None
    # On a local site, processes beyond the number of cores share the cores.
    if site.scheduler == "local":
        devices = min(devices, site.devices_per_node)
    executed = spec.hardware_flops_per_token(
        plan.recompute,
        whole=is_imported or plan.recomputes_whole,
        layers=plan.recomputed_layers(spec),
        attention=is_imported or plan.recomputes_attention,
    )
    return spec.flops_per_token() / (peak * devices), executed / (peak * devices)


def time_left_s(steps: Metrics | Columns, num_steps: int) -> float | None:
    """Returns the predicted seconds until a run has done `num_steps` steps. Returns None if the
    time of a step is unknown.

    The prediction uses the mean time of the last RECENT_STEPS steps of the newest attempt. To this
    it adds validation, saves and other pauses between steps, at the rate of the last PERIODS pauses
    of each kind. Therefore a slow phase in the past does not affect the prediction, however long it
    was.
    """
    if not len(steps):
        return None
    first = int(np.argmax(steps["attempt"] == steps["attempt"][-1]))
    first = max(first, len(steps) - LOOK_BACK_STEPS)
    took_s = steps["step_time_s"][first:]
    # The first step of an attempt is left out if there are others, since it compiles and connects.
    recent_s = took_s[1:][-RECENT_STEPS:] if len(took_s) > 1 else took_s
    recent_s = recent_s[np.isfinite(recent_s)]
    step_s = float(recent_s.mean()) if recent_s.size else 0.0
    if not step_s > 0:
        return None
    gaps_s = np.diff(steps["time"][first:]) - took_s[1:]
    # If the clock was set back, one gap is negative, and the gaps next to it may be far too long.
    # All of them are set to zero.
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
    """Returns the seconds per step that one kind of pause takes on average.

    Args:
        gaps_s: seconds between the end of each step and the beginning of the next step.
        pauses: indices in `gaps_s` of the gaps that are pauses of this kind, ascending.
    """
    if not len(pauses):
        return 0.0
    now = len(gaps_s) - 1
    counted = pauses[-PERIODS:]
    if len(pauses) <= PERIODS:  # With too few periods, the average is over the whole attempt.
        return float(gaps_s[counted].sum()) / (now + 1)
    begin = pauses[-PERIODS - 1]
    end = pauses[-1]
    # If the time since the last pause is longer than each of the counted periods, pauses have
    # become rarer. The average then includes this time.
    if now - end > np.diff(pauses[-PERIODS - 1 :]).max():
        end = now
    return float(gaps_s[counted].sum()) / float(end - begin)


def _column(steps: Metrics | Columns, name: str) -> np.ndarray:
    """Returns a column of the steps. If the run lacks the column, all values are NaN."""
    if isinstance(steps, Metrics) and name not in steps.columns:
        return np.full(len(steps), np.nan)
    return steps[name]


def refutes_peak(above: int, known: int) -> bool:
    """Returns whether too many steps are faster than the peak, so that the peak must be too low.
    `above` is the number of these steps, and `known` the number of all steps with a known speed.
    """
    return above > MAX_ABOVE_PEAK * known


def median(values: np.ndarray) -> float | None:
    """Returns the median of the finite values, or None if no value is finite."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else None


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns recorded numbers as int64. A value that is NaN or too large to be exact becomes 0."""
    return np.where(np.abs(values) < 2.0**53, values, 0).astype(np.int64)
