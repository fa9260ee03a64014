"""Alerts: a table of rules that find problems of a run.

`AlertMonitor` evaluates the rules in ALERT_RULES, reports each new alert once, and writes it to
`alerts.jsonl` in the run directory.
"""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from cluster.job import JobStatus
from cluster.logs import log_tail
from cluster.record import shortened
from cluster.state import JobState, find_log, read_exit
from kit.errors import kit_command
from kit.monitor.curves import Curves
from kit.monitor.detectors import (
    LossRise,
    RiseDetector,
    end_of_line,
    find_non_finite_rows,
    first_rows,
)
from kit.monitor.ranks import RankTimes
from kit.run import Run
from kit.run.alerts import Alert, AlertLog, Level
from kit.run.checkpoint import BYTES_PER_PARAM
from kit.run.metrics import median
from kit.show.results import short_number
from kit.trainer.spikes import find_bad_start, find_spikes

STALL_S = 15.0
"""Least time without a new training step that counts as a stall, in seconds."""
STALL_STEPS = 5.0
"""Least time without a new training step that counts as a stall, in median step times."""
JOIN_S = 180.0
"""Seconds after the start of a job at which a warning says that not all ranks have joined yet. The
alert is not an error, since imports from a slow file system may take longer."""
FIRST_STEP_S = 300.0
"""Seconds after all ranks have joined at which a warning says that no training step is finished.
Loading a large checkpoint and compilation take minutes."""
LOGS_READ = 8
"""Largest number of ranks whose logs are searched for a line that an alert quotes."""
MFU_STEPS = 50
"""Number of newest steps over which the present MFU is the median. The present MFU is compared with
the limits."""
MFU_HISTORY_STEPS = 20_000
"""Number of newest steps over which the usual MFU is the median. The present MFU is compared with
the usual MFU. Only steps with the layout of the last step are used."""
MFU_FALL = 0.75
"""Ratio of the present to the usual MFU below which the MFU counts as fallen."""
MFU_LOW = 0.30
"""MFU below which an alert says that the devices of a cluster are badly used."""
MFU_DOUBTFUL = 0.75
"""MFU above which the peak FLOP/s of the site is probably wrong, since real runs do not reach so
much."""
MEMORY_FULL = 0.92
"""Fraction of the device memory in use above which an alert says that the memory is almost full."""
CHECKPOINT_LATE = 1.5
"""Age of the last checkpoint above which a checkpoint counts as overdue, in checkpoint
intervals."""
ROWS_PER_LOOK = 20_000
"""Largest number of rows of the metrics that are examined at one look. A long history is examined
in several looks, so that each look is short."""


class Finding(NamedTuple):
    """Problem of a run that an alert rule has found."""

    message: str
    row: int | None = None
    """Row of the metrics at which the problem occurred. None if the problem exists now and belongs
    to no row."""
    time: float | None = None
    """Unix time of a problem without a row, in seconds. None: the time at which it was found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleInput:
    """Input of the alert rules at one look, which is one evaluation of all rules."""

    run: Run
    curves: Curves
    ranks: RankTimes
    status: JobStatus
    first: int
    """First row of the metrics that no earlier look has examined."""
    end: int
    """Row after the last row of the metrics that this look examines."""
    rises: list[LossRise]
    """Rises of the loss in the rows from `first` to `end`."""
    silent_s: float
    """Seconds for which a running job has recorded no training step, by the clock of this machine.
    Zero if the newest report from the job's machine is too old to say so."""
    starting_s: float
    """Seconds since the start of the job or, if all ranks have joined, since they joined. Zero if
    the job is not in the state of starting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlertRule:
    """One alert rule: its input, the level of its alerts, its function, and the source of its
    threshold.
    """

    kind: str
    """Kind of the rule's alerts, such as `nan`. Several rules may have one kind."""
    level: Level
    judges: Literal["new rows", "record", "job", "running job"]
    """Input of the rule. `new rows`: rows of the metrics that no earlier look has examined.
    `record`: all recorded data, also of a run that has ended. `job`: the present state of the job.
    `running job`: the present state of the job, only while the job runs."""
    find: Callable[[RuleInput], Iterable[Finding]]
    """Function that returns the problems that it finds at one look."""
    threshold: str
    """Threshold of the rule and its source, in words."""


class AlertMonitor:
    """Evaluates the alert rules of a run at each look, and reports new alerts.

    Each view of a run has one monitor. The monitor writes only to the alert log.

    Args:
        run: the run.
        earlier: monitor of this run before its plan or site changed. The state of the rules is
            taken over, so that rows are not examined again.
    """

    def __init__(self, run: Run, *, earlier: "AlertMonitor | None" = None) -> None:
        self.run = run
        if earlier is None:
            self.log = AlertLog(run.directory / "alerts.jsonl")
            self._rises = RiseDetector()
            self._judged_rows = 0
            self._revision = -1
            """Revision of the metrics to which `_judged_rows` refers. A new revision means that
            older rows have changed."""
            self._steps_timer = ChangeTimer()
            """Timer that measures the seconds since the last new row of the metrics."""
            self._start_timer = ChangeTimer()
            """Timer that measures for how many seconds a starting job has waited for its ranks or
            its first step."""
        else:
            self.log = earlier.log
            self._rises = earlier._rises
            self._judged_rows = earlier._judged_rows
            self._revision = earlier._revision
            self._steps_timer = earlier._steps_timer
            self._start_timer = earlier._start_timer

    def evaluate_rules(self, curves: Curves, status: JobStatus, ranks: RankTimes) -> list[Alert]:
        """Evaluates all alert rules. Writes the new alerts to the run directory and
        returns them.
        """
        look = self._prepare(curves, status, ranks)
        alerts: list[Alert] = []
        for rule in ALERT_RULES:
            if rule.judges == "new rows" and look.first == look.end:
                continue
            if rule.judges == "running job" and status.state is not JobState.RUNNING:
                continue
            alerts += [_alert(rule, finding, look) for finding in rule.find(look)]
        return self.log.add(alerts)

    def _prepare(self, curves: Curves, status: JobStatus, ranks: RankTimes) -> RuleInput:
        """Returns the input of the alert rules at this look. The rows of this look then count as
        examined.
        """
        columns = curves.columns
        if columns.revision != self._revision:
            self._revision = columns.revision
            self._judged_rows = 0
            self._rises = RiseDetector()
        first = self._judged_rows
        end = min(len(columns), first + ROWS_PER_LOOK)
        self._judged_rows = end
        rises: list[LossRise] = []
        if end > first:
            phases = [phase.until_tokens for phase in self.run.recipe.phases]
            new_data = np.searchsorted(curves["tokens"], phases).tolist()
            rises = self._rises.find(columns["loss"][:end], columns["learning_rate"], new_data)
        is_heard = not status.late_age
        is_running = status.state is JobState.RUNNING and is_heard
        silent_s = self._steps_timer.unchanged_s(len(columns), counts=is_running)
        is_starting = status.state is JobState.STARTING and is_heard
        start = (status.attempt, status.has_joined)
        starting_s = self._start_timer.unchanged_s(start, counts=is_starting)
        if is_starting:
            # The supervisor measures the time since the job began to start, which may be before
            # this view was opened.
            starting_s = max(starting_s, status.starting_s or 0.0)
        return RuleInput(
            run=self.run,
            curves=curves,
            ranks=ranks,
            status=status,
            first=first,
            end=end,
            rises=rises,
            silent_s=silent_s,
            starting_s=starting_s,
        )


class ChangeTimer:
    """Measures the seconds since a value last changed, by the clock of this machine."""

    def __init__(self) -> None:
        self._value: Any = None
        self._since = time.monotonic()

    def unchanged_s(self, value: Any, *, counts: bool) -> float:
        """Returns the seconds for which the measured value has been equal to `value`. If `counts`
        is False, the measurement starts again and the result is zero.
        """
        now = time.monotonic()
        if value != self._value or not counts:
            self._value = value
            self._since = now
        return now - self._since


def _alert(rule: AlertRule, finding: Finding, look: RuleInput) -> Alert:
    """Returns the alert for a problem that a rule has found. Attempt, step and time come from the
    row of the problem. For a problem without a row, they are the present attempt, its last step,
    and the time of the finding or, if it has none, the present time.
    """
    columns = look.curves.columns
    row = finding.row
    if row is None:
        attempt = look.status.attempt
        step = int(columns["step"][-1]) if len(columns) else 0
        when = time.time() if finding.time is None else finding.time
    else:
        attempt = int(columns["attempt"][row])
        step = int(columns["step"][row])
        when = float(columns["time"][row])
        if not math.isfinite(when):
            when = time.time()
    return Alert(
        kind=rule.kind,
        level=rule.level,
        message=finding.message,
        attempt=attempt,
        step=step,
        time=when,
    )


def _lines_with_nan(look: RuleInput) -> Iterator[Finding]:
    """Finds log lines of another trainer that report a number of steps with a loss that was not
    finite.
    """
    columns = look.curves.columns
    since = max(0, look.first - 1)
    losses = columns["loss"][: look.end]
    for row in first_rows(columns["nan_steps"][since : look.end] > 0, look.first).tolist():
        steps = f"{columns['nan_steps'][row]:,.0f}"
        if np.isfinite(losses[row]):
            steps += f" of {end_of_line(losses, row) - row + 1:,}"
        yield Finding(f"the loss of {steps} steps is not finite", row)


def _collapsed_loss_scale(look: RuleInput) -> Iterator[Finding]:
    """Finds rows at which the fp16 loss scale has fallen to 1 or below, after it was above 1."""
    scales = look.curves.columns["loss_scale"][: look.end]
    since = max(0, look.first - 1)
    for row in first_rows(scales[since:] <= 1, look.first).tolist():
        highest = np.nanmax(scales[: row + 1])
        if highest > 1:
            yield Finding(
                f"the loss scale fell to {scales[row]:g}, from up to {highest:,.0f}: gradients"
                " overflow at any scale, and steps are skipped. Go back to a checkpoint before it,"
                " lower the learning rate, or train in bf16",
                row,
            )


def _loss_not_finite(look: RuleInput) -> Iterator[Finding]:
    """Finds the first row of each stretch of neighbouring rows whose loss is not finite."""
    for row in find_non_finite_rows(look.curves.columns, "loss", look.first, look.end).tolist():
        yield Finding("loss is not finite", row)


def _gradient_not_finite(look: RuleInput) -> Iterator[Finding]:
    """Finds the first row of each stretch of neighbouring rows whose gradient norm is not
    finite.
    """
    for row in find_non_finite_rows(
        look.curves.columns, "grad_norm", look.first, look.end
    ).tolist():
        yield Finding("gradient norm is not finite", row)


def _bad_start(look: RuleInput) -> Iterator[Finding]:
    """Finds a loss that is too high at the start of training, compared with random guessing."""
    losses = look.curves.columns["loss"][: look.end]
    guess = math.log(look.run.spec.vocab_size)
    row = find_bad_start(losses, guess)
    if row is not None and row >= look.first:
        yield Finding(
            f"loss {losses[row]:.3g}, after {losses[0]:.3g} at the start (random guessing:"
            f" {guess:.3g}). Lower the learning rate, or warm up for longer",
            row,
        )


def _loss_spikes(look: RuleInput) -> Iterator[Finding]:
    """Finds loss spikes (`kit.trainer.spikes`)."""
    losses = look.curves.columns["loss"][: look.end]
    for row, before in find_spikes(losses, look.first):
        yield Finding(f"loss spike {losses[row]:.3g} (median before {before:.3g})", row)


def _loss_rises(look: RuleInput) -> Iterator[Finding]:
    """Finds increases of the loss from which the loss has not recovered (`RiseDetector`)."""
    steps = look.curves.columns["step"]
    for rise in look.rises:
        yield Finding(
            f"lowest {rise.low:.3g} at step {steps[rise.low_row]:,.0f}, now {rise.level:.3g}"
            f" and not back for {steps[rise.row] - steps[rise.low_row]:,.0f} steps; go back to"
            " a checkpoint before it, unless the data became harder",
            rise.row,
        )


def _refuted_peak(look: RuleInput) -> Iterator[Finding]:
    """Finds a peak FLOP/s that cannot be true, since too many steps are faster than the peak."""
    reached = look.curves.hfu_above_peak
    if reached is not None and (peak := _peak_words(look)):
        yield Finding(
            f"{peak} cannot be true: the steps reach {reached:.0%} of it, so no MFU or HFU is"
            f" given. {peak_advice(look.run)}",
            len(look.curves) - 1,
        )


def _doubtful_peak(look: RuleInput) -> Iterator[Finding]:
    """Finds an MFU above MFU_DOUBTFUL, which means that the peak FLOP/s of the site is probably
    wrong.
    """
    mfu = median(look.curves["mfu"][-MFU_STEPS:])
    is_high = mfu is not None and mfu > MFU_DOUBTFUL
    if is_high and (peak := _peak_words(look)):
        yield Finding(
            f"{peak} is doubtful: an MFU of {mfu:.0%} is higher than real runs reach."
            f" {peak_advice(look.run)}",
            len(look.curves) - 1,
        )


def _peak_words(look: RuleInput) -> str:
    """Returns the peak FLOP/s of a run's devices in words. Returns "" if the peak is unknown or the
    run has no step.
    """
    dtype = look.run.plan.precision
    peak = look.run.site.peak_flops_per_s(dtype)
    if peak is None or not len(look.curves):
        return ""
    return f"the {dtype} peak of {short_number(peak / 1e12)} TFLOP/s a device"


def peak_advice(run: Run) -> str:
    """Returns a sentence that says how to correct a peak FLOP/s that is unknown or doubtful."""
    if run.site.scheduler == "local":
        return (
            f"Measure it again on an idle machine: {kit_command('bench', '--apply', run.directory)}"
        )
    return (
        f"Check the tokens of a step, the number of devices ({run.plan.num_devices:,}) and, in "
        f"{run.directory / 'site.json'}, device.peak_flops_per_s against the data sheet"
    )


def _damaged_records(look: RuleInput) -> Iterator[Finding]:
    """Finds attempts whose plan or site file cannot be read. The alert belongs to the last row of
    the attempt.
    """
    attempts = look.curves.columns["attempt"]
    for attempt, reason in look.curves.damaged.items():
        for row in np.flatnonzero(attempts == attempt)[-1:].tolist():
            yield Finding(
                f"{reason} Steps of attempt {attempt} have no MFU until this file is restored", row
            )


def _bad_job_state(look: RuleInput) -> Iterator[Finding]:
    """Finds a job in a bad state: failed, lost or stalled. The alert about a failed job has the
    time at which the job ended, also if nobody has looked at the run until much later.
    """
    state = look.status.state
    is_bad = state in (JobState.FAILED, JobState.LOST, JobState.STALLED)
    # If state.json is missing, the run directory was removed or is being removed. An alert would
    # write a file into it.
    if not is_bad or not (look.run.directory / "state.json").exists():
        return
    report = read_exit(look.run.directory)
    ended_at = None
    if state is JobState.FAILED and report and report.attempt == look.status.attempt:
        ended_at = report.time
    what = "job" if look.status.is_cancelled else f"job {state}:"
    yield Finding(f"{what} {look.status.reason}", time=ended_at)


def _slow_start(look: RuleInput) -> Iterator[Finding]:
    """Finds a start of the job that takes too long. The message quotes the last line of a rank's
    log.
    """
    limit_s = FIRST_STEP_S if look.status.has_joined else JOIN_S
    if look.starting_s > limit_s:
        line = _last_log_line(look)
        quoted = f". Last line of {line}" if line else ""
        yield Finding(f"no step yet: {look.status.reason}{quoted}")


def _last_log_line(look: RuleInput) -> str:
    """Returns "FILE: LINE" with the last line of a rank's log, from the first rank whose log is not
    empty. Returns "" if all logs are empty.
    """
    directory = look.run.directory
    per_node = look.run.site.devices_per_node
    for rank in range(min(LOGS_READ, look.run.plan.num_devices)):
        file = find_log(directory, look.status.attempt, rank, per_node)
        if lines := log_tail(file).splitlines():
            return f"{file.relative_to(directory)}: {shortened(lines[-1].strip(), 300)}"
    return ""


def _no_step(look: RuleInput) -> Iterator[Finding]:
    """Finds a running job that has stopped recording training steps. At least five steps must be
    recorded, since the first steps include compilation.
    """
    columns = look.curves.columns
    usual_s = median(columns["step_time_s"][-50:]) or 0
    if len(columns) >= 5 and look.silent_s > max(STALL_S, STALL_STEPS * usual_s):
        yield Finding(
            f"no step for {look.silent_s:.0f} s (usual step time: {short_number(usual_s)} s)"
        )


def _mfu_falls(look: RuleInput) -> Iterator[Finding]:
    """Finds a present MFU that has fallen below MFU_FALL times the usual MFU."""
    if (medians := _mfu_medians(look)) is None:
        return
    now, before = medians
    if now < MFU_FALL * before:
        yield Finding(f"MFU fell to {now:.1%}, from {before:.1%}")


def _mfu_low(look: RuleInput) -> Iterator[Finding]:
    """Finds a present MFU below MFU_LOW on a cluster, unless `_mfu_falls` already reports it."""
    if look.run.site.scheduler == "local" or (medians := _mfu_medians(look)) is None:
        return
    now, before = medians
    if MFU_FALL * before <= now < MFU_LOW:
        yield Finding(f"MFU is {now:.1%}, below {MFU_LOW:.0%}")


def _mfu_medians(look: RuleInput) -> tuple[float, float] | None:
    """Returns (present MFU, usual MFU). These are the medians over the last MFU_STEPS and the last
    MFU_HISTORY_STEPS steps. Only steps with the layout of the last step are used. Returns None
    while fewer than twice MFU_STEPS of these steps have an MFU.
    """
    history = look.curves["mfu"][-MFU_HISTORY_STEPS:]
    layouts = look.curves["layout"][-MFU_HISTORY_STEPS:]
    # MFUs of steps with different layouts cannot be compared.
    history = history[layouts == layouts[-1:]]
    now = median(history[-MFU_STEPS:])
    before = median(history)
    if now is None or before is None or np.isfinite(history).sum() < 2 * MFU_STEPS:
        return None
    return now, before


def _slow_rank(look: RuleInput) -> Iterator[Finding]:
    """Finds a rank that is slower than the other ranks. The probability of a false alert is below
    `kit.monitor.ranks.BY_CHANCE`.
    """
    slowest = look.ranks.slowest
    if slowest and slowest.is_sure:
        yield Finding(str(slowest))


def _memory_full(look: RuleInput) -> Iterator[Finding]:
    """Finds a device memory that is almost full at the last training step."""
    memory = look.run.site.device.memory_bytes
    columns = look.curves.columns
    if not memory or not len(columns):
        return
    share = columns["memory_bytes"][-1] / memory.value
    if share > MEMORY_FULL:
        yield Finding(f"{share:.0%} of {memory.value / 2**30:.0f} GiB device memory is in use")


def _disk_full(look: RuleInput) -> Iterator[Finding]:
    """Finds a file system of the run directory with too little free space for one more
    checkpoint.
    """
    free, checkpoint = _disk_room(look)
    if free < 1.05 * checkpoint:
        yield Finding(_disk_words(free, checkpoint))


def _disk_short(look: RuleInput) -> Iterator[Finding]:
    """Finds a file system of the run directory with free space for one more checkpoint but not for
    two.
    """
    free, checkpoint = _disk_room(look)
    if 1.05 * checkpoint <= free <= 2.1 * checkpoint:
        yield Finding(_disk_words(free, checkpoint))


def _disk_room(look: RuleInput) -> tuple[float, float]:
    """Returns (free bytes on the file system, bytes of one checkpoint). The free bytes are infinite
    if the checkpoints are on another machine, or if the file system reports an error.
    """
    checkpoint = BYTES_PER_PARAM * look.run.spec.num_params
    if look.run.is_elsewhere:
        return math.inf, checkpoint
    try:
        return shutil.disk_usage(look.run.directory).free, checkpoint
    except OSError:
        return math.inf, checkpoint


def _disk_words(free: float, checkpoint: float) -> str:
    """Returns the message of an alert about disk space. Both arguments are in bytes."""
    return f"{free / 2**30:.1f} GiB free, a checkpoint takes {checkpoint / 2**30:.1f} GiB"


def _late_checkpoint(look: RuleInput) -> Iterator[Finding]:
    """Finds a job whose next checkpoint is overdue. Finds nothing if the checkpoints are on another
    machine.
    """
    run = look.run
    every = run.recipe.checkpoint_every
    columns = look.curves.columns
    first_step = columns.first_steps.get(look.status.attempt)
    if run.is_elsewhere or every is None or first_step is None:
        return
    last = max(first_step - 1, *run.checkpoints.steps(), 0)
    age = int(columns["step"][-1]) - last
    if age > CHECKPOINT_LATE * every:
        yield Finding(f"the last checkpoint is {age:,} steps old, one is due every {every:,}")


ALERT_RULES = (
    AlertRule(
        kind="nan",
        level="error",
        judges="new rows",
        find=_lines_with_nan,
        threshold="none: the trainer has counted at least one such step",
    ),
    AlertRule(
        kind="loss_scale",
        level="error",
        judges="new rows",
        find=_collapsed_loss_scale,
        threshold="1, at which the loss is not scaled any more",
    ),
    AlertRule(
        kind="nan",
        level="error",
        judges="new rows",
        find=_loss_not_finite,
        threshold="none: the value is not finite",
    ),
    AlertRule(
        kind="nan",
        level="error",
        judges="new rows",
        find=_gradient_not_finite,
        threshold="none: the value is not finite",
    ),
    AlertRule(
        kind="start",
        level="warning",
        judges="new rows",
        find=_bad_start,
        threshold="kit.trainer.spikes.find_bad_start",
    ),
    AlertRule(
        kind="spike",
        level="warning",
        judges="new rows",
        find=_loss_spikes,
        threshold="kit.trainer.spikes, false alerts counted on simulated noise",
    ),
    AlertRule(
        kind="rise",
        level="warning",
        judges="new rows",
        find=_loss_rises,
        threshold="kit.monitor.detectors.RiseDetector, tried on 75 public curves (decision 024)",
    ),
    AlertRule(
        kind="peak",
        level="error",
        judges="record",
        find=_refuted_peak,
        threshold="kit.run.metrics.refutes_peak",
    ),
    AlertRule(
        kind="peak",
        level="warning",
        judges="record",
        find=_doubtful_peak,
        threshold="MFU_DOUBTFUL, chosen above the MFU of real runs",
    ),
    AlertRule(
        kind="record",
        level="warning",
        judges="record",
        find=_damaged_records,
        threshold="none: the file cannot be read",
    ),
    AlertRule(
        kind="job",
        level="error",
        judges="job",
        find=_bad_job_state,
        threshold="none: the state of the job",
    ),
    AlertRule(
        kind="stall",
        level="warning",
        judges="job",
        find=_slow_start,
        threshold="JOIN_S and FIRST_STEP_S, chosen: slow imports and compilation take minutes",
    ),
    AlertRule(
        kind="stall",
        level="warning",
        judges="running job",
        find=_no_step,
        threshold="STALL_S and STALL_STEPS, chosen",
    ),
    AlertRule(
        kind="mfu",
        level="warning",
        judges="running job",
        find=_mfu_falls,
        threshold="MFU_FALL, chosen",
    ),
    AlertRule(
        kind="mfu",
        level="warning",
        judges="running job",
        find=_mfu_low,
        threshold="MFU_LOW, chosen",
    ),
    AlertRule(
        kind="straggler",
        level="warning",
        judges="running job",
        find=_slow_rank,
        threshold="kit.monitor.detectors.slowest_rank at kit.monitor.ranks.BY_CHANCE",
    ),
    AlertRule(
        kind="memory",
        level="warning",
        judges="running job",
        find=_memory_full,
        threshold="MEMORY_FULL, chosen",
    ),
    AlertRule(
        kind="disk",
        level="error",
        judges="running job",
        find=_disk_full,
        threshold="bytes of one checkpoint and 5 %: the next save fails",
    ),
    AlertRule(
        kind="disk",
        level="warning",
        judges="running job",
        find=_disk_short,
        threshold="bytes of two checkpoints and 5 %: the save after the next one fails",
    ),
    AlertRule(
        kind="checkpoint",
        level="warning",
        judges="running job",
        find=_late_checkpoint,
        threshold="CHECKPOINT_LATE, chosen",
    ),
)
"""All alert rules that a view evaluates. At each look they are evaluated in this order, which is
also the order of their alerts in the log. In addition, the trainer writes alerts of the kinds
`guard` and `hook`, and `kit watch` writes alerts of the kind `on_alert`."""
