"""Creates a run directory from another trainer's log, so that every view of the kit works on it.

The user gives settings that the log lacks, such as model and layout for a log of NxDT. Nothing is
written if the numbers are impossible: a step cannot be faster than the device multiplies matrices.
"""

import contextlib
import dataclasses
import datetime
import json
import shutil
import time
from collections.abc import Callable, Sequence
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
from kit.interop.logs.formats import FORMATS, NAMES, Format
from kit.interop.logs.logs import LogLines, Parser, Step, is_training
from kit.interop.logs.numbers import parse_number
from kit.interop.logs.patterns import pattern_format
from kit.interop.logs.rows import Row, StepRecorder, fill_in
from kit.interop.logs.setup import configure_run
from kit.interop.logs.suggest import check_text, suggested_pattern
from kit.run import Run
from kit.run.metrics import MetricsWriter
from kit.show.results import short_number

SPEED_TOLERANCE = 0.1
"""Relative difference between the sequences per second that a log prints and those by its clock.
Above it, the import report has a note."""
POLL_S = 2.0
"""Seconds between two reads of a log that is followed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport(Record):
    """Content of import.json: the log from which a run was imported, the numbers of its lines and
    steps, and notes for the user.
    """

    log: str = field_doc("absolute path of the imported log")
    format: str = field_doc(
        "trainer that wrote the log: one of `kit.interop.logs.formats.NAMES`, or `pattern`"
    )
    lines: int = field_doc("number of lines of the log that were read, without blank lines")
    steps: int = field_doc("number of recorded steps, repeated steps included")
    attempts: int = field_doc("number of starts of the trainer in the log")
    skipped_lines: int = field_doc(
        "number of lines about steps that were skipped, because they were torn (incomplete or"
        " mixed)"
    )
    notes: tuple[str, ...] = field_doc(
        "values that were derived or assumed, and contradictions in the log"
    )


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
    """Creates a run directory from a log and returns a report. With `follow`, the function returns
    when training in the log has ended.

    Args:
        log: file with the output of the trainer's last rank (Megatron) or of rank 0 (NxDT).
        out: new directory, or an earlier import of this log, which is then replaced.
        format: trainer that wrote the log, one of `kit.interop.logs.formats.NAMES`. If None, it is
            detected.
        pattern: for other trainers, a regular expression that finds each line about a step. It has
            the named groups `step` and `loss`, and may have others of
            `kit.interop.logs.patterns.GROUPS`.
        site: machine of the training. Its peak is used for MFU. Its best matrix product is the
            limit that no step can exceed.
        spec: model, if the log does not describe it.
        changes: fields of `spec`, `plan` and `recipe` that the log lacks or prints wrongly, and two
            fields of `import`. `zone` is the zone of time stamps without a zone, such as
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
        RunError: `out` is not empty and not an import of this log.
        JobError: `out` belongs to another user.
    """
    file = Path(log).expanduser().resolve()
    out = Path(out).expanduser().resolve()
    changes = {"spec": {}, "plan": {}, "recipe": {}, "import": {}, **(changes or {})}
    zone, logging_steps = _import_settings(changes["import"])
    _check_target(out, file)
    form = _format_of(file, format, pattern)
    _check_logging_steps(file, form, logging_steps)
    if follow and form.closes:
        raise ConfigError(
            "--follow: a trainer_state.json does not grow, it is written whole. Import it again."
        )
    parser = Parser(file, form, zone, logging_steps or 1)
    steps = list(parser.steps())
    if form.counts_lines:
        _check_epochs(file, parser.epochs, parser.steps_per_line)
    if not any(map(is_training, steps)):
        raise _no_steps_error(parser, is_detected=format is None and pattern is None)
    config = configure_run(parser, steps, spec=spec, changes=changes)
    recorder = config.recorder
    run = Run(out, spec=config.spec, plan=config.plan, recipe=config.recipe, site=site)
    rows = _rows(steps, recorder)
    fill_in(rows, parser.changed)
    notes = [*spec_notes, *config.notes, *_check_speed(rows, steps, run)]
    notes += _notes_on_lines(parser, steps, run)
    report = ImportReport(
        log=str(file),
        format=form.name,
        lines=parser.lines,
        steps=len(rows),
        attempts=parser.attempt,
        skipped_lines=parser.skipped_lines,
        notes=(*notes, *_unsure_notes(parser)),
    )
    _create(run, file)
    write_atomic(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if follow:
        report = _follow(run, parser, recorder, report, notes, idle)
    _write_state(run, parser, recorder.last_row, report, is_followed=False)
    return report


def _check_target(out: Path, log: Path) -> None:
    """Raises RunError if a directory is not empty and not an earlier import of the log."""
    refuse_other_owner(out, "import into it")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    with contextlib.suppress(ConfigError, OSError):
        if ImportReport.read(out / "import.json").log == str(log):
            return
    raise RunError(f"{out} exists and was not imported from {log}. Give a new or empty directory.")


def _import_settings(settings: dict[str, Any]) -> tuple[datetime.tzinfo, int | None]:
    """Returns (zone of time stamps without a zone, number of steps per line or None)."""
    allowed = ("zone", "logging_steps")
    for name in settings:
        if name not in allowed:
            raise ConfigError(f"import.{name}: unknown. {suggestion(name, allowed)}")
    steps = settings.get("logging_steps")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ConfigError(f"import.logging_steps: {steps!r} is not allowed. Give a number above 0.")
    if "zone" not in settings:
        return datetime.UTC, steps
    try:
        return ZoneInfo(str(settings["zone"])), steps
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"import.zone: {settings['zone']!r} is unknown. Give one as Europe/Berlin, or leave it"
            " out: UTC."
        ) from error


# Formats ------------------------------------------------------------------------------------------


def _format_of(file: Path, name: str | None, pattern: str | None) -> Format:
    """Returns the format of a log: the given format, or the format of the user's pattern, or the
    format of the first line with a step.

    Raises:
        ConfigError: The format is unknown, or both a format and a pattern are given.
        DataError: The file is missing or not a text.
    """
    if name is not None and pattern is not None:
        raise ConfigError(f"--pattern has no place beside --format {name}. Give one of them.")
    if name is not None and name not in NAMES:
        raise ConfigError(
            f"format: {name!r} is unknown. {suggestion(name, NAMES)} For others: --pattern."
        )
    check_text(file)
    if pattern is not None:
        return pattern_format(pattern, LogLines(file).new())
    return _detected(file, [form for form in FORMATS if name in (None, form.name)])


def _detected(file: Path, forms: list[Format]) -> Format:
    """Returns the format of the first line with a step, or the first of `forms` if no line has a
    step. A fallback format is returned only if no line is in another format.
    """
    fallback = None
    for line in LogLines(file).new():
        for form in forms:
            if form.is_fallback and fallback is not None:
                continue
            if form.is_about_step(line) and form.matches(line):
                if not form.is_fallback:
                    return form
                fallback = form
    return fallback or forms[0]


def _check_logging_steps(file: Path, form: Format, logging_steps: int | None) -> None:
    """Raises ConfigError if the lines of a log have no step, and the user gave no number of steps
    per line. The message then names the file to import instead.

    Also raises ConfigError if the lines have a step although the user gave a number.
    """
    if not form.counts_lines:
        if logging_steps is not None:
            raise ConfigError(
                "import.logging_steps: the lines of this log have their step. Leave it out."
            )
        return
    if logging_steps is not None:
        return
    where = "Import that file: the Trainer writes it into each checkpoint of its output_dir"
    if states := trainer_states(file.parent):
        where = f"Import that file: {kit_command('import', states[-1])}"
    raise ConfigError(
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
    epochs = [parse_number(text) for text in texts]
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


def _no_steps_error(parser: Parser, *, is_detected: bool) -> DataError:
    """Returns the error for a log in which no step was found. Its message suggests a pattern that
    may find the steps.
    """
    file = parser.file
    if parser.unsure:
        return DataError(f"{file}: the steps are not known. {parser.unsure[0]}.")
    asked = f"a {parser.form.name} log"
    advice = ""
    if is_detected:
        asked = "a log of a known format"
        advice = suggested_pattern(file)
    return DataError(
        f"{file}: none of its {parser.lines:,} lines tells of a step as {asked} does. "
        f"Formats: {', '.join(NAMES)}; for others --pattern.{advice} If training has only begun, "
        "import it after its first step."
    )


# Rows and notes -----------------------------------------------------------------------------------


def _rows(steps: list[Step], recorder: StepRecorder) -> list[Row]:
    """Returns one row of metrics.jsonl for each step of each attempt. If a step occurs several
    times in an attempt, its last row is returned.
    """
    rows: dict[tuple[int, int], Row] = {}
    for step in steps:
        for row in recorder.rows(step):
            rows[row["attempt"], row["step"]] = row
    return list(rows.values())


def _check_speed(rows: list[Row], steps: list[Step], run: Run) -> list[str]:
    """Returns notes on differences between the speeds that a log prints and the speeds by its
    clock. If a row is faster than the peak of the device, its step time is removed.

    Raises:
        ConfigError: The typical step is faster than the device can multiply matrices.
    """
    spec = run.spec
    plan = run.plan
    site = run.site
    devices = plan.num_devices
    speeds = [row["tokens"] / row["step_time_s"] / devices for row in rows if row["step_time_s"]]
    if not speeds:
        return ["no line tells how long a step took, so there are no speeds"]
    typical = median(speeds)
    hardware_flops = spec.hardware_flops_per_token(
        plan.recompute, whole=True, layers=plan.recomputed_layers(spec), attention=True
    )
    mfu_flops_per_s = typical * spec.flops_per_token()
    hfu_flops_per_s = typical * hardware_flops
    peak = site.peak_flops_per_s(plan.precision)
    best_product = site.device.matmul_flops_per_s.get(plan.precision)
    most = best_product.value if best_product else peak
    if most is not None and hfu_flops_per_s > most:
        raise ConfigError(
            f"import: {hfu_flops_per_s / 1e12:.1f} TFLOP/s on each of"
            f" {counted(devices, 'device')} is more than the {most / 1e12:.1f} that a matrix"
            f" product reaches on {site.device.name}: the steps cannot have run"
            f" {plan.global_batch_size} sequences each. Look up the engine's micro-batch and give"
            " the sequences really run, --set plan.global_batch_size=..., or correct the layout,"
            " the model or the site."
        )
    notes = []
    if peak is not None:
        too_fast = _remove_times_beyond(peak * devices / hardware_flops, rows)
        if too_fast:
            notes.append(f"{counted(too_fast, 'step')} faster than the peak, kept without a time")
    printed_flops = [step["flops_per_s"] for step in steps if step.get("flops_per_s")]
    if printed_flops:
        notes.append(
            f"the log prints {median(printed_flops) / 1e12:.1f} TFLOP/s per device, which is not"
            " used: step times and sequences give"
            f" {mfu_flops_per_s / 1e12:.1f} TFLOP/s without and {hfu_flops_per_s / 1e12:.1f}"
            " TFLOP/s with recomputation"
        )
    printed_rates = [step["samples_per_s"] for step in steps if step.get("samples_per_s")]
    rate = typical * devices / spec.sequence_length
    if printed_rates and abs(median(printed_rates) / rate - 1) > SPEED_TOLERANCE:
        notes.append(
            f"the log prints {short_number(median(printed_rates))} sequences/s, but clock and batch"
            f" make {short_number(rate)}"
        )
    return notes


def _remove_times_beyond(tokens_per_s: float, rows: list[Row]) -> int:
    """Removes the step times of rows that are faster than `tokens_per_s`, a rate over all devices.
    Returns the number of these rows.
    """
    count = 0
    for row in rows:
        if row["step_time_s"] and row["tokens"] > tokens_per_s * row["step_time_s"]:
            row["step_time_s"] = None
            count += 1
    return count


def _notes_on_lines(parser: Parser, steps: list[Step], run: Run) -> list[str]:
    """Returns notes on unusual lines of a log: no line has a loss, lines print losses of mixtures
    of experts, or time stamps have no zone.
    """
    notes = []
    if not any("loss" in step for step in steps):
        notes.append("no line has a loss")
    if parser.experts:
        notes.append(
            f"its lines have {parser.experts!r}, which only mixtures of experts have, but"
            f" {run.spec.name} is dense: its FLOPs are right only if a token costs as many FLOPs in"
            " both models"
        )
    if parser.has_local_times:
        notes.append(
            f"its time stamps name no zone and are read as {parser.zone}; for another: --set"
            " import.zone=Europe/Berlin"
        )
    return notes


def _unsure_notes(parser: Parser) -> list[str]:
    """Returns a list with a note on the lines that were left out because their steps are unknown.
    The list is empty if there are no such lines.
    """
    if not parser.unsure:
        return []
    lines = counted(len(parser.unsure), "line")
    return [f"{lines} left out, since the step is not known: {parser.unsure[0]}"]


# Files --------------------------------------------------------------------------------------------


def _create(run: Run, log: Path) -> None:
    """Writes the files that describe a run, such as spec.json and job.json, and removes those of an
    earlier import.
    """
    out = run.directory
    for name in ("spec", "state", "exit", "history", "alerts", "plan.attempt_*"):
        for old in out.glob(f"{name}.json*"):
            old.unlink()
    shutil.rmtree(out / "logs", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in run.configuration_texts().items():
        write_atomic(out / name, text)
    JobSpec(
        name=f"import of {log.name}",
        run_dir=str(out),
        argv=("kit", "import", str(log)),
        num_processes=run.plan.num_devices,
    ).write(out / "job.json")


def _follow(
    run: Run,
    parser: Parser,
    recorder: StepRecorder,
    report: ImportReport,
    notes: list[str],
    idle: Callable[[float], None],
) -> ImportReport:
    """Records the steps that are added to the log until training ends, and returns the report on
    the whole log. `notes` has all notes of the report except the note on lines with unknown steps,
    which may change.
    """
    writer = MetricsWriter(run.directory / "metrics.jsonl")
    # The loop ends without an error if the user interrupts, or if the log or run directory is
    # deleted.
    ended = contextlib.suppress(KeyboardInterrupt, FileNotFoundError)
    with contextlib.closing(writer), ended:
        while not parser.done and run.directory.is_dir() and parser.file.exists():
            _write_state(run, parser, recorder.last_row, report, is_followed=True)
            idle(POLL_S)
            rows = []
            for step in parser.steps():
                rows.extend(recorder.rows(step))
            writer.write({**row, "time": row["time"] or time.time()} for row in rows)
            report = report.replace(
                lines=parser.lines,
                steps=report.steps + len(rows),
                attempts=parser.attempt,
                skipped_lines=parser.skipped_lines,
                notes=(*notes, *_unsure_notes(parser)),
            )
    return report


def _write_state(
    run: Run, parser: Parser, row: Row, report: ImportReport, *, is_followed: bool
) -> None:
    """Writes the report, and the state of the run at the last step.

    While the log is followed, the run has the state of a running job, and each change of the log is
    its heartbeat. Otherwise the state is IMPORTED, because nothing is known of the job.
    """
    out = run.directory
    if not out.is_dir():  # The directory was deleted while the log was followed.
        return
    report.write(out / "import.json")
    for attempt in range(1, report.attempts + 1):
        run.plan.write(out / f"plan.attempt_{attempt:02d}.json")
        link = log_path(out, attempt, 0)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(parser.file)
    end = "says that training is done," if parser.done else "was read to its end,"
    update_state(
        out,
        attempt=report.attempts,
        state=JobState.RUNNING if is_followed else JobState.IMPORTED,
        step=row["step"],
        step_time_s=row["step_time_s"],
        reason=f"the log {end} at step {row['step']:,}",
        heartbeat=parser.changed,
    )
