"""Alerts: what deserves a look, said once, and kept in the run directory (`alerts.jsonl`).

Rules: a loss or gradient norm that is not finite, at once; a loss that starts too high or stands
out (`kit.trainer.spikes`), or rises and does not come back (`rise.py`); a loss scale that
collapses; a peak that the run goes beyond, or comes closer to than real runs do; no step for a long
time; MFU that falls or is low; a slow rank; memory and disk that run out; an overdue checkpoint; a
job that failed or was lost.
"""

import math
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from cluster.job import JobStatus
from cluster.login.mirror import unheard
from cluster.state import JobState
from kit.errors import kit_command
from kit.monitor.curves import Curves
from kit.monitor.ranks import RankTimes
from kit.monitor.rise import Rises, end_of_line
from kit.run import Run
from kit.run.alerts import Alert, AlertLog, Level
from kit.run.checkpoint import BYTES_PER_PARAM
from kit.run.columns import Columns
from kit.run.metrics import median
from kit.trainer.spikes import bad_start, spikes

STALL_S, STALL_STEPS = 15.0, 5.0
MFU_FALL, MFU_LOW, MFU_DOUBTFUL, MFU_STEPS = 0.75, 0.30, 0.75, 50
MEMORY_FULL = 0.92
CHECKPOINT_LATE = 1.5
ROWS_PER_LOOK = 20_000  # a long history is gone through in several looks, none of which takes long


class Watchman:
    """Looks at a run now and then and tells what is new.

    One per viewer; it only reads, except for the alert log.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.log = AlertLog(run.directory / "alerts.jsonl")
        self._checked_rows, self._revision, self._rises = 0, -1, Rises()
        self._rows, self._rows_since = -1, time.monotonic()
        self._device_memory = run.site.device.memory_bytes

    def look(
        self, columns: Columns, curves: Curves, status: JobStatus, ranks: RankTimes
    ) -> list[Alert]:
        """Returns the alerts that are new, after writing them to the run directory."""
        found = [
            *self._at_steps(columns, curves),
            *self._peak(curves),
            *self._now(columns, curves, status, ranks),
        ]
        return self.log.add(found)

    def _at_steps(self, columns: Columns, curves: Curves) -> Iterator[Alert]:
        if columns.revision != self._revision:
            self._revision, self._checked_rows, self._rises = columns.revision, 0, Rises()
        start, end = self._checked_rows, min(len(columns), self._checked_rows + ROWS_PER_LOOK)
        if start == end:
            return
        self._checked_rows = end
        losses, steps = columns["loss"][:end], columns["step"]
        yield from bad_lines(columns, start, end)
        for name in ("loss", "grad_norm"):
            for row in not_finite(columns, name, start, end):
                yield _at(columns, row, "nan", "error", f"{name.replace('_', ' ')} is not finite")
        guess = math.log(self.run.spec.vocab_size)
        if (row := bad_start(losses, guess)) is not None and row >= start:
            high = (
                f"loss {losses[row]:.3g} after {losses[0]:.3g} at the start, where guessing at"
                f" random gives {guess:.3g}"
            )
            yield _at(
                columns,
                row,
                "start",
                "warning",
                f"{high}. Lower the learning rate, or warm up for longer",
            )
        for row, before in spikes(losses, start):
            yield _at(
                columns,
                row,
                "spike",
                "warning",
                f"loss spike {losses[row]:.3g} (median before {before:.3g})",
            )
        mixes = np.searchsorted(
            curves["tokens"], [phase.until_tokens for phase in self.run.recipe.phases]
        )
        for rise in self._rises.look(losses, columns["learning_rate"], mixes.tolist()):
            low, now = (
                f"lowest {rise.low:.3g} at step {steps[rise.low_row]:,.0f}",
                f"now {rise.level:.3g}",
            )
            away = f"not back for {steps[rise.row] - steps[rise.low_row]:,.0f} steps"
            advice = "go back to a checkpoint before it, unless the data became harder"
            yield _at(columns, rise.row, "rise", "warning", f"{low}, {now} and {away}; {advice}")

    def _peak(self, curves: Curves) -> Iterator[Alert]:
        """Judges the record, not the machine: of a run that has ended too."""
        dtype, columns = self.run.plan.precision, curves.columns
        peak = self.run.site.peak_flops_per_s(dtype)
        if peak is None or not len(curves):
            return
        of, advice = f"{dtype} peak of {peak / 1e12:.3g} TFLOP/s a device", peak_advice(self.run)
        recent = _finite(curves["mfu"][-MFU_STEPS:])
        if curves.times_peak is not None:
            told = (
                f"the steps reach {curves.times_peak:.0%} of it, so no MFU or HFU is given."
                f" {advice}"
            )
            yield _at(columns, len(curves) - 1, "peak", "error", f"the {of} cannot be true: {told}")
        elif len(recent) and (mfu := float(np.median(recent))) > MFU_DOUBTFUL:
            told = f"an MFU of {mfu:.0%} is higher than real runs reach. {advice}"
            yield _at(columns, len(curves) - 1, "peak", "warning", f"the {of} is doubtful: {told}")

    def _now(
        self, columns: Columns, curves: Curves, status: JobStatus, ranks: RankTimes
    ) -> Iterator[Alert]:
        step = int(columns["step"][-1]) if len(columns) else 0

        def alert(kind: str, level: Level, message: str) -> Alert:
            return Alert(
                kind=kind,
                level=level,
                message=message,
                attempt=status.attempt,
                step=step,
                time=time.time(),
            )

        removed = not (
            self.run.directory / "state.json"
        ).exists()  # or being so: nothing may be written there
        if not removed and status.state in (JobState.FAILED, JobState.LOST, JobState.STALLED):
            yield alert("job", "error", f"job {status.state}: {status.reason}")
        if status.state is not JobState.RUNNING:
            self._rows_since = time.monotonic()
            return
        checks = [
            self._stall(columns),
            self._mfu(curves),
            self._straggler(ranks),
            self._memory(columns),
        ]
        if not (
            self.run.is_imported or self.run.is_mirror
        ):  # else its checkpoints are on another machine's disk
            checks += [self._disk(), self._checkpoint(columns, status.attempt, step)]
        for kind, level, message in filter(None, checks):
            yield alert(kind, level, message)

    def _stall(self, columns: Columns) -> tuple[str, Level, str] | None:
        """Judges by this host's own clock, since another host's may differ, and nothing while it
        hears of no steps.
        """
        if len(columns) != self._rows or unheard(self.run.directory):
            self._rows, self._rows_since = len(columns), time.monotonic()
        if len(columns) < 5:
            return None  # the first steps compile
        usual, silent = (
            median(columns["step_time_s"][-50:]) or 0,
            time.monotonic() - self._rows_since,
        )
        if silent <= max(STALL_S, STALL_STEPS * usual):
            return None
        return "stall", "warning", f"no step for {silent:.0f} s, where one takes {usual:.3g} s"

    def _mfu(self, curves: Curves) -> tuple[str, Level, str] | None:
        recent = _finite(curves["mfu"][-MFU_STEPS:])
        if not len(recent):
            return None
        now, before = float(np.median(recent)), _finite(curves["mfu"][-20_000:])
        if len(before) >= 2 * MFU_STEPS and now < MFU_FALL * float(np.median(before)):
            return "mfu", "warning", f"MFU fell to {now:.1%}, from {np.median(before):.1%}"
        if len(before) >= 2 * MFU_STEPS and now < MFU_LOW and self.run.site.scheduler != "local":
            return "mfu", "warning", f"MFU is {now:.1%}, below {MFU_LOW:.0%}"
        return None

    def _straggler(self, ranks: RankTimes) -> tuple[str, Level, str] | None:
        slowest = ranks.slowest()
        return ("straggler", "warning", str(slowest)) if slowest and slowest.is_sure else None

    def _memory(self, columns: Columns) -> tuple[str, Level, str] | None:
        if self._device_memory is None or not len(columns):
            return None
        used = columns["memory_bytes"][-1] / self._device_memory.value
        if not used > MEMORY_FULL:
            return None
        return (
            "memory",
            "warning",
            f"{used:.0%} of {self._device_memory.value / 2**30:.0f} GiB device memory is in use",
        )

    def _disk(self) -> tuple[str, Level, str] | None:
        try:
            free = shutil.disk_usage(self.run.directory).free
        except OSError:
            return None
        checkpoint = BYTES_PER_PARAM * self.run.spec.num_params
        if free > 2.1 * checkpoint:
            return None
        level: Level = "error" if free < 1.05 * checkpoint else "warning"
        return (
            "disk",
            level,
            f"{free / 2**30:.1f} GiB free, a checkpoint takes {checkpoint / 2**30:.1f} GiB",
        )

    def _checkpoint(
        self, columns: Columns, attempt: int, step: int
    ) -> tuple[str, Level, str] | None:
        every = self.run.recipe.checkpoint_every
        if every is None or attempt not in columns.first_steps:
            return None
        old = step - max([columns.first_steps[attempt] - 1, *self.run.checkpoints.steps()])
        if old <= CHECKPOINT_LATE * every:
            return None
        return (
            "checkpoint",
            "warning",
            f"the last checkpoint is {old:,} steps old, one is due every {every:,}",
        )


def peak_advice(run: Run) -> str:
    """Returns what to do about a peak that is not known or not believed."""
    if run.site.scheduler == "local":
        return (
            "Measure it again on an idle machine:"
            f" {kit_command('bench', 'site', '--apply', run.directory)}"
        )
    return (
        f"Check the tokens of a step, the number of devices ({run.plan.num_devices:,}) and, in "
        f"{run.directory / 'site.json'}, device.peak_flops_per_s against the data sheet"
    )


def not_finite(columns: Columns, name: str, start: int, end: int) -> np.ndarray:
    """Returns the rows from `start` to `end` at which a stretch of non-finite losses or gradient
    norms begins.

    A series that has never been finite was not logged, unless the loss of a step with a duration is
    the one missing. Nor is it a fault where fp16 skips a step to find its loss scale: its gradient
    has overflowed, and Megatron prints no loss where all steps of a line were skipped.
    """
    since = max(0, start - 1)
    bad = ~np.isfinite(columns[name][since:end]) & np.isfinite(columns["step_time_s"][since:end])
    if name == "grad_norm":
        known = np.flatnonzero(np.isfinite(columns[name][:end]))
        bad[: max(0, known[0] - since) if len(known) else None] = False
    skipped = (
        np.diff(
            np.nan_to_num(columns["skipped_steps"][since:end]), prepend=0 if start == 0 else np.inf
        )
        > 0
    )
    if name == "loss":
        skipped &= columns["nan_steps"][since:end] == 0
    rows = _begins(bad, start)
    return rows[~skipped[rows - since]]


def bad_lines(columns: Columns, start: int, end: int) -> Iterator[Alert]:
    """Yields what a trainer says of itself: lines with steps that were not finite, and a loss
    scale that collapses.
    """
    since = max(0, start - 1)
    for row in _begins(columns["nan_steps"][since:end] > 0, start):
        count, line = columns["nan_steps"][row], end_of_line(columns["loss"][:end], row) - row + 1
        of = (
            f"{count:,.0f} of {line:,} steps"
            if np.isfinite(columns["loss"][row])
            else f"{count:,.0f} steps"
        )
        yield _at(columns, row, "nan", "error", f"the loss of {of} is not finite")
    scales = columns["loss_scale"][:end]
    for row in _begins(scales[since:] <= 1, start):
        if (highest := np.nanmax(scales[: row + 1])) > 1:
            told = (
                f"the loss scale fell to {scales[row]:g}, from up to {highest:,.0f}: gradients"
                " overflow at any scale"
            )
            advice = (
                "steps are skipped. Go back to a checkpoint before it, lower the learning rate, or"
                " train in bf16"
            )
            yield _at(columns, row, "loss_scale", "error", f"{told}, and {advice}")


def _begins(bad: np.ndarray, start: int) -> np.ndarray:
    """Returns the rows from `start` on at which a stretch begins; `bad` has the row before
    `start` too, if any.
    """
    rows = max(0, start - 1) + np.flatnonzero(bad & ~np.append(False, bad[:-1]))
    return rows[rows >= start]


def _at(columns: Columns, row: int, kind: str, level: Level, message: str) -> Alert:
    values: dict[str, Any] = {name: columns[name][row] for name in ("attempt", "step", "time")}
    when = float(values["time"]) if np.isfinite(values["time"]) else time.time()
    return Alert(
        kind=kind,
        level=level,
        message=message,
        attempt=int(values["attempt"]),
        step=int(values["step"]),
        time=when,
    )


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]
