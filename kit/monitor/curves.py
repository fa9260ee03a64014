"""Curves: the series (loss, MFU and others) that the dashboard of a run draws, derived from the
columns of metrics.jsonl. Each series has an exact moving average, and its least and largest value
in each pixel of a chart.

Only new rows are processed. So an update has the same cost after a thousand steps and after a
million steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kit.run import Run
from kit.run.columns import Columns, GrowingArray, tokens_seen
from kit.run.metrics import Metrics, refutes_peak
from kit.run.tail import CHUNK_BYTES

SERIES = ("loss", "mfu", "tokens_per_s", "grad_norm", "learning_rate", "memory_bytes")
"""Names of the series that the dashboard draws by default, in the order of its charts."""
UNSMOOTHED = ("learning_rate", "memory_bytes")
"""Series that are drawn without a moving average. They have no noise, so an average would only lag
behind them."""
SPARSE_ROWS = 1000
"""Number of last steps that are searched for values of a series. A series that lacks a value in
more than half of these steps, such as a validation loss, is drawn without a moving average."""
DERIVED = ("tokens_per_s", "mfu", "hfu", "tokens", "time", "layout")
"""Series that are computed from columns of metrics.jsonl. All other series are columns of the
file."""
UTILISATIONS = ("mfu", "hfu")
SPEEDS = ("tokens_per_s", *UTILISATIONS)
"""Series whose values jump when the layout of the run changes. Their moving averages start again at
such a change, unlike the average of the loss."""
PLACES = ("step", "attempt", "time")
"""Columns that no chart shows, since they only say where a step belongs."""
SOURCE_COLUMNS = ("step", "tokens", "step_time_s", "attempt", "consumed_tokens", "time")
DRAWABLE = 1e30
"""Absolute value from which on a number is too large to be drawn on an axis. Such a number is
treated as not finite."""
SUM_BLOCK = 32
"""Number of values in a block of `discounted_sum`. One matrix product computes the sums within all
blocks."""
BLOCK_ROWS = 64
"""Number of rows in a block. The least and the largest value of each block are stored. In a long
run, the extremes of a pixel are computed from its blocks instead of its rows."""
WIDE_PIXEL_ROWS = 4 * BLOCK_ROWS
"""Number of rows from which on a pixel is aligned to blocks. An aligned pixel begins at a block
border, which is too early by at most a quarter of the pixel's width."""
MAX_WIDTH = 2400
"""Largest width of a chart in pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotRange:
    """The range of the x axis that a chart shows: from `start` to `end`, on `width` pixels. With
    `log_x`, the axis is logarithmic.
    """

    axis: str = "step"
    """Quantity on the x axis: `step`, `tokens` or `time` (elapsed seconds)."""
    start: float = -math.inf
    end: float = math.inf
    width: int = 600
    log_x: bool = False

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "PlotRange":
        """Returns the range that a message of the front end requests. A missing start is the first
        step of the run, a missing end is the last step. The width is clamped to the range from 100
        to MAX_WIDTH pixels.
        """
        start = message["start"]
        if start is None:
            start = -math.inf
        end = message["end"]
        if end is None:
            end = math.inf
        return cls(
            axis=message["axis"],
            start=start,
            end=end,
            width=min(max(message["width"], 100), MAX_WIDTH),
            log_x=message["log_x"],
        )


class Curves:
    """The series of a run over training step, tokens seen and elapsed seconds, with exponential
    moving averages. `curves["loss"]` is one series as an array.

    Args:
        run: the run, as its files describe it now.
        smoothing: weight of past values in the moving average, from 0 (no smoothing) to below 1.
        earlier: curves of this run before its plan or site changed. Their parsed rows and their
            smoothing are taken over. All derived series are computed again.
    """

    def __init__(
        self, run: Run, smoothing: float = 0.9, *, earlier: "Curves | None" = None
    ) -> None:
        self.run = run
        self.smoothing = earlier.smoothing if earlier else smoothing
        self.columns = earlier.columns if earlier else Columns(run.directory / "metrics.jsonl")
        self.damaged: Mapping[int, str] = {}
        """For each attempt whose plan or site file cannot be read, the reason, by number of the
        attempt."""
        self.scores: Mapping[str, Mapping[int, float]] = earlier.scores if earlier else {}
        """Scores of checkpoints by training step, by name of the series."""
        self._revision = self.columns.revision
        """Revision of `columns` from which the following attributes were derived. A new revision
        means that older rows have changed."""
        self._values = GrowingArray(len(DERIVED))
        self._above_peak = GrowingArray(1)
        """HFU of each step whose HFU is above 1. Later steps are appended to the array."""
        self._known_peak = 0
        """Number of training steps whose HFU is known."""
        self._averages: dict[str, Average] = {}
        self._blocks: dict[str, GrowingArray] = {}
        """Least and largest value in each complete block of BLOCK_ROWS rows, by name of the
        series."""
        if len(self.columns):
            self._extend()

    def __len__(self) -> int:
        return self._values.length

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.scores:
            return self._values_of_score(name)
        if name not in DERIVED:
            return self.columns[name][: len(self)]
        if name in UTILISATIONS and self.hfu_above_peak is not None:
            return np.broadcast_to(np.nan, len(self))
        return self._values.values[DERIVED.index(name)]

    @property
    def hfu_above_peak(self) -> float | None:
        """Median HFU of the steps whose HFU is above 1, if there are so many of these steps that
        the peak must be wrong. None for a believable peak.

        With a wrong peak, the run has neither MFU nor HFU (`kit.run.metrics.Metrics` has the rule).
        """
        above = self._above_peak.values[0]
        if not refutes_peak(len(above), self._known_peak):
            return None
        return float(np.median(above))

    @property
    def why_no_mfu(self) -> str | None:
        """Reason why no step of the run has an MFU: `peak unknown` or `above the peak`. None if
        steps can have an MFU.
        """
        if self.hfu_above_peak is not None:
            return "above the peak"
        peak = self.run.site.peak_flops_per_s(self.run.plan.precision)
        return "peak unknown" if peak is None else None

    def shown_speed(self) -> str:
        """Returns the name of the speed that views with only one speed chart show: `mfu` if any
        step has an MFU, else `tokens_per_s`.
        """
        return "mfu" if np.isfinite(self["mfu"]).any() else "tokens_per_s"

    def set_smoothing(self, smoothing: float) -> None:
        """Sets the weight of past values in the moving averages, from 0 (no smoothing) to
        below 1.
        """
        self.smoothing = smoothing

    def set_scores(self, scores: Mapping[str, Mapping[int, float]]) -> None:
        """Makes the scores of checkpoints further series. `scores` maps a name to the scores by
        training step. A name that a column of metrics.jsonl has is left out.
        """
        columns = self.columns.recorded_names()
        for name in self.scores:
            # Scores of old steps may be new, so the numbers of old steps have changed.
            self._averages.pop(name, None)
            self._blocks.pop(name, None)
        self.scores = {name: dict(scores[name]) for name in scores if name not in columns}

    def _values_of_score(self, name: str) -> np.ndarray:
        """Returns a score at each training step. NaN at a step whose checkpoint has no score."""
        steps = np.array(list(self.scores[name]))
        rows = np.searchsorted(self["step"], steps)
        rows[rows == len(self)] = 0
        found = self["step"][rows] == steps if len(self) else np.zeros(len(steps), dtype=bool)
        values = np.full(len(self), np.nan)
        values[rows[found]] = np.array(list(self.scores[name].values()))[found]
        return values

    def read(self, limit_bytes: int = CHUNK_BYTES) -> bool:
        """Reads new training steps, at most `limit_bytes` of metrics.jsonl. If older steps have
        changed, all series are derived again. Returns whether there is more to read.
        """
        more = self.columns.poll(limit_bytes)
        if self.columns.revision != self._revision:
            self._revision = self.columns.revision
            self._values = GrowingArray(len(DERIVED))
            self._above_peak = GrowingArray(1)
            self._known_peak = 0
            self.damaged = {}
            self._forget()
        if len(self) < len(self.columns):
            self._extend()
        return more

    def read_all(self) -> "Curves":
        """Reads all new training steps. Returns the curves themselves."""
        while self.read():
            pass
        return self

    def metrics(self) -> Metrics:
        """Returns the metrics of all training steps that were read so far."""
        return Metrics.of(self.columns, **self.run.metrics_arguments())

    def _forget(self) -> None:
        """Drops all moving averages and blocks. It is called when the values of their series have
        changed.
        """
        self._averages.clear()
        self._blocks.clear()

    def _extend(self) -> None:
        """Computes the derived series for new rows of the metrics."""
        first = len(self)
        new = {name: self.columns[name][first:] for name in SOURCE_COLUMNS}
        metrics = Metrics(columns=new, skipped_lines=0, **self.run.metrics_arguments())
        self.damaged = metrics.damaged
        speed = np.where(np.isfinite(metrics.tokens_per_s), metrics.tokens_per_s, np.nan)
        seen = self["tokens"][-1] if first else None
        tokens = tokens_seen(new["tokens"], new["consumed_tokens"], seen)
        # The elapsed time must not decrease, even if the clock of the trainer's machine was set
        # back.
        elapsed = np.append(self["time"][-1:], new["time"] - self.columns["time"][0])
        time = np.fmax.accumulate(np.append(0.0, elapsed))[-len(speed) :]
        rates = self._believable_rates(metrics.utilisations, len(speed))
        self._values.extend(np.vstack([speed, rates, tokens, time, metrics.layouts]))

    def further_names(self) -> list[str]:
        """Returns the names of the columns that have numbers and are not in SERIES, and of the
        scores, in the order in which they are offered as further charts.
        """
        names = [*self.columns.recorded_names(), *self.scores]
        return [name for name in names if name not in (*SERIES, *PLACES)]

    def is_smoothed(self, name: str) -> bool:
        """Returns whether a series is drawn with its moving average. A series of SERIES is smoothed
        if it is not in UNSMOOTHED. Any other series is smoothed if most steps have a value.
        """
        if name in SERIES:
            return name not in UNSMOOTHED
        newest = np.isfinite(self[name][-SPARSE_ROWS:])
        return bool(2 * np.count_nonzero(newest) > len(newest))

    def line(self, name: str) -> np.ndarray:
        """Returns the values of a series that a chart draws as its line, one for each training
        step: the moving average, or the series itself if it is not smoothed. Between the values of
        a sparse series, the line has the last value.
        """
        if name in UNSMOOTHED:
            return self[name]
        return self.average(name, None if self.is_smoothed(name) else 0.0)

    def average(self, name: str, smoothing: float | None = None) -> np.ndarray:
        """Returns the moving average of a series at each training step. The average is taken over
        all steps, not over the pixels of a chart. If `smoothing` is None, the present smoothing is
        used.
        """
        if smoothing is None:
            smoothing = self.smoothing
        if name not in self._averages or self._averages[name].smoothing != smoothing:
            self._averages[name] = Average(smoothing)
        layouts = self["layout"] if name in SPEEDS else None
        return self._averages[name].update(self[name], layouts)

    def window(
        self, names: tuple[str, ...], plot_range: PlotRange
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (x, rows) for those pixels of a chart that have data. `x`, [n], are the positions
        of the pixels. `rows`, [3 x names, n], are minimum, maximum and line (`Curves.line`) of each
        series in `names`.
        """
        x = self[plot_range.axis]
        edges = pixel_edges(x, plot_range)
        if len(edges) < 2:
            return np.empty(0), np.empty((3 * len(names), 0))
        last = edges[1:] - 1
        rows = []
        for name in names:
            rows += [*self.envelope(name, edges), self.line(name)[last]]
        at = x[last]
        if len(at) > 1:
            # The x of a pixel is the x of its last step. Only for the first pixel it is the x of
            # its first step, so that the curve begins where the run begins.
            at[0] = x[edges[0]]
        return at, np.stack(rows)

    def envelope(self, name: str, edges: np.ndarray) -> np.ndarray:
        """Returns the least and the largest finite value of a series in each pixel, [2, pixels].
        NaN for a pixel without a finite value. `edges` is a result of `pixel_edges`: the first row
        of each pixel.
        """
        values = self[name]
        inner = edges[1:-1]
        if len(inner) < 2 or (inner % BLOCK_ROWS).any():
            return extremes_between(values, values, edges)
        first = extremes_between(values, values, edges[:2])
        last = extremes_between(values, values, edges[-2:])
        least, largest = self._extremes_of_blocks(name)
        middle = extremes_between(least, largest, inner // BLOCK_ROWS)
        return np.hstack([first, middle, last])

    def _extremes_of_blocks(self, name: str) -> np.ndarray:
        """Returns the least and the largest finite value in each complete block of BLOCK_ROWS rows
        of a series, [2, blocks].
        """
        known = self._blocks.setdefault(name, GrowingArray(2))
        values = self[name]
        new = values[known.length * BLOCK_ROWS : len(values) // BLOCK_ROWS * BLOCK_ROWS]
        blocks = new.reshape(-1, BLOCK_ROWS)
        known.extend([np.fmin.reduce(blocks, axis=1), np.fmax.reduce(blocks, axis=1)])
        return known.values

    def _believable_rates(self, rates: np.ndarray | None, count: int) -> np.ndarray:
        """Returns MFU and HFU of `count` new steps, [2, count]. Values above 1 become NaN, since
        they are impossible.
        """
        if rates is None:
            return np.full((2, count), np.nan)
        was_refuted = self.hfu_above_peak is not None
        hardware = rates[1]
        self._above_peak.extend(hardware[hardware > 1])
        self._known_peak += int(np.isfinite(hardware).sum())
        if was_refuted != (self.hfu_above_peak is not None):
            self._forget()
        return np.where(rates > 1, np.nan, rates)


class Average:
    """Exponential moving average without bias at its start. With weight w (the smoothing), it is
    sum(w**age y) / sum(w**age) over all finite values y so far. The age of a value is the number of
    finite values after it.

    A value that is not finite does not change the average. Before the first finite value, the
    average is NaN.
    """

    def __init__(self, smoothing: float) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(
                f"smoothing: {smoothing!r} is not allowed. Give a number from 0 to below 1."
            )
        self.smoothing = smoothing
        self._result = GrowingArray(1)
        self._group = 0.0
        """Group number (layout) of the last value."""
        self._group_average = GroupAverage(smoothing)

    def update(self, values: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
        """Returns the moving average at each of `values`. The array must begin with the values of
        the last call.

        `groups` has a group number for each value, such as the number of the layout. Where the
        group changes, the average starts again.
        """
        known = self._result.length
        new = values[known:]
        if groups is None:
            self._result.extend(self._group_average.extend(new))
            return self._result.values[0]
        new_groups = groups[known:]
        changes = np.flatnonzero(np.diff(new_groups, prepend=self._group))
        for start, end in itertools.pairwise([0, *changes.tolist(), len(new)]):
            if start < end and new_groups[start] != self._group:
                self._group = new_groups[start]
                self._group_average = GroupAverage(self.smoothing)
            self._result.extend(self._group_average.extend(new[start:end]))
        return self._result.values[0]


class GroupAverage:
    """Exponential moving average of one group, which is a sequence of values over which an
    `Average` does not start again.
    """

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing
        self._last = math.nan
        """Moving average at the last value."""
        self._total = 0.0
        """Sum of all finite values, each multiplied by w**age, where w is the smoothing."""
        self._count = 0
        """Number of finite values so far."""

    def extend(self, values: np.ndarray) -> np.ndarray:
        """Returns the moving averages at the next values of the group."""
        finite = np.isfinite(values)
        # The average stays constant at values that are not finite.
        averages = np.append(self._last, self._extend_finite(values[finite]))
        self._last = float(averages[-1])
        return averages[np.cumsum(finite)]

    def _extend_finite(self, values: np.ndarray) -> np.ndarray:
        """Returns the moving averages at the next values of the group. All values must be finite.

        The weights of n values sum to (1 - w**n) / (1 - w), where w is the smoothing.
        """
        totals = discounted_sum(values, self._smoothing, self._total)
        counts = np.arange(self._count + 1, self._count + len(values) + 1)
        self._count += len(values)
        if len(values):
            self._total = float(totals[-1])
        return totals * (1 - self._smoothing) / (1 - self._smoothing**counts)


def mask_undrawable(values: np.ndarray) -> np.ndarray:
    """Returns `values` with NaN in place of each value that cannot be drawn on an axis (not finite,
    or from DRAWABLE on).
    """
    return np.where(np.abs(values) < DRAWABLE, values, np.nan)


def discounted_sum(values: np.ndarray, decay: float, start: float = 0.0) -> np.ndarray:
    """Returns the discounted sums s, with s[i] = decay * s[i-1] + values[i]. The sum before s[0] is
    `start`. The result is exact, and no Python loop runs over the values.

    One matrix product computes the sums within all blocks of SUM_BLOCK values. The sums at the ends
    of the blocks follow the same recurrence with fewer values, so they are computed recursively.
    """
    powers = decay ** np.arange(SUM_BLOCK + 1)
    lags = np.subtract.outer(np.arange(SUM_BLOCK), np.arange(SUM_BLOCK))
    inside = np.where(lags >= 0, powers[np.abs(lags)], 0.0)
    whole = len(values) // SUM_BLOCK * SUM_BLOCK
    result = np.empty(len(values))
    if whole:
        blocks = values[:whole].reshape(-1, SUM_BLOCK)
        local = np.matmul(blocks, inside.T, out=result[:whole].reshape(-1, SUM_BLOCK))
        carried = np.append(
            start, discounted_sum(local[:-1, -1].copy(), float(powers[SUM_BLOCK]), start)
        )
        local += carried[:, None] * powers[1:]
        start = float(local[-1, -1])
    rest = len(values) - whole
    result[whole:] = inside[:rest, :rest] @ values[whole:] + start * powers[1 : rest + 1]
    return result


def pixel_edges(x: np.ndarray, plot_range: PlotRange) -> np.ndarray:
    """Returns the first row of each pixel that has rows, followed by the row after the last pixel.
    With e as the result, pixel i consists of the rows from e[i] to e[i+1] - 1.

    One row before and one row after the shown range are included, so that lines reach the border of
    the chart.
    """
    first = max(0, int(np.searchsorted(x, plot_range.start)) - 1)
    if plot_range.log_x:
        # A logarithmic axis can show only positive x.
        first = max(first, int(np.searchsorted(x, 0, side="right")))
    last = min(len(x), int(np.searchsorted(x, plot_range.end, side="right")) + 1)
    if first >= last:
        return np.zeros(0, dtype=np.intp)
    if last - first <= 2 * plot_range.width:
        return np.arange(first, last + 1, dtype=np.intp)
    space = np.geomspace if plot_range.log_x else np.linspace
    grid = space(x[first], x[last - 1], plot_range.width + 1)
    edges = first + np.searchsorted(x[first:last], grid[1:-1])
    edges -= edges % BLOCK_ROWS * (np.diff(edges, prepend=first) >= WIDE_PIXEL_ROWS)
    return np.unique(np.concatenate([[first], edges, [last]])).astype(np.intp)


def extremes_between(least: np.ndarray, largest: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the least and the largest finite value in each pixel, [2, pixels]. NaN for a pixel
    without a finite value.

    Args:
        least: least value of each row, or of each block of rows.
        largest: largest value of each row, or of each block of rows.
        edges: index of the first row (or block) of each pixel, followed by the end of the last
            pixel.
    """
    low = np.fmin.reduceat(least[: edges[-1]], edges[:-1])
    return np.stack([low, np.fmax.reduceat(largest[: edges[-1]], edges[:-1])])
