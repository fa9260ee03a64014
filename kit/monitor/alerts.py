"""Alerts: what deserves a look, said once, and kept in the run directory (`alerts.jsonl`).

Rules: a loss or gradient norm that is not finite, at once; a loss that starts too high or stands
out (`kit.trainer.spikes`), or rises and does not come back (`rise.py`); a loss scale that
collapses; a peak that the run goes beyond, or comes closer to than real runs do; an attempt whose
plan or site is damaged, and so has no MFU; a start that takes long; no step for a long time; MFU
that falls or is low; a slow rank; memory and disk that run out; an overdue checkpoint; a job that
failed or was lost.
"""

import math
import shutil
import time
from collections.abc import Iterator

import numpy as np

from cluster.job import JobStatus
from cluster.login.mirror import unheard
from cluster.outcome import log_tail
from cluster.record import cut
from cluster.state import JobState, find_log
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
JOIN_S = 180.0
"""Seconds of a start after which a warning says that not all ranks have joined. It is no error,
since imports from a slow file system may take longer."""
FIRST_STEP_S = 300.0
"""Seconds from the joining of all ranks after which a warning says that there is no first step.
Loading a large checkpoint and compilation take minutes."""
LOGS_READ = 8
"""Number of ranks whose logs are searched for a last line."""
MFU_FALL, MFU_LOW, MFU_DOUBTFUL, MFU_STEPS = 0.75, 0.30, 0.75, 50
MEMORY_FULL = 0.92
CHECKPOINT_LATE = 1.5
ROWS_PER_LOOK = 20_000  # a long history is gone through in several looks, none of which takes long
Found = Iterator[tuple[int | None, str, Level, str]]
"""Row of the metrics (None: of now), kind, level and message."""


class Watchman:
    """Looks at a run now and then and tells what is new.

    One per viewer; it only reads, except for the alert log. `earlier` watched the same run before
    it changed. What it has judged is taken over.
    """

    def __init__(self, run: Run, *, earlier: "Watchman | None" = None) -> None:
        self.run = run
        self.log = earlier.log if earlier else AlertLog(run.directory / "alerts.jsonl")
        self._checked_rows = earlier._checked_rows if earlier else 0
        self._revision = earlier._revision if earlier else -1
        self._rises = earlier._rises if earlier else Rises()
        self._rows = earlier._rows if earlier else -1
        self._rows_since = earlier._rows_since if earlier else time.monotonic()
        self._start = earlier._start if earlier else (0, False)
        """(attempt, whether all ranks have joined) of the start that is watched."""
        self._start_since = earlier._start_since if earlier else time.monotonic()
        """Time at which this watchman first saw `_start`, in seconds of the monotonic clock."""

    def look(self, curves: Curves, status: JobStatus, ranks: RankTimes) -> list[Alert]:
        """Returns the alerts that are new, after writing them to the run directory."""
        columns = curves.columns

        def alert(row: int | None, kind: str, level: Level, message: str) -> Alert:
            last = len(columns) - 1 if row is None else row
            when = time.time() if row is None else float(columns["time"][row])
            return Alert(
                kind=kind,
                level=level,
                message=message,
                attempt=status.attempt if row is None else int(columns["attempt"][row]),
                step=int(columns["step"][last]) if len(columns) else 0,
                time=when if math.isfinite(when) else time.time(),
            )

        rules = (
            self._at_rows(curves),
            self._peak(curves),
            damaged_records(curves),
            self._now(curves, status, ranks),
        )
        return self.log.add([alert(*found) for rule in rules for found in rule])

    def _at_rows(self, curves: Curves) -> Found:
        """Yields what the rows tell that no look has been at."""
        columns = curves.columns
        if columns.revision != self._revision:
            self._revision, self._checked_rows, self._rises = columns.revision, 0, Rises()
        start, end = self._checked_rows, min(len(columns), self._checked_rows + ROWS_PER_LOOK)
        self._checked_rows = end
        if start == end:
            return
        yield from bad_lines(columns, start, end)
        for name, words in (("loss", "loss"), ("grad_norm", "gradient norm")):
            for row in not_finite(columns, name, start, end):
                yield row, "nan", "error", f"{words} is not finite"
        losses, steps = columns["loss"][:end], columns["step"]
        guess = math.log(self.run.spec.vocab_size)
        if (row := bad_start(losses, guess)) is not None and row >= start:
            yield (
                row,
                "start",
                "warning",
                f"loss {losses[row]:.3g} after {losses[0]:.3g} at the start, where guessing at"
                f" random gives {guess:.3g}. Lower the learning rate, or warm up for longer",
            )
        for row, before in spikes(losses, start):
            yield (
                row,
                "spike",
                "warning",
                f"loss spike {losses[row]:.3g} (median before {before:.3g})",
            )
        phases = [phase.until_tokens for phase in self.run.recipe.phases]
        new_data = np.searchsorted(curves["tokens"], phases).tolist()
        for rise in self._rises.look(losses, columns["learning_rate"], new_data):
            yield (
                rise.row,
                "rise",
                "warning",
                f"lowest {rise.low:.3g} at step {steps[rise.low_row]:,.0f}, now {rise.level:.3g}"
                f" and not back for {steps[rise.row] - steps[rise.low_row]:,.0f} steps; go back to"
                " a checkpoint before it, unless the data became harder",
            )

    def _peak(self, curves: Curves) -> Found:
        """Judges the record, not the machine: of a run that has ended too."""
        dtype, last = self.run.plan.precision, len(curves) - 1
        peak = self.run.site.peak_flops_per_s(dtype)
        if peak is None or last < 0:
            return
        of = f"the {dtype} peak of {peak / 1e12:.3g} TFLOP/s a device"
        if curves.times_peak is not None:
            told = f"the steps reach {curves.times_peak:.0%} of it, so no MFU or HFU is given."
            yield last, "peak", "error", f"{of} cannot be true: {told} {peak_advice(self.run)}"
        elif (mfu := median(curves["mfu"][-MFU_STEPS:]) or 0) > MFU_DOUBTFUL:
            told = f"an MFU of {mfu:.0%} is higher than real runs reach."
            yield last, "peak", "warning", f"{of} is doubtful: {told} {peak_advice(self.run)}"

    def _now(self, curves: Curves, status: JobStatus, ranks: RankTimes) -> Found:
        columns = curves.columns
        # Without its state a run was removed, or is being so: nothing may be written there.
        bad = status.state in (JobState.FAILED, JobState.LOST, JobState.STALLED)
        if bad and (self.run.directory / "state.json").exists():
            yield None, "job", "error", f"job {status.state}: {status.reason}"
        yield from self._slow_start(status)
        if status.state is not JobState.RUNNING:
            self._rows_since = time.monotonic()
            return
        yield from self._stall(columns)
        yield from self._mfu(curves)
        if ranks.slowest and ranks.slowest.is_sure:
            yield None, "straggler", "warning", str(ranks.slowest)
        memory = self.run.site.device.memory_bytes
        if memory and len(columns) and columns["memory_bytes"][-1] > MEMORY_FULL * memory.value:
            used, of = columns["memory_bytes"][-1] / memory.value, memory.value / 2**30
            yield None, "memory", "warning", f"{used:.0%} of {of:.0f} GiB device memory is in use"
        # The checkpoints of the others are on another machine's disk.
        if not (self.run.is_imported or self.run.is_mirror):
            yield from self._disk()
            yield from self._checkpoint(columns, status.attempt)

    def _slow_start(self, status: JobStatus) -> Found:
        """Yields a warning for a start that takes long, with the last line of a rank's log."""
        start = (status.attempt, status.has_joined)
        is_unknown = status.state is not JobState.STARTING or unheard(self.run.directory)
        if is_unknown or start != self._start:
            self._start = start
            self._start_since = time.monotonic()
        if is_unknown:
            return
        watched_s = time.monotonic() - self._start_since
        lasted_s = max(watched_s, status.starting_s or 0.0)
        if lasted_s > (FIRST_STEP_S if status.has_joined else JOIN_S):
            line = self._last_log_line(status.attempt)
            told = f". Last line of {line}" if line else ""
            yield None, "stall", "warning", f"no step yet: {status.reason}{told}"

    def _last_log_line(self, attempt: int) -> str:
        """Returns "NAME: LINE" for the first log of a rank that is not empty, with its last line.
        Empty if all are.
        """
        per_node = self.run.site.devices_per_node
        for rank in range(min(LOGS_READ, self.run.plan.num_devices)):
            file = find_log(self.run.directory, attempt, rank, per_node)
            if lines := log_tail(file).splitlines():
                return f"{file.relative_to(self.run.directory)}: {cut(lines[-1].strip(), 300)}"
        return ""

    def _stall(self, columns: Columns) -> Found:
        """Judges by this host's own clock, since another host's may differ, and nothing while it
        hears of no steps.
        """
        if len(columns) != self._rows or unheard(self.run.directory):
            self._rows, self._rows_since = len(columns), time.monotonic()
        usual = median(columns["step_time_s"][-50:]) or 0
        silent = time.monotonic() - self._rows_since
        # The first steps compile.
        if len(columns) >= 5 and silent > max(STALL_S, STALL_STEPS * usual):
            told = f"no step for {silent:.0f} s, where one takes {usual:.3g} s"
            yield None, "stall", "warning", told

    def _mfu(self, curves: Curves) -> Found:
        now, before = (median(curves["mfu"][-count:]) for count in (MFU_STEPS, 20_000))
        known = np.isfinite(curves["mfu"][-20_000:]).sum()
        if now is None or before is None or known < 2 * MFU_STEPS:
            return
        if now < MFU_FALL * before:
            yield None, "mfu", "warning", f"MFU fell to {now:.1%}, from {before:.1%}"
        elif now < MFU_LOW and self.run.site.scheduler != "local":
            yield None, "mfu", "warning", f"MFU is {now:.1%}, below {MFU_LOW:.0%}"

    def _disk(self) -> Found:
        try:
            free = shutil.disk_usage(self.run.directory).free
        except OSError:
            return
        checkpoint = BYTES_PER_PARAM * self.run.spec.num_params
        if free <= 2.1 * checkpoint:
            level: Level = "error" if free < 1.05 * checkpoint else "warning"
            yield (
                None,
                "disk",
                level,
                f"{free / 2**30:.1f} GiB free, a checkpoint takes {checkpoint / 2**30:.1f} GiB",
            )

    def _checkpoint(self, columns: Columns, attempt: int) -> Found:
        every = self.run.recipe.checkpoint_every
        if every is None or attempt not in columns.first_steps:
            return
        last = max(columns.first_steps[attempt] - 1, *self.run.checkpoints.steps(), 0)
        old = int(columns["step"][-1]) - last
        if old > CHECKPOINT_LATE * every:
            told = f"the last checkpoint is {old:,} steps old, one is due every {every:,}"
            yield None, "checkpoint", "warning", told


def damaged_records(curves: Curves) -> Found:
    """Yields at its last step which attempt has no MFU, and which of its files is the reason."""
    for attempt, reason in curves.damaged.items():
        for row in np.flatnonzero(curves.columns["attempt"] == attempt)[-1:].tolist():
            told = f"{reason} Steps of attempt {attempt} have no MFU until this file is restored"
            yield row, "record", "warning", told


def peak_advice(run: Run) -> str:
    """Returns what to do about a peak that is not known or not believed."""
    if run.site.scheduler == "local":
        return (
            f"Measure it again on an idle machine: {kit_command('bench', '--apply', run.directory)}"
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
        known = np.isfinite(columns[name][:end])
        bad[: max(0, int(known.argmax()) - since) if known.any() else None] = False
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


def bad_lines(columns: Columns, start: int, end: int) -> Found:
    """Yields what a trainer says of itself: lines with steps that were not finite, and a loss
    scale that collapses.
    """
    since, losses = max(0, start - 1), columns["loss"][:end]
    for row in _begins(columns["nan_steps"][since:end] > 0, start):
        line = end_of_line(losses, row) - row + 1
        of = f" of {line:,}" if np.isfinite(losses[row]) else ""
        count = f"{columns['nan_steps'][row]:,.0f}{of} steps"
        yield row, "nan", "error", f"the loss of {count} is not finite"
    scales = columns["loss_scale"][:end]
    for row in _begins(scales[since:] <= 1, start):
        if (highest := np.nanmax(scales[: row + 1])) > 1:
            yield (
                row,
                "loss_scale",
                "error",
                f"the loss scale fell to {scales[row]:g}, from up to {highest:,.0f}: gradients"
                " overflow at any scale, and steps are skipped. Go back to a checkpoint before it,"
                " lower the learning rate, or train in bf16",
            )


def _begins(bad: np.ndarray, start: int) -> np.ndarray:
    """Returns the rows from `start` on at which a stretch begins; `bad` has the row before
    `start` too, if any.
    """
    rows = max(0, start - 1) + np.flatnonzero(bad & ~np.append(False, bad[:-1]))
    return rows[rows >= start]
