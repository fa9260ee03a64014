"""Export: copies of the steps of a run, as a table in a file or in a tracker of experiments.

`export` writes a CSV or Parquet file. `copy_metrics` copies steps and scores to a sink: Weights &
Biases or TensorBoard. TARGETS lists all of them.

A sink only reads the run directory, in a process of its own, so its failure never reaches the
training job. Every attempt is a run of its own there. A resumed run repeats steps, which wandb
drops and TensorBoard draws as a zigzag where attempts share a curve. How far a sink has come is
kept beside its files, so it may be ended and started again.
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
"""Columns that say where a number belongs, and are no numbers of a step themselves."""
FIRST_EXTRA_COLUMN = "consumed_tokens"
"""Column that comes first among the columns that not every run records."""


def export_table(run: Run) -> Any:
    """Returns the steps of a run as a pyarrow table. Speeds and utilisations are derived, other
    columns are as recorded.

    Columns: those of `metrics.jsonl`, tokens_per_s, mfu and hfu (fractions) where the run has them,
    and total_tokens up to a step. Each step is there once, in order, as the newest attempt left it.
    A value is null only if it was not recorded: NaN and infinity stay what they are.
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
    """Writes `export_table` to `file` as `csv` or `parquet`, by atomic rename, and returns its
    number of rows.

    Raises:
        ConfigError: no such format.
        RunError: the file exists and `overwrite` is False, or its folder does not exist.
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
    """What a sink has done."""

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
    """Copies the steps of a run that a sink does not have yet, until the job of the run has ended.

    Args:
        run: at any time of its life. It is only read, apart from the sink's own folder `RUN/wandb`
            or `RUN/tensorboard`.
        to: `wandb` or `tensorboard`.
        follow: False copies what is there and returns.
        poll_s: seconds between two looks at the run.
        idle: waits between two looks. A KeyboardInterrupt raised by it ends the copying in good
            order.

    Raises:
        ConfigError: no such sink, or WANDB_MODE is neither `offline` nor `online`.
        MissingPackageError: its package is not installed.
        JobError: the run, or a link in the place of one of its folders, belongs to another user.
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
            # Before reading, so that what was written before the end is not missed.
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
    if run.directory.is_dir():  # only now is everything in its files
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
    """Returns the numbers of each row by name, with tokens_per_s and, if the peak is known and
    believable, mfu and hfu.
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
    """Returns recorded values as an Arrow array. Its elements are numbers if all values are
    numbers, else JSON texts.
    """
    import pyarrow

    known = [value for value in values if value is not None]
    with contextlib.suppress(OverflowError, pyarrow.ArrowInvalid):  # a number beyond 64 bits
        if all(isinstance(value, int) and is_number(value) for value in known):
            return pyarrow.array(values, pyarrow.int64())
        if all(map(is_number, known)):
            return pyarrow.array(_converted(values, float), pyarrow.float64())
    return pyarrow.array(_converted(values, json.dumps), pyarrow.string())


def _converted(values: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Returns converted values. None stays None."""
    converted = []
    for value in values:
        converted.append(None if value is None else convert(value))
    return converted


def _write_csv(table: Any, stream: BinaryIO) -> None:
    """Writes a table as CSV."""
    from pyarrow import csv

    # Texts are JSON, in quotes. Only the names of columns come from the run unquoted.
    names = [plain_cell(name) for name in table.column_names]
    csv.write_csv(table.rename_columns(names), stream)


def _write_parquet(table: Any, stream: BinaryIO) -> None:
    """Writes a table as Parquet."""
    from pyarrow import parquet

    parquet.write_table(table, stream, compression="zstd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkState(Record):
    """sink.json: what a sink has copied for good."""

    offset: int = field_doc("number of bytes of metrics.jsonl that have been copied", default=0)
    scores: dict[str, float] = field_doc(
        "scores of checkpoints that have been copied already", default_factory=dict
    )
    starts: int = field_doc("number of times that the sink was started", default=0)
    identity: str = field_doc(
        "random text that distinguishes this run from other runs with an equal name", default=""
    )


def _next_start(folder: Path) -> SinkState:
    """Returns the state of this start of a sink: how far the last start that ended in order had
    come.
    """
    try:
        last = SinkState.read(folder / "sink.json")
    except ConfigError:  # the first start, or damaged: everything is copied again, nothing is lost
        last = SinkState(identity=secrets.token_hex(4))
    return last.replace(starts=last.starts + 1)


def _is_over(run: Run) -> bool:
    """Returns whether the job of a run has ended, or the run was deleted."""
    try:
        return run.job.status().state.is_final
    except (JobError, ConfigError):  # deleted, or never submitted
        return not run.directory.is_dir()


def _time(row: dict[str, Any]) -> float | None:
    """Returns the unix time of a step, None if it is unknown."""
    value = float_or_nan(row.get("time"))
    return value if math.isfinite(value) else None


class Sink(Protocol):
    """A place that takes the steps of a run one by one."""

    def write(
        self, attempt: int, step: int, time_s: float | None, values: dict[str, float]
    ) -> None:
        """Takes the numbers of one step of one attempt, with the unix time of the step if it is
        known.
        """
        ...

    def close(self) -> None:
        """Returns once everything is in files."""
        ...


class TensorBoardSink:
    """Event files in `RUN/tensorboard/attempt_NN/`, for `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        with needed("tensorboard", "tensorboard", "The TensorBoard sink"):
            # by name, since what protobuf generates cannot be seen by a type checker
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
    """One wandb run per attempt, in a group with the run's name; offline, unless WANDB_MODE says
    `online`.

    The numbers carry their own `step`, which is the x axis: wandb's inner step only counts lines,
    so that it never drops one. A sink that is started again opens new wandb runs in the same group
    (`attempt 1, part 2`), since wandb cannot go on with an offline run.
    """

    def __init__(self, run: Run, folder: Path, state: SinkState) -> None:
        self.mode = os.environ.get("WANDB_MODE") or "offline"
        if self.mode not in WANDB_MODES:
            raise ConfigError(
                f"WANDB_MODE: {self.mode!r} is not allowed. {suggestion(self.mode, WANDB_MODES)}"
            )
        _refuse_planted_settings()
        if self.mode == "offline":
            # Read at import; offline, nothing may be sent.
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
    """Raises ConfigError if the working directory holds settings for wandb of another user.

    wandb reads them when it is imported. They may name the server to which the user's key is sent.
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
    """A format of a table in a file."""

    write: Callable[[Any, BinaryIO], None]
    """Writes a pyarrow table to an open file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkTarget:
    """A tracker of experiments."""

    open: Callable[[Run, Path, SinkState], Sink]
    """Opens the sink of a run in the sink's own folder."""


TARGETS: dict[str, FileTarget | SinkTarget] = {
    "csv": FileTarget(write=_write_csv),
    "parquet": FileTarget(write=_write_parquet),
    "wandb": SinkTarget(open=WandbSink),
    "tensorboard": SinkTarget(open=TensorBoardSink),
}
"""All places to which the steps of a run are copied, by the name that a user gives. `kit export`
also knows `hf`, which takes a checkpoint."""
