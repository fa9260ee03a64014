"""Import: a run directory from the log of another trainer, so that every view of the kit works on it.

What the log does not say (an NxDT log: model and layout) must be given. Nothing is written where the numbers
contradict each other: steps faster than the device can multiply matrices were not what the log takes them for.
"""

import contextlib
import dataclasses
import datetime
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from cluster.files import write_atomic
from cluster.job import JobSpec
from cluster.record import ConfigError, Record, counted, field_doc, suggestion
from cluster.site import Site
from cluster.state import JobState, log_path, refuse_other_owner, update_state
from kit.errors import DataError, RunError
from kit.foreign.formats import FORMATS, LineLog, pattern_format
from kit.foreign.logs import LoggedStep, LogParser, LogReader
from kit.foreign.setup import Described, describe
from kit.foreign.step_recorder import StepRecorder
from kit.plan import Plan
from kit.run import Run
from kit.run.metrics import MetricsWriter
from kit.run.rows import rows_to_metrics
from kit.spec import ModelSpec

SPEED_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport(Record):
    """import.json: where the steps of an imported run come from, and what to know about them."""

    log: str = field_doc("absolute path")
    format: str = field_doc("who wrote it, a name of `kit.foreign.formats.FORMATS`, or pattern")
    lines: int = field_doc("lines read")
    steps: int = field_doc("steps recorded, repeated ones too")
    attempts: int = field_doc("starts of the trainer")
    skipped_lines: int = field_doc("torn lines about steps")
    notes: tuple[str, ...] = field_doc("what was derived, assumed or found to disagree")


def import_log(
    log: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    pattern: str | None = None,
    site: Site,
    spec: ModelSpec | None = None,
    changes: dict[str, dict[str, Any]] | None = None,
    follow: bool = False,
    poll_s: float = 2.0,
    idle: Callable[[float], None] = time.sleep,
) -> ImportReport:
    """Makes a run directory from a log and returns what was found; with `follow` only when the log has ended.

    Args:
        log: what the trainer printed on its last rank (Megatron) or on rank 0 (NxDT).
        out: new directory, or one that was made from the same log, which is then made anew.
        format: who wrote it, a name of `FORMATS`; found out where it is not given.
        pattern: for other trainers, a regular expression with the named groups `step` and `loss`, and any other of
            `kit.foreign.formats.GROUPS`, which finds each line about a step.
        site: where it ran; its peak makes MFU, its highest matrix-product rate is what no step can exceed.
        spec: the model, where the log does not tell it.
        changes: of `spec`, `plan` and `recipe`: fields that the log does not tell, or tells wrongly; of `import` the
            field `zone`: of time stamps that name none, as `Europe/Berlin`. Trainers write the hour of their machine,
            so only the user knows it, and where its clocks were changed a step would be an hour too long; else UTC.
        follow: go on as the log grows, until training is done, the log is deleted, or `idle` raises KeyboardInterrupt.
        poll_s: time between two looks.
        idle: waits between two looks.

    Raises:
        DataError: the log is missing or has no step of this format.
        ConfigError: model or layout are not known, or contradict the log, or the zone is none; nothing was written.
        RunError: `out` holds something else. JobError: it is somebody else's.
    """
    log, out = Path(log).expanduser().resolve(), Path(out).expanduser().resolve()
    changes = {"spec": {}, "plan": {}, "recipe": {}, "import": {}, **(changes or {})}
    zone = _zone(changes["import"])
    _check_target(out, log)
    format, reader, logged = _read(log, _formats(format, pattern), zone, follow)
    asked = describe(reader.parser, logged, spec=spec, changes=changes)
    recorder = StepRecorder(
        batch=asked.printed_batch, sequence_length=asked.spec.sequence_length, engine_share=asked.engine_share,
        interval=asked.interval,
    )  # fmt: skip
    by_step = {(row["attempt"], row["step"]): row for step in logged for row in _rows(recorder, reader.parser, step)}
    rows = list(by_step.values())
    _fill_in(rows, log.stat().st_mtime)
    notes = [*asked.notes, *check_speed(rows, logged, asked, site)]
    if reader.parser.has_local_times:
        notes.append(
            f"its time stamps name no zone and are read as {zone}; for another: --set import.zone=Europe/Berlin"
        )

    run = _create(out, asked, site, log)
    write_atomic(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    report = ImportReport(
        log=str(log), format=format, lines=reader.lines, steps=len(rows), attempts=recorder.attempt,
        skipped_lines=reader.parser.skipped_lines, notes=tuple(notes),
    )  # fmt: skip
    report.write(out / "import.json")
    following = follow and not reader.parser.done
    _tell_state(run, recorder, reader, following)
    if following:
        added = _follow(run, recorder, reader, poll_s, idle)
        report = report.replace(lines=reader.lines, steps=len(rows) + added, attempts=recorder.attempt,
                                skipped_lines=reader.parser.skipped_lines)  # fmt: skip
        if out.is_dir():
            report.write(out / "import.json")
    return report


def _check_target(out: Path, log: Path) -> None:
    refuse_other_owner(out, "import into it")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        same = ImportReport.read(out / "import.json").log == str(log)
    except (ConfigError, OSError):
        same = False
    if not same:
        raise RunError(f"{out} exists and was not imported from {log}. Give a new or empty directory.")


def _formats(format: str | None, pattern: str | None) -> dict[str, Callable[[], LogParser]]:
    """Returns the formats that a log may have, by name."""
    if pattern is not None:
        if format is not None:
            raise ConfigError(f"--pattern has no place beside --format {format}. Give one of them.")
        return {"pattern": partial(LineLog, pattern_format(pattern))}
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format: {format!r} is unknown. {suggestion(format, FORMATS)} For others: --pattern.")
    return FORMATS if format is None else {format: FORMATS[format]}


def _zone(given: dict[str, Any]) -> datetime.tzinfo:
    """Returns the zone of time stamps that name none."""
    if other := next((name for name in given if name != "zone"), None):
        raise ConfigError(f"import.{other}: unknown. {suggestion(other, ['zone'])}")
    try:
        return ZoneInfo(str(given["zone"])) if given else datetime.UTC
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(f"import.zone: {given['zone']!r} is unknown. Give one as Europe/Berlin, or leave it out: UTC."
                          ) from error  # fmt: skip


def _read(
    log: Path, formats: dict[str, Callable[[], LogParser]], zone: datetime.tzinfo, follow: bool
) -> tuple[str, LogReader, list[LoggedStep]]:
    """Returns the first format in which a log tells of a step, and what it tells."""
    lines = 0
    for name, parser in formats.items():
        reader = LogReader(log, parser())
        reader.parser.zone = zone
        try:
            logged = reader.read() + reader.finish()
        except OSError as error:
            raise DataError(f"{log}: cannot be read ({error.strerror}). Give the trainer's log file.") from error
        if any(step.loss is not None or step.validation_loss is None for step in logged):
            if follow and name == "hf-trainer":
                raise ConfigError("--follow: a trainer_state.json does not grow, it is written whole. Import it again.")
            return name, reader, logged
        lines = reader.lines
    known = f"a {next(iter(formats))} log does" if len(formats) == 1 else "a log of a known format does"
    raise DataError(
        f"{log}: none of its {lines:,} lines tells of a step as {known}. Formats: {', '.join(FORMATS)}; for others "
        f"--pattern. If training has only begun, import it after its first step."
    )


def _rows(recorder: StepRecorder, parser: LogParser, logged: LoggedStep) -> list[dict[str, Any]]:
    """Returns the rows that a logged step adds; its own tells what was consumed until then, where the log does."""
    rows, consumed = recorder.rows(logged), logged.consumed_tokens
    if consumed is None and logged.consumed_samples and logged.sequence_length in (None, recorder.sequence_length):
        own = parser.counts_before * recorder.batch
        consumed = (logged.consumed_samples + own) * recorder.sequence_length
    if rows and consumed is not None:
        rows[-1]["consumed_tokens"] = round(consumed * recorder.engine_share)
    elif rows and rows[-1]["step"] != recorder.last_row["step"]:  # a held-out loss of a step before the last line
        rows[-1].pop("consumed_tokens", None)
    return rows


def _fill_in(rows: list[dict[str, Any]], end: float) -> None:
    """Gives rows without a speed, as an attempt's first, that of the next, and rows without a time one counted back."""
    for row, following in reversed(list(zip(rows, rows[1:], strict=False))):
        if row["step_time_s"] is None and row["attempt"] == following["attempt"]:
            row["step_time_s"] = following["step_time_s"]
    stamped = next((i for i, row in enumerate(rows) if row["time"] is not None), len(rows))
    later = end if stamped == len(rows) else rows[stamped]["time"]  # a log changes last when its last line is written
    for i in range(stamped - 1, -1, -1):
        if i < len(rows) - 1:
            later -= rows[i + 1]["step_time_s"] or 0.0
        rows[i]["time"] = later
    for before, row in zip(rows, rows[1:], strict=False):
        counted = before["time"] + (row["step_time_s"] or 0.0)
        row["time"] = counted if row["time"] is None else max(row["time"], before["time"])


def check_speed(rows: list[dict[str, Any]], logged: list[LoggedStep], asked: Described, site: Site) -> list[str]:
    """Returns what the log's own speeds say against the clock's; rows faster than the peak lose their time.

    Raises:
        ConfigError: the typical step is faster than the device can multiply matrices.
    """
    spec, plan = asked.spec, asked.plan
    metrics = rows_to_metrics(rows, spec=spec, plans={}, site=site)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_device = metrics.tokens_per_s / plan.num_devices
    known = per_device[np.isfinite(per_device)]
    if not known.size:
        return ["no line tells how long a step took, so there are no speeds"]
    model, hardware = spec.flops_per_token(), spec.hardware_flops_per_token(plan.recompute, whole=True)
    typical, peak = float(np.median(known)), site.peak_flops_per_s(plan.precision)
    ceiling = site.device.matmul_flops_per_s.get(plan.precision)
    most = ceiling.value if ceiling else peak
    if most is not None and typical * hardware > most:
        raise ConfigError(
            f"import: {typical * hardware / 1e12:.1f} TFLOP/s on each of {counted(plan.num_devices, 'device')} is more "
            f"than the {most / 1e12:.1f} that a matrix product reaches on {site.device.name}: the steps cannot have "
            f"run {plan.global_batch_size} sequences each. Look up the engine's micro-batch and give the sequences "
            f"really run, --set plan.global_batch_size=..., or correct the layout, the model or the site."
        )
    notes = []
    impossible = 0 if peak is None else sum(_drop_time(row, plan, hardware, peak) for row in rows)
    if impossible:
        notes.append(f"{counted(impossible, 'step')} faster than the peak, kept without a time")
    printed = [step.printed_flops_per_s for step in logged if step.printed_flops_per_s]
    if printed:
        notes.append(
            f"the log prints {np.median(printed) / 1e12:.1f} TFLOP/s per device, which is not used; from the clock and "
            f"the sequences run it is {typical * model / 1e12:.1f} of the model, {typical * hardware / 1e12:.1f} with "
            f"recomputation"
        )
    rates = [step.printed_samples_per_s for step in logged if step.printed_samples_per_s]
    rate = typical * plan.num_devices / spec.sequence_length
    if rates and abs(np.median(rates) / rate - 1) > SPEED_TOLERANCE:
        notes.append(f"the log prints {np.median(rates):.3g} sequences/s, but clock and batch make {rate:.3g}")
    return notes


def _drop_time(row: dict[str, Any], plan: Plan, hardware: float, peak: float) -> bool:
    impossible = bool(row["step_time_s"]) and row["tokens"] * hardware > peak * plan.num_devices * row["step_time_s"]
    if impossible:
        row["step_time_s"] = None
    return impossible


def _create(out: Path, asked: Described, site: Site, log: Path) -> Run:
    kept = ("spec.json", "state.json", "exit.json", "history.jsonl", "plan.attempt_*.json", "logs/attempt_*_*")
    for old in [file for pattern in (*kept, "alerts.jsonl") for file in out.glob(pattern)]:  # of an earlier import
        old.unlink()
    for folder in out.glob("logs/attempt_*"):
        shutil.rmtree(folder)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(out, spec=asked.spec, plan=asked.plan, recipe=asked.recipe, site=site)
    for name, text in run.asked().items():
        write_atomic(out / name, text)
    job = JobSpec(name=f"import of {log.name}", run_dir=str(out), argv=("kit", "import", str(log)),
                  num_processes=asked.plan.num_devices)  # fmt: skip
    job.write(out / "job.json")
    return run


def _tell_state(run: Run, recorder: StepRecorder, reader: LogReader, following: bool) -> None:
    """Says what the log shows: its last step; while it is followed it is taken for a job, each change for a heartbeat.

    Afterwards, or of a log that nobody follows, nothing is known of here and now.
    """
    attempt, row = recorder.attempt, recorder.last_row
    seen: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):  # a log may be deleted while it is followed
        seen = {"heartbeat": reader.file.stat().st_mtime}
    for number in range(1, attempt + 1):
        run.plan.write(run.directory / f"plan.attempt_{number:02d}.json")
        shown = log_path(run.directory, number, 0)
        shown.parent.mkdir(parents=True, exist_ok=True)
        if not shown.is_symlink():
            shown.symlink_to(reader.file)
    ends = "says that training is done," if reader.parser.done else "was read to its end,"
    update_state(
        run.directory, attempt=attempt, state=JobState.RUNNING if following else JobState.IMPORTED, step=row["step"],
        step_time_s=row["step_time_s"], reason=f"the log {ends} at step {row['step']:,}", **seen,
    )  # fmt: skip


def _follow(run: Run, recorder: StepRecorder, reader: LogReader, poll_s: float, idle: Callable[[float], None]) -> int:
    """Records what the log gains until it ends, and returns the number of rows added."""
    writer, added = MetricsWriter(run.directory / "metrics.jsonl"), 0
    try:
        while not reader.parser.done and run.directory.is_dir():
            idle(poll_s)
            rows = [row for step in reader.read() for row in _rows(recorder, reader.parser, step)]
            writer.write({**row, "time": row["time"] or time.time()} for row in rows)
            added += len(rows)
            if run.directory.is_dir():
                _tell_state(run, recorder, reader, following=True)
    except (KeyboardInterrupt, FileNotFoundError):  # the user, or log or run directory deleted
        pass
    finally:
        writer.stream.close()
        if run.directory.is_dir():
            _tell_state(run, recorder, reader, following=False)
    return added
