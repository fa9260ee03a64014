"""Import: a run directory from another trainer's log, so that every view of the kit works on it.

What the log does not say (an NxDT log: model and layout) must be given. Nothing is written where
the numbers contradict each other: steps faster than the device can multiply matrices were not what
the log takes them for.
"""

import contextlib
import dataclasses
import datetime
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cluster.files import write_atomic
from cluster.job import JobSpec
from cluster.ownership import refuse_other_owner
from cluster.record import ConfigError, Record, counted, field_doc, suggestion
from cluster.site import Site
from cluster.state import JobState, log_path, update_state
from kit.config.spec import ModelSpec
from kit.errors import DataError, RunError, kit_command
from kit.interop.logs.formats import FORMATS, NAMES, Format, number
from kit.interop.logs.logs import Parser, Step, StepRecorder
from kit.interop.logs.setup import describe
from kit.interop.logs.suggest import check_text, pattern_form, suggested_pattern
from kit.run import Run
from kit.run.metrics import MetricsWriter

SPEED_TOLERANCE = 0.1
POLL_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport(Record):
    """import.json: where the steps of an imported run come from, and what to know about them."""

    log: str = field_doc("absolute path of the log")
    format: str = field_doc(
        "trainer that wrote it, one of `kit.interop.logs.formats.NAMES`, or pattern"
    )
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
    spec_notes: Sequence[str] = (),
    follow: bool = False,
    idle: Callable[[float], None] = time.sleep,
) -> ImportReport:
    """Makes a run directory from a log and returns what was found; with `follow` when it ended.

    Args:
        log: what the trainer printed on its last rank (Megatron) or on rank 0 (NxDT).
        out: new directory, or one that was made from the same log, which is then made anew.
        format: trainer that wrote the log, one of `kit.interop.logs.formats.NAMES`. If None, it is
            detected.
        pattern: for other trainers, a regular expression with the named groups `step` and `loss`,
            and any other of `kit.interop.logs.formats.GROUPS`, which finds each line about a step.
        site: where it ran; its peak makes MFU, its best matrix product is what no step can exceed.
        spec: the model, where the log does not tell it.
        changes: fields of `spec`, `plan` and `recipe` that the log lacks or prints wrongly, and two
            fields of `import`. `zone` is the zone of time stamps without one, such as
            `Europe/Berlin`, by default UTC. Trainers print the local time of their machine, so only
            the user knows the zone. With a wrong zone, the step at a clock change is an hour too
            long. `logging_steps` is the number of steps per line if the lines have no step.
        spec_notes: assumptions about `spec`, for the notes of the report.
        follow: continue as the log grows, until training is done, the log is removed, or `idle`
            raises KeyboardInterrupt.
        idle: function that waits the given number of seconds between two reads of the log.

    Raises:
        DataError: The log is missing or has no step of this format, or its steps are unknown.
        ConfigError: The model, the layout, the pattern or a setting of `import` is unknown or
            contradicts the log. Nothing was written, unless the log is followed.
        RunError: `out` holds something else.
        JobError: `out` belongs to another user.
    """
    file = Path(log).expanduser().resolve()
    out = Path(out).expanduser().resolve()
    changes = {"spec": {}, "plan": {}, "recipe": {}, "import": {}, **(changes or {})}
    zone, logging_steps = _import_settings(changes["import"])
    _check_target(out, file)
    parser, steps = _read(file, format, pattern, zone, logging_steps)
    if follow and parser.form.closes:
        raise ConfigError(
            "--follow: a trainer_state.json does not grow, it is written whole. Import it again."
        )
    spec, plan, recipe, recorder, notes = describe(parser, steps, spec=spec, changes=changes)
    run = Run(out, spec=spec, plan=plan, recipe=recipe, site=site)
    rows = list(
        {
            (row["attempt"], row["step"]): row for step in steps for row in recorder.rows(step)
        }.values()
    )
    _fill_in(rows, parser.changed)
    notes = [*spec_notes, *notes, *_check_speed(rows, steps, run)]
    if not any("loss" in step for step in steps):
        notes.append("no line has a loss")
    if parser.experts:
        notes.append(
            f"its lines have {parser.experts!r}, which only mixtures of experts have, but"
            f" {spec.name} is dense: its FLOPs are right only if a token costs as many FLOPs in"
            " both models"
        )
    if parser.has_local_times:
        notes.append(
            f"its time stamps name no zone and are read as {zone}; for another: --set"
            " import.zone=Europe/Berlin"
        )
    report = ImportReport(
        log=str(file),
        format=parser.form.name,
        lines=parser.lines,
        steps=len(rows),
        attempts=parser.attempt,
        skipped_lines=parser.skipped_lines,
        notes=(*notes, *_unsure_notes(parser)),
    )
    _create(run, file)
    write_atomic(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if follow:
        report = _followed(run, parser, recorder, report, notes, idle)
    _tell(run, parser, recorder.last_row, report, following=False)
    return report


def _unsure_notes(parser: Parser) -> list[str]:
    """Returns a note on the lines that were left out because their steps are unknown, if any."""
    if not parser.unsure:
        return []
    lines = counted(len(parser.unsure), "line")
    return [f"{lines} left out, since the step is not known: {parser.unsure[0]}"]


def _check_target(out: Path, log: Path) -> None:
    refuse_other_owner(out, "import into it")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    with contextlib.suppress(ConfigError, OSError):
        if ImportReport.read(out / "import.json").log == str(log):
            return
    raise RunError(f"{out} exists and was not imported from {log}. Give a new or empty directory.")


def _import_settings(given: dict[str, Any]) -> tuple[datetime.tzinfo, int | None]:
    """Returns (zone of time stamps without a zone, number of steps per line or None)."""
    names = ["zone", "logging_steps"]
    if other := next((name for name in given if name not in names), None):
        raise ConfigError(f"import.{other}: unknown. {suggestion(other, names)}")
    steps = given.get("logging_steps")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"import.logging_steps: {steps!r} is not allowed. Give a number above 0.")
    zone: datetime.tzinfo = datetime.UTC
    if "zone" in given:
        try:
            zone = ZoneInfo(str(given["zone"]))
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ConfigError(
                f"import.zone: {given['zone']!r} is unknown. Give one as Europe/Berlin, or leave it"
                " out: UTC."
            ) from error
    return zone, steps


def _read(
    file: Path,
    format: str | None,
    pattern: str | None,
    zone: datetime.tzinfo,
    logging_steps: int | None,
) -> tuple[Parser, list[Step]]:
    """Returns (parser of a log, its steps). The format is the given one, the user's pattern, or the
    format of the first line with a step.

    Raises:
        DataError: The file is not a text, has no step of the format, or its steps are unknown.
        ConfigError: An option is unknown, missing or not allowed for the format.
    """
    _check_log(file, format, pattern)
    if pattern is not None:
        form = pattern_form(file, pattern, zone)
    else:
        form = _detected(file, [it for it in FORMATS if format in (None, it.name)], zone)
    if form.counts_lines and logging_steps is None:
        raise ConfigError(_no_steps(file))
    if logging_steps is not None and not form.counts_lines:
        raise ConfigError(
            "import.logging_steps: the lines of this log have their step. Leave it out."
        )
    parser = Parser(file, form, zone, logging_steps or 1)
    steps = list(parser.steps())
    if form.counts_lines:
        _check_epochs(file, parser.epochs, parser.steps_per_line)
    if any("attempt" in step for step in steps):
        return parser, steps
    if parser.unsure:
        raise DataError(f"{file}: the steps are not known. {parser.unsure[0]}.")
    asked = f"a {form.name} log" if format or pattern else "a log of a known format"
    advice = "" if format or pattern else suggested_pattern(file, zone)
    raise DataError(
        f"{file}: none of its {parser.lines:,} lines tells of a step as {asked} does. "
        f"Formats: {', '.join(NAMES)}; for others --pattern.{advice} If training has only begun, "
        "import it after its first step."
    )


def _check_log(file: Path, format: str | None, pattern: str | None) -> None:
    """Raises ConfigError for an unknown format or two formats, DataError for a file that is not a
    text.
    """
    if format is not None and pattern is not None:
        raise ConfigError(f"--pattern has no place beside --format {format}. Give one of them.")
    if format not in (None, *NAMES):
        raise ConfigError(
            f"format: {format!r} is unknown. {suggestion(format, NAMES)} For others: --pattern."
        )
    check_text(file)


def _detected(file: Path, forms: list[Format], zone: datetime.tzinfo) -> Format:
    """Returns the format of the first line with a step, or the first of `forms` if no line has one.
    A fallback format is returned only if no line is in another format.
    """
    fallback = None
    for line in Parser(file, forms[0], zone).new():
        for form in forms:
            if form.is_fallback and fallback is not None:
                continue
            if re.search(form.sign, line) and re.search(form.line, line):
                if not form.is_fallback:
                    return form
                fallback = form
    return fallback or forms[0]


def _no_steps(file: Path) -> str:
    """Returns the error message for the printed lines of transformers' Trainer, which have no step,
    with the file to import instead.
    """
    states = trainer_states(file.parent)
    if states:
        where = f"Import that file: {kit_command('import', states[-1])}"
    else:
        where = "Import that file: the Trainer writes it into each checkpoint of its output_dir"
    return (
        f"{file}: the lines that transformers' Trainer prints have no step. Its trainer_state.json"
        f" has the steps. {where}; or give the number of steps per line, the logging_steps of the"
        " training (500 unless it was set): --set import.logging_steps=10."
    )


def trainer_states(folder: Path) -> list[Path]:
    """Returns the trainer_state.json files in an output_dir of transformers' Trainer, the newest
    last.
    """
    found = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]

    def step(file: Path) -> float:
        if file.parent == folder:
            return float("inf")  # The Trainer writes this file when training ends.
        digits = file.parent.name.rpartition("-")[2]
        return int(digits) if digits.isdigit() else -1

    return sorted(found, key=step)


def _check_epochs(file: Path, texts: list[str], steps_per_line: int) -> None:
    """Raises DataError if the printed epochs do not grow evenly from line to line.

    Steps are derived from the number of lines, which is wrong after a restart or with
    `logging_first_step`. The last step of an epoch may be shorter than the other steps.
    """
    epochs = [number(text) for text in texts]
    last = epochs[-1] if epochs else None
    if last is None or not last > 0:
        return
    decimals = max(len(text.partition(".")[2]) for text in texts)
    per_line = last / len(epochs)
    for count, epoch in enumerate(epochs, start=1):
        if epoch is None:
            continue
        # transformers 4 prints two decimals, transformers 5 prints four digits.
        rounding = 0.0101 if decimals <= 2 else 0.0012 * max(epoch, count * per_line)
        if abs(epoch - count * per_line) > rounding + per_line / max(steps_per_line, 2):
            raise DataError(
                f"{file}: line {count} of {len(epochs)} with a loss is of epoch {epoch:g}, though"
                f" {count * per_line:.4g} would follow from an equal number of steps for each line,"
                " as after a restart or with logging_first_step. Import trainer_state.json, which"
                " has the steps."
            )


def _fill_in(rows: list[dict[str, Any]], end: float) -> None:
    """Gives rows without a speed, as an attempt's first, the next one's, and all of them a time.

    It is counted back from the first known, or from the log's last change: that was its last line.
    """
    stamped = next((i for i, row in enumerate(rows) if row["time"] is not None), len(rows) - 1)
    rows[stamped]["time"] = rows[stamped]["time"] or end
    for i, (row, after) in reversed(list(enumerate(pairwise(rows)))):
        if row["step_time_s"] is None and row["attempt"] == after["attempt"]:
            row["step_time_s"] = after["step_time_s"]
        if i < stamped:
            row["time"] = after["time"] - (after["step_time_s"] or 0.0)
    for before, row in pairwise(rows):
        counted_on = before["time"] + (row["step_time_s"] or 0.0)
        row["time"] = counted_on if row["time"] is None else max(row["time"], before["time"])


def _check_speed(rows: list[dict[str, Any]], steps: list[Step], run: Run) -> list[str]:
    """Returns what the log's own speeds say against the clock's.

    Rows faster than the peak lose their time.

    Raises:
        ConfigError: the typical step is faster than the device can multiply matrices.
    """
    spec = run.spec
    plan = run.plan
    site = run.site
    devices = run.plan.num_devices
    known = [row["tokens"] / row["step_time_s"] / devices for row in rows if row["step_time_s"]]
    if not known:
        return ["no line tells how long a step took, so there are no speeds"]
    model = spec.flops_per_token()
    hardware = spec.hardware_flops_per_token(
        plan.recompute, whole=True, layers=plan.recomputed_layers(spec)
    )
    typical = median(known)
    peak = site.peak_flops_per_s(plan.precision)
    most = getattr(site.device.matmul_flops_per_s.get(plan.precision), "value", peak)
    if most is not None and typical * hardware > most:
        raise ConfigError(
            f"import: {typical * hardware / 1e12:.1f} TFLOP/s on each of"
            f" {counted(devices, 'device')} is more than the {most / 1e12:.1f} that a matrix"
            f" product reaches on {site.device.name}: the steps cannot have run"
            f" {plan.global_batch_size} sequences each. Look up the engine's micro-batch and give"
            " the sequences really run, --set plan.global_batch_size=..., or correct the layout,"
            " the model or the site."
        )
    notes = []
    limit = float("inf") if peak is None else peak * devices / hardware
    fast = [
        row for row in rows if row["step_time_s"] and row["tokens"] > limit * row["step_time_s"]
    ]
    for row in fast:
        row["step_time_s"] = None
    if fast:
        notes.append(f"{counted(len(fast), 'step')} faster than the peak, kept without a time")
    if printed := [flops for step in steps if (flops := step.get("flops_per_s"))]:
        notes.append(
            f"the log prints {median(printed) / 1e12:.1f} TFLOP/s per device, which is not used; "
            f"from the clock and the sequences run it is {typical * model / 1e12:.1f} of the "
            f"model, {typical * hardware / 1e12:.1f} with recomputation"
        )
    rates = [rate for step in steps if (rate := step.get("samples_per_s"))]
    rate = typical * devices / spec.sequence_length
    if rates and abs(median(rates) / rate - 1) > SPEED_TOLERANCE:
        notes.append(
            f"the log prints {median(rates):.3g} sequences/s, but clock and batch make {rate:.3g}"
        )
    return notes


def _create(run: Run, log: Path) -> None:
    """Writes what was asked for, in the place of an earlier import."""
    out = run.directory
    for name in ("spec", "state", "exit", "history", "alerts", "plan.attempt_*"):
        for old in out.glob(f"{name}.json*"):
            old.unlink()
    shutil.rmtree(out / "logs", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in run.asked().items():
        write_atomic(out / name, text)
    JobSpec(
        name=f"import of {log.name}",
        run_dir=str(out),
        argv=("kit", "import", str(log)),
        num_processes=run.plan.num_devices,
    ).write(out / "job.json")


def _tell(
    run: Run, parser: Parser, row: dict[str, Any], report: ImportReport, following: bool
) -> None:
    """Says what the log shows: its last step. While it is followed it is taken for a job.

    Each change is its heartbeat. Afterwards, or of a log that nobody follows, nothing is known of
    here and now.
    """
    out = run.directory
    if not out.is_dir():  # deleted while the log was followed
        return
    report.write(out / "import.json")
    for attempt in range(1, report.attempts + 1):
        run.plan.write(out / f"plan.attempt_{attempt:02d}.json")
        shown = log_path(out, attempt, 0)
        shown.parent.mkdir(parents=True, exist_ok=True)
        if not shown.is_symlink():
            shown.symlink_to(parser.file)
    ends = "says that training is done," if parser.done else "was read to its end,"
    update_state(
        out,
        attempt=report.attempts,
        state=JobState.RUNNING if following else JobState.IMPORTED,
        step=row["step"],
        step_time_s=row["step_time_s"],
        reason=f"the log {ends} at step {row['step']:,}",
        heartbeat=parser.changed,
    )


def _followed(
    run: Run,
    parser: Parser,
    recorder: StepRecorder,
    report: ImportReport,
    notes: list[str],
    idle: Callable[[float], None],
) -> ImportReport:
    """Records the steps that are added to the log until training ends, and returns the report on
    the whole log. `notes` are its notes other than on lines that were left out.
    """
    writer = MetricsWriter(run.directory / "metrics.jsonl")
    ended = contextlib.suppress(KeyboardInterrupt, FileNotFoundError)  # the user, or one is deleted
    with contextlib.closing(writer), ended:
        while not parser.done and run.directory.is_dir() and parser.file.exists():
            _tell(run, parser, recorder.last_row, report, following=True)
            idle(POLL_S)
            rows = [row for step in parser.steps() for row in recorder.rows(step)]
            writer.write({**row, "time": row["time"] or time.time()} for row in rows)
            report = report.replace(
                lines=parser.lines,
                steps=report.steps + len(rows),
                attempts=parser.attempt,
                skipped_lines=parser.skipped_lines,
                notes=(*notes, *_unsure_notes(parser)),
            )
    return report
