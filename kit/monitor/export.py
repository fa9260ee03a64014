"""Export: copies of the steps of a run, as a table in a file or in a tracker of experiments.

`export` writes a CSV or Parquet file. `copy_metrics` copies steps and scores to a sink: Weights &
Biases or TensorBoard. TARGETS lists all formats and sinks.

A sink only reads the run directory, in a separate process, so its failure does not affect the
training job. Each attempt becomes a separate run in the tracker. A resumed run repeats steps. If
attempts shared a curve, wandb would drop repeated steps, and TensorBoard would draw a zigzag. The
progress of a sink is stored beside its files, so a sink may be stopped and started again.
"""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from cluster.files import other_owner, replacement
from cluster.record import ConfigError, Record, field_doc, suggestion
from cluster.state import JobError, refuse_planted_links
from kit.errors import RunError, needed
from kit.monitor.scores import ScoreFollower
from kit.run import Run
from kit.run.columns import COLUMNS, float_or_nan, is_number, parse_rows, that_count
from kit.run.tail import Tail
from kit.show.style import plain_cell
from kit.show.terminal import plain

WANDB_MODES = ("offline", "online")
NOT_SCALARS = ("step", "attempt", "time")
"""Columns that identify a row. They are not copied as numbers of the step."""
FIRST_EXTRA_COLUMN = "consumed_tokens"
"""First of the columns that not every run records, in the order of the exported table."""


def export_table(run: Run) -> Any:
    """Returns the steps of a run as a pyarrow table in ascending order, each step once. If several
    attempts have done a step, the row is that of the newest attempt.

    Recorded columns are those of `metrics.jsonl`. Derived columns are tokens_per_s, total_tokens at
    the end of the step, and, if the run has them, mfu and hfu as fractions. A value is null only if
    it was not recorded. NaN and infinity are kept.
    """
    import pyarrow

    tail = Tail(run.directory / "metrics.jsonl")
    recorded: list[dict[str, Any]] = []
    for text in iter(tail.new_lines, b""):
        rows, _ = parse_rows(text)
        recorded += rows
    steps = [row["step"] for row in recorded]
    attempts = [row["attempt"] for row in recorded]
    kept = [recorded[index] for index in that_count(steps, attempts)]
    metrics = run.metrics(kept)
    extra = set().union(*kept) - {*COLUMNS}
    names = [*COLUMNS, *sorted(extra, key=lambda name: (name != FIRST_EXTRA_COLUMN, name))]
    columns = {}
    for name in names:
        columns[name] = _column([row.get(name) for row in kept])
    for name, column in (metrics.speeds() | {"total_tokens": metrics.total_tokens}).items():
        columns[name] = pyarrow.array(column)
    facts = {
        "run": run.name,
        "model": run.spec.name,
        "model_flops_per_token": run.spec.flops_per_token(),
        "site": run.site.name,
        "why_no_mfu": metrics.why_no_mfu,
        "peak_flops_per_s_per_device": run.site.peak_flops_per_s(run.plan.precision),
        "devices_by_attempt": {
            str(attempt): plan.num_devices for attempt, plan in metrics.plans.items()
        },
    }
    return pyarrow.table(columns).replace_schema_metadata({"kit": json.dumps(facts)})


def export(run: Run, file: Path, *, format: str, overwrite: bool = False) -> int:
    """Writes the result of `export_table` to `file` in the format `csv` or `parquet`, by atomic
    rename. Returns the number of rows.

    Raises:
        ConfigError: The format is unknown.
        RunError: The file exists and `overwrite` is False, or its folder does not exist.
    """
    target = TARGETS.get(format)
    if not isinstance(target, FileTarget):
        formats = [name for name, known in TARGETS.items() if isinstance(known, FileTarget)]
        raise ConfigError(f"format: {format!r} is unknown. {suggestion(format, formats)}")
    if file.is_dir() or not file.parent.is_dir():
        raise RunError(f"{file} cannot be written: give a file in a folder that exists.")
    if file.exists() and not overwrite:
        raise RunError(f"{file} exists. Give another --out, or --overwrite.")
    table = export_table(run)
    with replacement(file) as stream:
        target.write(table, stream)
    return table.num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkReport(Record):
    """Result of one start of a sink."""

    to: str = field_doc("name of the sink to which steps are copied: wandb or tensorboard")
    folder: str = field_doc("folder of the sink's files")
    rows: int = field_doc("number of steps that this start of the sink has copied")
    attempts: tuple[int, ...] = field_doc("numbers of the attempts whose steps were copied")
    skipped_lines: int = field_doc(
        "number of lines of metrics.jsonl that are torn or not from the kit"
    )
    end: str = field_doc("reason why the sink has ended")


def copy_metrics(
    run: Run,
    to: str,
    *,
    follow: bool = True,
    poll_s: float = 2.0,
    idle: Callable[[float], None] = time.sleep,
) -> SinkReport:
    """Copies the steps and scores of a run that a sink does not have yet, until the job of the run
    has ended.

    Args:
        run: run before, during or after training. Only the sink's folder, `RUN/wandb` or
            `RUN/tensorboard`, is written.
        to: `wandb` or `tensorboard`.
        follow: if False, copies the present steps and returns.
        poll_s: seconds between two reads of the run.
        idle: function that waits for a number of seconds. If it raises KeyboardInterrupt, the copy
            ends normally.

    Raises:
        ConfigError: The sink is unknown, or WANDB_MODE is neither `offline` nor `online`.
        MissingPackageError: The package of the sink is not installed.
        JobError: The run belongs to another user, or one of its folders is another user's link.
    """
    target = TARGETS.get(to)
    if not isinstance(target, SinkTarget):
        sinks = [name for name, known in TARGETS.items() if isinstance(known, SinkTarget)]
        raise ConfigError(f"sink: {to!r} is unknown. {suggestion(to, sinks)}")
    run.check_writable(f"write {to}'s files into it")
    refuse_planted_links(run.directory)
    folder = run.directory / to
    state = _next_start(folder)
    sink = target.open(run, folder, state)
    state.write(folder / "sink.json")
    tail = Tail(run.directory / "metrics.jsonl", state.offset)
    scores = ScoreFollower(run, state.scores)
    copied = Counter[int]()
    skipped = 0
    end = "everything is copied"
    try:
        while True:
            # The end is checked before the rows are read, so that the last rows are not missed.
            is_last = not follow or _is_over(run)
            for text in iter(tail.new_lines, b""):
                rows, torn = parse_rows(text)
                for row, values in zip(rows, scalars(run, rows), strict=True):
                    sink.write(row["attempt"], row["step"], _time(row), values)
                copied.update(row["attempt"] for row in rows)
                skipped += torn
            for attempt, step, values in scores.read():
                sink.write(attempt, step, None, values)
            if is_last or not run.directory.is_dir():
                break
            idle(poll_s)
    except KeyboardInterrupt:
        end = "interrupted; start it again to go on"
    finally:
        sink.close()
    if run.directory.is_dir():  # The state is written last, once all data are in files.
        state.replace(offset=tail.position, scores=scores.seen).write(folder / "sink.json")
    else:
        end = f"{run.directory} was deleted"
    return SinkReport(
        to=to,
        folder=str(folder),
        rows=copied.total(),
        attempts=tuple(sorted(copied)),
        end=end,
        skipped_lines=skipped,
    )


def scalars(run: Run, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns one dictionary of numbers for each row, by name. It includes tokens_per_s and, if the
    peak is known and believable, mfu and hfu.
    """
    speeds = run.metrics(rows).speeds()
    scalars_of_rows: list[dict[str, float]] = []
    for i, row in enumerate(rows):
        numbers = {name: value for name, value in row.items() if is_number(value)}
        for name, column in speeds.items():
            if not math.isnan(column[i]):
                numbers[name] = column[i]
        scalars_of_rows.append(
            {
                plain(name): float(value)
                for name, value in numbers.items()
                if name not in NOT_SCALARS
            }
        )
    return scalars_of_rows


def _column(values: list[Any]) -> Any:
    """Returns recorded values as an Arrow array. If all values are numbers, the elements are
    numbers. Otherwise they are JSON texts.
    """
    import pyarrow

    known = [value for value in values if value is not None]
    with contextlib.suppress(OverflowError, pyarrow.ArrowInvalid):  # An integer above 64 bits.
        if all(isinstance(value, int) and is_number(value) for value in known):
            return pyarrow.array(values, pyarrow.int64())
        if all(map(is_number, known)):
            return pyarrow.array(_converted(values, float), pyarrow.float64())
    return pyarrow.array(_converted(values, json.dumps), pyarrow.string())


def _converted(values: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Returns the results of `convert` for all values. None stays None."""
    converted = []
    for value in values:
        converted.append(None if value is None else convert(value))
    return converted


def _write_csv(table: Any, stream: BinaryIO) -> None:
    from pyarrow import csv

    # Text cells are JSON in quotes, so no cell is a formula. Names of columns need `plain_cell`.
    names = [plain_cell(name) for name in table.column_names]
    csv.write_csv(table.rename_columns(names), stream)


def _write_parquet(table: Any, stream: BinaryIO) -> None:
    from pyarrow import parquet

    parquet.write_table(table, stream, compression="zstd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkState(Record):
    """Content of sink.json: the progress of a sink up to its last normal end."""

    offset: int = field_doc("number of bytes of metrics.jsonl that have been copied", default=0)
    scores: dict[str, float] = field_doc(
        "scores of checkpoints that have been copied already", default_factory=dict
    )
    starts: int = field_doc("number of times that the sink was started", default=0)
    identity: str = field_doc(
        "random text that distinguishes this run from other runs with an equal name", default=""
    )


def _next_start(folder: Path) -> SinkState:
    """Returns the state with which a sink starts now. It has the progress of the last start that
    ended normally.
    """
    try:
        last = SinkState.read(folder / "sink.json")
    except ConfigError:  # First start, or damaged file. All steps are copied again.
        last = SinkState(identity=secrets.token_hex(4))
    return last.replace(starts=last.starts + 1)


def _is_over(run: Run) -> bool:
    """Returns whether the job of a run has ended, or the run was deleted."""
    try:
        return run.job.status().state.is_final
    except (JobError, ConfigError):  # The run was deleted, or was never submitted.
        return not run.directory.is_dir()


def _time(row: dict[str, Any]) -> float | None:
    """Returns the unix time of a step, None if it is unknown."""
    value = float_or_nan(row.get("time"))
    return value if math.isfinite(value) else None


class Sink(Protocol):
    """Writer of the steps of a run to a tracker of experiments."""

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        """Writes the numbers of one step of one attempt. `time_s` is the unix time of the step, or
        None if it is unknown.
        """
        ...

    def close(self) -> None:
        """Closes the sink. Returns once all numbers are in files."""
        ...


class TensorBoardSink:
    """Event files in `RUN/tensorboard/attempt_NN/`, for `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        with needed("tensorboard", "tensorboard", "The TensorBoard sink"):
            # The modules are imported by name: a type checker cannot read code that protobuf
            # generates.
            self.event = import_module("tensorboard.compat.proto.event_pb2").Event
            self.summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
            writers = import_module("tensorboard.summary.writer.event_file_writer")
        self.folder = folder
        self.open_writer = writers.EventFileWriter
        self.writers: dict[int, Any] = {}

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        if attempt not in self.writers:
            self.writers[attempt] = self.open_writer(str(self.folder / f"attempt_{attempt:02d}"))
        tags = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self.event(
            summary=self.summary(value=tags), wall_time=time_s or time.time(), step=step
        )
        self.writers[attempt].add_event(event)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


class WandbSink:
    """One wandb run per attempt, in a group with the name of the kit's run. wandb is offline unless
    WANDB_MODE is `online`.

    Each line has its own number `step`, which is the x axis. wandb's internal step only counts
    lines, so wandb drops no line. A sink that is started again opens new wandb runs in the same
    group (`attempt 1, part 2`), since wandb cannot continue an offline run.
    """

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        self.mode = os.environ.get("WANDB_MODE") or "offline"
        if self.mode not in WANDB_MODES:
            raise ConfigError(
                f"WANDB_MODE: {self.mode!r} is not allowed. {suggestion(self.mode, WANDB_MODES)}"
            )
        _refuse_planted_settings()
        if self.mode == "offline":
            # wandb reads this variable at its import. In offline mode nothing may be sent.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        with needed("wandb", "wandb", "The wandb sink"):
            import wandb
        self.wandb: Any = wandb
        self.run = run
        self.folder = folder
        self.state = state
        self.attempts: dict[int, Any] = {}

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        if attempt not in self.attempts:
            self.attempts[attempt] = self._open(attempt)
        wall_time = {} if time_s is None else {"time": time_s}
        self.attempts[attempt].log({"step": step, "attempt": attempt, **wall_time, **values})

    def close(self) -> None:
        for attempt in self.attempts.values():
            attempt.finish()

    def _open(self, attempt: int) -> Any:
        """Returns a new wandb run for an attempt."""
        run = self.run
        part = self.state.starts
        plan = run.plans().get(attempt, run.plan)
        records = {"spec": run.spec, "plan": plan, "recipe": run.recipe}
        settings = self.wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        name = plain(f"{run.name}, attempt {attempt}")
        if part > 1:
            name += f", part {part}"
        opened = self.wandb.init(
            mode=self.mode,
            project=os.environ.get("WANDB_PROJECT") or "pretraining",
            group=plain(f"{run.name}-{self.state.identity}"),
            name=name,
            id=f"{self.state.identity}-{attempt:02d}-{part:02d}",
            dir=str(self.folder),
            config={
                **{name: record.to_dict() for name, record in records.items()},
                "site": run.site.name,
                "attempt": attempt,
            },
            reinit="create_new",
            settings=settings,
        )
        opened.define_metric("step", hidden=True)
        opened.define_metric("*", step_metric="step")
        return opened


def _refuse_planted_settings() -> None:
    """Raises ConfigError if the working directory has wandb settings that belong to another user.

    wandb reads these settings at its import. They may name the server to which the user's key is
    sent.
    """
    for name in ("wandb/settings", ".wandb/settings"):
        file = Path.cwd() / name
        if owner := other_owner(file):
            raise ConfigError(
                f"{file}: belongs to {owner}, and wandb would use it, for example as the address of"
                " its server. Run this in another directory."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTarget:
    """File format of an exported table."""

    write: Callable[[Any, BinaryIO], None]
    """Function that writes a pyarrow table to an open file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkTarget:
    """Tracker of experiments to which steps are copied."""

    open: Callable[[Run, Path, SinkState], Sink]
    """Function that opens the sink of a run. The path is the folder of the sink's files."""


TARGETS: dict[str, FileTarget | SinkTarget] = {
    "csv": FileTarget(write=_write_csv),
    "parquet": FileTarget(write=_write_parquet),
    "wandb": SinkTarget(open=WandbSink),
    "tensorboard": SinkTarget(open=TensorBoardSink),
}
"""File formats and sinks for the steps of a run, by the name that a user gives. `kit export` also
has the format `hf`, which exports a checkpoint."""
